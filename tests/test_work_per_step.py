"""The cost of a step: messages, pickles, waits, copies and calls. Counted, as times differ by machine.

If a number here grows, steps have become slower for all users.
"""

from __future__ import annotations

import gc
import select
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import FrameType, SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from modes import ORACLE, PROCESSES

from parallelenv import ParallelEnv
from parallelenv.backends import _bell, _channel_group, _pipe, _process, subproc
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


PICKLING = {"Pickler", "Unpickler", "dump", "dumps", "load", "loads"}
WATCHED: list[tuple[Any, str, set[str]]] = [
    (_pipe, "os", {"write", "writev", "read", "readv"}),
    (_bell, "os", {"eventfd_write", "eventfd_read"}),
    (codec, "pickle", PICKLING),
    (codec, "copying", PICKLING),
]


def watch(replace: Callable[[Any, str, Any], None] = setattr) -> list[Event]:
    """Record from now on which messages and pickles this process makes."""
    log: list[Event] = []
    for module, name, functions in WATCHED:
        replace(module, name, Spy(getattr(module, name), functions, log))
    return log


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of this process, the caller."""
    return watch(monkeypatch.setattr)


def count_calls(function: Callable[[], Any]) -> int:
    """Return how many Python functions are called within a call."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # it would make additional calls
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 1  # the function itself


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
    """Returns the same at every step, after a nap. If it ``watches``, it records the events between its steps."""

    def __init__(
        self,
        space: gym.Space[Any],
        actions: gym.Space[Any],
        ends: bool = False,
        info: dict[str, Any] | None = None,
        naps: float = 0.0,
        watches: bool = False,
    ) -> None:
        self.observation_space = space
        self.action_space = actions
        self.naps = naps
        self.state = space.sample()
        self.answer = (self.state, 1.0, ends, False, info or {})
        self.log: list[Event] = watch() if watches else []
        self.marks: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.state, self.answer[-1]

    def step(self, action: Any) -> Any:
        self.marks.append(len(self.log))
        if self.naps:
            time.sleep(self.naps)
        return self.answer

    def between_steps(self) -> list[list[Event]]:
        """Return the events of the process from the start of each of the latest steps to the next."""
        return [self.log[begin:end] for begin, end in pairwise(self.marks[-NUM_STEPS:])]


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
    num_cpus: int = 2,
    copy: bool = True,
    options: dict[str, Any] = PIPES,
    **kwargs: Any,
) -> Iterator[tuple[ParallelEnv, Callable[[], Any]]]:
    """Make a pool that has made some steps, and a function that makes one more."""
    options = options if mode == PROCESSES else {}
    first_of_each_worker = range(0, num_envs, num_envs // num_cpus) if mode == PROCESSES else ()
    env_fns = [
        partial(Constant, *spaces, watches=number in first_of_each_worker, **kwargs) for number in range(num_envs)
    ]
    with ParallelEnv(env_fns, mode, "restart", num_cpus, copy=copy, **options) as env:
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
    with settled(spaces, info=info, ends=ends) as (env, step):
        log.clear()
        for _ in range(NUM_STEPS):
            told = step().infos[5]
            assert told.items() >= {**(info or {}), "reset": ends}.items()
            assert not ends or told["reset_info"] == (info or {})
        assert Counter(log) == {("write", HEADER): 2 * NUM_STEPS, ("read", HEADER): 2 * NUM_STEPS}
        for events in env.customized_method("between_steps", id=[0, 4]):
            assert events == [[("write", HEADER), ("read", HEADER)]] * (NUM_STEPS - 1)


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
        for between in env.customized_method("between_steps", id=[0, 4]):
            # In the first, a worker may read a message about an earlier step, which it has noticed in the meantime.
            assert between[0] in ([("eventfd_write", 0)], [("eventfd_write", 0), ("read", HEADER)])
            assert between[1:] == [[("eventfd_write", 0)]] * (NUM_STEPS - 2)


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
    with settled(info={"trace": [np.zeros(3)]}) as (env, step):
        repeat(step, log)
        count = Counter(name for name, _ in log)
        count["loads"] += count.pop("load", 0) + count.pop("Unpickler", 0)
        loads = 5  # a head, and each of four envs
        assert count == {"write": 2 * NUM_STEPS, "read": 4 * NUM_STEPS, "loads": 2 * NUM_STEPS * loads}
        assert sum(nbytes for name, nbytes in log if name == "write") == HEADER * 2 * NUM_STEPS
        for events in env.customized_method("between_steps", id=[0, 4]):
            assert [[name for name, _ in one] for one in events] == [["Pickler", "write", "read"]] * (NUM_STEPS - 1)


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
        assert names == {"write": owners, "read": owners, **({"Pickler": owners} if is_pickled else {})}


# ---------------------------------------------------------------- waits


class WatchedPoll:
    """A `select.poll` that records how long each wait may last."""

    def __init__(self, waits: list[float]) -> None:
        self._poll, self._waits = select.poll(), waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self._waits.append(timeout)
        return self._poll.poll(timeout)


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable periodic actions."""
    monkeypatch.setattr(_channel_group, "_HEARTBEAT", 60.0)
    monkeypatch.setattr(_process, "_PAUSE", 3600.0)
    monkeypatch.setattr(step_plan, "PATIENCE", 60.0)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("num_cpus", [1, 2, 4])
@pytest.mark.parametrize("naps", [0.0, 0.002])
def test_the_caller_sleeps_at_most_once_per_worker(num_cpus: int, naps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    latest: list[float] = []
    watched = SimpleNamespace(POLLIN=select.POLLIN, poll=partial(WatchedPoll, latest))
    monkeypatch.setattr(_channel_group, "select", watched)
    waits = []
    with settled(num_cpus=num_cpus, naps=naps) as (_, step):
        for _ in range(NUM_STEPS):
            latest.clear()
            step()
            waits.append([timeout > 0 for timeout in latest])
    assert max(sum(is_sleep) for is_sleep in waits) <= num_cpus
    if naps:  # after a poll: it busy-waits only for workers that are, or seem, fast
        assert sum(len(is_sleep) <= 2 * num_cpus for is_sleep in waits) > NUM_STEPS / 2


# ---------------------------------------------------------------- copies and calls


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
def test_states_are_copied_once_or_not_at_all(mode: str, copy: bool) -> None:
    large = Box(0, 255, (256, 256), np.uint8)
    with settled((large, Discrete(2)), mode, copy=copy) as (_, step):
        assert copies_made(step, 8 * 256 * 256) == copy


CALLS = {
    (ORACLE, 1, False): 33,
    (PROCESSES, 1, False): 60,
    (PROCESSES, 2, False): 75,
    (PROCESSES, 1, True): 30,
    (PROCESSES, 2, True): 30,
}
"""Python calls of a step of 16 envs, by mode, number of workers, and whether a bell announces it."""


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(("mode", "num_cpus", "has_bell"), CALLS)
def test_step_makes_few_python_calls(mode: str, num_cpus: int, has_bell: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_bell and not _bell.HAS_BELL:
        pytest.skip("there is no bell on this system")
    wait = subproc.SubprocBackend.wait

    def wait_late(*arguments: Any) -> Any:
        time.sleep(0.005)  # so that it finds all replies together
        return wait(*arguments)

    monkeypatch.setattr(subproc.SubprocBackend, "wait", wait_late)
    with settled(mode=mode, num_envs=16, num_cpus=num_cpus, options={"eventfd": has_bell}) as (_, step):
        assert min(count_calls(step) for _ in range(NUM_STEPS)) <= 1.1 * CALLS[mode, num_cpus, has_bell]
