"""A policy beside its envs: it collects steps, is evaluated, and takes new weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from parallelenv.collect.checks import (
    check_component,
    check_policy_maker,
    check_rank,
    check_version,
    checked_env,
    listening,
)
from parallelenv.collect.history import History
from parallelenv.collect.stopping import Stoppable
from parallelenv.contract import arguments
from parallelenv.contract.arguments import check_name, check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.env_specs import told
from parallelenv.contract.messages import count, show
from parallelenv.engine.guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import AbsentAttributeError, ArgumentError, WorkerDiedError, WorkerTimeoutError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.local_rollout import LocalRollouts
from parallelenv.rollouts.trajectory import Rollout

Info = dict[str, Any]


class Collector(Stoppable):
    """Holds a policy, envs to collect steps from, and envs to test it in.

    The policy is ``policy(states, rnn_state=None, done=None, *, deterministic=False)`` and returns actions, or
    ``(actions, rnn_state, extras)``; as in `ParallelEnv.rollout`, and it may do without any parameter but the first. It
    is called in this process, with the states of all envs, wherever these are. It stays one and the same object, so
    what it draws or counts goes on from one collection to the next.

    Same seeds give identical data in every mode of the envs.

    Args:
        make_policy: Returns the policy. If it has parameters ``rank``, ``world_size`` or ``seed``, it gets these: the
            rank, the number of collectors, and ``seed`` plus the rank.
        make_envs: Returns the `ParallelEnv` to collect from, in any mode, with ``asynchronous="restart"``. It is closed
            by `stop`.
        num_steps: So many steps each env makes in a collection.
        seed: Env i gets ``seed + rank * num_envs + i`` for its first episode; ``None``: nothing.
        weights: What the policy begins with, as by `set_weights`; ``None``: as it was made.
        make_test_envs: Returns the `ParallelEnv` for `evaluate`; any policy ``asynchronous``.
        start_steps: So many steps in the first collection; ``None``: as in any other.
        log_dir: Folder for TensorBoard; needs ``tensorboardX``, or ``tensorboard`` beside torch.
        rank: Number of this collector among others.
        world_size: How many collectors there are.

    Attributes:
        version: Of the policy's weights: 0 at first, and one more with every `set_weights` that does not name it.
        history: A `History` of all collections and evaluations.

    Raises:
        ArgumentError: If an argument has no usable value.
        BaseException: What the functions given have raised.
    """

    _unrepeatable = ("collect", "replace")

    def __init__(
        self,
        make_policy: Callable[..., Any],
        make_envs: Callable[[], ParallelEnv],
        *,
        num_steps: int,
        seed: int | None = None,
        weights: Any = None,
        make_test_envs: Callable[[], ParallelEnv] | None = None,
        start_steps: int | None = None,
        log_dir: Any = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        arguments.check_positive("num_steps", num_steps)
        if start_steps is not None:
            arguments.check_positive("start_steps", start_steps)
        check_rank(rank, world_size)
        self._rank, self._world_size = rank, world_size
        self._seed = arguments.check_base_seed(seed)
        self._test_seed = None if self._seed is None else _derived(self._seed, rank)
        self._num_steps, self._next_steps = num_steps, start_steps or num_steps
        self.version = 0
        self._env: ParallelEnv
        self._test_env: ParallelEnv | None = None
        self.history = History(log_dir)
        try:
            self._replace_policy(make_policy)
            if weights is not None:
                load_weights(self._policy, weights)
            self._env = checked_env(make_envs, "make_envs", must_restart=True)
            self._begin()
            if make_test_envs is not None:
                self._test_env = checked_env(make_test_envs, "make_test_envs", must_restart=False)
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        """Let the next collection begin with new episodes."""
        self._rnn_state: Any = None
        self._needs_reset = True
        self._tallies = Tallies()
        if self._seed is not None:
            self._env.seed(self._seed + self._rank * len(self._env))

    # ---------------------------------------------------------------- collecting

    @single_threaded
    def collect(
        self, num_steps: int | None = None, listen_to: Iterable[Any] = (), *, progress: bool = True
    ) -> tuple[Rollout, Info]:
        """Let the policy act, and return the steps. Episodes go on from one collection to the next.

        Args:
            num_steps: So many each env makes; ``None``: as many as the collector was made for, in the first collection
                ``start_steps``.
            listen_to: Events (whatever has ``is_set()``) and functions without arguments. As soon as one is set, or
                returns ``True``, the collection stops at its next step and returns what it has.
            progress: Whether a bar shows, on a terminal or in a notebook, from the first second on.

        Returns:
            ``data``, a `Rollout`, and ``info``, a dict of

            * ``episode_returns`` and ``episode_lengths``, ``(num_ended,)``, of the episodes that have ended, also of
              their steps in earlier collections, in the order of ``data.ended_states``;
            * ``num_steps``, of each env, and ``num_samples``, of all together;
            * ``seconds`` that it took;
            * ``version`` of the policy.

        Raises:
            ArgumentError: If an argument has no usable value.
            ClosedError: After `stop`.
            BaseException: What an env or the policy raised, as `ParallelEnv.rollout`; ``error.partial`` is the
                `Rollout` so far. The next collection begins new episodes.
        """
        is_over = listening(listen_to)
        if num_steps is not None:
            arguments.check_positive("num_steps", num_steps)
        data, seconds = self._gather(num_steps or self._next_steps, lambda _: is_over(), progress)
        info = self._told(data, seconds)
        self.history.note(info["episode_returns"], self.version, info["num_samples"], seconds)
        return data, info

    def _gather(self, num_steps: int, is_over: Callable[[int], bool], progress: bool) -> tuple[Rollout, float]:
        """Return steps, and the seconds that they took."""
        began = time.perf_counter()
        with _telling_the_way_out("envs"):
            if self._needs_reset:
                self._env.reset()
                self._rnn_state = None
            self._needs_reset = True  # and so it stays if anything goes wrong
            data = LocalRollouts(self._env.engine).run(self._policy, num_steps, self._rnn_state, progress, is_over)
        self._needs_reset = False
        self._next_steps = self._num_steps
        self._rnn_state = deep_copy(data.rnn_state)
        return data, time.perf_counter() - began

    def _told(self, data: Rollout, seconds: float) -> Info:
        """Return what there is to say of steps, the next of the envs."""
        returns, lengths = self._tallies.count(data)
        return {
            "episode_returns": returns,
            "episode_lengths": lengths,
            "num_steps": len(data),
            "num_samples": int(data.valid.sum()),
            "seconds": seconds,
            "version": self.version,
        }

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None, progress: bool = True) -> Evaluation:
        """Play whole episodes in the test envs, with ``deterministic=True`` if the policy takes that.

        Args:
            num_episodes: Of all test envs together.
            seed: Of the first episodes; ``None``: one that follows from the collector's, the same every time, so that
                versions of a policy are compared by the same episodes.
            progress: As in `collect`.

        Returns:
            An `Evaluation`.

        Raises:
            ArgumentError: If there are no test envs, or an argument has no usable value.
            ClosedError: After `stop`.
            BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
        """
        if self._test_env is None:
            raise ArgumentError(
                "evaluate() was called, but there are no test envs. Give make_test_envs, or replace('test_envs', make)."
            )
        if seed is None:
            seed = self._test_seed
        policy = as_deterministic(self._policy)
        with _telling_the_way_out("test_envs"):
            evaluation = self._test_env.run_episodes(policy, num_episodes, seed=seed, progress=progress)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    # ---------------------------------------------------------------- what is given to it

    @single_threaded
    def set_weights(self, weights: Any, version: int | None = None) -> None:
        """Give the policy weights, by its ``set_weights(weights)`` or torch's ``load_state_dict``, as they are.

        Args:
            weights: Whatever the policy takes.
            version: What they are called in infos; ``None``: one more than before.

        Raises:
            ArgumentError: If the policy takes none, or ``version`` is no int of 0 or more.
            ClosedError: After `stop`.
        """
        version = check_version(version, self.version)
        load_weights(self._policy, weights)
        self.version = version

    @single_threaded
    def update_policy(self, name: str, value: Any) -> None:
        """Set an attribute that the policy has, to a copy of ``value``; ``"a.b"`` sets ``b`` of its object ``a``.

        Raises:
            ArgumentError: If the name is none.
            AbsentAttributeError: If the policy has no such attribute.
            ClosedError: After `stop`.
        """
        set_existing(self._policy, name, value)

    @single_threaded
    def replace(self, component: str, make: Callable[..., Any]) -> None:
        """Put another policy, or other envs, in the place of what is there. Envs that go are closed then.

        Args:
            component: ``"policy"``, which has the weights that it is made with; ``"envs"``, whose episodes then begin
                anew, with the collector's seed; or ``"test_envs"``.
            make: As ``make_done_policy``, ``make_envs`` or ``make_test_envs``.

        Raises:
            ArgumentError: If there is no such component, or what was made is not one. Nothing was replaced.
            ClosedError: After `stop`.
        """
        check_component(component)
        if component == "policy":
            self._replace_policy(make)
            self._rnn_state = None
        elif component == "test_envs":
            old, self._test_env = self._test_env, checked_env(make, "make", must_restart=False)
            if old is not None:
                old.close()
        else:
            former, self._env = self._env, checked_env(make, "make", must_restart=True)
            former.close()
            self._begin()

    def _replace_policy(self, make: Callable[..., Any]) -> None:
        self._policy = make_policy(make, self._rank, self._world_size, self._seed)

    def reseed(self, seed: int) -> None:
        """Begin anew with other seeds: for a collector in the place of one that has died."""
        self._seed = seed
        self._begin()

    # ---------------------------------------------------------------- the rest

    @property
    def policy(self) -> Callable[..., Any]:
        """The policy."""
        return self._policy

    @property
    def num_envs(self) -> int:
        """Number of envs to collect from."""
        return len(self._env)

    def _close_envs(self) -> None:
        for env in (getattr(self, "_env", None), getattr(self, "_test_env", None)):
            if env is not None:
                env.close()

    def __repr__(self) -> str:
        """Return one line."""
        state = "stopped" if self._guard.is_closed else f"version {self.version}"
        return f"<parallelenv.Collector of {count(len(self._env), 'env')}, {state}>"


@contextlib.contextmanager
def _telling_the_way_out(component: str) -> Iterator[None]:
    """Let errors of dead or late workers, which speak of ``restart``, say what a collector has instead."""
    try:
        yield
    except (WorkerDiedError, WorkerTimeoutError, BaseExceptionGroup) as error:
        kinds = WorkerDiedError, WorkerTimeoutError
        if not isinstance(error, BaseExceptionGroup) or error.subgroup(kinds):
            error.add_note(
                f"A collector has no restart(): replace({show(component)}, make_{component}) gives it new ones. With "
                f"on_failure='restart' the ParallelEnv in make_{component} rebuilds its envs itself."
            )
        raise


def _derived(seed: int, rank: int) -> int:
    return int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1)[0])


Policy = Callable[..., Any]
_LOADERS = ("set_weights", "load_state_dict")


def make_policy(make: Any, rank: int, world_size: int, seed: int | None) -> Policy:
    """Return a policy; ``make`` gets those of ``rank``, ``world_size`` and ``seed`` that it has parameters for.

    Raises:
        ArgumentError: If what makes it, or the policy itself, cannot be called.
    """
    check_policy_maker(make)
    policy: Policy = told(make, rank, world_size, seed)()
    check_policy(policy)
    return policy


def load_weights(policy: Policy, weights: Any) -> None:
    """Give a policy weights, as they are.

    Raises:
        ArgumentError: If it has no method that takes them.
    """
    for name in _LOADERS:
        load = getattr(policy, name, None)
        if callable(load):
            load(weights)
            return
    raise ArgumentError(
        f"The policy, a {type(policy).__name__}, takes no weights. Give it a method set_weights(weights), or let it be "
        "a torch module, which has load_state_dict."
    )


def set_existing(policy: Policy, name: str, value: Any) -> None:
    """Set an attribute that a policy has; ``"a.b"`` sets ``b`` of the object ``a``.

    Raises:
        ArgumentError: If the name is none.
        AbsentAttributeError: If there is no such attribute.
    """
    check_name("name", name)
    *way, last = name.split(".")
    owner: Any = policy
    for part in way:
        owner = _existing(owner, part, name, policy)
    _existing(owner, last, name, policy)
    setattr(owner, last, deep_copy(value))


def _existing(owner: Any, part: str, name: str, policy: Policy) -> Any:
    if not hasattr(owner, part):
        raise AbsentAttributeError(
            f"name={name!r}: the policy, a {type(policy).__name__}, has no {part!r} there. Set what it has, or give "
            "another one by replace('policy', make_policy)."
        )
    return getattr(owner, part)


def as_deterministic(policy: Policy) -> Policy:
    """Return a policy that is called with ``deterministic=True``, if it takes that."""
    parameters: Any = ()
    try:
        parameters = inspect.signature(policy).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and hasattr(policy, "forward"):
            parameters = inspect.signature(policy.forward).parameters  # a torch module takes anything
    except (TypeError, ValueError):  # a builtin without a signature
        pass
    return functools.partial(policy, deterministic=True) if "deterministic" in parameters else policy


class Tallies:
    """What has been of the episodes under way, by env."""

    def __init__(self) -> None:
        self._returns: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}

    def count(self, rollout: Rollout) -> tuple[Array, Array]:
        """Return the whole returns and lengths of the episodes that have ended in a rollout, the next of its envs.

        Returns:
            ``(num_ended,)`` each, in the order of `Rollout.ended_states`; float64, or objects if rewards are no
            numbers, and int64.
        """
        ids = rollout.env_ids.tolist()
        for column in np.flatnonzero(rollout.starts).tolist():
            self._forget(ids[column])
        returns, lengths = rollout.episode_returns, rollout.episode_lengths
        begins = np.zeros(len(ids), dtype=np.int64)
        for place, (step, column) in enumerate(np.argwhere(rollout.dones).tolist()):
            if not begins[column]:
                returns[place] = returns[place] + self._returns.get(
                    ids[column], 0.0
                )  # not in place: it may be an array
                lengths[place] += self._lengths.get(ids[column], 0)
                self._forget(ids[column])
            begins[column] = step + 1
        for column, begin in enumerate(begins.tolist()):
            valid = rollout.valid[begin:, column]
            if valid.any():
                env_id = ids[column]
                self._returns[env_id] = self._returns.get(env_id, 0.0) + rollout.rewards[begin:, column][valid].sum()
                self._lengths[env_id] = self._lengths.get(env_id, 0) + int(valid.sum())
        return returns, lengths

    def under_way(self, rollout: Rollout) -> list[tuple[Any, int]]:
        """Return the return and length so far of each env's episode under way, in the order of a rollout's envs."""
        return [(self._returns.get(one, 0.0), self._lengths.get(one, 0)) for one in rollout.env_ids.tolist()]

    def _forget(self, env_id: int) -> None:
        self._returns.pop(env_id, None)
        self._lengths.pop(env_id, None)
