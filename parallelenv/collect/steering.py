"""What the collectors of a set are told, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parallelenv import arguments
from parallelenv.broadcast import Broadcast
from parallelenv.collect.checks import check_component, check_version
from parallelenv.collect.crew import Crew
from parallelenv.collect.stopping import Stoppable, alone
from parallelenv.env import ParallelEnv
from parallelenv.texts import count


class Steered(Stoppable):
    """The part of a `CollectorSet` that gives its collectors what they work with."""

    version: int
    _env: ParallelEnv
    _crew: Crew
    _word: Any

    # ---------------------------------------------------------------- what is given to them

    @alone
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
            ClosedError: After `stop`.
        """
        self._announce_weights(weights, check_version(version, self.version))

    def _announce_weights(self, weights: Any, version: int = 0) -> None:
        broadcast = Broadcast("collector.set_weights", weights, version)
        before, self.version = self.version, version
        try:
            self._crew.announce("weights", broadcast)
        except KeyboardInterrupt:  # all will have them
            raise
        except BaseException:
            self.version = before
            raise

    @alone
    def update_policy(self, name: str, value: Any) -> None:
        """Set an attribute of all policies, as `Collector.update_policy`. Collectors at work do so afterwards."""
        arguments.check_name("name", name)
        self._crew.announce(f"setting {name}", Broadcast("collector.update_policy", name, value))

    @alone
    def replace(self, component: str, make: Callable[..., Any]) -> None:
        """Put another policy, or other envs, into all collectors, as `Collector.replace`. Those at work do so later.

        Another policy has the weights that it is made with. There may be another number of envs.
        """
        check_component(component)
        outdates = ("weights", "setting ") if component == "policy" else ()
        self._crew.announce(component, Broadcast("collector.replace", component, make), outdates)

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

    def __repr__(self) -> str:
        """Return one line."""
        state = "stopped" if self._is_stopped else f"version {self.version}"
        return f"<parallelenv.CollectorSet of {count(len(self), 'collector')}, para_mode={self._word!r}, {state}>"
