"""A collector: a policy beside its envs. It collects steps, evaluates the policy and takes new weights.

`CollectorEnv` is one as an env, so that `ParallelEnv` runs, restarts and schedules collectors like envs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import numpy as np

from parallelenv.collect.base import (
    ENV_MAKER,
    CollectorBase,
    Info,
    Policy,
    check_maker,
    derived_seed,
)
from parallelenv.collect.history import import_package
from parallelenv.contract.arguments import check_policy, check_positive, is_int
from parallelenv.contract.copying import deep_copy, loads
from parallelenv.contract.env_specs import bind_arguments
from parallelenv.contract.error_text import count, show
from parallelenv.contract.failures import Failure, put
from parallelenv.contract.rollout_data import map_leaves
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.engine.thread_guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import AbsentAttributeError, ArgumentError, WorkerDiedError, WorkerTimeoutError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.rollout import Rollout, count_episodes
from parallelenv.rollouts.running_rollout import LocalRollouts

_taken: weakref.WeakSet[ParallelEnv] = weakref.WeakSet()
"""Envs that collectors of this process use."""


class Collector(CollectorBase):
    """Holds a policy, envs to collect steps from, and envs to test it in.

    The policy is called as ``policy(states, rnn_state=None, done=None, *, deterministic=False)``; only the first
    parameter is required. It returns actions, or ``(actions, rnn_state, extras)``. See `ParallelEnv.rollout`. It runs
    in this process on the states of all envs, wherever these run, and keeps its random state and counters from one
    collection to the next. The same seeds give identical data in every ``para_mode`` of the envs.

    Args:
        make_policy: Returns the policy. Called with those of ``rank``, ``world_size`` and ``seed`` that it has as
            parameters; its ``seed`` is this collector's ``seed`` plus the rank.
        make_envs: Returns the `ParallelEnv` to collect from, in any mode, with ``asynchronous="restart"``. `stop`
            closes it.
        num_steps: Steps of each env in one collection.
        seed: Env i gets ``seed + rank * num_envs + i`` for its first episode; ``None`` seeds nothing.
        weights: First weights of the policy, set as by `set_weights`; ``None`` leaves the policy as it was made.
        make_test_envs: Returns the `ParallelEnv` for `evaluate`, with any done policy.
        start_steps: Steps of each env in the first collection; ``None`` means ``num_steps``.
        log_dir: Folder for TensorBoard; needs ``tensorboardX``, or ``tensorboard`` and torch.
        rank: Index of this collector in its set.
        world_size: Number of collectors in the set.

    Attributes:
        version: Version of the policy's weights: 0 at first, then plus one with every `set_weights` without
            ``version``.
        history: A `History` of all collections and evaluations.

    Raises:
        ArgumentError: If an argument has an invalid value.
        BaseException: If one of the given functions raised it.
    """

    _unrepeatable = ("collect", "replace")

    def __init__(
        self,
        make_policy: Callable[..., Policy],
        make_envs: Callable[[], ParallelEnv],
        *,
        num_steps: int,
        seed: int | None = None,
        weights: object = None,
        make_test_envs: Callable[[], ParallelEnv] | None = None,
        start_steps: int | None = None,
        log_dir: object = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_positive("world_size", world_size)
        if not is_int(rank) or not 0 <= rank < world_size:
            raise ArgumentError(
                f"rank={show(rank)} must be an int from 0 to {world_size - 1}: below world_size={world_size}."
            )
        super().__init__(num_steps, start_steps, seed, log_dir)
        self._rank, self._world_size = rank, world_size
        self._test_seed = None if self._seed is None else derived_seed(self._seed, rank)
        self._next_steps = self._start_steps
        try:
            self._make_policy(make_policy)
            if weights is not None:
                self._set_weights(weights, 0)
            self._make_envs("envs", make_envs, "make_envs")
            if make_test_envs is not None:
                self._make_envs("test_envs", make_test_envs, "make_test_envs")
        except BaseException:
            self.stop()
            raise

    def _make_policy(self, make: Callable[..., Policy]) -> None:
        check_maker("make_policy", make)
        policy = bind_arguments(make, self._rank, self._world_size, self._seed)()
        check_policy(policy)
        self._policy: Policy = policy
        self._rnn_state: Any = None

    def _make_envs(self, component: str, make: Callable[[], ParallelEnv], name: str) -> None:
        """Make ``"envs"`` or ``"test_envs"`` and close the former ones. ``name`` is that of ``make`` in messages."""
        check_maker(name, make)
        env = make()
        if not isinstance(env, ParallelEnv):
            raise ArgumentError(f"{name}() returned a {type(env).__name__}. {ENV_MAKER}")
        if env in _taken:
            raise ArgumentError(
                f"{name}() returned a ParallelEnv that a collector has already. Let it make a new one: collectors, "
                "and envs to collect from and test envs, play apart, and what is replaced is closed."
            )
        if component == "envs" and env.asynchronous != "restart":
            env.close()
            raise ArgumentError(
                f"{name}() returned a ParallelEnv with asynchronous={env.asynchronous!r}. A collector does not stop "
                "where an episode ends: make it with asynchronous='restart'."
            )
        _taken.add(env)
        former, self._envs[component] = self._envs.get(component), env
        if former is not None:
            former.close()
        if component == "envs":
            self._begin()

    def _begin(self) -> None:
        """Make the next collection begin with new episodes."""
        self._rnn_state, self._needs_reset = None, True
        self._open_episodes = OpenEpisodes(self.num_envs)
        if self._seed is not None:
            self._envs["envs"].seed(self._seed + self._rank * self.num_envs)

    # ---------------------------------------------------------------- collecting

    def _collect(
        self, num_steps: int | None, is_over: Callable[[], bool] | None, progress: bool
    ) -> tuple[Rollout, Info]:
        data, seconds = self._gather(
            num_steps or self._next_steps, lambda _: is_over is not None and is_over(), progress
        )
        ended = count_episodes(data, self._open_episodes, data.env_ids)
        num_samples = int(data.valid.sum())
        self.history.note(ended.returns, self.version, num_samples, seconds)
        return data, {
            "episode_returns": ended.returns,
            "episode_lengths": ended.lengths,
            "num_steps": len(data),
            "num_samples": num_samples,
            "seconds": seconds,
            "version": self.version,
        }

    def _gather(self, num_steps: int, is_over: Callable[[int], bool], progress: bool) -> tuple[Rollout, float]:
        """Return the next steps as a rollout, and the seconds they took. For ``is_over`` see `HostRollout`."""
        began = time.perf_counter()
        env = self._envs["envs"]
        with _with_collector_hints("envs"):
            if self._needs_reset:
                env.reset()
                self._rnn_state = None
            self._needs_reset = True  # stays set if anything below fails
            data = LocalRollouts(env.engine).run(self._policy, num_steps, self._rnn_state, progress, is_over)
        self._needs_reset, self._next_steps = False, self._num_steps
        self._rnn_state = deep_copy(data.rnn_state)
        return data, time.perf_counter() - began

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None, progress: bool = True) -> Evaluation:
        """Play whole episodes in the test envs, with ``deterministic=True`` if the policy has that parameter.

        Args:
            num_episodes: Number of episodes, over all test envs.
            seed: Seed of the first episodes; ``None`` derives it from the collector's seed, the same each time, so
                versions of a policy are compared on the same episodes.
            progress: Whether to show a progress bar. See `collect`.

        Raises:
            ArgumentError: If there are no test envs, or an argument has an invalid value.
            ClosedError: After `stop`.
            BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
        """
        if "test_envs" not in self._envs:
            raise ArgumentError(
                "evaluate() was called, but there are no test envs. Give make_test_envs, or replace('test_envs', make)."
            )
        seed = self._test_seed if seed is None else seed
        policy = self._policy
        try:
            parameters: Mapping[str, inspect.Parameter] = inspect.signature(policy).parameters
            if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and hasattr(policy, "forward"):
                parameters = inspect.signature(policy.forward).parameters  # a torch module's __call__ accepts anything
        except (TypeError, ValueError):  # a builtin without a signature
            parameters = {}
        if "deterministic" in parameters:
            policy = functools.partial(policy, deterministic=True)
        with _with_collector_hints("test_envs"):
            evaluation = self._envs["test_envs"].run_episodes(policy, num_episodes, seed=seed, progress=progress)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    # ---------------------------------------------------------------- weights and components

    def _apply(self, method: str, *arguments: object) -> None:
        getattr(self, f"_{method}")(*arguments)

    def _set_weights(self, weights: object, version: int) -> None:
        policy = self._policy
        load = getattr(policy, "set_weights", None) or getattr(policy, "load_state_dict", None)
        if not callable(load):
            raise ArgumentError(
                f"The policy, a {type(policy).__name__}, takes no weights. Give it a method set_weights(weights), or "
                "let it be a torch module, which has load_state_dict."
            )
        load(weights)
        self.version = version

    def _update_policy(self, name: str, value: object) -> None:
        path, _, last = name.rpartition(".")
        try:
            owner = operator.attrgetter(path)(self._policy) if path else self._policy
            getattr(owner, last)
        except AttributeError:
            raise AbsentAttributeError(
                f"name={name!r}: the policy, a {type(self._policy).__name__}, has no such attribute. Set what it has, "
                "or give another one by replace('policy', make_policy)."
            ) from None
        setattr(owner, last, deep_copy(value))

    def _replace(self, component: str, make: Callable[..., Any]) -> None:
        if component == "policy":
            self._make_policy(make)
        else:
            self._make_envs(component, make, "make")

    # ---------------------------------------------------------------- other

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._policy

    @property
    def num_envs(self) -> int:
        """Number of envs to collect from."""
        return len(self._envs["envs"])

    def __repr__(self) -> str:
        """Return one line."""
        state = "stopped" if self.closed else f"version {self.version}"
        return f"<parallelenv.Collector of {count(self.num_envs, 'env')}, {state}>"


@contextlib.contextmanager
def _with_collector_hints(component: str) -> Iterator[None]:
    """Add to errors of dead or late workers, which suggest ``restart``, what to call on a collector instead."""
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


_LEVEL = 1
"""zstd, ratio and speeds: steps of 16 CartPoles 0.47, compress 0.8 GB/s, decompress 1.3 GB/s; decompression counts, as
the caller opens all collections. LZ4: 0.51, 1.9 and 1.0 GB/s. Drawn frames of 84x84x4: zstd 0.01, 1.8 and 3.3 GB/s;
LZ4 0.02, 3.5 and 0.5. Higher levels take longer and gain 0.01."""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """The next task of a collector, which is the action of its `CollectorEnv`: at most so many steps and seconds."""

    num_steps: int
    seconds: float = math.inf


@dataclass(slots=True)
class Part:
    """Steps of a collector: the state of its `CollectorEnv`."""

    num_envs: int
    version: int  # of the policy
    seconds: float = 0.0  # that the steps took
    failure: Failure | None = None  # why the collector stopped before its request was done
    data: Rollout | None = None
    packed: bytes = b""  # in place of the data, pickled and compressed
    num_bytes: tuple[int, int] | None = None  # before and after compression

    def pack(self) -> None:
        """Compress the steps."""
        if self.data is not None:
            plain = cloudpickle.dumps(self.data)
            self.packed, self.data = zstandard().compress(plain, _LEVEL), None
            self.num_bytes = len(plain), len(self.packed)

    def unpack(self) -> Rollout | None:
        """Return the steps, decompressed if need be."""
        if self.packed:
            self.data, self.packed = loads(zstandard().decompress(self.packed)), b""
        return self.data

    def __deepcopy__(self, memo: object) -> Part:
        """Return itself: the sender never changes it. Within one process this saves a copy of all steps."""
        return self


class CollectorEnv(Collector):
    """A collector, made with these arguments, that is also an env: one step is one request; there are no episodes."""

    def __init__(self, arguments: dict[str, Any], compresses: bool) -> None:
        super().__init__(**arguments)
        self._compresses = compresses

    def reset(self, seed: int | None = None) -> None:
        """Take a seed if one is given, that is, if this collector replaces one that died."""
        if seed is not None:
            self._seed = seed
            self._begin()

    def step(self, request: CollectRequest) -> tuple[Part, float, bool, dict[str, Any]]:
        """Collect. What an env or the policy raises is returned with the steps made until then."""
        end = time.perf_counter() + request.seconds
        part = Part(self.num_envs, self.version)
        try:
            part.data, part.seconds = self._gather(
                request.num_steps, lambda num_made: num_made > 0 and time.perf_counter() >= end, progress=False
            )
        except Exception as error:  # noqa: BLE001 (users' code runs; the error is sent)
            made = getattr(error, "partial", None)
            if isinstance(made, Rollout):
                num_steps = int(np.flatnonzero((made.valid | made.dones).any(axis=1)).max(initial=-1)) + 1
                names = ("states", "actions", "rewards", "terminated", "truncated", "valid", "extras")
                kept = {name: map_leaves(getattr(made, name), lambda leaf: leaf[:num_steps]) for name in names}
                part.data = replace(made, **kept)  # without trailing steps that no env made
                put(error, "partial", None)  # else the error would carry the steps as well
            part.failure = Failure(error, self._rank, "collect")
        if self._compresses:
            part.pack()
        return part, 0.0, False, {}

    def close(self) -> None:
        """Close the envs."""
        self.stop()


def zstandard() -> Any:
    """Return the module for compression; raise `MissingDependencyError` if it is not installed."""
    return import_package("zstandard", "compress_data=True")
