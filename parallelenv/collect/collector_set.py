"""Several collectors in workers of their own, synchronous or first come."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np

from parallelenv import registry
from parallelenv.collect.argument_checks import (
    any_of,
    check_component,
    check_env_maker,
    check_policy_maker,
    check_version,
)
from parallelenv.collect.collector import Info
from parallelenv.collect.collector_env import CollectorEnv, CollectRequest, require_compression
from parallelenv.collect.concat import join_beside, join_evaluations
from parallelenv.collect.history import History
from parallelenv.collect.scheduler import CollectorHandles, ReceivedCollections, Scheduler
from parallelenv.collect.stopping import Stoppable
from parallelenv.collect.unsent_samples import UnsentSamples
from parallelenv.contract import arguments
from parallelenv.contract.broadcast import Broadcast
from parallelenv.contract.error_text import count, show
from parallelenv.engine.thread_guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, ClosedError, UnpicklableError
from parallelenv.registry import ParaMode
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.rollout_length import RolloutLength, progress_bar
from parallelenv.rollouts.trajectory import Rollout


class CollectorSet(Stoppable):
    """Runs collectors in workers of their own, each with a policy and envs.

    The same seeds give identical data in every mode, as long as all collectors make the same number of steps and none
    dies: envs are seeded as if all belonged to one collector.

    Args:
        num_workers: Number of collectors.
        make_policy: Returns the policy, see `Collector`. Called in each worker.
        make_envs: Returns the `ParallelEnv`, see `Collector`. Called in each worker. Its mode is usually ``"dummy"``:
            beside the policy, in the worker's own process.
        num_steps: Steps of each env in one collection.
        para_mode: Where the collectors run. The values of `ParallelEnv`, except ``"auto"``.
        seed: Seed of the first collector. See `Collector`.
        weights: First weights. See `Collector`.
        make_test_envs: Returns the `ParallelEnv` for `evaluate`. See `Collector`.
        start_steps: Steps of each env in the first collection. See `Collector`.
        fraction_samples: Once this fraction of the collectors has finished, the others stop at their next step (within
            0.05 s if a step takes less), and `collect` returns what they have.
        compress_data: Whether to compress collections for transfer over a slow network (needs ``zstandard``).
        worker_resources: Resources of each collector's Ray actor, as ``actor.options`` takes them, for example
            ``{"num_cpus": 1, "num_gpus": 0.5, "memory": 2**30}``. Only for Ray modes.
        timeout: Seconds that a collector may take for one slice of its work (about 0.5 s of collecting; in `stream` a
            whole collection) before `WorkerTimeoutError` is raised.
        max_restarts: How often one collector is replaced within ten minutes; its next death is raised.
        log_dir: Folder for TensorBoard. See `Collector`.
        **options: Further arguments of `ParallelEnv`, and options of the mode.

    Attributes:
        version: Version of the weights that were set last: 0 at first.
        history: A `History` of all collections and evaluations.

    Raises:
        ArgumentError: If an argument has an invalid value.
        BaseException: If one of the given functions raised it.
    """

    def __init__(
        self,
        num_workers: int,
        make_policy: Callable[..., Any],
        make_envs: Callable[[], ParallelEnv],
        *,
        num_steps: int,
        para_mode: ParaMode = "subproc",
        seed: int | None = None,
        weights: Any = None,
        make_test_envs: Callable[[], ParallelEnv] | None = None,
        start_steps: int | None = None,
        fraction_samples: float = 1.0,
        compress_data: bool = False,
        worker_resources: dict[str, Any] | None = None,
        timeout: float | None = None,
        max_restarts: int = 10,
        log_dir: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check(num_workers, num_steps, start_steps, fraction_samples, max_restarts, compress_data)
        seed = arguments.check_base_seed(seed)
        self._num_steps, self._start_steps = num_steps, start_steps or num_steps
        self._word = para_mode
        self.version = 0
        given: dict[str, Any] = {"make_policy": make_policy, "make_envs": make_envs, "make_test_envs": make_test_envs}
        given |= {"num_steps": num_steps, "seed": seed}
        options = {"timeout": timeout, **options}
        self.history = History(log_dir)
        self._unsent = UnsentSamples.create(num_workers)
        try:
            self._env = start(num_workers, given, compress_data, self._unsent, para_mode, worker_resources, options)
            self._handles = CollectorHandles(self._env, self._unsent, max_restarts, seed)
            if weights is not None:
                self._announce_weights(weights)
        except BaseException:
            self.stop()
            raise
        self._fresh = set(range(num_workers))  # ranks that have not made their first collection
        self._collections = ReceivedCollections(num_workers)
        self._scheduler = Scheduler(self._handles, self._collections, fraction_samples)
        self._last_report = time.perf_counter()

    @classmethod
    def create(
        cls, num_workers: int, make_policy: Callable[..., Any], make_envs: Callable[[], ParallelEnv], **options: Any
    ) -> CollectorSet:
        """Return a set. Same as the constructor."""
        return cls(num_workers, make_policy, make_envs, **options)

    @classmethod
    def create_factory(
        cls, num_workers: int, make_policy: Callable[..., Any], make_envs: Callable[[], ParallelEnv], **options: Any
    ) -> Callable[..., CollectorSet]:
        """Return a picklable function that makes such a set in another process, for schemes with several learners.

        It takes further arguments of the constructor, and overrides for those given here.
        """
        given: dict[str, Any] = {"num_workers": num_workers, "make_policy": make_policy, "make_envs": make_envs}
        return functools.partial(cls, **given, **options)

    # ---------------------------------------------------------------- synchronous

    @single_threaded
    def collect(
        self, num_steps: int | None = None, listen_to: Iterable[Any] = (), *, progress: bool = True
    ) -> tuple[Rollout, Info]:
        """Run all collectors, and return the steps of all of them.

        Collections in flight, for instance after Ctrl-C or an abandoned `stream`, are included.

        Args:
            num_steps: Steps of each env. See `Collector.collect`.
            listen_to: Events and functions, see `Collector.collect`. Checked in this process, about every 0.05 s.
            progress: Whether to show a progress bar. See `Collector.collect`.

        Returns:
            ``data``: a `Rollout` of all envs, those of the first collector, then those of the second ... Steps that a
            collector lacks are not ``valid``. Where a collector was replaced, its open episodes are marked truncated
            and counted with the return and length so far. If envs were replaced in between, the steps of the former
            ones come first, in a collection of their own. ``info``: that of `Collector.collect`, over all collectors,
            and

            * ``num_steps``, ``version`` and ``staleness``, ``(num_workers,)`` each: the steps of each collector, the
              (oldest) version of its policy, and how many versions that is behind; below 0 if `set_weights` went back
              to an earlier version;
            * ``lost_samples``: samples that collectors made and had not sent when they died; these were replaced;
            * ``lost_exactly``: ``False`` if the number is not known for a collector on another machine or without
              Linux. It then counts with the steps requested, an upper bound;
            * with ``compress_data``: ``num_bytes`` and ``num_bytes_sent``.

        Raises:
            ArgumentError: If an argument has an invalid value, or the collections cannot be joined because they differ,
                in nesting for example. They stay available to `stream`.
            ClosedError: After `stop`.
            UsageError: If another thread is in a call.
            WorkerDiedError: If a collector has died too often.
            WorkerTimeoutError: If a collector took too long. It is not replaced: the next collection waits for it
                again; if it hangs, `stop` ends it.
            BaseException: What an env or a policy raised. All steps made until then are in the next collection.
        """
        is_over = any_of(listen_to)
        if num_steps is not None:
            arguments.check_positive("num_steps", num_steps)
        is_quick = self._scheduler.fraction < 1 or bool(listen_to)
        goals = [num_steps or self._steps_of(rank) for rank in range(len(self))]
        self._last_report = time.perf_counter()
        with progress_bar(RolloutLength(sum(goals), None), progress, "collect") as advance:
            self._scheduler.work(goals, is_quick, is_over, advance)
        self._fresh.clear()
        return self._deliver_all()

    def _steps_of(self, rank: int) -> int:
        return self._start_steps if rank in self._fresh else self._num_steps

    # ---------------------------------------------------------------- first come

    def stream(
        self, num_steps: int | None = None, *, max_in_flight: int | None = None, num_collections: int | None = None
    ) -> Iterator[tuple[Rollout, Info]]:
        """Yield collections as they become ready: ``for data, info in collectors.stream()``.

        A collector begins its next collection, with the current weights, before its last one is yielded, so it works
        while the loop body runs. At most ``max_in_flight`` collections are requested and not yet yielded; faster
        collectors wait for the loop. The loop may be left at any time: collections in flight are part of the next
        `collect` or `stream`.

        Args:
            num_steps: Steps of each env. See `Collector.collect`.
            max_in_flight: At most, and by default, the number of collectors. With one fewer, a collector begins only
                after the loop body has run on its previous collection, so it has the weights set there.
            num_collections: Number of collections to yield; ``None`` continues until the set is stopped.

        Yields:
            ``data, info`` of one collector, as `Collector.collect` returns them. ``info`` also has ``collector``, its
            index; ``staleness``, how many versions it is behind the set's weights; ``lost_samples`` and
            ``lost_exactly`` of `collect`, since the last yield; and, with ``compress_data``, ``num_bytes`` and
            ``num_bytes_sent``.

        Raises:
            The errors of `collect`.
        """
        if self._guard.is_closed:
            raise self._guard.refusal("stream")
        for name, value in (("num_steps", num_steps), ("num_collections", num_collections)):
            if value is not None:
                arguments.check_positive(name, value)
        most = len(self) if max_in_flight is None else max_in_flight
        arguments.check_positive("max_in_flight", most)
        if most > len(self):
            raise ArgumentError(
                f"max_in_flight={most} is more than {count(len(self), 'collector')} can have: each works on one "
                "collection at a time. Give at most that many, or use more workers."
            )
        return self._streamed(num_steps, most, math.inf if num_collections is None else num_collections)

    def _streamed(self, num_steps: int | None, most: int, left: float) -> Iterator[tuple[Rollout, Info]]:
        self._last_report = time.perf_counter()
        while left and not self._guard.is_closed:
            try:
                answer = self._stream(num_steps, most, left)
            except ClosedError:
                if self._guard.is_closed:
                    return
                raise
            if answer is not None:
                left -= 1
                yield answer

    @single_threaded
    def _stream(self, num_steps: int | None, most: int, left: float) -> tuple[Rollout, Info] | None:
        """Return a collection that is ready; or wait until one may be, and return ``None``."""
        ready = [rank for rank in self._collections.waiting if rank not in self._handles.busy]
        if ready:
            answer = self._deliver_one(ready[0])
            self._order_more(num_steps, most, left - 1)
            return answer
        self._order_more(num_steps, most, left)
        for rank, collection in self._handles.receive():
            self._collections.add(rank, collection)
        return None

    def _order_more(self, num_steps: int | None, most: int, left: float) -> None:
        """Start idle collectors up to the limit in flight."""
        waiting = self._collections.waiting
        room = int(min(most, left)) - len({*waiting, *self._handles.busy})
        chosen = [rank for rank in self._handles.idle if rank not in waiting][: max(0, room)]
        if chosen:
            self._handles.order({rank: CollectRequest(num_steps or self._steps_of(rank)) for rank in chosen})
            self._fresh.difference_update(chosen)

    # ---------------------------------------------------------------- results

    def _deliver_all(self) -> tuple[Rollout, Info]:
        data, info = self._collections.take(range(len(self)), self.version, join_beside)
        return data, self._completed(info)

    def _deliver_one(self, rank: int) -> tuple[Rollout, Info]:
        data, info = self._collections.take([rank], self.version, operator.itemgetter(0))
        single = {name: int(info[name][0]) for name in ("num_steps", "version", "staleness")}
        return data, self._completed({**info, **single, "collector": rank})

    def _completed(self, info: Info) -> Info:
        """Complete an info with what only the set knows, and add it to the history."""
        now = time.perf_counter()
        seconds, self._last_report = now - self._last_report, now
        self.history.note(info["episode_returns"], int(np.min(info["version"])), info["num_samples"], seconds)
        return {**info, "seconds": seconds, **self._handles.take_loss()}

    # ---------------------------------------------------------------- weights and components

    @single_threaded
    def set_weights(self, weights: Any, version: int | None = None) -> None:
        """Set the weights of all policies. Busy collectors take them before their next collection.

        The weights are pickled once. With Ray, collectors elsewhere fetch them from the object store, one per node.

        Args:
            weights: Passed to each policy as a copy. See `Collector.set_weights`.
            version: Their version in infos. See `Collector.set_weights`.

        Raises:
            ArgumentError: If a policy has no method for them, or ``version`` is invalid.
            UnpicklableError: If they cannot be pickled; nothing was set.
            KeyboardInterrupt: On Ctrl-C. The weights are set all the same: collectors that do not have them yet take
                them before their next collection.
            WorkerTimeoutError: If a policy takes too long to load them. They are set all the same, as after Ctrl-C.
            ClosedError: After `stop`.
        """
        self._announce_weights(weights, check_version(version, self.version))

    def _announce_weights(self, weights: Any, version: int = 0) -> None:
        broadcast = Broadcast("collector.set_weights", weights, version)
        before, self.version = self.version, version
        try:
            self._handles.announce("weights", broadcast)
        except BaseException:
            if not self._handles.is_known(broadcast):
                self.version = before
            raise

    @single_threaded
    def update_policy(self, name: str, value: Any) -> None:
        """Set an attribute of all policies, see `Collector.update_policy`; for busy collectors, when they are done."""
        arguments.check_name("name", name)
        self._handles.announce(f"setting {name}", Broadcast("collector.update_policy", name, value))

    @single_threaded
    def replace(self, component: str, make: Callable[..., Any]) -> None:
        """Replace the policy or envs of all collectors, see `Collector.replace`; for busy ones, when they are done.

        A new policy has the weights it was made with. The number of envs may change.
        """
        check_component(component)
        outdates = ("weights", "setting ") if component == "policy" else ()
        self._handles.announce(component, Broadcast("collector.replace", component, make), outdates)

    # ---------------------------------------------------------------- evaluation

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None) -> Evaluation:
        """Play whole episodes in the test envs of all collectors, each its share.

        Waits for collections in flight first; they are part of the next `collect` or `stream`.

        Args:
            num_episodes: Number of episodes over all collectors; if not divisible, the first collectors play one more.
            seed: Seed of the first collector, see `Collector.evaluate`; ``seed + 1`` of the second ...

        Returns:
            An `Evaluation`: the episodes of the first collector, then those of the second ...; test envs are numbered
            in that order.

        Raises:
            ArgumentError: If there are no test envs, or an argument has an invalid value.
            ClosedError: After `stop`.
            WorkerDiedError: If a collector died too often; otherwise it is replaced, and plays its share again.
            BaseException: What an env or a policy raised.
        """
        arguments.check_positive("num_episodes", num_episodes)
        seed = arguments.check_base_seed(seed)
        self._scheduler.work([0] * len(self), False, lambda: True, lambda _: None)
        shares = {
            rank: share for rank, share in RolloutLength(None, num_episodes).shares(range(len(self))).items() if share
        }
        orders = {
            rank: {"num_episodes": share, "seed": None if seed is None else seed + rank}
            for rank, share in shares.items()
        }
        found: list[Evaluation] = self._handles.ask("evaluate", orders)
        evaluation = join_evaluations(found)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    # ---------------------------------------------------------------- other

    def __len__(self) -> int:
        """Return the number of collectors."""
        return len(self._env)

    @property
    def num_envs(self) -> int:
        """Number of envs to collect from, over all collectors."""
        return sum(self._handles.sizes)

    @property
    def num_replaced(self) -> int:
        """Number of times a collector died and was replaced."""
        return self._handles.num_replaced

    def _close_envs(self) -> None:
        if hasattr(self, "_env"):  # missing if the constructor failed
            self._env.close()
        self._unsent.close()

    def __repr__(self) -> str:
        """Return one line."""
        state = "stopped" if self._guard.is_closed else f"version {self.version}"
        return f"<parallelenv.CollectorSet of {count(len(self), 'collector')}, para_mode={self._word!r}, {state}>"


_OURS = {"asynchronous", "copy", "envs", "on_failure", "spaces"}
"""Arguments of `ParallelEnv` about the envs, not about how they are run."""
_ENV_MAKERS = ("make_envs", "make_test_envs")


def check(
    num_workers: Any, num_steps: Any, start_steps: Any, fraction: Any, max_restarts: Any, compresses: Any
) -> None:
    """Refuse invalid arguments of a `CollectorSet`.

    Raises:
        ArgumentError: If there is one.
        MissingDependencyError: If the package for compression is not installed.
    """
    arguments.check_positive("num_workers", num_workers)
    arguments.check_positive("num_steps", num_steps)
    arguments.check_positive("start_steps", num_steps if start_steps is None else start_steps)
    arguments.check_positive("max_restarts", max_restarts)
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise ArgumentError(f"fraction_samples={show(fraction)} must be a number above 0, and 1 at most.")
    arguments.check_flags(compress_data=compresses)
    if compresses:
        require_compression()


def start(
    num_workers: int,
    given: dict[str, Any],
    compresses: bool,
    unsent: UnsentSamples,
    para_mode: Any,
    worker_resources: Any,
    options: dict[str, Any],
) -> ParallelEnv:
    """Return a `ParallelEnv` whose envs are the collectors, one per worker if the mode has workers.

    Args:
        num_workers: Number of collectors.
        given: Arguments of each `Collector`.
        compresses: Whether collectors compress what they send.
        unsent: Where collectors count the samples not sent yet.
        para_mode: Mode of the collectors.
        worker_resources: Resources of each Ray actor.
        options: Further arguments of the `ParallelEnv`.

    Raises:
        ArgumentError: If the mode or the resources are not available, an option is about envs, or a given function
            is not callable.
        UnpicklableError: If a given function cannot be pickled.
    """
    if isinstance(para_mode, str) and para_mode == registry.AUTO:
        raise ArgumentError(
            f"para_mode={para_mode!r} tries envs, and a collector is none. Name the mode: 'subproc', or 'ray'."
        )
    for name in _OURS.intersection(options):
        raise ArgumentError(
            f"{name}={show(options[name])} is nothing that a CollectorSet can be given: collectors are not what it "
            "means. "
            "Give it to the ParallelEnv in make_envs."
        )
    check_policy_maker(given["make_policy"])
    for name in _ENV_MAKERS:
        if name == "make_envs" or given[name] is not None:
            check_env_maker(given[name], name)
    given = {**given, "world_size": num_workers}
    collector_envs = [
        functools.partial(CollectorEnv, {**given, "rank": rank}, compresses, unsent) for rank in range(num_workers)
    ]
    options = {"num_cpus": num_workers, **options}
    try:
        return _with_resources(collector_envs, para_mode, worker_resources, options)
    except UnpicklableError:
        _refuse_unpicklable(given)
        raise


def _refuse_unpicklable(given: dict[str, Any]) -> None:
    """Raise an error that names the given function that cannot be pickled."""
    for name in ("make_policy", *_ENV_MAKERS):
        try:
            cloudpickle.dumps(given[name])
        except Exception as error:  # pickling runs user code, which may raise anything
            raise UnpicklableError(
                f"{name}={show(given[name])} cannot move to the collectors' workers: it does not pickle "
                f"({type(error).__name__}: {error}). Let it make such things where it runs, or use "
                "para_mode='dummy' or 'thread'."
            ) from error


def _with_resources(
    collector_envs: Sequence[Any], para_mode: Any, resources: Any, options: dict[str, Any]
) -> ParallelEnv:
    if resources is None:
        return ParallelEnv(collector_envs, para_mode, "continue", **options)
    if not isinstance(resources, dict) or "ray_options" in options:
        raise ArgumentError(
            f"worker_resources={show(resources)} must be a dict, as {{'num_cpus': 1}}, and instead of ray_options."
        )
    try:
        return ParallelEnv(collector_envs, para_mode, "continue", ray_options=dict(resources), **options)
    except ArgumentError as error:
        if "ray_options" not in str(error):
            raise
        raise ArgumentError(
            f"worker_resources={show(resources)} cannot be kept with para_mode={para_mode!r}: only Ray gives its "
            "workers resources. Leave them out, or give para_mode='ray'."
        ) from error
