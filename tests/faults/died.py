"""Workers that die or hang."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import psutil
import pytest
from fragile import when_begun
from holdings import is_alive
from modes import MODES, PROCESSES

from faults.context import (
    CLOSE_PATIENCE,
    IN_THREAD_OF_CALLER,
    NO_WORKERS,
    STARTS_POOL,
    STARTS_WORKER,
    Context,
    begin_all,
    check_gone,
    fault,
    kill,
    poll,
)
from faults.envs import NUM_ENVS, actions, faulty
from parallelenv.errors import WorkerDiedError, WorkerTimeoutError
from parallelenv.testing.contract import drain

TIMEOUT = 0.5
_WORKER: dict[str, Any] = {"impossible": NO_WORKERS, "more": STARTS_WORKER}
_HANGS: dict[str, Any] = {"impossible": IN_THREAD_OF_CALLER, "limit": 1.0 + TIMEOUT, "more": STARTS_WORKER}


@fault("SIGKILL of an idle worker", **_WORKER)
def killed_idle(context: Context) -> float:
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    began = time.monotonic()
    kill(victim)
    with pytest.raises(WorkerDiedError) as caught:
        env.step(actions())
    context.check_death_error(caught.value, victim, "SIGKILL")
    return context.rebuild(env) - began


_RESET = [{"do": "wait"}, None, None, None]


@fault("SIGKILL of a worker in a step", "step", actions("wait"), "SIGKILL", **_WORKER)
@fault("SIGSEGV in a step", "step", actions("crash"), "SIGSEGV", **_WORKER)
@fault("os._exit in a step", "step", actions("leave"), "exit code is 7", **_WORKER)
@fault("SIGKILL of a worker in a reset", "reset", _RESET, "SIGKILL", **_WORKER)
def killed(context: Context, call: str, argument: Any, ending: str) -> float:
    """Let the first worker die in a call, of itself or, if the ending is SIGKILL, as soon as env 0 has started."""
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    killing = when_begun(context.folder, 0, lambda: kill(victim)) if ending == "SIGKILL" else contextlib.nullcontext()
    began = time.monotonic()
    with killing, pytest.raises(WorkerDiedError) as caught:
        env.step(argument) if call == "step" else env.reset(options=argument)
    context.check_death_error(caught.value, victim, ending)
    if ending == "SIGSEGV" and context.is_process:  # where compiled code crashed, in terms of Python
        assert "in crash" in str(caught.value)
    rest: Any = caught.value.partial  # type: ignore[attr-defined]
    assert getattr(rest, "states", rest)[:, 0].tolist() == [2, 3]
    return context.rebuild(env) - began


# Elsewhere Ray carries results. The pipe is only read during calls: it can contain a thousandth of the result.
@fault("SIGKILL of a worker that sends a result", impossible=[mode for mode in MODES if mode != PROCESSES])
def killed_while_sending(context: Context) -> float:
    env = context.make()
    victim = env.customized_method("pid", id=0)[0]
    env.send(actions("hand_out_much"))
    poll(lambda: context.has("began"))
    poll(lambda: _is_idle(psutil.Process(victim)))
    began = time.monotonic()
    kill(victim)
    with pytest.raises(WorkerDiedError) as caught:
        drain(env)  # results of live workers may come first
    context.check_death_error(caught.value, victim, "SIGKILL")
    assert not is_alive(victim)
    return context.rebuild(env) - began


def _is_idle(process: psutil.Process) -> bool:
    """Return whether a process does nothing for a moment."""
    before = process.cpu_times()
    time.sleep(0.05)
    return process.status() == psutil.STATUS_SLEEPING and process.cpu_times() == before


@fault("os._exit in __init__", impossible=NO_WORKERS, more=STARTS_POOL)
def left_at_birth(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="The worker of envs 0, 1 .* died while its envs were made") as caught:
        context.make(faulty(context.folder, number=1, birth="leave"))
    assert "restart" not in str(caught.value)  # no env could be restarted
    if context.is_process:
        assert "exit code is 7" in str(caught.value)
    told = time.monotonic()
    return max(told - began, begin_all(context.make()) - told)


@fault("an env sleeps for ever", **_HANGS)
def hung(context: Context) -> float:
    env = context.make(timeout=TIMEOUT)
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as caught:
        env.step(actions("wait"))
    assert caught.value.env_ids == (0, 1)
    assert "envs 0, 1 did not answer within 0.5 s" in str(caught.value)
    assert "restart([0, 1])" in str(caught.value)
    assert sorted(env.recv(min_envs=2).env_ids.tolist()) == [2, 3]
    assert env.restart(0) == (0, 1)
    return begin_all(env) - began


@fault("an env ignores SIGTERM and hangs: close", impossible=NO_WORKERS, limit=1.0 + CLOSE_PATIENCE, is_slow=True)
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


@fault("on_failure='restart': SIGKILL of a worker in a step", "wait", WorkerDiedError, 2, **_WORKER)
@fault("on_failure='restart': an exception in a step", "fall", ZeroDivisionError, 1)
@fault("on_failure='restart': an env sleeps for ever", "wait", WorkerTimeoutError, 2, **_HANGS)
def restarted(context: Context, deed: str, kind: type[Exception], num_failed: int) -> float:
    """Let the first envs fail; check that their episodes are cut off, and that the next step works."""
    timeout = TIMEOUT if kind is WorkerTimeoutError else None
    env = context.make(on_failure="restart", asynchronous="restart", timeout=timeout)
    victim = env.customized_method("pid", id=0)[0]
    is_killed = kind is WorkerDiedError
    began = time.monotonic()
    with when_begun(context.folder, 0, partial(kill, victim)) if is_killed else contextlib.nullcontext():
        result = env.step(actions(deed))
    failed = [number < num_failed for number in range(NUM_ENVS)]
    assert result.truncated.tolist() == result.dones.tolist() == failed
    assert result.states[:, 1].tolist() == [0 if one else 1 for one in failed]
    for env_id, info in enumerate(result.infos[:num_failed]):
        assert type(info["failure"]) is kind
        if is_killed:
            context.check_death_error(info["failure"], victim, "SIGKILL", (env_id,))
    result = env.step(actions())
    recovered = time.monotonic() - began
    assert result.states.tolist() == [[number, 1 if one else 2] for number, one in enumerate(failed)]
    assert not result.dones.any()
    return recovered
