"""Calls against a model: random resets, steps, pauses and restarts, under each done policy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from modes import ORACLE
from test_rollout import Count

from parallelenv import ParallelEnv
from parallelenv.errors import EnvBusyError, ExhaustedError, ResetNeededError
from parallelenv.testing.contract import DONE_POLICIES

NUM_ENVS = 5
EVERYONE = range(NUM_ENVS)
GO_ON, TERMINATE, TRUNCATE = range(3)
some = st.lists(st.sampled_from(EVERYONE), min_size=1, max_size=NUM_ENVS, unique=True)
some_or_all = st.none() | some
actions = st.lists(st.sampled_from([GO_ON, TERMINATE, TRUNCATE]), min_size=NUM_ENVS, max_size=NUM_ENVS)


class Obedient(Count):
    """Ends its episode if the action says so."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            raise ExhaustedError("no more")
        return super().reset()

    def step(self, action: Any) -> Any:
        state, *_ = super().step(action)
        return state, 1.0, action == TERMINATE, action == TRUNCATE, {}


class Calls(RuleBasedStateMachine):
    """Makes calls and notes, for each env, the steps of its episode, whether it is done, and the call in flight."""

    @initialize(word=st.sampled_from(DONE_POLICIES))
    def make(self, word: Any) -> None:
        self.word = word
        self.env = ParallelEnv([partial(Obedient, number) for number in EVERYONE], ORACLE, word)
        self.env.reset()
        self.steps = dict.fromkeys(EVERYONE, 0)  # of the envs that have an episode
        self.done = dict.fromkeys(EVERYONE, False)
        self.exhausted: set[int] = set()
        self.paused: set[int] = set()
        self.in_flight: dict[int, tuple[str, Any]] = {}

    def teardown(self) -> None:
        self.env.close()

    def chosen(self, env_ids: list[int] | None) -> list[int]:
        return [env_id for env_id in EVERYONE if env_id not in self.paused] if env_ids is None else env_ids

    def lose(self, env_ids: list[int]) -> None:
        """Note that envs lose their episodes and calls."""
        for env_id in env_ids:
            self.steps.pop(env_id, None)
            self.in_flight.pop(env_id, None)
        self.exhausted.difference_update(env_ids)

    def finish(self, calls: dict[int, tuple[str, Any]]) -> list[Any]:
        """Note what finished calls change; return the state and the done flag that they should return."""
        results: list[Any] = []
        ends: dict[int, bool] = {}
        for env_id, (call, argument) in calls.items():
            if call == "last reset":
                self.exhausted.add(env_id)
                self.done[env_id] = True
            elif call == "reset":
                self.steps[env_id] = 0
            elif call == "step":
                ends[env_id] = argument != GO_ON
                self.steps[env_id] = 0 if ends[env_id] and self.word == "restart" else self.steps[env_id] + 1
            is_absent = call in ("rest", "last reset")
            results.append((None, True) if is_absent else ([env_id, self.steps[env_id]], ends.get(env_id, False)))
        if self.word is not None:
            self.done.update(ends)
        elif any(ends.values()):
            self.done = dict.fromkeys(EVERYONE, True)
        return results

    @rule(env_ids=some_or_all, is_last=st.booleans(), is_sent=st.booleans())
    def reset(self, env_ids: list[int] | None, is_last: bool, is_sent: bool) -> None:
        ids = self.chosen(env_ids)
        self.lose(ids)
        self.done.update(dict.fromkeys(ids, False))
        calls = dict.fromkeys(ids, ("last reset" if is_last else "reset", None))
        options = {"last": True} if is_last else None
        if is_sent:
            self.env.send_reset(env_ids, options=options)
            self.in_flight.update(calls)
        else:
            states = [None if state is None else state.tolist() for state in self.env.reset(env_ids, options=options)]
            assert states == [state for state, _ in self.finish(calls)]

    @rule(env_ids=some_or_all, actions=actions, is_sent=st.booleans())
    def step(self, env_ids: list[int] | None, actions: list[int], is_sent: bool) -> None:
        ids = self.chosen(env_ids)
        make = self.env.send if is_sent else partial(self.env.step, align="batch")
        given: Any = actions[: len(ids)] if is_sent else np.array(actions[: len(ids)], int)
        is_busy = not (self.paused | self.in_flight.keys()).isdisjoint(ids)
        if is_busy or not (self.exhausted | self.steps.keys()).issuperset(ids):
            with pytest.raises(EnvBusyError if is_busy else ResetNeededError):
                make(given, env_ids)
            return
        resting = self.exhausted | {env_id for env_id in EVERYONE if self.done[env_id] and self.word in (None, "idle")}
        calls = {env_id: ("rest" if env_id in resting else "step", actions[row]) for row, env_id in enumerate(ids)}
        result: Any = make(given, env_ids)
        if is_sent:
            self.in_flight.update(calls)
        else:
            self.compare(result, calls)

    @precondition(lambda self: self.in_flight)
    @rule(most=st.integers(1, NUM_ENVS))
    def receive(self, most: int) -> None:
        batch = self.env.recv(max_envs=most, align="batch")
        assert 1 <= len(batch) <= most
        self.compare(batch, {env_id: self.in_flight.pop(env_id) for env_id in batch.env_ids.tolist()})

    def compare(self, batch: Any, calls: dict[int, tuple[str, Any]]) -> None:
        found = [(None if state is None else state.tolist(), bool(done)) for state, _, done, _ in batch]
        assert found == self.finish(calls)

    @rule(env_ids=some)
    def restart(self, env_ids: list[int]) -> None:
        if self.in_flight.keys().isdisjoint(env_ids):
            assert self.env.restart(env_ids) == tuple(sorted(env_ids))
            self.lose(env_ids)

    @rule(pauses=some, resumes=some)
    def pause(self, pauses: list[int], resumes: list[int]) -> None:
        self.env.pause(pauses)
        self.env.resume(resumes)
        self.paused = self.paused.union(pauses).difference(resumes)

    @invariant()
    def agrees(self) -> None:
        assert self.env.done.tolist() == list(self.done.values())
        assert self.env.paused.tolist() == [env_id in self.paused for env_id in EVERYONE]
        assert self.env.exhausted.tolist() == [env_id in self.exhausted for env_id in EVERYONE]


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck))
