"""What users are told of a step under a policy: states, flags and infos, each their own."""

from __future__ import annotations

from typing import Any, Literal

from parallelenv.batch import Array, Batch, has_true
from parallelenv.episodes import Episodes
from parallelenv.flights import Landed
from parallelenv.ownership import own
from parallelenv.policy import Policy
from parallelenv.protocol import NOTHING
from parallelenv.results import StepBatch, StepResult, by_env, by_item, ended_state

Align = Literal["item", "batch"]


class Teller:
    """Tells the user what has come of a step, and keeps record of the episodes.

    Args:
        policy: What happens when an episode ends.
        episodes: Where they are.
        copy: Whether states are copied for the user.
    """

    def __init__(self, policy: Policy, episodes: Episodes, copy: bool) -> None:
        self._policy = policy
        self._episodes = episodes
        self._copy = copy

    def tell(self, batch: Batch, landed: Landed, align: Align) -> StepResult | StepBatch:
        """Return what has landed as ``align`` says.

        Args:
            batch: Where it has.
            landed: Nothing in it has failed.
            align: As in `ParallelEnv.step`.
        """
        episodes, stepped = self._episodes, landed.stepped
        rows = batch.rows(stepped)
        terminated, truncated = batch.terminated[rows].copy(), batch.truncated[rows].copy()
        if landed.extras and (has_true(terminated) or has_true(truncated)):
            episodes.note_exhausted(landed.exhausted)
        reborn = self._note_resets(landed) if self._policy.resets_next and has_true(episodes.done) else None
        flags = episodes.note_step(landed.env_ids, rows, terminated, truncated)
        score = episodes.score
        log = score.log
        log.append(batch.outcome() if stepped is episodes.everyone else score.part(rows, batch.outcome()))
        if len(log) == score.room:
            score.settle()
        if reborn:
            score.begin(reborn)
        infos = self._infos(batch, landed, flags[2])
        if align == "batch":
            return by_env(batch, landed, rows, flags, infos)
        return by_item(batch, landed, rows, flags, infos, self._copy)

    def _note_resets(self, landed: Landed) -> list[int]:
        """Keep the infos of envs that had ended before, and so were reset instead of stepped; return who they are."""
        reborn = [env_id for env_id in self._episodes.ended(landed.stepped) if env_id not in landed.restarted]
        for env_id in reborn:
            self._episodes.reset_infos[env_id] = own(landed.extras.get(env_id, NOTHING).info or {})
        return reborn

    def _note_begun(self, landed: Landed, infos: Array) -> None:
        """Say of envs that were reset that they were, and keep what the resets said."""
        for position, env_id in enumerate(landed.env_ids):
            if env_id in landed.begun:
                infos[position]["reset"] = True
                self._episodes.reset_infos[env_id] = own(landed.extras.get(env_id, NOTHING).info or {})
        self._episodes.note_first_states(landed.begun)

    def _infos(self, batch: Batch, landed: Landed, dones: Array) -> Array:
        """Return the infos, each a dict of its own, also where an env had nothing to say."""
        env_ids, extras = landed.env_ids, landed.extras
        infos = self._policy.plain_infos(len(env_ids))
        if len(landed.stepped) < len(env_ids):
            stepped = set(landed.stepped)
            for position, env_id in enumerate(env_ids):
                if env_id not in stepped:
                    infos[position] = self._episodes.absent_info(env_id)
        if extras:
            for position, env_id in enumerate(env_ids):
                said = extras[env_id].info if env_id in extras else None
                if said:
                    infos[position] = {**said, **infos[position]}
        if landed.begun:
            self._note_begun(landed, infos)
        if self._policy.autoreset:
            for position in dones.nonzero()[0].tolist():
                self._describe_end(batch, landed, landed.env_ids[position], infos[position])
        return infos

    def _describe_end(self, batch: Batch, landed: Landed, env_id: int, info: dict[str, Any]) -> None:
        """Say of an env whose episode has ended what the reset within the step would hide."""
        extra = landed.extras.get(env_id, NOTHING)
        is_exhausted = bool(extra.is_exhausted)
        if env_id in self._episodes.exhausted and not is_exhausted:  # since an earlier step
            return
        reset_info = extra.reset_info or {}
        self._episodes.reset_infos[env_id] = own(reset_info) if reset_info else {}
        is_known = env_id not in landed.restarted
        ended = ended_state(batch, env_id, extra) if is_known else None
        self._policy.describe_end(info, ended, reset_info, is_exhausted)
