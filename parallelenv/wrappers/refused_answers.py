"""Results that wrappers refuse: the error keeps them, and the results of the other envs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from parallelenv.contract.failures import put
from parallelenv.contract.spaces import Structure, describe_value
from parallelenv.errors import EnvContractError
from parallelenv.results import StepResult
from parallelenv.wrappers.answer_rows import rows_of, unstacked, was_restarted

WHERE_THEY_ARE = "What they answered is in error.refused, what the others did in error.partial."


class RefusedResults(dict[int, Any]):
    """Results that a wrapper refused, by env id, as it received them.

    Each is ``(state, reward, done, info)``, or after a reset a state.

    Attributes:
        beside: The ``partial`` it belongs to: an exception raised a second time may have an old one.
    """

    beside: Any = None

    @classmethod
    def of(cls, result: StepResult, structure: Structure) -> RefusedResults:
        """Return a step's whole result as refused. ``structure`` is that of its states."""
        rows = unstacked(result.states, structure, len(result.env_ids))
        answers = zip(rows, result.rewards.tolist(), result.dones.tolist(), result.infos.tolist(), strict=True)
        return cls(zip(result.env_ids.tolist(), answers, strict=True))

    @property
    def ended(self) -> dict[int, bool]:
        """After a step: env ids of ended episodes, with whether the env was rebuilt."""
        return {env_id: was_restarted(info) for env_id, (_, _, done, info) in self.items() if done}


def refused_in(error: BaseException) -> RefusedResults | None:
    """Return what wrappers have refused; ``None`` if the error did not come from one."""
    refused = getattr(error, "refused", None)
    is_of_now = isinstance(refused, RefusedResults) and refused.beside is getattr(error, "partial", None)
    return refused if is_of_now else None


def attach_partial(error: BaseException, partial: Any, refused: RefusedResults | None = None) -> None:
    """Set an error's ``partial`` and ``refused``; without ``refused`` it keeps its current one."""
    if refused is None:
        refused = refused_in(error)
    put(error, "partial", partial)
    if refused is not None:
        refused.beside = partial
        put(error, "refused", refused)
    elif isinstance(getattr(error, "refused", None), RefusedResults):  # left from an earlier raise
        object.__delattr__(error, "refused")


def is_unanswered(partial: StepResult, refused: RefusedResults) -> bool:
    """Return whether all results in ``partial`` were refused by an inner wrapper."""
    return bool(refused) and refused.keys() >= set(partial.env_ids.tolist())


def partition_results(
    result: StepResult, env_ids: Collection[int], structure: Structure
) -> tuple[StepResult, StepResult]:
    """Return the results of all other envs, and those of these envs."""
    is_theirs = np.isin(result.env_ids, list(env_ids))
    others, theirs = (
        StepResult(
            rows_of(structure, result.states, rows.tolist()),
            result.rewards[rows],
            result.dones[rows],
            result.infos[rows],
            result.terminated[rows],
            result.truncated[rows],
            result.env_ids[rows],
        )
        for rows in (np.flatnonzero(~is_theirs), np.flatnonzero(is_theirs))
    )
    return others, theirs


def no_number_error(rewards: Mapping[int, Any], who_asks: str) -> EnvContractError:
    """Return the error about rewards, by env id, that are not numbers."""
    env_id, reward = next(iter(rewards.items()))
    others = f", and those of envs {list(rewards)[1:]} neither" if len(rewards) > 1 else ""
    return EnvContractError(
        f"{who_asks} needs rewards that are numbers; that of env {env_id} is {describe_value(reward)}{others}. "
        f"{WHERE_THEY_ARE}"
    )
