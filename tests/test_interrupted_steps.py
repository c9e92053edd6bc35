"""A signal before any line of a step: every result is delivered once and in order, and no env is skipped."""

from __future__ import annotations

import contextlib
import itertools
import signal
import weakref
from typing import Any

import numpy as np
import pytest
from conftest import MakeEnv
from interrupting import NO_MEMORY, Counting, Moments, at_many_moments, interrupt_at
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
pytestmark = pytest.mark.timeout(method="thread")
with_bell = pytest.mark.skipif(not HAS_BELL, reason="there is no bell")


def receive(env: ParallelEnv) -> list[float] | None:
    """Return the states of the interrupted step, ``None`` if none was sent, ``[]`` if an env was interrupted in it."""
    try:
        return env.recv(NUM_ENVS).states[:, 0].tolist()  # type: ignore[no-any-return]
    except NothingInFlightError:
        return None
    except EnvInterruptedError:
        return []


def count_steps(env: ParallelEnv) -> int:
    return env.engine.table.stats.summary().num_steps


@at_many_moments
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
    mode: str, options: dict[str, Any], way: str, env_ids: Any, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step takes the general way, is a planned one, or is the first that is planned."""
    monkeypatch.setattr(Engine, "plans_steps", way != "general")
    count = 1 if way == "first" else 3
    actions = [0] * len(env_ids or ZEROS)
    num_received, lost = 0, []
    with ParallelEnv([Counting] * NUM_ENVS, mode, "continue", **{"num_cpus": 2, **options}) as env:
        for line, interrupt in moments:
            env.reset()
            if way == "first":
                env.engine.plans.clear()
            for _ in range(count):
                env.step(actions, env_ids)
            assert any(plan.is_valid() for plan in env.engine.plans.values()) is (way == "planned")
            num_counted = count_steps(env)
            outcome = interrupt_at(line, lambda: env.step(actions, env_ids), interrupt=interrupt)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            found = receive(env)
            if found == []:
                continue
            made = [after - count for after in env.get_env_attr("count", env_ids)]
            assert made in ([0] * len(actions), [1] * len(actions)), outcome
            assert count_steps(env) - num_counted == sum(made), outcome
            if found is not None:  # no part of a result alone
                assert found == [count + 1] * len(actions), outcome
                num_received += 1
            elif made[0]:  # the call was about to return
                lost.append(outcome.line)
            assert env.step(actions, env_ids).states[:, 0].tolist() == [count + made[0] + 1] * len(actions), outcome
    assert num_received > 15 // moments.stride
    # Without a plan, a step is recorded and its ticket removed in one section, which takes 5 us.
    assert len(set(lost)) <= (15 if way == "planned" else 50), lost  # some lines come twice


@pytest.mark.xfail(
    strict=True,
    reason="calls do not ask the workers which commands they have, so they may wait for one that was not sent",
)
@pytest.mark.parametrize(
    ("mode", "options"), [(ORACLE, {}), (PROCESSES, {"eventfd": False}), (PROCESSES, CALLER_STEPS)]
)
def test_step_can_be_made_after_a_reset_whatever_error_ended_a_step(
    mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "plans_steps", False)
    found = signal.getsignal(signal.SIGINT)
    with ParallelEnv([Counting] * NUM_ENVS, mode, "continue", timeout=2, **{"num_cpus": 2, **options}) as env:
        for line, interrupt in Moments(NO_MEMORY):
            signal.signal(signal.SIGINT, found)  # the error may have come at the line that ends a section
            env.reset()
            outcome = interrupt_at(line, lambda: env.step(ZEROS), ["parallelenv/engine", "backends"], interrupt)
            if not outcome.line:
                break
            assert env.reset().tolist() == [[0]] * NUM_ENVS, outcome
            assert env.step(ZEROS).states.tolist() == [[1]] * NUM_ENVS, outcome


class Telling(Counting):
    """Has an info in its fifth step, so that a planned step does not end as one."""

    looks = 0

    def look(self) -> None:
        self.looks += 1

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        return *others, {"word": "fifth"} if self.count == 5 else info


@at_many_moments
@pytest.mark.parametrize("call", ["recv", "look"])
@pytest.mark.parametrize(("mode", "options"), [(ORACLE, {}), (PROCESSES, {"num_cpus": 2}), (PROCESSES, CALLER_STEPS)])
def test_command_whose_wait_was_interrupted_is_executed_once(
    mode: str, options: dict[str, Any], call: str, moments: Moments
) -> None:
    """If it stayed in the queue, it would be executed again when a planned step has to use the queue.

    A method that is still running makes the plan invalid.
    """
    num_received = 0
    with ParallelEnv([Telling] * NUM_ENVS, mode, "continue", timeout=20, **options) as env:
        for line, interrupt in moments:
            env.reset()
            for _ in range(3):
                env.step(ZEROS)
            env.set_env_attr("looks", 0)
            if call == "recv":
                env.send(ZEROS)
                outcome = interrupt_at(line, lambda: env.recv(NUM_ENVS), IN_WAITS, interrupt)
            else:
                outcome = interrupt_at(line, lambda: env.customized_method("look"), IN_WAITS, interrupt)
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
        assert (num_received if call == "recv" else line) > 15 // moments.stride


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


@at_many_moments
@pytest.mark.parametrize(("mode", "options"), [(ORACLE, {}), (PROCESSES, {"num_cpus": 2})])
def test_step_wait_returns_the_step_of_an_interrupted_step_async(
    mode: str, options: dict[str, Any], moments: Moments
) -> None:
    num_sent = 0
    with ParallelEnv([Counting] * NUM_ENVS, mode, "continue", **options) as env:
        for line, interrupt in moments:
            env.reset()
            outcome = interrupt_at(line, lambda: env.step_async(ZEROS), interrupt=interrupt)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            is_sent = bool(env.engine.in_flight)
            with contextlib.nullcontext() if is_sent else pytest.raises(NothingInFlightError):
                assert env.step_wait().states[:, 0].tolist() == [1] * NUM_ENVS
            num_sent += is_sent
    assert num_sent > 5 // moments.stride


stepped_here: list[int] = []
"""Ids of the envs of this process in the order of their steps."""


class Stopping(Counting):
    """Interrupts the caller in the step of the caller's first env, if ``stops`` is true."""

    stops = False

    def step(self, action: Any) -> Any:
        info: Any = get_worker_info()
        stepped_here.append(info.env_id)
        if self.stops and info.env_id == (0 if info.num_workers == 1 else 2):
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


def interrupt_first(env: ParallelEnv, plans: bool) -> list[int]:
    """Interrupt a step; return the ids of those envs of the caller that have not begun it."""
    env.reset()
    for _ in range(3 if plans else 0):
        env.step(ZEROS)
    assert any(plan.is_valid() for plan in env.engine.plans.values()) is plans
    stepped_here.clear()
    Stopping.stops = True  # not in the workers, which have classes of their own
    with pytest.raises(KeyboardInterrupt):
        env.step(ZEROS)
    Stopping.stops = False
    (first,) = stepped_here
    stepped_here.clear()
    return list(range(first + 1, NUM_ENVS))


with_and_without_plan = pytest.mark.parametrize("plans", [False, True], ids=["", "plan"])


@with_and_without_plan
@pytest.mark.parametrize("call", ["reset", "restart"])
@here_and_in_caller_steps
def test_rest_of_an_interrupted_step_is_not_executed_after_it_is_dropped(
    mode: str, options: dict[str, Any], call: str, plans: bool
) -> None:
    with ParallelEnv([Stopping] * NUM_ENVS, mode, "continue", **options) as env:
        assert interrupt_first(env, plans)
        if call == "reset":
            env.reset()
        else:
            assert env.restart() == tuple(range(NUM_ENVS))
            env.get_env_attr("spec")
        assert stepped_here == []
        env.reset()
        with pytest.raises(NothingInFlightError):
            env.recv()
        assert env.step(ZEROS).states[:, 0].tolist() == [1] * NUM_ENVS


@with_and_without_plan
@here_and_in_caller_steps
def test_interrupted_step_of_envs_that_are_not_reset_is_received(
    mode: str, options: dict[str, Any], plans: bool
) -> None:
    with ParallelEnv([Stopping] * NUM_ENVS, mode, "continue", **options) as env:
        left = interrupt_first(env, plans)
        env.reset(left[:1])
        assert stepped_here == left[1:]
        dropped, first = left[0], left[0] - 1
        with pytest.raises(EnvInterruptedError, match=rf"env {first} was interrupted in the middle of step") as caught:
            env.recv(NUM_ENVS)
        partial: Any = caught.value.partial  # type: ignore[attr-defined]
        assert sorted(partial.env_ids) == [one for one in range(NUM_ENVS) if one not in (dropped, first)]
        assert set(partial.states[:, 0]) == {4 if plans else 1}
        env.reset(first)
        count = [5 if plans else 2] * NUM_ENVS
        count[first] = count[dropped] = 1
        assert env.step(ZEROS).states[:, 0].tolist() == count


@with_and_without_plan
@here_and_in_caller_steps
def test_calls_after_an_interrupted_step_come_after_its_rest(mode: str, options: dict[str, Any], plans: bool) -> None:
    """As in workers, which execute all that they were sent, in order."""
    with ParallelEnv([Stopping] * NUM_ENVS, mode, "continue", **options) as env:
        left = interrupt_first(env, plans)
        found = env.get_env_attr("count")
        assert stepped_here == left
        count = 4 if plans else 1
        assert found == [count - (one == left[0] - 1) for one in range(NUM_ENVS)]
        with pytest.raises(EnvInterruptedError):
            env.recv(NUM_ENVS)
        assert stepped_here == left


@here_and_in_caller_steps
def test_sent_step_is_executed_before_a_reset_in_every_mode(mode: str, options: dict[str, Any]) -> None:
    """Otherwise, a reset without a seed would depend on the mode."""
    with ParallelEnv([Stopping] * NUM_ENVS, mode, "continue", **options) as env:
        env.reset()
        stepped_here.clear()
        env.send(ZEROS)
        env.reset()
        assert stepped_here == list(range(NUM_ENVS))[0 if mode == ORACLE else 2 :]


LENGTH = 4


class Ending(Counting):
    """Ends after `LENGTH` steps."""

    def step(self, action: Any) -> Any:
        state, reward, *_ = super().step(action)
        return state, reward, self.count == LENGTH, False, {}


@at_many_moments
@with_and_without_plan
@here_and_in_caller_steps
def test_interrupted_step_starts_the_requested_episodes(
    mode: str, options: dict[str, Any], plans: bool, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next-step autoreset a planned step reads which envs have ended, and clears these flags."""
    monkeypatch.setattr(Engine, "plans_steps", plans)
    num_begun = 0
    with contextlib.closing(ParallelEnv([Counting, Ending] * 2, mode, **options).to_gymnasium("NextStep")) as env:
        engine = env.parallel_env.engine
        for line, interrupt in moments:
            env.reset()
            for _ in range(LENGTH):
                terminations = env.step(np.array(ZEROS))[2]
            assert terminations.tolist() == [False, True] * 2
            assert any(plan.is_valid() for plan in engine.plans.values()) is plans
            outcome = interrupt_at(line, lambda: env.step(np.array(ZEROS)), IN_WAITS, interrupt)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            with contextlib.suppress(NothingInFlightError, EnvInterruptedError):
                found = env.step_wait()[0][:, 0].tolist()
                assert found == [LENGTH + 1, 0] * 2, outcome
                num_begun += 1
        assert num_begun > 5 // moments.stride


@at_many_moments
@pytest.mark.parametrize("is_end", [True, False], ids=["end", "next"])
@with_and_without_plan
@pytest.mark.parametrize("mode", [ORACLE, PROCESSES])
def test_interrupted_end_of_an_episode_is_recorded_once(
    mode: str, plans: bool, is_end: bool, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With next-step autoreset, envs that have just ended must not count as those that the step has reset."""
    monkeypatch.setattr(Engine, "plans_steps", plans)
    num_received = 0
    paths = ["parallelenv/engine", "parallelenv/adapters"]
    with contextlib.closing(ParallelEnv([Counting, Ending] * 2, mode, num_cpus=2).to_gymnasium("NextStep")) as env:
        for line, interrupt in moments:
            env.reset()
            for _ in range(LENGTH - is_end):
                env.step(np.array(ZEROS))
            before = env.parallel_env.engine.table.stats.summary()
            outcome = interrupt_at(line, lambda: env.step(np.array(ZEROS)), paths, interrupt)
            if not outcome.line:
                break
            assert outcome.is_raised, outcome
            try:
                states, _, terminations, _, infos = env.step_wait()
            except (NothingInFlightError, EnvInterruptedError):
                continue
            num_received += 1
            assert states[:, 0].tolist() == ([LENGTH] * 4 if is_end else [LENGTH + 1, 0] * 2), outcome
            assert terminations.tolist() == [False, is_end] * 2, outcome
            assert infos == {}, outcome
            after = env.parallel_env.engine.table.stats.summary()
            assert after.num_steps - before.num_steps == (4 if is_end else 2), outcome
            assert after.num_episodes - before.num_episodes == (2 if is_end else 0), outcome
            states = env.step(np.array(ZEROS))[0]
            assert states[:, 0].tolist() == ([LENGTH + 1, 0] * 2 if is_end else [LENGTH + 2, 1] * 2), outcome
    assert num_received > 10 // moments.stride


def test_step_interrupted_after_it_was_counted_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summing up takes long, so an interrupt is likely to come while it is deferred."""
    with ParallelEnv([Counting] * NUM_ENVS, ORACLE, "continue") as env:
        env.reset()
        stats = env.engine.table.stats
        sum_up = stats.sum_up

        def interrupted() -> None:
            sum_up()
            raise KeyboardInterrupt

        monkeypatch.setattr(stats, "sum_up", interrupted)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (one of the steps sums up)
            for _ in range(stats._room + 1):
                env.step(ZEROS)
        monkeypatch.undo()
        assert env.recv(NUM_ENVS).states[0, 0] * NUM_ENVS == count_steps(env)


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["", "interrupted"])
def test_close_frees_the_batch_while_the_object_is_kept(make_env: MakeEnv, is_interrupted: bool) -> None:
    env = make_env([Counting] * NUM_ENVS, asynchronous="continue", num_cpus=2)
    env.reset()
    for _ in range(3):
        env.step(ZEROS)
    for line in itertools.count(1) if is_interrupted else ():
        outcome = interrupt_at(line, lambda: env.step(ZEROS), ["engine/step_plan.py"])
        if env.engine.pool.planned is not None or not outcome.line:
            break
    kept = weakref.ref(env.engine.pool.batch)
    env.close()
    assert kept() is None
