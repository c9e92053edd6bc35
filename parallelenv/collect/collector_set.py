"""A set of collectors, each in its own worker."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv import registry
from parallelenv.collect.collector import CollectorBase, check_maker, check_optional
from parallelenv.collect.scheduler import CollectorEnv, CollectRequest, Scheduler, zstandard
from parallelenv.contract.arguments import Policy, check_base_seed, check_flags, check_positive, is_number
from parallelenv.contract.copying import pickles
from parallelenv.contract.error_text import count, did_you_mean, show
from parallelenv.contract.spaces import Info
from parallelenv.engine.thread_guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, ClosedError, UnpicklableError
from parallelenv.registry import ParaMode
from parallelenv.rollouts.evaluation import Evaluation, join_evaluations
from parallelenv.rollouts.rollout import Rollout, RolloutLength, progress_bar


class CollectorSet(CollectorBase):
    """Runs collectors, each in its own worker with its own policy and envs.

    The same seeds give identical data in every mode, as long as all collectors make the same number of steps and none
    of them dies. Envs are seeded as if they all belonged to one collector.

    Args:
        num_workers: Number of collectors.
        make_policy: Function that returns the policy. See `Collector`. Called in each worker.
        make_envs: Function that returns the `ParallelEnv`. See `Collector`. Called in each worker. The mode of the envs
            is usually ``"dummy"``, because the collectors already run in parallel.
        num_steps: Steps of each env in one collection.
        para_mode: Mode of the collectors: any mode of `ParallelEnv` except ``"auto"``.
        seed: See `Collector`.
        weights: Initial weights. See `Collector`.
        make_test_envs: Function that returns the `ParallelEnv` for `evaluate`. See `Collector`.
        start_steps: Steps of each env in the first collection. See `Collector`.
        fraction_samples: Once this fraction of the collectors has finished, the others stop after their current step,
            or within 0.05 s if steps are shorter than that. `collect` then returns the steps made so far.
        compress_data: Whether to compress collections for transfer over a slow network (needs ``zstandard``).
        worker_resources: Resources of each collector's Ray actor, in the form that ``actor.options`` takes, for example
            ``{"num_cpus": 1, "num_gpus": 0.5, "memory": 2**30}``. Only for Ray modes.
        timeout: Seconds that a collector may take for one slice of its work before `WorkerTimeoutError` is raised. A
            slice is about 0.5 s of collecting or, in `stream`, a whole collection.
        max_restarts: Maximum number of times that a collector is replaced within ten minutes. If it dies once more in
            that time, `WorkerDiedError` is raised.
        log_dir: Folder for TensorBoard. See `Collector`.
        **options: Further arguments of `ParallelEnv`, and options of the mode.

    Attributes:
        version: Version of the latest weights; 0 at first.
        history: A `History` of all collections and evaluations.

    Raises:
        BaseException: Any exception raised by one of the given functions.
    """

    def __init__(
        self,
        num_workers: int,
        make_policy: Callable[..., Policy],
        make_envs: Callable[[], ParallelEnv],
        *,
        num_steps: int,
        para_mode: ParaMode = "subproc",
        seed: int | None = None,
        weights: object = None,
        make_test_envs: Callable[[], ParallelEnv] | None = None,
        start_steps: int | None = None,
        fraction_samples: float = 1.0,
        compress_data: bool = False,
        worker_resources: dict[str, object] | None = None,
        timeout: float | None = None,
        max_restarts: int = 10,
        log_dir: object = None,
        **options: Any,
    ) -> None:
        check_positive("num_workers", num_workers)
        check_positive("max_restarts", max_restarts)
        check_flags(compress_data=compress_data)
        if not is_number(fraction_samples) or not 0 < fraction_samples <= 1:
            raise ArgumentError(f"fraction_samples={show(fraction_samples)} must be a number above 0 and at most 1.")
        makers = {"make_policy": make_policy, "make_envs": make_envs, "make_test_envs": make_test_envs}
        for name, make in makers.items():
            if make is not None or name != "make_test_envs":
                check_maker(name, make)
        known = {*registry.option_names(para_mode), *inspect.signature(ParallelEnv).parameters}
        for name in options.keys() - known:
            if hint := did_you_mean(name, inspect.signature(CollectorSet).parameters):  # else `ParallelEnv` refuses it
                raise ArgumentError(
                    f"{name}={show(options[name])} is neither an argument of CollectorSet nor an option of "
                    f"para_mode={registry.word_of(para_mode)!r}.{hint}"
                )
        super().__init__(num_steps, start_steps, seed, log_dir)
        self._word, self._last_report = para_mode, time.perf_counter()
        self._fresh = set(range(num_workers))  # collectors that have not made their first collection yet
        self._enough = math.ceil(round(fraction_samples * num_workers, 9))  # 0.07 * 100 is 7.000000000000001
        given = {**makers, "num_steps": num_steps, "seed": self._seed, "world_size": num_workers}
        envs = [functools.partial(CollectorEnv, {**given, "rank": rank}, compress_data) for rank in range(num_workers)]
        options = {"timeout": timeout, "num_cpus": num_workers, **options}
        try:
            if compress_data:
                zstandard()
            self._envs["collectors"] = _start(envs, para_mode, worker_resources, options, makers)
            self._scheduler = Scheduler(self._envs["collectors"], max_restarts, self._seed)
            if weights is not None:
                self._apply("set_weights", weights, 0)
        except BaseException:
            self.stop()
            raise

    @classmethod
    def create(
        cls, num_workers: int, make_policy: Callable[..., Policy], make_envs: Callable[[], ParallelEnv], **options: Any
    ) -> CollectorSet:
        """Return a `CollectorSet`. The arguments are those of the constructor."""
        return cls(num_workers, make_policy, make_envs, **options)

    @classmethod
    def create_factory(
        cls, num_workers: int, make_policy: Callable[..., Policy], make_envs: Callable[[], ParallelEnv], **options: Any
    ) -> Callable[..., CollectorSet]:
        """Return a picklable function that makes a `CollectorSet` with these arguments.

        The function is meant for training with several learners: you can call it in another process. It accepts keyword
        arguments of the constructor, which override those given to this method.
        """
        given: dict[str, Any] = {"num_workers": num_workers, "make_policy": make_policy, "make_envs": make_envs}
        return functools.partial(cls, **given, **options)

    def _collect(
        self, num_steps: int | None, is_over: Callable[[], bool] | None, progress: bool
    ) -> tuple[Rollout, Info]:
        goals = [num_steps or self._steps_of(rank) for rank in range(len(self))]
        self._last_report = time.perf_counter()
        with progress_bar(RolloutLength(sum(goals), None), progress, "collect") as advance:
            self._scheduler.work(goals, self._enough, is_over, advance)
        self._fresh.clear()
        data, info = self._scheduler.take(range(len(self)))
        return data, self._completed(info)

    def _steps_of(self, rank: int) -> int:
        return self._start_steps if rank in self._fresh else self._num_steps

    def stream(
        self, num_steps: int | None = None, *, max_in_flight: int | None = None, num_collections: int | None = None
    ) -> Iterator[tuple[Rollout, Info]]:
        """Yield collections as they become ready: ``for data, info in collectors.stream()``.

        By default, a collector starts its next collection, with the current weights, before the finished one is
        yielded, so it works while the loop body runs. At any time, at most ``max_in_flight`` collections are in flight:
        requested, but not yet yielded. You can leave the loop whenever you like: collections in flight become part of
        the next `collect` or `stream`.

        Args:
            num_steps: Steps of each env. See `Collector.collect`.
            max_in_flight: Maximum number of collections in flight. The default, and upper limit, is the number of
                collectors. With a smaller number, a collector starts its next collection only after the loop body has
                run on its previous one, so the new collection uses any weights that the loop body set.
            num_collections: Number of collections to yield; ``None`` continues until `stop` is called.

        Yields:
            ``data, info`` of one collector, as `Collector.collect` returns them. ``info`` also has ``collector``, the
            index of the collector; ``staleness``, as in `collect` but an int; ``lost_samples``, as in `collect` but
            counted since the last yield; and, with ``compress_data``, ``num_bytes`` and ``num_bytes_sent``. ``seconds``
            is the time since the last yield.

        Raises:
            The same errors as `collect`.
        """
        if self.closed:
            raise self._guard.refusal("stream")
        check_optional(num_steps=num_steps, num_collections=num_collections, max_in_flight=max_in_flight)
        most = max_in_flight or len(self)
        if most > len(self):
            raise ArgumentError(
                f"max_in_flight={most} is more than {count(len(self), 'collector')} can have: each works on one "
                "collection at a time. Give at most that many, or use more workers."
            )
        return self._streamed(num_steps, most, num_collections or math.inf)

    def _streamed(self, num_steps: int | None, most: int, left: float) -> Iterator[tuple[Rollout, Info]]:
        self._last_report = time.perf_counter()
        while left and not self.closed:
            try:
                answer = self._stream(num_steps, most, left)
            except ClosedError:
                if self.closed:
                    return
                raise
            if answer is not None:
                left -= 1
                yield answer

    @single_threaded
    def _stream(self, num_steps: int | None, most: int, left: float) -> tuple[Rollout, Info] | None:
        """Return a collection that is ready. If none is ready, wait until a collector replies, and return ``None``."""
        scheduler = self._scheduler
        ready = [rank for rank in sorted(scheduler.idle) if scheduler.members[rank].parts][:1]
        in_flight = scheduler.in_flight.difference(ready)
        room = int(min(most, left - len(ready))) - len(in_flight)
        chosen = [rank for rank in scheduler.idle if rank not in in_flight][: max(0, room)]
        if chosen:
            scheduler.request({rank: CollectRequest(num_steps or self._steps_of(rank)) for rank in chosen})
            self._fresh.difference_update(chosen)
        if not ready:
            scheduler.receive()
            return None
        data, info = scheduler.take(ready)
        info |= {name: int(info[name][0]) for name in ("num_steps", "version", "staleness")}
        return data, self._completed({**info, "collector": ready[0]})

    def _completed(self, info: Info) -> Info:
        """Set ``info["seconds"]``, note the collection in the history, and return ``info``."""
        now = time.perf_counter()
        info["seconds"], self._last_report = now - self._last_report, now
        self.history.note(info["episode_returns"], int(np.min(info["version"])), info["num_samples"], info["seconds"])
        return info

    def _apply(self, method: str, *arguments: object) -> None:
        try:
            self._scheduler.announce(method, *arguments)
        finally:
            self.version = self._scheduler.version

    @single_threaded
    def evaluate(self, num_episodes: int = 10, *, seed: int | None = None, progress: bool = True) -> Evaluation:
        """Run whole episodes in the test envs of all collectors. Each collector runs a share of the episodes.

        Collections in flight are finished first. They become part of the next `collect` or `stream`.

        Args:
            num_episodes: Number of episodes of all collectors together. If the episodes do not divide evenly, each of
                the first collectors runs one more.
            seed: See `Collector.evaluate`.
            progress: Whether to show a progress bar. It advances when all collectors have finished. See `collect`.

        Returns:
            The episodes of the first collector, then those of the second, and so on. Test envs are numbered in the same
            order, including those that run no episode.

        Raises:
            ArgumentError: If there are no test envs, or an argument has an invalid value.
            ClosedError: After `stop`.
            WorkerDiedError: If a collector has died more often than ``max_restarts`` allows. Otherwise, a dead
                collector is replaced, and the new one runs all of its episodes again.
            BaseException: Any exception raised by an env or a policy.
        """
        check_positive("num_episodes", num_episodes)
        seed = check_base_seed(seed)
        goal = RolloutLength(None, num_episodes)
        shares = {rank: share for rank, share in goal.shares(range(len(self))).items() if share}
        with progress_bar(goal, progress, "evaluate") as advance:
            evaluation = join_evaluations(self._scheduler.evaluate(shares, seed))
            advance(num_episodes)
        self.history.note(evaluation.returns, self.version, is_test=True)
        return evaluation

    def __len__(self) -> int:
        return len(self._envs["collectors"])

    @property
    def num_envs(self) -> int:
        """Total number of envs that the collectors collect from; test envs are not counted."""
        return sum(member.num_envs for member in self._scheduler.members)

    @property
    def num_replaced(self) -> int:
        """Number of times that a collector died and was replaced."""
        return self._scheduler.num_replaced

    def __repr__(self) -> str:
        state = "stopped" if self.closed else f"version {self.version}"
        return f"<parallelenv.CollectorSet of {count(len(self), 'collector')}, para_mode={self._word!r}, {state}>"


def _start(
    envs: Sequence[Callable[[], CollectorEnv]],
    para_mode: ParaMode,
    worker_resources: dict[str, object] | None,
    options: dict[str, Any],
    makers: Mapping[str, object],
) -> ParallelEnv:
    """Return a `ParallelEnv` of collectors."""
    if para_mode == registry.AUTO:
        raise ArgumentError(
            f"para_mode={para_mode!r} measures envs, but collectors are not envs. Give a mode: 'subproc' or 'ray'."
        )
    for name in {"asynchronous", "copy", "envs", "on_failure", "spaces"}.intersection(options):
        raise ArgumentError(
            f"{name}={show(options[name])} is for envs, but a CollectorSet runs collectors. Give it to the "
            "ParallelEnv in make_envs."
        )
    if worker_resources is not None:
        if not isinstance(worker_resources, dict) or "ray_options" in options:
            raise ArgumentError(
                f"worker_resources={show(worker_resources)} must be a dict, such as {{'num_cpus': 1}}, and "
                "cannot be combined with ray_options."
            )
        options = {**options, "ray_options": dict(worker_resources)}
    try:
        return ParallelEnv(envs, para_mode, "continue", **options)
    except ArgumentError as error:
        if worker_resources is not None:
            error.add_note("worker_resources was passed on as ray_options: only Ray's workers have resources.")
        raise
    except UnpicklableError as error:
        for name, make in makers.items():
            if not pickles(make):
                error.add_note(f"The envs of a CollectorSet are collectors, and {name}={show(make)} cannot be pickled.")
        raise
