"""Trials with real envs: they run, stay within their limits and leave nothing behind. No time is asserted."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from modes import ORACLE, PROCESSES

from parallelenv import ParallelEnv, recommend
from parallelenv.autotune import recommend as recommending
from parallelenv.errors import ExhaustedError
from parallelenv.testing import envs as zoo

MS = 1e-3


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten trials in this process; two cores, so that processes are tried."""
    monkeypatch.setattr(recommending, "_SLICE", 2 * MS)
    monkeypatch.setattr(recommending, "ROUNDS", 2)
    monkeypatch.setattr(recommending, "usable_cores", lambda: 2)


class Witness(zoo.Counter):
    """Records the calls of its methods, in a list that may be shared."""

    def __init__(self, notes: list[str] | None = None) -> None:
        super().__init__(0, 5)
        self.notes = [] if notes is None else notes
        self.notes.append("made")

    def _state(self) -> object:
        self.notes.append("step" if self.count else "reset")
        return super()._state()

    def close(self) -> None:
        self.notes.append("close")


class Acting(Witness):
    """Calls a function in each step."""

    def __init__(self, act: Callable[[], Any], notes: list[str] | None = None) -> None:
        super().__init__(notes)
        self.act = act

    def step(self, action: Any) -> Any:
        self.act()
        return super().step(action)


def test_tried_env_is_made_stepped_and_closed() -> None:
    lives: list[list[str]] = []

    def make() -> Witness:
        lives.append([])
        return Witness(lives[-1])

    found = recommend([make] * 8)
    assert lives.pop(1) == ["made", "close"]  # to check that the env fn makes a new env each time
    for notes in lives:  # one, or three if the machine was so slow that threads were tried
        assert notes[:2] == ["made", "reset"]
        assert notes.count("step") >= 3
        assert notes.count("close") == 1
        assert notes[-1] == "close"
    assert found.step_cost is not None
    assert found.step_cost > 0


def test_at_most_three_kinds_of_env_are_tried() -> None:
    made: set[int] = set()

    def make(kind: int) -> Witness:
        made.add(kind)
        return Witness()

    for num_kinds, tried in (1, {0}), (2, {0, 1}), (10, {0, 4, 7}):
        made.clear()
        assert recommend([partial(make, kind) for kind in range(num_kinds)]).step_cost is not None
        assert made == tried


@pytest.fixture
def try_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each candidate count as faster than all before it, whatever the times."""
    monkeypatch.setattr(recommending, "CLOSE_ENOUGH", 0.0)
    monkeypatch.setattr(recommending, "_LIMIT", 100.0)


class Counted(zoo.Witness):
    """Computes for a millisecond, and writes the calls of all processes into a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0, str(folder), length=10**9)

    def _reward(self, action: int) -> float:
        end = time.thread_time() + MS
        while time.thread_time() < end:
            pass
        return 1.0


def counted(folder: Path) -> Counter[str]:
    return Counter((folder / "0").read_text().split())


def test_number_of_envs_made_does_not_grow_with_the_list(try_all: None, tmp_path: Path) -> None:
    found = recommend([partial(Counted, tmp_path)] * 1000)
    assert found.label == "subproc, caller_steps"
    counts = counted(tmp_path)
    assert counts["made"] == 2 + 2 + 2 + 1  # in this thread, in two threads, in two processes, next to the caller
    assert counts["closed"] == counts["made"]
    assert counts["reset"] == counts["made"] - 1  # all except the one that was made to check that it is new
    assert not recommending._SHARED


@pytest.mark.parametrize(("limit", "most_steps"), [("_LONG_STEP", 2), ("_LONG_MAKING", 1000)])
def test_one_slow_env_is_made_and_hardly_stepped(
    limit: str, most_steps: int, try_all: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommending, limit, 0.0)
    monkeypatch.setattr(recommending, "_QUICK_BUILD", 0.0)
    found = recommend([partial(Counted, tmp_path)] * 16)
    counts = counted(tmp_path)
    assert counts["made"] == counts["reset"] == counts["closed"] == 1
    assert counts["stepped"] <= most_steps
    assert found.arguments == {"para_mode": PROCESSES, "num_cpus": 2}
    assert "are estimated for subproc with 2 workers, which was not tried because these envs are slow." in found.reason


@pytest.mark.parametrize("is_hidden", [False, True])
def test_trial_does_not_modify_env_instances(is_hidden: bool) -> None:
    env = Witness()
    found = recommend([lambda: env] if is_hidden else [env])
    assert env.notes == ["made"]
    assert env._np_random is None
    assert found.step_cost is not None  # a copy was tried


def test_trial_of_an_instance_does_not_warn_of_lost_state() -> None:
    env = gymnasium.make("LunarLander-v3").unwrapped  # an EzPickle
    env.reset(seed=0)
    assert recommend([env]).step_cost is not None


def test_uncopyable_instance_is_not_tried() -> None:
    env: Any = Witness()
    env.lock = threading.Lock()
    with pytest.warns(UserWarning, match="cannot pickle '_thread.lock' object"):
        found = recommend([env])
    assert env.notes == ["made"]
    assert (found.mode, found.step_cost) == (ORACLE, None)
    assert "Instances are not stepped in a trial" in found.reason
    assert "they cannot be pickled (TypeError: cannot pickle '_thread.lock' object)" in found.reason


def break_down() -> None:
    raise ValueError("it\nbroke")


def fail() -> Any:
    raise ZeroDivisionError("no such level")


class Finite(Witness):
    def _state(self) -> object:
        if self.episode == 3:
            raise ExhaustedError
        return super()._state()


@pytest.mark.parametrize(
    ("envs", "why"),
    [
        ([partial(Acting, break_down)], "ValueError: it broke. Trials take random actions; action_masks()"),
        ([fail], "ZeroDivisionError: no such level."),
        ([lambda: 3], "An env fn returned 3, which has no reset() and step()"),
        ([zoo.Old], "it declares no action space to draw random actions from."),
        ([Finite], "it has too few episodes for a trial"),
        ([Acting(partial(time.sleep, 60))], "0.5 s"),  # a copy of it, in another process
    ],
)
def test_env_that_cannot_be_tried_gets_dummy_mode(envs: list[Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommending, "_PATIENCE", 0.5)
    with pytest.warns(
        UserWarning, match=r"^No mode could .* 'dummy' may not be the fastest.* No env could be tried: .*Give para_mode"
    ) as told:
        found = recommend(envs)
    assert why in str(told[0].message)
    assert (found.mode, found.step_cost, found.releases_gil) == (ORACLE, None, None)
    assert "No env could be tried: " in found.reason
    assert why in found.reason


def test_env_that_fails_in_the_trial_is_closed() -> None:
    notes: list[str] = []
    with pytest.warns(UserWarning, match="it broke"):
        recommend([partial(Acting, break_down, notes)] * 3)
    assert notes.count("close") == notes.count("made") == 2


def test_auto_mode_warns_if_no_env_could_be_tried() -> None:
    notes: list[str] = []
    envs = [partial(Acting, break_down, notes)] * 2
    text = r"No env could be tried: ValueError: it broke\. .*Give para_mode"
    with pytest.warns(UserWarning, match=text), ParallelEnv(envs, "auto") as env:
        assert env.para_mode == ORACLE
    with pytest.raises(UserWarning, match=text):  # if warnings are errors
        ParallelEnv(envs, "auto")
    assert notes.count("close") == notes.count("made")


class Masked(Witness):
    """Has a method that returns the mask of the next action."""

    action_space = gymnasium.spaces.Discrete(50)
    wrong = 0  # steps with an action that the mask does not allow

    def action_masks(self) -> Any:
        return np.arange(50) == self.count % 50

    def step(self, action: Any) -> Any:
        if action != self.count % 50:
            raise ValueError("not allowed")
        return super().step(0)


class MaskedByInfo(Masked):
    action_masks = None  # type: ignore[assignment]

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {"action_mask": Masked.action_masks(self)}

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"action_mask": Masked.action_masks(self)}


class MaskedParts(Masked):
    action_space = gymnasium.spaces.MultiDiscrete([50, 2])  # type: ignore[assignment]

    def action_masks(self) -> Any:
        return super().action_masks().astype(np.int8), np.array([1, 0], np.int8)

    def step(self, action: Any) -> Any:
        if action[1]:
            raise ValueError("not allowed")
        return super().step(action[0])


@pytest.mark.parametrize("kind", [Masked, MaskedByInfo, MaskedParts])
def test_envs_with_masks_are_tried_with_allowed_actions(kind: Any, try_all: None) -> None:
    state = kind.action_space.np_random.bit_generator.state
    for envs in ([kind] * 4, [kind()]):
        found = recommend(envs)
        assert found.step_cost is not None
        assert not found.problem
    assert kind.action_space.np_random.bit_generator.state == state


def test_auto_mode_raises_the_error_of_an_env_fn() -> None:
    with pytest.raises(ZeroDivisionError, match="no such level"):
        ParallelEnv([fail], "auto")


@pytest.mark.parametrize("envs", [["CartPole-v1", "Acrobot-v1"], [zoo.Sheet]])
def test_envs_of_other_kinds_are_tried(envs: list[Any]) -> None:
    assert recommend(envs).step_cost is not None


def disturb() -> None:
    """Draw from the generators of the whole process, and warn."""
    np.random.random()
    random.random()
    warnings.warn("step by step", stacklevel=1)


def test_trial_does_not_change_generators_or_spaces() -> None:
    def state() -> list[Any]:
        space: Any = Witness.action_space
        return [random.getstate(), np.random.get_state()[1].tolist(), space.np_random.bit_generator.state]  # type: ignore[index]

    Witness.action_space.seed(3)
    before = state()
    assert recommend([partial(Acting, disturb)]).step_cost is not None
    assert state() == before


sleepy = partial(Acting, partial(time.sleep, MS))


def test_waiting_is_distinguished_from_computing(try_all: None, tmp_path: Path) -> None:
    waiting = recommend([sleepy] * 4, num_cpus=4)
    assert ", mostly waiting." in waiting.reason
    assert waiting.releases_gil is not None
    assert "waiting" not in recommend([partial(Counted, tmp_path)] * 4).reason
    assert recommend([Witness]).releases_gil is None  # no other mode was tried with one env


def test_trial_of_auto_mode_with_seed_globals_chooses_a_mode_that_has_it() -> None:
    with ParallelEnv([sleepy] * 4, "auto", num_cpus=2, seed_globals=True) as env:
        assert env.recommendation is not None
        assert env.recommendation.step_cost is not None


def work_only_in(pid: int, thread: int) -> None:
    time.sleep(MS)
    if (os.getpid(), threading.get_ident()) != (pid, thread):
        raise OSError("the licence server refused")


def test_mode_that_fails_is_not_chosen(try_all: None) -> None:
    with pytest.warns(
        UserWarning, match=r"Threads cannot be used: .* Other processes cannot be used: .*Give para_mode"
    ):
        found = recommend([partial(Acting, partial(work_only_in, os.getpid(), threading.get_ident()))] * 4)
    assert found.mode == ORACLE
    for what in ("Threads", "Other processes"):
        text = f"{what} cannot be used: a trial of them failed (OSError: the licence server refused)."
        assert text in found.reason


class Nesting(Witness):
    def __init__(self) -> None:
        super().__init__()
        self.reason = recommend([sleepy] * 2).reason


def test_trial_can_run_inside_an_env() -> None:
    with ParallelEnv([Nesting] * 2, PROCESSES, num_cpus=2) as env:
        assert all("2 envs made" in reason for reason in env.get_env_attr("reason"))


def test_busy_caller_is_part_of_the_trial(try_all: None, tmp_path: Path) -> None:
    found = recommend([partial(Counted, tmp_path)] * 4, caller_busy=True)
    assert ", with the caller busy." in found.reason
    assert "caller_steps" not in found.reason
    counts = counted(tmp_path)
    assert counts["closed"] == counts["made"]
