"""Ctrl-C before any line of a step: every result is delivered once and in order, and no env is skipped."""

from __future__ import annotations

import contextlib
import itertools
import signal
from typing import Any

import numpy as np
import pytest
from interrupting import Counting, interrupt_at
from modes import ORACLE, PROCESSES, THREADS

from parallelenv import ParallelEnv, get_worker_info
from parallelenv.backends._bell import HAS_BELL
from parallelenv.engine.engine import Engine
from parallelenv.errors import EnvInterruptedError, NothingInFlightError

NUM_ENVS = 4
ZEROS = [0] * NUM_ENVS
IN_WAITS = ["parallelenv/worker", "backends"]
CALLER_STEPS = {"caller_steps": True, "num_cpus": 2}
here_and_in_caller_steps = pytest.mark.parametrize(("mode", "options"), [(ORACLE, {}), (PROCESSES, CALLER_STEPS)])
with_bell = pytest.mark.skipif(not HAS_BELL, reason="there is no bell")


def receive(env: ParallelEnv) -> list[float] | None:
    """Return the states of the interrupted step, ``None`` if none was sent, ``[]`` if an env was interrupted in it."""
    try:
        return env.recv(NUM_ENVS).states[:, 0].tolist()  # type: ignore[no-any-return]
    except NothingInFlightError:
        return None
    except EnvInterruptedError:
        return []


@pytest.mark.parametrize("env_ids", [None, [2, 0, 3]], ids=["all", "some"])
@pytest.mark.parametrize(
    ("mode", "options", "way"),
    [
        (ORACLE, {}, "general"),
        (ORACLE, {}, "planned"),
        (THREADS, {}, "first"),
        (THREADS, {}, "general"),
        (PROCESSES, {"eventfd": False}, "general"),
        pytest.param(PROCESSES, {"eventfd": True}, "general", marks=with_bell),
        pytest.param(PROCESSES, {"eventfd": True}, "first", marks=with_bell),
        pytest.param(PROCESSES, {"eventfd": True}, "planned", marks=with_bell),
        (PROCESSES, CALLER_STEPS, "general"),
        (PROCESSES, CALLER_STEPS, "planned"),
    ],
    ids=itertools.count(),
)
def test_interrupted_step_is_delivered_once_and_in_order(
    mode: str, options: dict[str, Any], way: str, env_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step takes the general way, is a planned one, or is the first that is planned."""
    monkeypatch.setattr(Engine, "plans_steps", way != "general")
    count = 1 if way == "first" else 3
    actions = [0] * len(env_ids or ZEROS)
    num_received, lost = 0, []
    with ParallelEnv([Counting] * NUM_ENVS, mode, "continue", **{"num_cpus": 2, **options}) as env:
        for line in itertools.count(1):
            env.reset()
            if way == "first":
                env.engine.plans.clear()
            for _ in range(count):
                env.step(actions, env_ids)
            assert any(plan.is_valid() for plan in env.engine.plans.values()) is (way == "planned")
            outcome = interrupt_at(line, lambda: env.step(actions, env_ids))
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            found = receive(env)
            if found == []:
                continue
            made = [after - count for after in env.get_env_attr("count", env_ids)]
            assert made in ([0] * len(actions), [1] * len(actions)), outcome
            if found is not None:  # no part of a result alone
                assert found == [count + 1] * len(actions), outcome
                num_received += 1
            elif made[0]:  # the call was about to return
                lost.append(outcome.line)
            assert env.step(actions, env_ids).states[:, 0].tolist() == [count + made[0] + 1] * len(actions), outcome
    assert num_received > 15
    assert len(lost) <= 15, lost


class Telling(Counting):
    """Has an info in its fifth step, so that a planned step does not end as one."""

    looks = 0

    def look(self) -> None:
        self.looks += 1

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        return *others, {"word": "fifth"} if self.count == 5 else info


@pytest.mark.parametrize("call", ["recv", "look"])
@pytest.mark.parametrize(("mode", "options"), [(ORACLE, {}), (PROCESSES, {"num_cpus": 2}), (PROCESSES, CALLER_STEPS)])
def test_command_whose_wait_was_interrupted_is_executed_once(mode: str, options: dict[str, Any], call: str) -> None:
    """If it stayed in the queue, it would be executed again when a planned step has to use the queue.

    A method that is still running makes the plan invalid.
    """
    num_received = 0
    with ParallelEnv([Telling] * NUM_ENVS, mode, "continue", timeout=20, **options) as env:
        for line in itertools.count(1):
            env.reset()
            for _ in range(3):
                env.step(ZEROS)
            env.set_env_attr("looks", 0)
            if call == "recv":
                env.send(ZEROS)
                outcome = interrupt_at(line, lambda: env.recv(NUM_ENVS), IN_WAITS)
            else:
                outcome = interrupt_at(line, lambda: env.customized_method("look"), IN_WAITS)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            found = receive(env)
            if found == []:
                continue
            num_received += found is not None
            for count in (5, 6) if call == "recv" else (4, 5, 6):
                assert env.step(ZEROS).states[:, 0].tolist() == [count] * NUM_ENVS, outcome
            assert max(env.get_env_attr("looks")) <= 1, outcome
        assert (num_received if call == "recv" else line) > 15


class Trained(Counting):
    """Has a method that is interrupted in the first env of the caller."""

    fits = 0

    def fit(self) -> None:
        self.fits += 1
        info: Any = get_worker_info()
        if info.env_id == (0 if info.num_workers == 1 else 2):
            signal.raise_signal(signal.SIGINT)


@here_and_in_caller_steps
def test_interrupted_method_is_not_called_on_the_remaining_envs(mode: str, options: dict[str, Any]) -> None:
    with ParallelEnv([Trained] * NUM_ENVS, mode, **options) as env:
        with pytest.raises(KeyboardInterrupt):
            env.customized_method("fit")
        env.reset()
        fits = [1, 0, 0, 0] if mode == ORACLE else [1, 1, 1, 0]
        assert env.get_env_attr("fits") == fits
        with pytest.raises(NothingInFlightError):
            env.recv()
        assert env.step(ZEROS).states[:, 0].tolist() == [1] * NUM_ENVS
        adapted = env.to_gymnasium()
        adapted.call_async("fit")
        with pytest.raises(KeyboardInterrupt):
            adapted.call_wait()
        first = fits.index(1) if mode == ORACLE else 2  # in the other mode, the caller has the envs 2 and 3
        message = rf"env {first} was interrupted in the middle of fit\(\).* reset\({first}\)\. .*no such call for env"
        with pytest.raises(EnvInterruptedError, match=message) as caught:
            adapted.call_wait()
        assert caught.value.env_ids == tuple(range(first, NUM_ENVS))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("mode", "options"), [(ORACLE, {}), (PROCESSES, {"num_cpus": 2})])
def test_step_wait_returns_the_step_of_an_interrupted_step_async(mode: str, options: dict[str, Any]) -> None:
    num_sent = 0
    with ParallelEnv([Counting] * NUM_ENVS, mode, "continue", **options) as env:
        for line in itertools.count(1):
            env.reset()
            outcome = interrupt_at(line, lambda: env.step_async(ZEROS))
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            is_sent = bool(env.engine.in_flight)
            with contextlib.nullcontext() if is_sent else pytest.raises(NothingInFlightError):
                assert env.step_wait().states[:, 0].tolist() == [1] * NUM_ENVS
            num_sent += is_sent
    assert num_sent > 5


LENGTH = 4


class Ending(Counting):
    """Ends after `LENGTH` steps."""

    def step(self, action: Any) -> Any:
        state, reward, *_ = super().step(action)
        return state, reward, self.count == LENGTH, False, {}


@pytest.mark.parametrize("plans", [False, True], ids=["", "plan"])
@here_and_in_caller_steps
def test_interrupted_step_starts_the_requested_episodes(
    mode: str, options: dict[str, Any], plans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next-step autoreset a planned step reads which envs have ended, and clears these flags."""
    monkeypatch.setattr(Engine, "plans_steps", plans)
    num_begun = 0
    with contextlib.closing(ParallelEnv([Counting, Ending] * 2, mode, **options).to_gymnasium("NextStep")) as env:
        engine = env.parallel_env.engine
        for line in itertools.count(1):
            env.reset()
            for _ in range(LENGTH):
                terminations = env.step(np.array(ZEROS))[2]
            assert terminations.tolist() == [False, True] * 2
            assert any(plan.is_valid() for plan in engine.plans.values()) is plans
            outcome = interrupt_at(line, lambda: env.step(np.array(ZEROS)), IN_WAITS)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            with contextlib.suppress(NothingInFlightError, EnvInterruptedError):
                found = env.step_wait()[0][:, 0].tolist()
                assert found == [LENGTH + 1, 0] * 2, outcome
                num_begun += 1
        assert num_begun > 5
