"""What the collectors of a set are told, how they are evaluated, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelenv.collect.checks import check_component, check_version
from parallelenv.collect.crew import Crew
from parallelenv.collect.foreman import Foreman
from parallelenv.collect.joining import join_evaluations
from parallelenv.collect.stopping import Stoppable
from parallelenv.collect.unsent import Unsent
from parallelenv.contract import arguments
from parallelenv.contract.broadcast import Broadcast
from parallelenv.contract.messages import count
from parallelenv.engine.guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.length import Goal


class Steered(Stoppable):
    """The part of a `CollectorSet` that gives its collectors what they work with, and tests it."""

    version: int
    _env: ParallelEnv
    _crew: Crew
    _foreman: Foreman
    _unsent: Unsent
    _word: Any

    # ---------------------------------------------------------------- what is given to them

    @single_threaded
    def set_weights(self, weights: Any, version: int | None = None) -> None:
        """Give all policies weights. Collectors at work take them before their next collection.

        They are pickled once. With Ray, collectors elsewhere fetch them from the object store, one copy for each node.

        Args:
            weights: As in `Collector.set_weights`; each policy gets copies.
            version: As in `Collector.set_weights`.

        Raises:
            ArgumentError: If a policy takes none, or ``version`` is no int of 0 or more.
            UnpicklableError: If they cannot be copied; nothing was set.
            KeyboardInterrupt: After Ctrl-C. They are set all the same: who has not taken them does so before its next
                collection.
            WorkerTimeoutError: If a policy takes too long to take them. They are set all the same, as after Ctrl-C.
            ClosedError: After `stop`.
        """
        self._announce_weights(weights, check_version(version, self.version))

    def _announce_weights(self, weights: Any, version: int = 0) -> None:
        broadcast = Broadcast("collector.set_weights", weights, version)
        before, self.version = self.version, version
        try:
            self._crew.announce("weights", broadcast)
        except BaseException:
            if not self._crew.is_known(broadcast):
                self.version = before
            raise

    @single_threaded
    def update_policy(self, name: str, value: Any) -> None:
        """Set an attribute of all policies, as `Collector.update_policy`. Collectors at work do so afterwards."""
        arguments.check_name("name", name)
        self._crew.announce(f"setting {name}", Broadcast("collector.update_policy", name, value))

    @single_threaded
    def replace(self, component: str, make: Callable[..., Any]) -> None:
        """Put another policy, or other envs, into all collectors, as `Collector.replace`. Those at work do so later.

        Another policy has the weights that it is made with. There may be another number of envs.
        """
        check_component(component)
        outdates = ("weights", "setting ") if component == "policy" else ()
        self._crew.announce(component, Broadcast("collector.replace", component, make), outdates)

    # ---------------------------------------------------------------- how good they are

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None) -> Evaluation:
        """Play whole episodes in the test envs of all collectors, each its share.

        What is under way is waited for, and comes with the next `collect` or `stream`.

        Args:
            num_episodes: Of all together; the first collectors play one more if they do not come out even.
            seed: As in `Collector.evaluate`, of the first collector; ``seed + 1`` of the second ...

        Returns:
            An `Evaluation`: the episodes of the first collector, then those of the second ...; test envs are numbered
            in that order.

        Raises:
            ArgumentError: If there are no test envs, or an argument has no usable value.
            ClosedError: After `stop`.
            WorkerDiedError: If a collector has died too often; else it is replaced, and plays its share anew.
            BaseException: What an env or a policy raised.
        """
        arguments.check_positive("num_episodes", num_episodes)
        seed = arguments.check_base_seed(seed)
        self._foreman.work([0] * len(self), False, lambda: True, lambda _: None)
        shares = {rank: share for rank, share in Goal(None, num_episodes).shares(range(len(self))).items() if share}
        orders = {
            rank: {"num_episodes": share, "seed": None if seed is None else seed + rank}
            for rank, share in shares.items()
        }
        found: list[Evaluation] = self._crew.ask("evaluate", orders)
        evaluation = join_evaluations(found)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    # ---------------------------------------------------------------- the rest

    def __len__(self) -> int:
        """Return the number of collectors."""
        return len(self._env)

    @property
    def num_envs(self) -> int:
        """Number of envs to collect from, of all collectors."""
        return sum(self._crew.sizes)

    @property
    def num_replaced(self) -> int:
        """How often a collector has died and was replaced."""
        return self._crew.num_replaced

    def _close_envs(self) -> None:
        if hasattr(self, "_env"):  # else its making has failed
            self._env.close()
        self._unsent.close()

    def __repr__(self) -> str:
        """Return one line."""
        state = "stopped" if self._guard.is_closed else f"version {self.version}"
        return f"<parallelenv.CollectorSet of {count(len(self), 'collector')}, para_mode={self._word!r}, {state}>"
