"""Assembles the result of a step or a reset: states, rewards, flags and infos.

Rewards may be of any type, except for adapters and wrappers, for which they are converted to numbers here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from parallelenv.contract.batch import (
    Array,
    Batch,
    Index,
    gather_states,
    has_true,
    loose_columns,
    select_rows,
)
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import NOTHING, Extra
from parallelenv.contract.spaces import State, describe_value, object_array
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.tickets import Outcome
from parallelenv.errors import EnvContractError
from parallelenv.results import StepBatch, StepResult

if TYPE_CHECKING:
    from parallelenv.engine.env_table import EnvTable


Align = Literal["item", "batch"]


class GatheredInfos(dict[str, Any]):
    """The infos of all envs in a step, in the form of Gymnasium's vector envs. See `InfoColumns.gather`."""


Form = Align | type[GatheredInfos]
"""The form of a result.

`GatheredInfos`, which adapters use, is like ``"item"``, but the infos are of this class if possible. Users cannot
request this form, because it is not a string.
"""


class PreparedRecord(NamedTuple):
    """What a step changes in the `EnvTable`."""

    rows: Index  #: Rows of the stepped envs.
    terminated: Array
    truncated: Array
    counted: tuple[bytes, Index | None, Sequence[int]]  #: Arguments of `EpisodeStats.add_step`.
    begun: list[int]  #: Ids of the envs that were reset or restarted, and start an episode.
    resets: Sequence[int]  #: See `Outcome.resets`.


class Assembler:
    """Builds the results of steps, and records the steps in the `EnvTable`.

    These are two methods: an interrupt may come while a result is built, which is then built again from the same
    outcome, but not while its step is recorded.
    """

    def __init__(self, done_policy: DonePolicy, table: EnvTable, copy: bool) -> None:
        self._done_policy = done_policy
        self._table = table
        self._copy = copy

    def infos(self, batch: Batch, rows: Index, count: int) -> Array:
        """Return the infos that `InfoColumns` holds for ``count`` envs.

        The result is a ``(count,)`` array in which each info is a separate dict. An env without an info in the columns
        gets a copy of `DonePolicy.plain_info`.
        """
        if batch.info_columns is None:
            return self._done_policy.plain_infos(count)
        positions, found = batch.info_columns.read(rows, count, self._done_policy.plain_info)
        if len(found) == count:
            return np.fromiter(found, object, count)
        infos = self._done_policy.plain_infos(count)
        for position, info in zip(positions, found, strict=True):
            infos[position] = info
        return infos

    def gathered_infos(self, batch: Batch, rows: Index, count: int) -> Array | GatheredInfos:
        """Return the same infos as `infos`, but as `GatheredInfos` if possible."""
        gathered = {} if batch.info_columns is None else batch.info_columns.gather(rows)
        return self.infos(batch, rows, count) if gathered is None else GatheredInfos(gathered)

    def assemble(self, batch: Batch, outcome: Outcome, align: Form) -> StepResult | StepBatch:
        """Return the result of a step in which no env failed, in the form ``align``."""
        stepped, extras = outcome.stepped, outcome.extras
        rows, (terminated, truncated, dones), infos = self._described(batch, outcome, gathers=align is GatheredInfos)
        rewards: Array = batch.rewards[rows].copy()
        others = {env_id: extra.reward[0] for env_id, extra in extras.items() if extra.reward is not None}
        if others:
            plain = zip(stepped, rewards.tolist(), strict=True)
            rewards = object_array([others.get(env_id, reward) for env_id, reward in plain])
        flags: dict[str, Array] = {"terminated": terminated, "truncated": truncated}
        if outcome.restarted:
            flags["restarted"] = np.array([env_id in outcome.restarted for env_id in outcome.env_ids], dtype=bool)
        states: State
        if align != "batch" and len(stepped) == len(outcome.env_ids):
            states = gather_states(batch, stepped, rows, extras, self._copy)
            return StepResult(states, rewards, dones, infos, env_ids=batch.env_ids[rows].copy(), **flags)
        env_ids = np.array(outcome.env_ids, dtype=np.int64)
        states = _completed(outcome, list_states(batch, stepped, extras))
        completed = _completed(outcome, rewards.tolist())
        if align == "batch":
            items = list(zip(states, completed, dones.tolist(), infos.tolist(), strict=True))
            return StepBatch(items, env_ids=env_ids, **flags)
        states, rewards = object_array(states), object_array(completed)
        return StepResult(states, rewards, dones, infos, env_ids=env_ids, **flags)

    def prepare_record(self, batch: Batch, outcome: Outcome) -> PreparedRecord:
        """Return what `record` needs to record a step whose result has been built."""
        table, stepped = self._table, outcome.stepped
        rows, reborn = batch.rows(stepped), self._reborn(stepped)
        table.stats.make_room()
        return PreparedRecord(
            rows,
            batch.terminated[rows],
            batch.truncated[rows],
            (batch.outcome(), None if stepped is table.env_ids else rows, [*reborn, *outcome.resets]),
            [*reborn, *outcome.restarted],
            outcome.resets,
        )

    def record(self, prepared: PreparedRecord) -> None:
        """Record a step in the `EnvTable`. An interrupt meanwhile would lose the result, so this method is short."""
        rows, terminated, truncated, counted, begun, resets = prepared
        table = self._table
        table.record_step(rows, terminated, truncated)
        table.stats.add_step(*counted)
        if begun:
            table.stats.begin_episodes(begun)
        if resets:
            table.record_first_states(resets)

    def _reborn(self, stepped: Sequence[int]) -> Sequence[int]:
        """Return the envs that a step has reset instead, because their episode had ended before it."""
        return self._table.ended(stepped) if self._done_policy.resets_next and has_true(self._table.done) else ()

    def _described(self, batch: Batch, outcome: Outcome, *, gathers: bool) -> tuple[Index, Flags, Any]:
        """Return the rows of the stepped envs, and the flags and infos of the result.

        With ``gathers``, the infos are `GatheredInfos` if possible.
        """
        table, stepped = self._table, outcome.stepped
        rows = batch.rows(stepped)
        terminated, truncated = batch.terminated[rows].copy(), batch.truncated[rows].copy()
        reborn = self._reborn(stepped)
        if outcome.extras and (has_true(terminated) or has_true(truncated)):
            table.record_exhausted(outcome.exhausted)
        flags = table.flags_of_step(outcome.env_ids, rows, terminated, truncated)
        if reborn and outcome.restarted:
            reborn = [env_id for env_id in reborn if env_id not in outcome.restarted]  # these have their reset's info
        is_plain = len(stepped) == len(outcome.env_ids) and not (outcome.extras or outcome.resets)
        infos: Any
        if gathers and is_plain and not (self._done_policy.autoreset and has_true(flags[2])):
            infos = self.gathered_infos(batch, rows, len(stepped))
        else:
            infos = self._infos(batch, outcome, rows, flags[2])
        if reborn:
            if type(infos) is not GatheredInfos:
                places = {env_id: place for place, env_id in enumerate(outcome.env_ids)}
                found = [deep_copy(infos[places[env_id]]) for env_id in reborn]
            elif batch.info_columns is not None and infos:
                found = batch.info_columns.read([env_id - batch.layout.first for env_id in reborn], len(reborn))[1]
            else:
                found = [{} for _ in reborn]
            for env_id, info in zip(reborn, found, strict=True):  # infos of the resets
                table.reset_infos[env_id] = info
        return rows, flags, infos

    def _infos(self, batch: Batch, outcome: Outcome, rows: Index, dones: Array) -> Array:
        """Return the infos of the result: a separate dict for each env, even if the env's own info is empty."""
        env_ids, extras = outcome.env_ids, outcome.extras
        infos = self.infos(batch, rows, len(outcome.stepped))
        if len(outcome.stepped) < len(env_ids):
            found = dict(zip(outcome.stepped, infos.tolist(), strict=True))
            infos = object_array([found[one] if one in found else self._table.absent_info(one) for one in env_ids])
        if extras:
            for position, env_id in enumerate(env_ids):
                own_info = extras[env_id].info if env_id in extras else None
                if own_info:
                    infos[position] = {**own_info, **infos[position]}
        if outcome.resets:
            for position, env_id in enumerate(env_ids):
                if env_id in outcome.resets:
                    infos[position]["reset"] = True
                    self._table.reset_infos[env_id] = deep_copy(extras.get(env_id, NOTHING).info or {})
        if self._done_policy.autoreset:
            self.describe_ends(batch, outcome, dones, infos)
        return infos

    def describe_ends(self, batch: Batch, outcome: Outcome, dones: Array, infos: Array) -> None:
        """For each env whose episode has ended, add to its info what a reset within the step would otherwise hide."""
        env_ids, extras, table = outcome.env_ids, outcome.extras, self._table
        positions = dones.nonzero()[0].tolist()
        in_columns = batch.read_reset_infos([env_ids[position] for position in positions])
        for position in positions:
            env_id = env_ids[position]
            extra = extras.get(env_id, NOTHING) if extras else NOTHING
            if table.exhausted and env_id in table.exhausted and not extra.is_exhausted:  # exhausted in an earlier step
                continue
            reset_info = extra.reset_info or in_columns.get(env_id, {})
            table.reset_infos[env_id] = deep_copy(reset_info) if reset_info else {}
            ended = None if env_id in outcome.restarted else ended_state(batch, env_id, extra)
            self._done_policy.describe_end(infos[position], ended, reset_info, bool(extra.is_exhausted))


Flags = tuple[Array, Array, Array]
"""Three arrays with one item per env of the result: terminated, truncated, and whether either is set."""


def first_states(batch: Batch, outcome: Outcome, is_listed: bool, copy: bool) -> State:
    """Return the states after a reset: batched or, if ``is_listed``, as a list.

    An exhausted env has the state ``None``.
    """
    is_whole = len(outcome.stepped) == len(outcome.env_ids)
    if is_whole and not is_listed:
        return gather_states(batch, outcome.stepped, batch.rows(outcome.stepped), outcome.extras, copy)
    states = _completed(outcome, list_states(batch, outcome.stepped, outcome.extras))
    return states if is_listed else object_array(states)


def _completed(outcome: Outcome, values: list[Any]) -> list[Any]:
    """Return one value for each env of the result: the given value for a stepped env, ``None`` for any other env."""
    if len(values) == len(outcome.env_ids):
        return values
    found = dict(zip(outcome.stepped, values, strict=True))
    return [found.get(env_id) for env_id in outcome.env_ids]


def list_states(batch: Batch, env_ids: Sequence[int], extras: Mapping[int, Extra]) -> list[State]:
    """Return a list with the state of each of these envs."""
    structure = batch.layout.states
    rows = batch.rows(env_ids)
    loose = iter(loose_columns(batch, env_ids, extras))
    columns = [next(loose) if array is None else list(select_rows(array, rows, copy=True)) for array in batch.states]
    if structure.is_single:
        return list(columns[0])
    return [structure.join([column[place] for column in columns]) for place in range(len(env_ids))]


def ended_state(batch: Batch, env_id: int, extra: Extra) -> State:
    """Return the last state of the episode that ended in an env's latest step."""
    row = env_id - batch.layout.first
    if extra.ended_state is not None:
        return extra.ended_state[0]
    if batch.single_state is not None:
        single: Any = batch.ended_states[0]
        return single[row].copy()
    loose = iter(extra.ended_loose or ())
    leaves = [next(loose) if array is None else array[row].copy() for array in batch.ended_states]
    return batch.layout.states.join(leaves)


def as_number(reward: Any) -> float | None:
    """Return a reward as a float; ``None`` if it is not a number, or is an int too large for a float."""
    if not isinstance(reward, Real | Decimal | np.bool_):
        return None
    try:
        return float(reward)
    except OverflowError:
        return None


def refuse_other_rewards(batch: Batch, outcome: Outcome, dtype: np.dtype[Any]) -> tuple[Outcome, Sequence[int]]:
    """Write an outcome's rewards to the batch as numbers; rewards that do not fit ``dtype`` become failures.

    Returns:
        The new outcome, and the ids of the envs whose rewards were refused, ascending. In the outcome, each of these
        envs has an `EnvContractError` as its failure, but its step still counts.
    """
    wrong: dict[int, Any] = {}
    extras = dict(outcome.extras)
    for env_id, extra in outcome.extras.items():
        if extra.reward is None:
            continue
        reward = extra.reward[0]
        number = np.nan if reward is None else as_number(reward)  # numpy, too, converts None to nan
        if number is None:
            wrong[env_id] = reward
        elif env_id not in outcome.failures:
            batch.rewards[env_id - batch.layout.first] = number
            extras[env_id] = extra._replace(reward=None)
    wrong = {**too_large_rewards(batch, outcome.stepped, dtype), **wrong}
    wrong = {env_id: reward for env_id, reward in wrong.items() if env_id not in outcome.failures}
    outcome = replace(outcome, extras=extras) if extras else outcome
    if not wrong:
        return outcome, ()
    ids = sorted(wrong)
    descriptions = ", ".join(f"env {env_id} {describe_value(wrong[env_id])}" for env_id in ids)
    message = f"A reward must be a number that fits {dtype}, and these do not: {descriptions}. Return one from step()."
    failures = {env_id: Failure(EnvContractError(message), env_id, "step") for env_id in ids}
    return replace(outcome, failures={**outcome.failures, **failures}), ids


def too_large_rewards(batch: Batch, env_ids: Sequence[int], dtype: np.dtype[Any]) -> dict[int, Any]:
    """Return, by env id, the finite rewards in the batch that would become infinite in the given dtype."""
    if dtype == batch.rewards.dtype:
        return {}
    rewards = batch.rewards[batch.rows(env_ids)]
    is_too_large = np.abs(rewards) > np.finfo(dtype).max
    if not is_too_large.any():
        return {}
    places = np.flatnonzero(is_too_large & np.isfinite(rewards)).tolist()
    return {env_ids[place]: float(rewards[place]) for place in places}
