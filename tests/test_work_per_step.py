"""The cost of a step: messages, pickles, wake-ups and copies. Counted, as times differ by machine.

If a number here grows, steps have become slower for all users.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from modes import ORACLE, PROCESSES

from parallelenv import ParallelEnv
from parallelenv.backends import _bell, _channel_group, _pipe
from parallelenv.contract import codec
from parallelenv.engine import step_plan

NUM_STEPS = 10
HEADER = 19  # bytes of a message that needs no more
Event = tuple[str, int]
"""A function that was called, and the bytes it moved if it moves bytes."""

# ---------------------------------------------------------------- counting


class Spy:
    """Replaces a module and records the calls of some of its functions."""

    def __init__(self, module: Any, names: set[str], log: list[Event]) -> None:
        self._module = module
        self._names = names
        self._log = log

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return partial(self._call, name, found) if name in self._names else found

    def _call(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        moved = result if type(result) is int else len(result) if type(result) is bytes and name == "read" else 0
        self._log.append((name, moved))
        return result


PICKLING = {"Unpickler", "dump", "dumps", "load", "loads"}
WATCHED: list[tuple[Any, str, set[str]]] = [
    (_pipe, "os", {"write", "writev", "read", "readv"}),
    (_bell, "os", {"eventfd_write", "eventfd_read"}),
    (codec, "pickle", PICKLING),
    (codec, "copying", PICKLING),
]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The messages and pickles that the caller makes from now on; each message is from or to a worker."""
    log: list[Event] = []
    for module, name, functions in WATCHED:
        monkeypatch.setattr(module, name, Spy(getattr(module, name), functions, log))
    monkeypatch.setattr(codec, "_dump", Spy(codec, {"_dump"}, log)._dump)
    return log


def copies_made(function: Callable[[], Any], nbytes: int) -> float:
    """Return the peak memory of a call, in units of ``nbytes``."""
    tracemalloc.start()
    try:
        function()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        function()
        return round((tracemalloc.get_traced_memory()[1] - before) / nbytes, 1)
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- envs


class Constant(gym.Env[Any, Any]):
    """Returns the same at every step, after a nap."""

    def __init__(
        self, space: Any, actions: Any, ends: bool = False, info: dict[str, Any] | None = None, naps: float = 0.0
    ) -> None:
        self.observation_space, self.action_space, self.naps = space, actions, naps
        self.answer = (space.sample(), 1.0, ends, False, info or {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.answer[0], self.answer[-1]

    def step(self, action: Any) -> Any:
        if self.naps:
            time.sleep(self.naps)
        return self.answer


VECTOR = Box(-1, 1, (4,), np.float32)
SPACES: dict[str, tuple[gym.Space[Any], gym.Space[Any]]] = {
    "vector": (VECTOR, Discrete(2)),
    "image": (Box(0, 255, (8, 8, 3), np.uint8), Box(-1, 1, (2,), np.float32)),
    "dict": (Dict({"a": VECTOR, "b": Discrete(5)}), MultiDiscrete([2, 3])),
}


PIPES, BELL = {"eventfd": False}, {"eventfd": True}
with_bell = pytest.mark.skipif(not _bell.HAS_BELL, reason="there is no bell on this system")


@contextmanager
def settled(
    spaces: tuple[gym.Space[Any], gym.Space[Any]] = SPACES["vector"],
    mode: str = PROCESSES,
    num_envs: int = 8,
    copy: bool = True,
    options: dict[str, Any] = PIPES,
    **kwargs: Any,
) -> Iterator[tuple[ParallelEnv, Callable[[], Any]]]:
    """Make a pool that has made some steps, and a function that makes one more."""
    options = options if mode == PROCESSES else {}
    with ParallelEnv(
        [partial(Constant, *spaces, **kwargs)] * num_envs, mode, "restart", 2, copy=copy, **options
    ) as env:
        env.reset()
        action = env.action_space.sample()  # type: ignore[union-attr]
        for _ in range(5):
            env.step(action)
        yield env, lambda: env.step(action)


def repeat(call: Callable[[], Any], log: list[Event]) -> None:
    """Make some calls and record only what they do."""
    log.clear()
    for _ in range(NUM_STEPS):
        call()


# ---------------------------------------------------------------- messages and pickles

STEADY = {"speed": np.float64(1.5), "lap": 3}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("spaces", "info"),
    [*((spaces, None) for spaces in SPACES.values()), (SPACES["vector"], STEADY)],
    ids=[*SPACES, "infos of a steady form"],
)
def test_plain_step_sends_one_small_message_each_way(spaces: Any, info: Any, ends: bool, log: list[Event]) -> None:
    with settled(spaces, info=info, ends=ends) as (_, step):
        log.clear()
        for _ in range(NUM_STEPS):
            told = step().infos[5]
            assert told.items() >= {**(info or {}), "reset": ends}.items()
            assert not ends or told["reset_info"] == (info or {})
        assert Counter(log) == {("write", HEADER): 2 * NUM_STEPS, ("read", HEADER): 2 * NUM_STEPS}


def wait_until_workers_sleep(env: ParallelEnv) -> None:
    """Wait until every worker has noticed the latest ring, so that none needs a message to look for the next one."""
    group = env.engine.pool.backend._group  # type: ignore[attr-defined]
    words, lines = group.bell.words, [channel.line for channel in group.channels]
    while any(words[line + _bell.SEEN] != words[0] for line in lines):
        pass


@with_bell
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES)
def test_plain_step_rings_once_and_each_worker_counts_once(spaces: Any, ends: bool, log: list[Event]) -> None:
    with settled(spaces, ends=ends, options=BELL) as (env, step):
        log.clear()
        for _ in range(NUM_STEPS):
            wait_until_workers_sleep(env)
            step()
        events = Counter(name for name, _ in log)
        assert events.keys() == {"eventfd_write", "eventfd_read"}
        assert events["eventfd_write"] == NUM_STEPS
        assert events["eventfd_read"] <= NUM_STEPS * (1 + 2)  # the old bell, and the counter once per worker


@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES)
def test_step_through_an_adapter_sends_one_message_each_way(spaces: Any, autoreset_mode: str, log: list[Event]) -> None:
    with settled(spaces, ends=autoreset_mode != "Disabled") as (env, _):
        vector_env: Any = env.to_gymnasium(autoreset_mode)
        vector_env.reset()
        action = vector_env.action_space.sample()
        for _ in range(3):
            vector_env.step(action)
        repeat(partial(vector_env.step, action), log)  # with NextStep every other one resets all
        assert Counter(name for name, _ in log) == {"write": 2 * NUM_STEPS, "read": 2 * NUM_STEPS}


def test_infos_of_other_forms_cost_one_pickle_per_worker(log: list[Event]) -> None:
    with settled(info={"trace": [np.zeros(3)]}) as (_, step):
        repeat(step, log)
        count = Counter(name for name, _ in log)
        count["loads"] += count.pop("load", 0) + count.pop("Unpickler", 0)
        loads = 5  # a head, and each of four envs
        assert count == {"write": 2 * NUM_STEPS, "read": 4 * NUM_STEPS, "loads": 2 * NUM_STEPS * loads}
        assert sum(nbytes for name, nbytes in log if name == "write") == HEADER * 2 * NUM_STEPS


def test_halves_that_take_turns_need_no_pickle(log: list[Event]) -> None:
    with settled() as (env, _):
        halves = [[0, 1, 4, 5], [2, 3, 6, 7]]

        def take_turns() -> None:
            for half in halves:
                env.send([1] * 4, half)
                env.recv(4)

        for _ in range(2):
            take_turns()
        repeat(take_turns, log)
        num_messages = 2 * len(halves) * NUM_STEPS
        assert Counter(log) == {("write", HEADER): num_messages, ("read", HEADER): num_messages}


@pytest.mark.parametrize(
    ("env_ids", "owners", "is_pickled"),
    [([4, 5, 6, 7], 1, False), ([0, 1], 1, True), ([6], 1, True), ([7, 4], 1, True), ([3, 4], 2, True)],
    ids=str,
)
def test_step_of_some_envs_wakes_only_their_workers(
    env_ids: list[int], owners: int, is_pickled: bool, log: list[Event]
) -> None:
    with settled() as (env, _):
        log.clear()
        env.step([1] * len(env_ids), env_ids)
        names = Counter(name for name, _ in log)
        assert names == {"write": owners, "read": owners, **({"_dump": owners} if is_pickled else {})}


class WatchedPoll:
    """A `select.poll` that records whether each wait may sleep."""

    def __init__(self, sleeps: list[bool]) -> None:
        self._poll, self._sleeps = select.poll(), sleeps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self._sleeps.append(timeout > 0)
        return self._poll.poll(timeout)


@pytest.mark.parametrize("naps", [0.0, 0.002])
def test_the_caller_sleeps_at_most_once_per_worker(naps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (_channel_group, "_HEARTBEAT"), (step_plan, "PATIENCE"):
        monkeypatch.setattr(module, name, 3600.0)  # no periodic actions
    sleeps: list[bool] = []
    watched = SimpleNamespace(POLLIN=select.POLLIN, poll=partial(WatchedPoll, sleeps))
    monkeypatch.setattr(_channel_group, "select", watched)
    polls = []
    with settled(naps=naps) as (_, step):
        for _ in range(NUM_STEPS):
            sleeps.clear()
            step()
            assert sleeps
            assert sum(sleeps) <= 2
            polls.append(len(sleeps))
    if naps:  # after a poll: it busy-waits only for workers that are, or seem, fast
        assert sum(number <= 4 for number in polls) > NUM_STEPS / 2


# ---------------------------------------------------------------- results received a few at a time


def bytecodes_of(function: Callable[[], Any]) -> int:
    """Return how many bytecodes a call executes."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def receive(env: ParallelEnv) -> None:
    env.recv(1, 1)


def receive_listed(env: ParallelEnv) -> None:
    env.recv(1, 1, align="batch")


def receive_asynchronously(env: ParallelEnv) -> None:
    with contextlib.suppress(StopIteration):  # nothing has to be waited for, so no event loop is needed
        received = env.arecv(1, 1)
        while True:
            received.send(None)


def exchange(env: ParallelEnv) -> None:
    got = env.get_state()
    assert got is not None
    env.send_action(1, got[1])


STREAMS: dict[ParallelEnv, Any] = {}


def stream_on(env: ParallelEnv) -> None:
    next(STREAMS[env])


def start_stream(env: ParallelEnv) -> None:
    STREAMS[env] = env.stream(lambda states: [1] * len(states), max_envs=1)


def send_steps(env: ParallelEnv) -> None:
    env.send([1] * len(env))


def send_resets(env: ParallelEnv) -> None:
    env.send_reset()


def send_singly(env: ParallelEnv) -> None:
    for env_id in range(len(env)):
        env.send([1], env_id)


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("info", [{}, {"trace": []}], ids=["plain", "infos"])
@pytest.mark.parametrize(
    ("start", "call"),
    [
        (send_steps, receive),
        (send_singly, receive),
        (send_resets, receive_listed),
        (send_steps, receive_asynchronously),
        (send_steps, exchange),
        (start_stream, stream_on),
    ],
)
def test_one_result_costs_the_same_however_many_envs_are_in_flight(
    start: Any, call: Any, info: Any, on_failure: Any
) -> None:
    counts = {}
    for num_envs in (64, 1024):
        envs = [partial(Constant, *SPACES["vector"], info=info)] * num_envs
        with ParallelEnv(envs, ORACLE, "restart", on_failure=on_failure) as env:
            env.reset()
            start(env)
            for _ in range(3):
                call(env)
            counts[num_envs] = min(bytecodes_of(partial(call, env)) for _ in range(3))
            STREAMS.clear()
    assert counts[1024] < 1.2 * counts[64] < 20_000


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
def test_states_are_copied_once_or_not_at_all(mode: str, copy: bool) -> None:
    large = Box(0, 255, (256, 256), np.uint8)
    with settled((large, Discrete(2)), mode, copy=copy) as (_, step):
        assert copies_made(step, 8 * 256 * 256) == copy
