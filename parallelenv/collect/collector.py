"""A collector holds a policy and its envs. It collects steps, evaluates the policy and accepts new weights."""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import inspect
import io
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np

from parallelenv.contract.arguments import Policy, check_base_seed, check_name, check_policy, check_positive, is_int
from parallelenv.contract.attributes import ABSENT, defines, look_up
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.env_specs import bind_arguments
from parallelenv.contract.error_text import count, show
from parallelenv.contract.spaces import Info
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.engine.thread_guard import Guard, single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import (
    AbsentAttributeError,
    ArgumentError,
    MissingDependencyError,
    WorkerDiedError,
    WorkerTimeoutError,
)
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.rollout import Rollout, count_episodes
from parallelenv.rollouts.running_rollout import local_rollout
from parallelenv.worker.rollout_recorder import policy_parameters


class Record(NamedTuple):
    """A collection or an evaluation.

    Attributes:
        samples: Total number of env steps collected so far.
        seconds: Total time spent on collecting so far.
        version: Version of the policy.
        episodes: Number of episodes that ended in this collection or evaluation.
        mean_return: Mean return of these episodes; nan if there are no episodes, or if rewards are not numbers.
        is_test: Whether this is an evaluation.
    """

    samples: int
    seconds: float
    version: int
    episodes: int
    mean_return: float
    is_test: bool


class History:
    """All collections and evaluations so far, oldest first."""

    def __init__(self, log_dir: object = None) -> None:
        self._records: list[Record] = []
        self._samples, self._seconds = 0, 0.0
        self._writer: Any = None
        if log_dir is None:
            return
        for module in ("tensorboardX", "torch.utils.tensorboard"):
            try:
                self._writer = importlib.import_module(module).SummaryWriter(str(log_dir))
                return
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in ("tensorboardX", "tensorboard", "torch"):
                    raise
        raise MissingDependencyError(
            f"log_dir={show(log_dir)} needs the package 'tensorboardX', or 'tensorboard' and torch. Install it with: "
            "pip install tensorboardX"
        )

    def note(
        self, returns: Array, version: int, samples: int = 0, seconds: float = 0.0, *, is_test: bool = False
    ) -> None:
        """Add a collection or an evaluation. For an evaluation, leave ``samples`` and ``seconds`` at 0."""
        self._samples += samples
        self._seconds += seconds
        mean = float(returns.mean()) if returns.size and returns.dtype != object else math.nan
        record = Record(self._samples, self._seconds, version, len(returns), mean, is_test)
        self._records.append(record)
        if self._writer is None:
            return
        kind, names = ("test", []) if is_test else ("train", ["seconds", "version"])
        for name in ("episodes", *names, *([] if math.isnan(mean) else ["mean_return"])):
            self._writer.add_scalar(f"{kind}/{name}", getattr(record, name), self._samples)

    def close(self) -> None:
        """Close the TensorBoard writer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records))

    def __getitem__(self, index: int) -> Record:
        return self._records[index]

    def __repr__(self) -> str:
        return f"<History of {count(len(self), 'record')}, {self._samples:,} samples in {self._seconds:.1f} s>"

    def plot(self, axes: object = None) -> Any:
        """Plot mean returns against samples and against seconds, with collections as a line and evaluations as dots.

        Args:
            axes: Two matplotlib axes; ``None`` makes a new figure.

        Returns:
            The figure.

        Raises:
            MissingDependencyError: If matplotlib is not installed.
        """
        if axes is None:  # without pyplot, which would keep the figure; notebooks would then show it twice
            figure = import_package("matplotlib.figure", "plot()").Figure

            def as_png(self: Any) -> bytes:
                content = io.BytesIO()
                self.savefig(content, format="png", dpi=80)
                return content.getvalue()

            picture: Any = type("Picture", (figure,), {"_repr_png_": as_png})
            axes = picture(figsize=(9, 3), layout="constrained").subplots(1, 2)
        pair: list[Any] = list(axes) if isinstance(axes, Iterable) else [axes]
        if len(pair) != 2 or not all(hasattr(one, "plot") for one in pair):
            raise ArgumentError(f"axes={show(axes)} are not two axes of matplotlib: for samples and for seconds.")
        for axis, name in zip(pair, ("samples", "seconds"), strict=True):
            for is_test, style, label in ((False, "-", "collected"), (True, "o", "evaluated")):
                chosen = [one for one in self if one.is_test is is_test and not math.isnan(one.mean_return)]
                if chosen:
                    returns = [one.mean_return for one in chosen]
                    axis.plot([getattr(one, name) for one in chosen], returns, style, label=label)
            axis.set_xlabel(name)
            axis.set_ylabel("mean return")
            if axis.get_legend_handles_labels()[0]:
                axis.legend()
        return pair[0].figure


def import_package(module: str, purpose: str) -> Any:
    """Return a module of an optional package; raise `MissingDependencyError` if the package is not installed."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingDependencyError(
            f"{purpose} needs the package {package!r}, which is not installed. Install it with: pip install {package}"
        ) from error


_COMPONENTS = ("policy", "envs", "test_envs")
ENV_MAKER = (
    "Give a function without arguments that returns a ParallelEnv. Instead of wrapping it, wrap its envs or do the "
    "same in the policy."
)
_taken: weakref.WeakSet[ParallelEnv] = weakref.WeakSet()
"""The `ParallelEnv` objects that collectors in this process use or have used."""


class CollectorBase(ShortTracebacks):
    """Base class of `Collector` and `CollectorSet`. See `Collector` for the arguments."""

    _unrepeatable: tuple[str, ...] = ()
    """Methods that must not be called within another call on this object, for example by a policy."""

    def __init__(self, num_steps: int, start_steps: int | None, seed: int | None, log_dir: object) -> None:
        check_positive("num_steps", num_steps)
        check_optional(start_steps=start_steps)
        self._num_steps, self._start_steps = num_steps, start_steps or num_steps
        self._seed = check_base_seed(seed)
        self.version = 0
        self._envs: dict[str, ParallelEnv] = {}  # to be closed by `stop`
        self._guard = Guard(type(self).__name__, "stopped", self._unrepeatable)
        self.history = History(log_dir)

    @single_threaded
    def collect(
        self, num_steps: int | None = None, listen_to: Iterable[object] = (), *, progress: bool = True
    ) -> tuple[Rollout, Info]:
        """Step the envs with the policy, and return the steps. Episodes continue from one collection to the next.

        A `CollectorSet` runs all of its collectors. Its result includes the steps of collections that earlier calls
        left in flight, for example after Ctrl-C or an abandoned `stream`.

        Args:
            num_steps: Steps of each env. ``None`` means ``start_steps`` for the first collection and ``num_steps``
                for all others, as given to the constructor.
            listen_to: Events (objects with ``is_set()``) and functions without arguments. As soon as an event is set or
                a function returns ``True``, the collection stops before its next step and returns the steps so far,
                which may be none. A `CollectorSet` checks the events and functions about every 0.05 s.
            progress: Whether to show a progress bar, on a terminal or in a notebook, after the first second.

        Returns:
            ``data``, a `Rollout`, and ``info``, a dict with

            * ``episode_returns`` and ``episode_lengths``, ``(num_ended,)``: returns and lengths of the episodes that
              ended, including their steps in earlier collections, in the order of ``data.ended_states``;
            * ``num_steps``: number of steps of each env;
            * ``num_samples``: number of steps of all envs together;
            * ``seconds``: time that the collection took;
            * ``version``: version of the policy.

            For a `CollectorSet`, ``data`` has all envs: those of the first collector, then those of the second, and so
            on. ``data.valid`` is ``False`` for steps that a collector did not make. If a collector died and was
            replaced, its running episodes are truncated at that point and count as ended. If `replace` changed the
            number of envs or the nesting of their data, only the steps made before the change are returned; the later
            ones are part of the next collection. ``num_steps`` and ``version`` (the oldest version used) are arrays
            with one item per collector, ``(num_workers,)``, and ``info`` also has

            * ``staleness``, ``(num_workers,)``: the set's latest version minus the oldest version that the collector
              used;
            * ``lost_samples``: upper bound on the number of samples that were lost because collectors died before
              sending them. All samples that were requested from a dead collector are counted: about 0.5 s of work or,
              in `stream`, a whole collection;
            * ``num_bytes`` and ``num_bytes_sent``, only with ``compress_data``: sizes of the data before and after
              compression.

        Raises:
            ArgumentError: If an argument has an invalid value, or if the steps of a set's collectors cannot be joined,
                for example because the nesting of the data differs between collectors. The collections stay available
                to `stream`.
            ClosedError: After `stop`.
            EnvContractError: If the rewards of an episode cannot be added; ``error.partial`` is the collection.
            UsageError: If another thread is using this object.
            WorkerDiedError: If a collector of a set has died more often than ``max_restarts`` allows.
            WorkerTimeoutError: If a collector of a set took longer than ``timeout``. The collector is not replaced: the
                next collection waits for it again. If the collector hangs, `stop` terminates it.
            BaseException: Any exception raised by an env or the policy, as in `ParallelEnv.rollout`. In a `Collector`,
                ``error.partial`` is the `Rollout` so far, and the next collection starts new episodes. In a set, the
                steps made before the exception are part of the next collection.
        """
        asked: list[Any] = [None]
        if isinstance(listen_to, Iterable) and not isinstance(listen_to, str):
            asked = [getattr(one, "is_set", one) for one in listen_to]
        if not all(map(callable, asked)):
            raise ArgumentError(
                f"listen_to={show(listen_to)} must be a list. Give a list of events, such as threading.Event, or of "
                "functions without arguments."
            )
        check_optional(num_steps=num_steps)
        return self._collect(num_steps, (lambda: any(ask() for ask in asked)) if asked else None, progress)

    @abc.abstractmethod
    def _collect(
        self, num_steps: int | None, is_over: Callable[[], bool] | None, progress: bool
    ) -> tuple[Rollout, Info]:
        """Do the work of `collect`, with checked arguments."""

    @single_threaded
    def set_weights(self, weights: object, version: int | None = None) -> None:
        """Set the policy's weights with its method ``set_weights(weights)`` or ``load_state_dict(weights)``.

        A `Collector` passes the weights on without copying them. A `CollectorSet` pickles them once and sends each
        collector a copy; busy collectors get their copies before their next collection. With Ray, collectors on other
        nodes fetch the weights from the object store, once per node.

        Args:
            weights: Passed to the policy.
            version: Version of the weights, as reported in the ``info`` of collections: an int of at least 0. ``None``
                means the current version plus one.

        Raises:
            ArgumentError: If the policy has neither of these methods, or ``version`` is invalid.
            UnpicklableError: If a `CollectorSet` cannot pickle the weights. The earlier weights stay in use.
            KeyboardInterrupt, WorkerTimeoutError: In a `CollectorSet`, on Ctrl-C, or if a policy takes too long to load
                the weights. The weights are set anyway: collectors that do not have them yet load them before their
                next collection.
            ClosedError: After `stop`.
        """
        if version is not None and (not is_int(version) or version < 0):
            raise ArgumentError(f"version={show(version)} must be an int of 0 or more, or None for the next one.")
        self._apply("set_weights", weights, self.version + 1 if version is None else int(version))

    @single_threaded
    def update_policy(self, name: str, value: object) -> None:
        """Set an existing attribute of the policy to a copy of ``value``.

        The name ``"a.b"`` sets the attribute ``b`` of the policy's attribute ``a``. A `CollectorSet` updates the
        policies of all of its collectors. A busy collector updates its policy once it has finished its current work.

        Raises:
            ArgumentError: If ``name`` is invalid.
            AbsentAttributeError: If the policy does not have the attribute.
            ClosedError: After `stop`.
        """
        check_name("name", name)
        self._apply("update_policy", name, value)

    @single_threaded
    def replace(self, component: str, make: Callable[..., object]) -> None:
        """Replace the policy, the envs or the test envs.

        Replaced envs are closed. The number of envs may change. A `CollectorSet` replaces the component in all of its
        collectors. In a busy collector, this happens once its current work is finished.

        Args:
            component: ``"policy"``, ``"envs"`` or ``"test_envs"``. A new policy keeps the weights that it was made
                with. New envs start new episodes, seeded with the collector's seed.
            make: Function that returns the new component. It works like the constructor's ``make_policy``,
                ``make_envs`` or ``make_test_envs``.

        Raises:
            ArgumentError: If ``component`` is unknown, or ``make`` returns an object of the wrong type. In both cases,
                nothing is replaced.
            ClosedError: After `stop`.
        """
        if component not in _COMPONENTS:
            raise ArgumentError(f"component={show(component)} is not known; expected one of {_COMPONENTS}.")
        self._apply("replace", component, make)

    @abc.abstractmethod
    def _apply(self, method: str, *arguments: object) -> None:
        """Do the work of the public method called ``method``, with checked arguments."""

    @property
    def closed(self) -> bool:
        """True once `stop` has been called."""
        return self._guard.is_closed

    def plot(self, axes: object = None) -> Any:
        """Plot the returns of episodes against samples and seconds. See `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. You can call this method more than once."""
        self._guard.is_closed = True
        for env in self._envs.values():
            env.close()
        self.history.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class Collector(CollectorBase):
    """Holds a policy, envs to collect steps from, and envs to test the policy in.

    The policy is called as ``policy(states, rnn_state=None, done=None, *, deterministic=False)``; only the first
    parameter is required. It returns actions, or ``(actions, rnn_state, extras)``. See `ParallelEnv.rollout`. The
    policy always runs in this process, on the states of all envs, and keeps its random state and counters from one
    collection to the next. The same seeds give identical data in every ``para_mode`` of the envs.

    Args:
        make_policy: Function that returns the policy. If the function has parameters named ``rank``, ``world_size`` or
            ``seed``, it gets these arguments; ``seed`` is then this collector's ``seed`` plus the rank.
        make_envs: Function that returns the `ParallelEnv` to collect from, in any mode, with
            ``asynchronous="restart"``. `stop` closes this `ParallelEnv`.
        num_steps: Steps of each env in one collection.
        seed: Env i gets ``seed + rank * num_envs + i`` for its first episode. With ``None``, envs get no seeds.
        weights: Initial weights of the policy, set as by `set_weights`. With ``None``, the policy keeps the weights
            that it was made with.
        make_test_envs: Function that returns the `ParallelEnv` for `evaluate`, with any value of ``asynchronous``.
        start_steps: Steps of each env in the first collection; ``None`` means ``num_steps``.
        log_dir: Folder for TensorBoard logs, which need ``tensorboardX``, or ``tensorboard`` and torch.
        rank: Index of this collector in its set.
        world_size: Number of collectors in the set.

    Attributes:
        version: Version of the policy's weights. It is 0 at first, and every `set_weights` without ``version`` adds
            one.
        history: A `History` of all collections and evaluations.

    Raises:
        BaseException: Any exception raised by one of the given functions.
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
        check_maker(name, make)
        env = make()
        if not isinstance(env, ParallelEnv):
            raise ArgumentError(f"{name}() returned a {type(env).__name__}. {ENV_MAKER}")
        if env in _taken:
            raise ArgumentError(
                f"{name}() returned a ParallelEnv that a collector already uses. Let it make a new one: each "
                "collector needs its own, as do test envs, and replaced envs are closed."
            )
        if component == "envs" and env.asynchronous != "restart":
            env.close()
            raise ArgumentError(
                f"{name}() returned a ParallelEnv with asynchronous={env.asynchronous!r}. A collector does not stop "
                "at the end of an episode: make it with asynchronous='restart'."
            )
        _taken.add(env)
        former, self._envs[component] = self._envs.get(component), env
        if former is not None:
            former.close()
        if component == "envs":
            self._begin()

    def _begin(self) -> None:
        """Make the next collection start with new episodes."""
        self._rnn_state, self._needs_reset = None, True
        self._open_episodes = OpenEpisodes(self.num_envs)
        if self._seed is not None:
            self._envs["envs"].seed(self._seed + self._rank * self.num_envs)

    def _collect(
        self, num_steps: int | None, is_over: Callable[[], bool] | None, progress: bool
    ) -> tuple[Rollout, Info]:
        data, seconds = self._gather(
            num_steps or self._next_steps, lambda _: is_over is not None and is_over(), progress
        )
        ended = count_episodes(data, self._open_episodes, data.env_ids)
        self._needs_reset = False
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
            self._needs_reset = True  # until the caller has noted these steps
            data = local_rollout(env.engine, self._policy, num_steps, self._rnn_state, progress, is_over)
        self._next_steps, self._rnn_state = self._num_steps, deep_copy(data.rnn_state)
        return data, time.perf_counter() - began

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None, progress: bool = True) -> Evaluation:
        """Run the policy in the test envs for whole episodes, with ``deterministic=True`` if it has that parameter.

        Args:
            num_episodes: Number of episodes of all test envs together.
            seed: Env i gets ``seed + rank * num_test_envs + i`` for its first episode. ``None`` means a seed derived
                from the collector's seed. The derived seed is the same in every call, so that versions of a policy are
                compared on the same episodes.
            progress: Whether to show a progress bar. See `collect`.

        Raises:
            ArgumentError: If there are no test envs, or an argument has an invalid value.
            ClosedError: After `stop`.
            BaseException: Any exception raised by an env or the policy; ``error.partial`` holds the episodes that ended
                before the exception.
        """
        if "test_envs" not in self._envs:
            raise ArgumentError(
                "evaluate() was called, but there are no test envs. Give make_test_envs, or replace('test_envs', make)."
            )
        env, policy, seed = self._envs["test_envs"], self._policy, check_base_seed(seed)
        seed = self._test_seed if seed is None else seed + self._rank * len(env)
        if "deterministic" in policy_parameters(policy):
            policy = functools.partial(policy, deterministic=True)
        with _with_collector_hints("test_envs"):
            evaluation = env.run_episodes(policy, num_episodes, seed=seed, progress=progress)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    def _apply(self, method: str, *arguments: object) -> None:
        getattr(self, f"_{method}")(*arguments)

    def _set_weights(self, weights: object, version: int) -> None:
        policy = self._policy
        load = look_up(policy, "set_weights", None) or look_up(policy, "load_state_dict", None)
        if not callable(load):
            raise ArgumentError(
                f"The policy, a {type(policy).__name__}, does not accept weights. Give it a method "
                "set_weights(weights), or make it a torch module, which has load_state_dict."
            )
        load(weights)
        self.version = version

    def _update_policy(self, name: str, value: object) -> None:
        *way, last = name.split(".")
        owner: Any = self._policy
        for one in way:
            owner = ABSENT if owner is ABSENT else look_up(owner, one)
        if owner is ABSENT or not (defines(owner, last) or look_up(owner, last) is not ABSENT):
            raise AbsentAttributeError(
                f"name={name!r}: the policy, a {type(self._policy).__name__}, has no such attribute. Set one that it "
                "has, or replace the policy with replace('policy', make_policy)."
            )
        setattr(owner, last, deep_copy(value))

    def _replace(self, component: str, make: Callable[..., Any]) -> None:
        if component == "policy":
            self._make_policy(make)
        else:
            self._make_envs(component, make, "make")

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self._policy

    @property
    def num_envs(self) -> int:
        """Number of envs to collect from."""
        return len(self._envs["envs"])

    def __repr__(self) -> str:
        state = "stopped" if self.closed else f"version {self.version}"
        return f"<parallelenv.Collector of {count(self.num_envs, 'env')}, {state}>"


@contextlib.contextmanager
def _with_collector_hints(component: str) -> Iterator[None]:
    """Add a note to errors that report dead or late workers."""
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


def check_optional(**counts: object) -> None:
    """Check that each count is an int of at least 1, or ``None``."""
    for name, value in counts.items():
        if value is not None:
            check_positive(name, value)


def derived_seed(seed: int, *key: int) -> int:
    """Return a new seed derived from ``seed`` and ``key``."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])


def check_maker(name: str, make: object) -> None:
    """Check that ``make`` can be called without arguments."""
    is_policy = name == "make_policy"
    way_out = ENV_MAKER
    if is_policy:
        way_out = "Give a function that returns a policy; if this is the policy itself, lambda: policy."
    if not callable(make):
        raise ArgumentError(f"{name}={show(make)} cannot be called. {way_out}")
    try:
        parameters = inspect.signature(bind_arguments(make, 0, 1, 0) if is_policy else make).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    is_open = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = ", ".join(one.name for one in parameters if one.default is one.empty and one.kind not in is_open)
    if needed:
        given = ", but is only given rank, world_size and seed" if is_policy else ""
        raise ArgumentError(f"{name}={show(make)} needs {needed}{given}. {way_out}")
