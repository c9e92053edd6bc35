"""The summary of a profile, with advice in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.contract.batch import Array
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.error_text import count, duration, format_table, list_ids, name_range
from parallelenv.contract.process_info import this_process
from parallelenv.notebook.recording import Recording, WorkerRecord, merge, total_length

if TYPE_CHECKING:
    pass

_MUCH = 0.2
"""Minimum share of the time for which advice is given."""


def advise(recording: Recording, shares: Mapping[str, float], straggler_loss: float, envs: Sequence[EnvTime]) -> str:
    """Return advice on what takes most of the time, or else on what takes much of it."""
    unknown = sorted({*recording.missing, *recording.rebuilt})
    if unknown:
        return (
            f"what workers of envs {list_ids(unknown)} did is not all known, and counts as transport; profile again "
            "while they live."
        )
    if not envs:
        return "no env was stepped; profile some steps."
    if shares["caller"] >= max(shares.values()):
        return (
            f"your own code takes {shares['caller']:.0%} of the time, so faster envs would not help; send() and recv() "
            "let envs work meanwhile."
        )
    if shares["transport"] > max(_MUCH, straggler_loss):
        return _of_rollouts(recording, shares) if _are_rollouts(recording) else _of_steps(recording, shares)
    if straggler_loss > _MUCH:
        return _of_stragglers(shares, straggler_loss, envs)
    takes = f"envs take {shares['envs']:.0%} of the time"
    if len(recording.workers) == 1 < min(usable_cores(), len(envs)):
        return (
            f"{takes} in one worker, and there are {usable_cores()} cores; try para_mode='subproc' (or let 'auto' "
            "choose)."
        )
    return f"{takes}: all is well, and only faster envs or more cores would help."


def _are_rollouts(recording: Recording) -> bool:
    """Return whether workers spent most of their busy time in rollouts."""
    whole = in_rollouts = 0.0
    for worker in recording.workers:
        is_rollout = np.array([name == "rollout" for name in worker.operations], bool)
        whole += recording.share(worker.spans)
        in_rollouts += recording.share(worker.spans[is_rollout])
    return in_rollouts > whole / 2


def _of_rollouts(recording: Recording, shares: Mapping[str, float]) -> str:
    """Return advice if there are messages per rollout."""
    ways = ["more steps in each rollout()", "envs with smaller states"]
    if len(recording.workers) > 1:
        ways.insert(1, "fewer workers (num_cpus)")
    return (
        f"messages, and putting rollouts together, take {shares['transport']:.0%} of the time; what helps: "
        f"{'; '.join(ways)}."
    )


def _of_steps(recording: Recording, shares: Mapping[str, float]) -> str:
    """Return advice if there are messages per step."""
    is_away = [worker.process.pid != this_process().pid for worker in recording.workers]
    ways = ["rollout(), which makes many steps with one call", "more envs in each step"]
    if len(is_away) > 1:
        ways.append("fewer workers (num_cpus)")
    if len(is_away) > 1 and all(is_away):
        ways.append("caller_steps=True of para_mode='subproc'")
    if (len(is_away) > 1 or is_away[0]) and shares["transport"] > shares["envs"]:
        ways.append("para_mode='dummy', which needs none")
    return (
        f"messages and the answers' forms take {shares['transport']:.0%} of the time, as steps are short; what helps: "
        f"{'; '.join(ways)}."
    )


def _of_stragglers(shares: Mapping[str, float], straggler_loss: float, envs: Sequence[EnvTime]) -> str:
    """Return advice if workers wait for others."""
    numbers = [env.steps for env in envs]
    if max(numbers) > 1.5 * min(numbers):
        return (
            f"envs take {shares['envs']:.0%} of the time, and go on without each other; workers have nothing to do for "
            f"{straggler_loss:.0%} of it, while your policy acts, or because there was no more to do."
        )
    slowest = max(envs, key=lambda env: env.mean)
    return (
        f"workers wait for the slowest of them {straggler_loss:.0%} of the time (env {slowest.env_id} takes "
        f"{duration(slowest.mean)} a step); send() and recv(min_envs=...) go on with those that are ready."
    )


_MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class EnvTime:
    """Durations of an env's steps.

    Attributes:
        env_id: Its id.
        steps: Number of steps recorded.
        mean: Mean seconds per step, including a reset within the step.
        longest: Seconds of the longest step.
    """

    env_id: int
    steps: int
    mean: float
    longest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the time went. Shares are fractions of ``seconds``; those of caller, transport and envs add up to 1.

    Attributes:
        seconds: Duration of the recording.
        caller_share: The caller's own code ran, outside the `ParallelEnv`, and no worker did.
        transport_share: The caller was in a call of the `ParallelEnv`, and no worker ran.
        env_share: At least one worker ran.
        straggler_loss: Part of ``env_share`` in which a worker waited for others, averaged over workers.
        policy_share: Part of ``env_share`` in which a worker ran the policy of a rollout, averaged over workers.
        busy: Share in which each worker ran, in the order of ``workers``.
        workers: Env ids of each worker.
        envs: An `EnvTime` for each env that was stepped.
        sampled: Share of the time that was recorded completely: 1, or less if calls were so fast that some were
            skipped. Everything else is then an estimate, extrapolated from the recorded ones.
        missing: Ids of envs whose worker sent no record: it died, or was still busy.
        rebuilt: Ids of envs whose worker was rebuilt; the record of the former one is lost.
        is_full: Whether the recording exceeded its maximum size.
        advice: Advice, in one line.
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
    sampled: float
    missing: tuple[int, ...]
    rebuilt: tuple[int, ...]
    is_full: bool
    advice: str

    @property
    def slowest(self) -> EnvTime | None:
        """The env with the longest mean step; ``None`` if none was stepped."""
        return max(self.envs, key=lambda env: env.mean, default=None)

    def __repr__(self) -> str:
        """Return a table."""
        lines = [f"{duration(self.seconds)} recorded, {count(len(self.workers), 'worker')}", *self._tables()]
        slowest = self.slowest
        if slowest is not None:
            usual = float(np.median([env.mean for env in self.envs]))
            lines += [
                "",
                f"slowest env: {slowest.env_id}, {duration(slowest.mean)} per step on average, "
                f"{duration(slowest.longest)} at most (median env: {duration(usual)} per step)",
            ]
        if self.missing:
            lines.append(f"not recorded: envs {list_ids(self.missing)}, whose workers died or were still busy")
        if self.rebuilt:
            lines.append(f"recorded only since their workers were built anew: envs {list_ids(self.rebuilt)}")
        if self.sampled < 1:
            noted = sum(env.steps for env in self.envs)
            lines.append(
                f"sampled, to keep the overhead low: all shares are estimates from {self.sampled:.1%} of the time and "
                f"{count(noted, 'step')} of envs"
            )
        if self.is_full:
            lines.append("incomplete: the recording is full, and what came later is missing")
        return "\n".join([*lines, f"advice: {self.advice}"])

    def _tables(self) -> list[str]:
        """Return the tables of shares and of busy workers. Parts are indented under their total."""
        rows = [
            ("your code", self.caller_share, "your program ran outside of the ParallelEnv, and no worker ran"),
            ("transport", self.transport_share, "a call ran or waited, and no worker ran"),
            ("workers", self.env_share, "at least one worker ran"),
        ]
        if len(self.workers) > 1:
            rows.append(("  stragglers", self.straggler_loss, "part of it: the average worker waited for slower ones"))
        if self.policy_share >= 0.001:
            rows.append(("  policy", self.policy_share, "part of it: the average worker ran the policy, in rollouts"))
        shown = [(name, f"{share:.1%}", said) for name, share, said in rows]
        tables = [format_table(("where", "share", "what"), shown, left=("where", "what"))]
        workers = [(name_range(ids), f"{busy:.1%}") for ids, busy in zip(self.workers, self.busy, strict=True)]
        if workers:
            table = format_table(("worker of envs", "busy"), workers[:_MOST_WORKERS], left=("worker of envs",))
            tables += ["", table]
        if len(workers) > _MOST_WORKERS:
            tables.append(f"... and {count(len(workers) - _MOST_WORKERS, 'more worker')}")
        return tables


def summarise(recording: Recording) -> Summary:
    """Return where the time went."""
    seconds = recording.end - recording.begin
    busy = [recording.share(worker.spans) for worker in recording.workers]
    some = merge(np.concatenate([np.zeros((0, 2)), *(worker.spans for worker in recording.workers)]))
    env_share = recording.share(some)
    occupied = recording.share(np.concatenate([some, recording.calls]))
    shares = {"caller": 1 - occupied, "transport": occupied - env_share, "envs": env_share}
    straggler_loss = max(0.0, env_share - float(np.mean(busy))) if busy else 0.0
    envs = tuple(env for worker in recording.workers for env in _env_times(recording, worker))
    policy = float(np.mean([_beside(recording, worker) for worker in recording.workers])) if busy else 0.0
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
        _sampled(recording),
        recording.missing,
        recording.rebuilt,
        any(worker.is_full for worker in recording.workers),
        advise(recording, shares, straggler_loss, envs),
    )


def _sampled(recording: Recording) -> float:
    """Return the share of the time recorded completely; rollouts count by their share of recorded steps."""
    noted = total_length(recording.windows) / (recording.end - recording.begin)
    left_out = [_left_out(worker) for worker in recording.workers]
    return noted if max(left_out, default=0.0) == 0 else noted * (1 - float(np.mean(left_out)))


def _left_out(worker: WorkerRecord) -> float:
    """Return the share of steps in rollouts that a worker did not record."""
    return 1 - len(worker.stands_for) / max(1, int(worker.stands_for.sum()))


def _env_times(recording: Recording, worker: WorkerRecord) -> list[EnvTime]:
    durations = (worker.turns[:, 1] - worker.turns[:, 0])[worker.is_step]
    owners = worker.owners[worker.is_step]
    weights = (_weights(recording, worker)[worker.span_of])[worker.is_step]
    found = []
    for env_id in worker.env_ids:
        is_own = owners == env_id
        own = durations[is_own]
        if len(own):
            mean = float(np.average(own, weights=weights[is_own]))
            found.append(EnvTime(env_id, len(own), mean, float(own.max())))
    return found


def _weights(recording: Recording, worker: WorkerRecord) -> Array:
    """Return how many commands each recorded command of a worker represents: ``(m,)`` float64."""
    weights: Array = recording.weights[recording.window_of(worker.spans[:, 0])] * worker.stands_for
    return weights


def _beside(recording: Recording, worker: WorkerRecord) -> float:
    """Return the share of the time in which a worker was in rollouts and stepped no env."""
    is_rollout = np.array([name == "rollout" for name in worker.operations], bool)
    rollouts = merge(worker.spans[is_rollout])
    if not len(rollouts):
        return 0.0
    within = np.searchsorted(rollouts[:, 0], worker.spans[:, 0], side="right") - 1
    is_inner = ~is_rollout & (within >= 0) & (worker.spans[:, 1] <= rollouts[within, 1])
    lengths = worker.spans[is_inner, 1] - worker.spans[is_inner, 0]
    stepped = float(lengths @ _weights(recording, worker)[is_inner]) / (recording.end - recording.begin)
    return max(0.0, recording.share(rollouts) - stepped)
