"""Workers that die or hang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
from holdings import is_alive
from modes import MODES, PROCESSES, RAY_POOLS

from faults.context import (
    CLOSE_PATIENCE,
    IN_THREAD_OF_CALLER,
    NO_WORKERS,
    Context,
    begin_all,
    check_gone,
    fault,
    kill,
    poll,
)
from faults.envs import actions, faulty
from parallelenv.errors import WorkerDiedError, WorkerTimeoutError
from parallelenv.testing.contract import drain

TIMEOUT = 0.5


@fault("SIGKILL of an idle worker", NO_WORKERS, replaces="worker")
def killed_idle(context: Context) -> float:
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    began = time.monotonic()
    kill(victim)
    with pytest.raises(WorkerDiedError) as caught:
        env.step(actions())
    context.check_death_error(caught.value, victim, "SIGKILL")
    return context.rebuild(env) - began


def _die(act: Callable[[Any], Any], ending: str, context: Context) -> float:
    """Let the first worker die in a call, of itself or, if the ending is SIGKILL, as soon as env 0 has started."""
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    is_killed = ending == "SIGKILL"
    meanwhile = context.once_begun(lambda: kill(victim)) if is_killed else contextlib.nullcontext([time.monotonic()])
    with meanwhile as moments, pytest.raises(WorkerDiedError) as caught:
        act(env)
    context.check_death_error(caught.value, victim, ending)
    if ending == "SIGSEGV" and context.is_process:  # where compiled code crashed, in terms of Python
        assert "in crash" in str(caught.value)
    rest: Any = caught.value.partial  # type: ignore[attr-defined]
    assert getattr(rest, "states", rest)[:, 0].tolist() == [2, 3]
    return context.rebuild(env) - moments[0]


for _name, _act, _ending in (
    ("SIGKILL of a worker in a step", lambda env: env.step(actions("wait")), "SIGKILL"),
    ("SIGKILL of a worker in a reset", lambda env: env.reset(options=[{"do": "wait"}, None, None, None]), "SIGKILL"),
    ("SIGSEGV in a step", lambda env: env.step(actions("crash")), "SIGSEGV"),
    ("os._exit in a step", lambda env: env.step(actions("leave")), "exit code is 7"),
):
    fault(_name, NO_WORKERS, replaces="worker")(partial(_die, _act, _ending))


@fault("SIGKILL of a worker that sends a result", NO_WORKERS, replaces="worker")
def killed_while_sending(context: Context) -> float:
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    in_pipe = context.mode == PROCESSES  # the pipe is only read during calls: it can contain a thousandth of the result
    env.send(actions("hand_out_much" if in_pipe else "hand_out_slowly"))
    poll(lambda: context.has("began"))
    if in_pipe:
        _wait_until_idle(victim)
    began = time.monotonic()
    kill(victim)
    with pytest.raises(WorkerDiedError) as caught:
        drain(env)  # results of live workers may come first
    context.check_death_error(caught.value, victim, "SIGKILL")
    assert not is_alive(victim)
    return context.rebuild(env) - began


def _wait_until_idle(pid: int) -> None:
    """Wait until a process is idle in ten checks."""
    process = psutil.Process(pid)
    looks: list[Any] = []

    def is_idle() -> bool:
        looks.append(process.cpu_times()[:2])
        time.sleep(0.005)
        return process.status() == psutil.STATUS_SLEEPING and len(looks) > 10 and looks[-1] == looks[-10]

    poll(is_idle)


@fault("os._exit in __init__", NO_WORKERS, replaces="pool")
def left_at_birth(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="The worker of envs 0, 1 .* died while its envs were made") as caught:
        context.make(faulty(context.folder, number=1, birth="leave"))
    assert "restart" not in str(caught.value)  # no env could be restarted
    if context.is_process:
        assert "exit code is 7" in str(caught.value)
    told = time.monotonic()
    return max(told - began, begin_all(context.make()) - told)


@fault("SIGKILL of the actor that owns workers", [mode for mode in MODES if mode != RAY_POOLS], replaces="pool")
def actor_killed(context: Context) -> float:
    env = context.make()
    workers = list(dict.fromkeys(env.customized_method("pid")))
    victim = _actor_of(workers[0])
    with context.once_begun(lambda: kill(victim)) as moments, pytest.raises(WorkerDiedError) as caught:
        env.step(actions("wait"))
    assert caught.value.env_ids == (0, 1)
    assert caught.value.pid == workers[0]
    assert "Ray reports: The actor died" in str(caught.value)
    assert check_gone(workers) - moments[0] < 2.0
    assert env.restart(0) == (0, 1)
    with pytest.raises(WorkerDiedError, match=rf"The worker of envs 2, 3 \(process {workers[1]}\) is dead"):
        env.reset([2, 3])  # it had done its part of the step before it died
    assert env.restart(2) == (2, 3)
    return begin_all(env) - moments[0]


def _actor_of(worker: int) -> int:
    """Return the Ray actor that started a worker, possibly through a fork server."""
    above = psutil.Process(worker).parents()
    return next(process.pid for process in above if "RelayActor" in " ".join(process.cmdline()))


@fault("an env sleeps for ever", IN_THREAD_OF_CALLER, patience=TIMEOUT, replaces="worker")
def hung(context: Context) -> float:
    env = context.make(timeout=TIMEOUT)
    with context.once_begun(lambda: None) as moments, pytest.raises(WorkerTimeoutError) as caught:
        env.step(actions("wait"))
    assert caught.value.env_ids == (0, 1)
    assert "envs 0, 1 did not answer within 0.5 s" in str(caught.value)
    assert "restart([0, 1])" in str(caught.value)
    assert sorted(env.recv(min_envs=2).env_ids.tolist()) == [2, 3]
    assert env.restart(0) == (0, 1)
    return begin_all(env) - moments[0]


@fault("an env ignores SIGTERM and hangs: close", NO_WORKERS, patience=CLOSE_PATIENCE, is_slow=True)
def stubborn(context: Context) -> float:
    env = context.make()
    workers = sorted(set(env.customized_method("pid")))
    env.send(actions("hang_stubbornly"))
    poll(lambda: context.has("began"))
    began = time.monotonic()
    env.close()
    gone = check_gone(workers)
    assert context.has("closed", 2)
    return gone - began


@fault("on_failure='restart': SIGKILL of a worker in a step", NO_WORKERS, replaces="worker")
def killed_and_restarted(context: Context) -> float:
    env = context.make(on_failure="restart", asynchronous="restart")
    victim = env.customized_method("pid", id=0)[0]
    with context.once_begun(lambda: kill(victim)) as moments:
        result = env.step(actions("wait"))
    assert result.truncated.tolist() == result.dones.tolist() == [True, True, False, False]
    assert result.states.tolist() == [[0, 0], [1, 0], [2, 1], [3, 1]]
    for env_id, info in enumerate(result.infos[:2]):
        context.check_death_error(info["failure"], victim, "SIGKILL", (env_id,))
    result = env.step(actions())
    recovered = time.monotonic() - moments[0]
    assert result.states.tolist() == [[0, 1], [1, 1], [2, 2], [3, 2]]
    assert not result.dones.any()
    return recovered


@fault("on_failure='restart': an exception in a step")
def failed_and_restarted(context: Context) -> float:
    env = context.make(on_failure="restart", asynchronous="restart")
    began = time.monotonic()
    result = env.step(actions("go", "fall"))
    assert result.truncated.tolist() == result.dones.tolist() == [False, True, False, False]
    assert result.states.tolist() == [[0, 1], [1, 0], [2, 1], [3, 1]]
    assert type(result.infos[1]["failure"]) is ZeroDivisionError
    result = env.step(actions())
    recovered = time.monotonic() - began
    assert result.states.tolist() == [[0, 2], [1, 1], [2, 2], [3, 2]]
    assert not result.dones.any()
    return recovered


@fault("on_failure='restart': an env sleeps for ever", IN_THREAD_OF_CALLER, patience=TIMEOUT, replaces="worker")
def hung_and_restarted(context: Context) -> float:
    env = context.make(on_failure="restart", asynchronous="restart", timeout=TIMEOUT)
    with context.once_begun(lambda: None) as moments:
        result = env.step(actions("wait"))
    assert result.truncated.tolist() == [True, True, False, False]
    assert isinstance(result.infos[0]["failure"], WorkerTimeoutError)
    result = env.step(actions())
    recovered = time.monotonic() - moments[0]
    assert result.states.tolist() == [[0, 1], [1, 1], [2, 2], [3, 2]]
    return recovered
