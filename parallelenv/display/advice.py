"""What to do about where the time went, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from parallelenv.cores import usable_cores
from parallelenv.display.recording import Recording
from parallelenv.seats import here
from parallelenv.texts import duration, list_ids

if TYPE_CHECKING:
    from parallelenv.display.summary import EnvTime

_MUCH = 0.2
"""Share of the time from which on it is worth while to do something about it."""


def advise(recording: Recording, shares: Mapping[str, float], straggler_loss: float, envs: Sequence[EnvTime]) -> str:
    """Say what to do, by what takes most of the time, and else by what takes much of it."""
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
    """Whether workers worked at rollouts for most of the time for which they worked."""
    whole = in_rollouts = 0.0
    for worker in recording.workers:
        is_rollout = np.array([name == "rollout" for name in worker.operations], bool)
        whole += recording.share(worker.spans)
        in_rollouts += recording.share(worker.spans[is_rollout])
    return in_rollouts > whole / 2


def _of_rollouts(recording: Recording, shares: Mapping[str, float]) -> str:
    """Say what helps where there are messages for each rollout."""
    ways = ["more steps in each rollout()", "envs with smaller states"]
    if len(recording.workers) > 1:
        ways.insert(1, "fewer workers (num_cpus)")
    return (
        f"messages, and putting rollouts together, take {shares['transport']:.0%} of the time; what helps: "
        f"{'; '.join(ways)}."
    )


def _of_steps(recording: Recording, shares: Mapping[str, float]) -> str:
    """Say what helps where there are messages for each step."""
    is_away = [worker.seat.pid != here().pid for worker in recording.workers]
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
    """Say what helps where workers wait while others work."""
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
