"""The host's side of a rollout: a copy of the policy with the envs, stepped together, and the record of the steps.

Per step and host that is one call of the policy, one of `Host.run_step`, and a row written to each array of the chunk.
With envs and a policy that do nothing a step takes 23 us for one env, 36 us for 16 and 183 us for 256, all included;
stepped from outside, in the same process, 35, 49 and 207 us.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from parallelenv.contract.batch import Array, Index, gather_states
from parallelenv.contract.copying import cannot_travel, deep_copy, loads
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import NOTHING, Command, Extra, Reply
from parallelenv.contract.rollout_data import (
    EpisodeEnds,
    ExtrasFormat,
    RecurrentState,
    RolloutChunk,
    RolloutRequest,
    StepIndex,
    empty_actions,
    empty_array,
    empty_rows,
    join_ends,
)
from parallelenv.contract.spaces import State, object_array
from parallelenv.worker.policy_runner import Extras, PolicyRunner
from parallelenv.worker.row_writer import RowWriter


class StepSource(Protocol):
    """The owner of the envs that a policy acts for: a `Host`, or the caller, for all envs of all hosts.

    Attributes:
        doing: See `Host`.
        writer: The rows that its envs write now, and the loose leaves of their states.
        in_caller: Whether Ctrl-C arrives here.
    """

    doing: str

    @property
    def in_caller(self) -> bool: ...  # noqa: D102

    @property
    def writer(self) -> RowWriter: ...  # noqa: D102

    def run_step(self, env_ids: tuple[int, ...], each: Sequence[Any] | None, autoreset: bool) -> Reply:
        """Step envs."""
        ...


class HostRollout:
    """One rollout on a host. It persists from chunk to chunk.

    Args:
        number: Id of the rollout.
        packed: The pickled policy. See `RolloutRequest`.
        player: The policy, if it is here already.
        is_over: Called after every step with the number of envs stepped, and before the first with 0; returns whether
            to stop.

    Attributes:
        has_stopped: The latest result of ``is_over``.
    """

    def __init__(
        self,
        number: int,
        packed: Array | None,
        player: PolicyRunner | None = None,
        is_over: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.number = number
        self._packed = packed
        self._player = player
        self._is_over = is_over
        self.has_stopped = False

    def play(self, host: StepSource, command: Command) -> RolloutChunk:
        """Make the steps requested, fewer if every env reaches its limit or the policy fails.

        Args:
            host: Owner of the envs.
            command: The envs, for each how many episodes it may still end (``None``: any number), and the
                `RolloutRequest`.
        """
        recorder = StepRecorder(host.writer, command.env_ids, command.common)
        host.doing = "the policy"
        try:
            if self._player is None:
                policy, memory = loads(self._packed)
                self._player, self._packed = PolicyRunner(policy, memory, host.writer.batch.layout), None
        except BaseException as error:  # noqa: BLE001 (unpickling runs user code)
            recorder.broken = _failure_of_policy(error, host, command)
            return recorder.chunk(None, {})
        self._make_steps(self._player, host, command, recorder)
        try:
            state = self._player.memory
        except BaseException as error:  # noqa: BLE001 (copying runs user code)
            recorder.broken = recorder.broken or _failure_of_policy(error, host, command)
            state = None
        return recorder.chunk(state, self._player.forms)

    def _make_steps(self, player: PolicyRunner, host: StepSource, command: Command, recorder: StepRecorder) -> None:
        order: RolloutRequest = command.common
        writer = host.writer
        shares = list(command.each or [None] * len(command.env_ids))
        recorder.select([column for column, share in enumerate(shares) if share != 0])
        self.has_stopped = self._is_over(0)
        while recorder.env_ids and recorder.count < order.num_steps and not self.has_stopped:
            host.doing = "the policy"
            try:
                actions, extras = player.act(recorder.env_ids, recorder.states_now())
                each = player.give(actions, writer.batch, recorder.env_ids)
                recorder.note_decision(each, extras)
            except BaseException as error:  # noqa: BLE001 (the policy is user code)
                recorder.broken = _failure_of_policy(error, host, command)
                return
            if host.writer is not writer:  # abandoned meanwhile: its result is no longer wanted
                return
            num_made = len(recorder.env_ids)
            ended = recorder.note_step(host.run_step(recorder.env_ids, each, order.autoreset))
            self._go_on(player, recorder, ended, shares, order)
            self.has_stopped = self._is_over(num_made)

    @staticmethod
    def _go_on(
        player: PolicyRunner,
        recorder: StepRecorder,
        ended: Sequence[int],
        shares: list[int | None],
        order: RolloutRequest,
    ) -> None:
        """Exclude from the next step the envs that failed or have no episode left."""
        if not (ended or recorder.failed):
            return
        failed = [column for column in recorder.active if recorder.all_ids[column] in recorder.failed]
        player.forget([recorder.all_ids[column] for column in (*ended, *failed)])
        for column in ended:
            left = shares[column]
            rests = order.skips_done or recorder.all_ids[column] in recorder.exhausted
            shares[column] = 0 if rests else left if left is None else left - 1
        out = {column for column in ended if shares[column] == 0}.union(failed)
        if out:
            recorder.select([column for column in recorder.active if column not in out])


def _failure_of_policy(error: BaseException, host: StepSource, command: Command) -> Failure:
    """Return the policy's exception as a failure; raise an interrupt of the caller again."""
    if isinstance(error, KeyboardInterrupt) and host.in_caller:
        raise error
    return Failure(error, command.env_ids[0], "the policy")


class StepRecorder:
    """The arrays of a chunk that is being made.

    Args:
        writer: The rows of the envs.
        all_ids: The envs, one column each.
        order: The request.

    Attributes:
        all_ids: All envs of the chunk.
        active: Columns of the envs that are stepped now.
        env_ids: Their env ids.
        count: Number of steps made.
        exhausted: See `RolloutChunk`.
        failed: See `RolloutChunk`.
        broken: See `RolloutChunk`.
    """

    def __init__(self, writer: RowWriter, all_ids: tuple[int, ...], order: RolloutRequest) -> None:
        self._begun = time.perf_counter()
        self.all_ids = all_ids
        self.active: list[int] = []
        self.env_ids: tuple[int, ...] = ()
        self.count = 0
        self.exhausted: set[int] = set()
        self.failed: dict[int, tuple[int, Failure]] = {}
        self.broken: Failure | None = None
        self._writer, self._batch = writer, writer.batch
        self._has_loose = any(array is None for array in self._batch.states)
        self._autoreset = order.autoreset
        shape = order.num_steps, len(all_ids)
        self._states = [empty_rows(shape, array) for array in self._batch.states]
        self._actions = empty_actions(shape, self._batch)
        self._rewards = np.zeros(shape)
        self._flags = np.zeros((*shape, 2), dtype=bool)
        self._valid = np.zeros(shape, dtype=bool)
        self._extras: list[tuple[Index, Extras]] = []
        self._said: dict[StepIndex, Extra] = {}
        self._ended: list[EpisodeEnds] = []
        self._columns: Index = slice(None)
        self._rows: Index = slice(0, 0)

    def select(self, columns: list[int]) -> None:
        """Set the columns of the envs that are stepped from now on."""
        self.active = columns
        is_all = len(columns) == len(self.all_ids)
        self._columns = slice(None) if is_all else np.array(columns, dtype=np.intp)
        self.env_ids = self.all_ids if is_all else tuple(self.all_ids[column] for column in columns)
        rows = self._writer.rows(self.env_ids)
        self._rows = rows if isinstance(rows, slice) else np.array(rows, dtype=np.intp)

    def states_now(self) -> State:
        """Return copies of the states of the active envs, which the policy may keep or change."""
        loose = {env_id: Extra(loose=leaves) for env_id, leaves in self._loose(self.env_ids).items()}
        return gather_states(self._batch, self.env_ids, self._rows, loose, copy=True)

    def _loose(self, env_ids: Sequence[int]) -> dict[int, list[Any]]:
        """Return copies of the loose leaves of states, by env id, if there are any."""
        if not self._has_loose:
            return {}
        first, loose = self._writer.first, self._writer.loose
        return {env_id: deep_copy(loose[env_id - first]) for env_id in env_ids if env_id - first in loose}

    def note_decision(self, each: list[Any] | None, extras: Extras) -> None:
        """Record the policy's inputs and outputs."""
        step, columns, rows = self.count, self._columns, self._rows
        loose = self._loose(self.env_ids)
        leaves = iter(zip(*loose.values(), strict=True))
        for kept, array in zip(self._states, self._batch.states, strict=True):
            kept[step, columns] = object_array(next(leaves)) if array is None else array[rows]
        if each is None:
            for kept, array in zip(self._actions, self._batch.actions, strict=True):
                kept[step, columns] = array[rows]
        else:
            self._actions[0][step, columns] = object_array([deep_copy(action) for action in each])
        if extras:
            self._extras.append((columns, extras))

    def note_step(self, reply: Reply) -> list[int]:
        """Record the results of a step; return the columns of the envs whose episode ended."""
        step, columns, rows = self.count, self._columns, self._rows
        self._rewards[step, columns] = self._batch.rewards[rows]
        self._flags[step, columns] = self._batch.flags[rows]
        self._valid[step, columns] = True
        self.count += 1
        failures = dict(reply.failures)
        for env_id, (info, _, reward, _, reset_info, is_exhausted, _) in reply.values.items():
            if is_exhausted:
                self.exhausted.add(env_id)
            if not (info or reward or reset_info):
                continue
            try:  # copied now because the env may change it in its next step
                extra = Extra(deep_copy(info), None, deep_copy(reward), None, deep_copy(reset_info))
            except Exception as error:  # noqa: BLE001 (copying runs user code: anything may come)
                why = cannot_travel(reply.values[env_id], error)
                failures[env_id] = Failure(why, env_id, "the copying of its result")
            else:
                self._said[step, env_id] = extra
        for env_id, failure in failures.items():
            column = self.all_ids.index(env_id)
            self.failed[env_id] = step, failure
            self._rewards[step, column], self._flags[step, column], self._valid[step, column] = 0.0, False, False
        return self._note_ends(step, reply) if self._flags[step].any() else []

    def _note_ends(self, step: int, reply: Reply) -> list[int]:
        columns = np.flatnonzero(self._flags[step].any(axis=1))
        env_ids = [self.all_ids[column] for column in columns.tolist()]
        if self._autoreset:
            loose = {env_id: reply.values.get(env_id, NOTHING).ended_loose or [] for env_id in env_ids}
        else:
            loose = self._loose(env_ids)
        leaves = iter(zip(*loose.values(), strict=True)) if self._has_loose else iter(())
        rows = np.array(env_ids, dtype=np.intp) - self._writer.first
        arrays = self._batch.ended_states if self._autoreset else self._batch.states
        states = [object_array(deep_copy(next(leaves))) if array is None else array[rows] for array in arrays]
        self._ended.append(EpisodeEnds(np.full(len(columns), step), columns, states))
        return columns.tolist()

    def chunk(self, memory: RecurrentState | None, forms: Mapping[str, ExtrasFormat]) -> RolloutChunk:
        """Return the chunk, with the policy's recurrent state and its extras in these formats."""
        count = self.count
        return RolloutChunk(
            self.all_ids,
            [kept[:count] for kept in self._states],
            [kept[:count] for kept in self._actions],
            self._rewards[:count],
            self._flags[:count],
            self._valid[:count],
            join_ends(self._ended, self._batch.states),
            self._stacked_extras(forms),
            self._said,
            self._loose(self.all_ids),
            memory,
            time.perf_counter() - self._begun,
            self.failed,
            self.broken,
            self.exhausted,
        )

    def _stacked_extras(self, forms: Mapping[str, ExtrasFormat]) -> dict[str, Array]:
        """Return the policy's extras, ``(num_steps, k, ...)`` each, zeros where the policy was not called."""
        said = self._extras[: self.count]
        if not said:
            return {}
        shape = self.count, len(self.all_ids)
        stacked = {name: empty_array((*shape, *form.shape), form.dtype) for name, form in forms.items()}
        for step, (columns, extras) in enumerate(said):
            for name, array in extras.items():
                stacked[name][step, columns] = array
        return stacked
