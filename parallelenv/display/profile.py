"""Where the time went: what `ParallelEnv.profile` has recorded, as a table, a picture and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallelenv.backends.watch import HostRecord
from parallelenv.batch import Array
from parallelenv.cores import usable_cores
from parallelenv.errors import ArgumentError, NotRecordedError
from parallelenv.seats import Seat
from parallelenv.tables import format_table
from parallelenv.texts import count, duration, list_ids, name_range


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRecord:
    """What a worker did. All moments are seconds of the caller's `time.perf_counter`.

    Attributes:
        env_ids: Its envs.
        seat: Where it is.
        operations: As in `HostRecord`.
        spans: As in `HostRecord`.
        turns: ``(k, 2)`` float64: when each env began and ended to do what it was asked.
        owners: ``(k,)`` int64: env ids of the turns.
        is_step: ``(k,)`` bool: whether that was a step.
        span_of: ``(k,)`` int64: the span that each turn is a part of.
        resets: As in `HostRecord`.
        is_full: As in `HostRecord`.
        since: As in `HostRecord`.
    """

    env_ids: tuple[int, ...]
    seat: Seat
    operations: Sequence[str]
    spans: Array
    turns: Array
    owners: Array
    is_step: Array
    span_of: Array
    resets: Array
    is_full: bool
    since: float

    @classmethod
    def of(cls, record: HostRecord, offset: float) -> WorkerRecord:
        """Return what a host has noted. ``offset``: the caller's clock less the host's."""
        span_of = np.repeat(np.arange(len(record.counts)), record.counts)
        ends = np.append(record.moments[1:], 0.0)
        is_last = np.append(span_of[1:] != span_of[:-1], True) if len(span_of) else np.zeros(0, bool)
        ends = ends[: len(span_of)]
        ends[is_last] = record.spans[span_of[is_last], 1]
        is_step = np.array([name == "step" for name in record.operations], bool)
        turns = np.column_stack([record.moments, ends]) + offset
        resets = record.resets.copy()
        resets[:, :2] += offset
        return cls(
            record.env_ids,
            record.seat,
            record.operations,
            record.spans + offset,
            turns,
            record.owners,
            is_step[span_of],
            span_of,
            resets,
            record.is_full,
            record.since + offset,
        )

    def busy(self) -> Array:
        """Return when it worked: ``(m, 2)``, one after the other."""
        return merge(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What was recorded.

    Attributes:
        begin: Moment, of the caller's `time.perf_counter`.
        end: Likewise.
        calls: ``(m, 2)`` float64: when the caller was in a call of the `ParallelEnv`.
        workers: What each did.
        missing: Ids of envs whose worker has told nothing.
    """

    begin: float
    end: float
    calls: Array
    workers: Sequence[WorkerRecord]
    missing: tuple[int, ...]

    @property
    def rebuilt(self) -> tuple[int, ...]:
        """Ids of envs whose worker was built anew meanwhile: what the one before did is not known."""
        return tuple(env_id for worker in self.workers if worker.since > self.begin for env_id in worker.env_ids)


@dataclass(frozen=True, slots=True)
class EnvTime:
    """The steps of an env.

    Attributes:
        env_id: Its id.
        steps: Number of them.
        mean: Seconds of one on average, with a reset that followed within it.
        longest: Seconds of the longest.
    """

    env_id: int
    steps: int
    mean: float
    longest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the time went. Shares are of ``seconds``, 0 to 1; those of caller, transport and envs make 1.

    Attributes:
        seconds: How long was recorded.
        caller_share: Nobody worked but the caller, outside of the `ParallelEnv`.
        transport_share: The caller waited, or did the work of the `ParallelEnv`, and no worker worked.
        env_share: At least one worker worked.
        straggler_loss: A worker had nothing to do while another one worked, on average over workers.
        policy_share: Workers worked on something else than envs, in rollouts: the policy; on average over them.
        busy: Share for which each worker worked, in the order of ``workers``.
        workers: Env ids of each.
        envs: Of each env that was stepped.
        missing: Ids of envs whose worker has told nothing: it died, or was still busy.
        rebuilt: Ids of envs whose worker was built anew; what the one before did is not known.
        is_full: Whether there was more than could be kept.
        advice: What to do about it, in one line.
    """

    seconds: float
    caller_share: float
    transport_share: float
    env_share: float
    straggler_loss: float
    policy_share: float
    busy: tuple[float, ...]
    workers: tuple[tuple[int, ...], ...]
    envs: tuple[EnvTime, ...]
    missing: tuple[int, ...]
    rebuilt: tuple[int, ...]
    is_full: bool
    advice: str

    @property
    def slowest(self) -> EnvTime | None:
        """The env whose steps take longest on average; ``None`` if none was stepped."""
        return max(self.envs, key=lambda env: env.mean, default=None)

    def __repr__(self) -> str:
        """Return a table."""
        shares = [
            ("caller", self.caller_share, "outside of the ParallelEnv, and no env works"),
            ("transport", self.transport_share, "in it, and no env works"),
            ("envs", self.env_share, "at least one worker works"),
        ]
        rows = [(name, f"{share:.1%}", said) for name, share, said in shares]
        if self.policy_share >= 0.001:
            rows.append(("policy", f"{self.policy_share:.1%}", "of it beside the envs, in rollouts"))
        rows.append(("stragglers", f"{self.straggler_loss:.1%}", "workers wait while others work"))
        lines = [f"{duration(self.seconds)} recorded, {count(len(self.workers), 'worker')}"]
        lines.append(format_table(("where", "share", "what"), rows, left=("where", "what")))
        workers = [
            (name_range(ids), f"{busy:.1%}") for ids, busy in zip(self.workers[:16], self.busy[:16], strict=True)
        ]
        if workers:
            lines += ["", format_table(("worker of envs", "works"), workers, left=("worker of envs",))]
        slowest = self.slowest
        if slowest is not None:
            usual = float(np.median([env.mean for env in self.envs]))
            lines += [
                "",
                f"slowest env: {slowest.env_id}, {duration(slowest.mean)} a step (the median env {duration(usual)}), "
                f"{duration(slowest.longest)} at most",
            ]
        if self.missing:
            lines.append(f"not recorded: envs {list_ids(self.missing)}, whose workers died or were still busy")
        if self.rebuilt:
            lines.append(f"recorded only since their workers were built anew: envs {list_ids(self.rebuilt)}")
        if self.is_full:
            lines.append("not all recorded: there was more than is kept")
        return "\n".join([*lines, f"advice: {self.advice}"])


class Profile:
    """What was recorded within ``with env.profile() as p``. It can be asked when that is over."""

    _recording: Recording | None = None

    def keep(self, recording: Recording) -> None:
        """Take what was recorded."""
        self._recording = recording

    @property
    def recording(self) -> Recording:
        """What was recorded.

        Raises:
            NotRecordedError: If it is not over.
        """
        if self._recording is None:
            raise NotRecordedError("Nothing is recorded yet: ask when the block `with env.profile() as p` has ended.")
        return self._recording

    def summary(self) -> Summary:
        """Return where the time went, and what to do about it. It shows as a table.

        Raises:
            NotRecordedError: If the block has not ended.
        """
        return summarise(self.recording)

    def plot(self, begin: float | None = None, end: float | None = None, path: str | Path | None = None) -> Any:
        """Return a timeline, which a notebook shows: who worked when, and below it some steps as large as life.

        Args:
            begin: Seconds since the recording began: from then on. ``None``: from the first one.
            end: Likewise, until then.
            path: Where to write it, too: a name that ends in ``.svg``.

        Returns:
            A `Timeline`.

        Raises:
            NotRecordedError: If the block has not ended.
            ArgumentError: If there is nothing between ``begin`` and ``end``, or ``path`` ends otherwise.
            OSError: If it cannot be written.
        """
        from parallelenv.display.timeline import Timeline

        timeline = Timeline.of(self.recording, begin, end)
        if path is not None:
            timeline.save(path)
        return timeline

    def save(self, path: str | Path) -> Path:
        """Write a trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``, and return where to.

        Args:
            path: A name that ends in ``.json``; a file that is there is replaced.

        Raises:
            NotRecordedError: If the block has not ended.
            ArgumentError: If ``path`` ends otherwise.
            OSError: If it cannot be written.
        """
        from parallelenv.display.trace import write_trace

        target = checked_path(path, ".json")
        write_trace(self.recording, target)
        return target

    def __repr__(self) -> str:
        """Return the table, if there is one."""
        return "<Profile, still recording>" if self._recording is None else repr(self.summary())


def checked_path(path: Any, suffix: str) -> Path:
    """Return a path that ends as it should.

    Raises:
        ArgumentError: If it does not.
    """
    target = Path(path) if isinstance(path, (str, Path)) else None
    if target is None or target.suffix.lower() != suffix or "\0" in str(target):
        raise ArgumentError(f"path={path!r} must be the name of a file that ends in {suffix}.")
    return target


def merge(spans: Array) -> Array:
    """Return spans, ``(m, 2)``, in order and without those that overlap: these are made one."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > reached[:-1])
    last = np.append(np.flatnonzero(first)[1:], len(spans)) - 1
    return np.column_stack([spans[first, 0], reached[last]])


def measure(spans: Array) -> float:
    """Return the length of spans that do not overlap."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def summarise(recording: Recording) -> Summary:
    """Return where the time went."""
    seconds = recording.end - recording.begin
    each = [merge(worker.spans.clip(recording.begin, recording.end)) for worker in recording.workers]
    busy = [measure(spans) / seconds for spans in each]
    some = merge(np.concatenate([np.zeros((0, 2)), *each]))
    env_share = measure(some) / seconds
    occupied = measure(merge(np.concatenate([some, recording.calls]))) / seconds
    shares = {"caller": 1 - occupied, "transport": occupied - env_share, "envs": env_share}
    straggler_loss = max(0.0, env_share - float(np.mean(busy))) if busy else 0.0
    envs = tuple(env for worker in recording.workers for env in _env_times(worker))
    policy = float(np.mean([_beside(worker) for worker in recording.workers])) / seconds if busy else 0.0
    return Summary(
        seconds,
        shares["caller"],
        shares["transport"],
        shares["envs"],
        straggler_loss,
        policy,
        tuple(busy),
        tuple(worker.env_ids for worker in recording.workers),
        tuple(sorted(envs, key=lambda env: env.env_id)),
        recording.missing,
        recording.rebuilt,
        any(worker.is_full for worker in recording.workers),
        _advise(recording, shares, straggler_loss, envs),
    )


def _env_times(worker: WorkerRecord) -> list[EnvTime]:
    durations = (worker.turns[:, 1] - worker.turns[:, 0])[worker.is_step]
    owners = worker.owners[worker.is_step]
    found = []
    for env_id in worker.env_ids:
        own = durations[owners == env_id]
        if len(own):
            found.append(EnvTime(env_id, len(own), float(own.mean()), float(own.max())))
    return found


def _beside(worker: WorkerRecord) -> float:
    """Return for how many seconds a worker made rollouts and stepped no env."""
    is_rollout = np.array([name == "rollout" for name in worker.operations], bool)
    rollouts = merge(worker.spans[is_rollout])
    if not len(rollouts):
        return 0.0
    steps = merge(worker.spans[~is_rollout])
    return max(0.0, measure(merge(np.concatenate([rollouts, steps]))) - measure(steps))


def _advise(recording: Recording, shares: dict[str, float], straggler_loss: float, envs: Sequence[EnvTime]) -> str:
    """Say what to do, by what takes most of the time."""
    unknown = sorted({*recording.missing, *recording.rebuilt})
    if unknown:
        return (
            f"what workers of envs {list_ids(unknown)} did is not all known, and counts as transport; profile again "
            "while they live."
        )
    if not envs:
        return "no env was stepped; profile some steps."
    is_parallel = len(recording.workers) > 1
    largest = max(shares, key=lambda name: shares[name])
    if largest == "caller":
        return (
            f"your own code takes {shares['caller']:.0%} of the time, so faster envs would not help; send() and recv() "
            "let envs work meanwhile."
        )
    if largest == "transport":
        return (
            f"messages and the answers' forms take {shares['transport']:.0%}, as steps are short; rollout() makes many "
            "steps with one message" + (", and para_mode='dummy' needs none." if is_parallel else ".")
        )
    numbers = [env.steps for env in envs]
    if straggler_loss > 0.2 and max(numbers) > 1.5 * min(numbers):
        return (
            f"envs take {shares['envs']:.0%} of the time, and go on without each other; workers have nothing to do for "
            f"{straggler_loss:.0%} of it, while your policy acts, or because there was no more to do."
        )
    if straggler_loss > 0.2:
        slowest = max(envs, key=lambda env: env.mean)
        return (
            f"workers wait for the slowest of them {straggler_loss:.0%} of the time (env {slowest.env_id} takes "
            f"{duration(slowest.mean)} a step); send() and recv(min_envs=...) go on with those that are ready."
        )
    if not is_parallel and usable_cores() > 1 and len(envs) > 1:
        return (
            f"envs take {shares['envs']:.0%} of the time in one worker, and there are {usable_cores()} cores; try "
            "para_mode='subproc' (or let 'auto' choose)."
        )
    return f"envs take {shares['envs']:.0%} of the time: all is well, and only faster envs or more cores would help."
