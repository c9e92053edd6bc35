"""The table of envs against a model: random transitions of random envs, under each done policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parallelenv.contract.failures import Failure
from parallelenv.engine.done_policies import make_done_policy
from parallelenv.engine.env_table import EnvTable, Phase
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import EnvBusyError, ResetNeededError

NUM_ENVS = 5
EVERYONE = tuple(range(NUM_ENVS))
some = st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=NUM_ENVS, unique=True).map(tuple)
flags = st.lists(st.sampled_from([(False, False), (True, False), (False, True)]), min_size=NUM_ENVS, max_size=NUM_ENVS)


class TableMachine(RuleBasedStateMachine):
    """Drives a table and a model of it: a phase, a done flag, a pause flag and a ticket for each env."""

    @initialize(word=st.sampled_from([None, "idle", "restart", "continue"]))
    def make(self, word: str | None) -> None:
        self.word = word
        self.table = EnvTable(EVERYONE, make_done_policy(word))
        self.needs_reset = set(EVERYONE)
        self.exhausted: set[int] = set()
        self.done = [False] * NUM_ENVS
        self.paused: set[int] = set()
        self.tickets: dict[int, Ticket] = {}
        self.arrivals: list[tuple[Ticket, list[int] | None]] = []  # None: in the order of the envs of the call
        self.number = 0

    @property
    def arrived(self) -> list[int]:
        found = []
        for ticket, env_ids in self.arrivals:
            running = [env_id for part in ticket.pending.values() for env_id in part]
            answered = [env_id for env_id in ticket.env_ids if env_id not in running] if env_ids is None else env_ids
            found += [env_id for env_id in answered if self.tickets.get(env_id) is ticket]
        return found

    def changes(self, before: int) -> bool:
        return self.table.version != before

    # ---------------------------------------------------------------- episodes

    @rule(env_ids=some)
    def begin(self, env_ids: tuple[int, ...]) -> None:
        """A reset: it loses the old episodes before it is sent, and notes the new ones when it has arrived."""
        before = self.table.version
        self.table.require_reset(env_ids)
        assert self.changes(before)
        self.table.clear_flags(env_ids)
        self.table.record_first_states(env_ids)
        self.needs_reset.difference_update(env_ids)
        self.exhausted.difference_update(env_ids)
        for env_id in env_ids:
            self.done[env_id] = False

    @rule(env_ids=some)
    def lose(self, env_ids: tuple[int, ...]) -> None:
        before = self.table.version
        self.table.require_reset(env_ids)
        assert self.changes(before)
        self.needs_reset.update(env_ids)
        self.exhausted.difference_update(env_ids)

    @rule(env_ids=some)
    def exhaust(self, env_ids: tuple[int, ...]) -> None:
        """A reset that finds no further episode."""
        self.table.record_exhausted(env_ids)
        self.needs_reset.difference_update(env_ids)
        self.exhausted.update(env_ids)
        for env_id in env_ids:
            self.done[env_id] = True

    @precondition(lambda self: len(self.needs_reset) + len(self.exhausted) < NUM_ENVS)
    @rule(env_ids=some, flags=flags)
    def step(self, env_ids: tuple[int, ...], flags: list[tuple[bool, bool]]) -> None:
        """A step of those of the envs that have an episode and are not skipped; the others rest."""
        asked = [env_id for env_id in env_ids if env_id not in self.needs_reset]
        stepped, positions = self.table.choose(asked)
        skips = self.word in (None, "idle")
        rests = {env_id for env_id in asked if env_id in self.exhausted or (skips and self.done[env_id])}
        assert list(stepped) == [env_id for env_id in asked if env_id not in rests]
        assert [asked[position] for position in positions or range(len(asked))] == list(stepped) or not stepped
        ends = np.array([flags[env_id] for env_id in stepped], dtype=bool).reshape(-1, 2)
        before = self.table.version
        self.table.record_step(asked, list(stepped), ends[:, 0], ends[:, 1])
        assert not self.changes(before)
        has_ended: Any = ends.any(axis=1)
        if self.word is None and has_ended.any():
            self.done = [True] * NUM_ENVS
        elif self.word is not None:
            for env_id, is_over in zip(stepped, has_ended.tolist(), strict=True):
                self.done[env_id] = is_over

    # ---------------------------------------------------------------- pauses

    @rule(env_ids=some)
    def pause(self, env_ids: tuple[int, ...]) -> None:
        before = self.table.version
        self.table.set_paused(env_ids, True)
        assert self.changes(before)
        self.paused.update(env_ids)

    @rule(env_ids=some)
    def resume(self, env_ids: tuple[int, ...]) -> None:
        before = self.table.version
        self.table.set_paused(env_ids, False)
        assert self.changes(before)
        self.paused.difference_update(env_ids)

    # ---------------------------------------------------------------- calls in flight

    @rule(
        env_ids=some,
        num_resting=st.integers(0, NUM_ENVS),
        num_failed=st.integers(0, 2),
        cut=st.integers(1, 3),
        separately=st.booleans(),
    )
    def send(self, env_ids: tuple[int, ...], num_resting: int, num_failed: int, cut: int, separately: bool) -> None:
        """A call to several workers: some envs rest, and some are known to have failed before anything is sent."""
        asked = env_ids[: max(0, len(env_ids) - num_resting)]
        ticket = Ticket("step", asked)
        failed, running = asked[:num_failed], asked[num_failed:]
        ticket.failures = {env_id: Failure(OSError(), env_id, "step") for env_id in failed}
        for first in range(0, len(running), cut):
            self.number += 1
            ticket.pending[self.number] = running[first : first + cut]
        self.table.enter(env_ids, ticket, separately=separately)
        self.tickets.update(dict.fromkeys(env_ids, ticket))
        entry = [env_id for env_id in env_ids if env_id not in running]
        self.arrivals = [(one, ids) for one, ids in self.arrivals if one is not ticket]
        self.arrivals.append((ticket, entry if separately else None))

    @precondition(lambda self: any(ticket.pending for ticket in self.tickets.values()))
    @rule(data=st.data())
    def reply(self, data: Any) -> None:
        """A worker replies, perhaps for envs for which another call was sent in the meantime."""
        busy = sorted({number for ticket in self.tickets.values() for number in ticket.pending})
        number = data.draw(st.sampled_from(busy))
        ticket = next(one for one in self.tickets.values() if number in one.pending)
        env_ids = ticket.pending[number]
        ticket.record_reply(number, {}, {})
        if (ticket, None) not in self.arrivals:
            self.arrivals.append((ticket, list(env_ids)))

    @precondition(lambda self: self.arrived)
    @rule(most=st.integers(1, NUM_ENVS))
    def receive(self, most: int) -> None:
        env_ids = self.table.arrived[:most]
        assert env_ids == self.arrived[:most]
        self.drop(tuple(env_ids))

    @rule(env_ids=some)
    def drop(self, env_ids: tuple[int, ...]) -> None:
        self.table.release(env_ids)
        for env_id in env_ids:
            self.tickets.pop(env_id, None)

    # ---------------------------------------------------------------- invariants

    @invariant()
    def agrees(self) -> None:
        table = self.table
        for env_id in EVERYONE:
            expected = Phase.RUNNING
            if env_id in self.needs_reset:
                expected = Phase.NEEDS_RESET
            elif env_id in self.exhausted:
                expected = Phase.EXHAUSTED
            elif self.done[env_id] and self.word != "restart":
                expected = Phase.DONE
            assert table.phase(env_id) is expected
        assert table.done.tolist() == self.done
        assert table.exhausted == self.exhausted
        assert table.unpaused == tuple(env_id for env_id in EVERYONE if env_id not in self.paused)
        assert table.tickets == self.tickets
        assert table.arrived == self.arrived
        assert sorted([*table.arrived, *table.pending_ids]) == sorted(self.tickets)

    @invariant()
    def refuses(self) -> None:
        for env_id in EVERYONE:
            for call, error, is_refused in (
                (self.table.refuse_without_episode, ResetNeededError, env_id in self.needs_reset),
                (self.table.refuse_paused, EnvBusyError, env_id in self.paused),
            ):
                if is_refused:
                    with pytest.raises(error, match=rf"\b{env_id}\b"):
                        call((env_id,))
                else:
                    call((env_id,))


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
