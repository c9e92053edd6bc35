"""Callers that are interrupted, killed, or exit, each in a separate interpreter."""

from __future__ import annotations

from faults.context import CLOSE_PATIENCE, IN_CALLER, Context, check_gone, fault

_GONE = 2.0
"""Seconds after the death of the caller within which its workers should be gone."""
IN_CALLER_TOO = {mode: f"{reason} and die with it" for mode, reason in IN_CALLER.items()}
_NO_BACKGROUND = {"dummy": "nothing happens in the background"}


# ---------------------------------------------------------------- SIGINT to the whole process group


def _interrupt(context: Context, program: str, begun: str = "began-0") -> float:
    """Interrupt a program once one of its envs has begun; return the seconds until all step again."""
    caller = context.call(program)
    caller.await_file(begun)
    moment = caller.interrupt()
    facts = caller.read()
    gone = check_gone(facts["pids"]) if "pids" in facts else 0.0
    caller.finish()
    return float(max(facts["told"], facts["usable"], gone) - moment)


@fault("Ctrl-C in step", is_slow=True)
def in_step(context: Context) -> float:
    return _interrupt(context, "interrupt_step")


@fault("Ctrl-C in reset", is_slow=True)
def in_reset(context: Context) -> float:
    return _interrupt(context, "interrupt_reset")


@fault("Ctrl-C in customized_method", is_slow=True)
def in_method(context: Context) -> float:
    return _interrupt(context, "interrupt_method")


@fault("Ctrl-C in the constructor", is_slow=True)
def in_constructor(context: Context) -> float:
    return _interrupt(context, "interrupt_construction")


@fault("Ctrl-C in close", is_slow=True, patience=CLOSE_PATIENCE)
def in_close(context: Context) -> float:
    return _interrupt(context, "interrupt_close", "closed-0")


@fault("Ctrl-C while on_failure='restart' rebuilds an env", is_slow=True)
def in_recovery(context: Context) -> float:
    return _interrupt(context, "interrupt_recovery")


@fault("Ctrl-C twice", is_slow=True)
def twice(context: Context) -> float:
    caller = context.call("interrupt_twice")
    caller.await_file("began-0")
    caller.interrupt()
    caller.read()
    if context.mode == "dummy":  # the next env is stepped by recv, in the caller
        caller.await_file("began-1")
    moment = caller.interrupt()
    facts = caller.read()
    caller.finish()
    return float(facts["usable"]) - moment


# ---------------------------------------------------------------- the end of the caller


def _kill(context: Context, program: str, begun: tuple[str, ...] = ()) -> float:
    """Kill a program; return the seconds until its workers have exited."""
    caller = context.call(program)
    workers = caller.read()["pids"]
    for name in begun:
        caller.await_file(name)
    moment = caller.kill()
    gone = check_gone(workers)
    caller.check_nothing_left(
        with_processes=not context.column.needs_ray
    )  # Ray's own processes exit half a minute later
    return gone - moment


@fault("SIGKILL of the caller, idle workers", IN_CALLER_TOO, limit=_GONE, is_slow=True)
def killed_idle(context: Context) -> float:
    return _kill(context, "stay_idle")


@fault("SIGKILL of the caller, busy workers", IN_CALLER_TOO, limit=_GONE, is_slow=True)
def killed_busy(context: Context) -> float:
    return _kill(context, "stay_busy", ("began-0", "began-2"))


@fault("SIGKILL of the caller, worker in C code that keeps the GIL", IN_CALLER_TOO, limit=_GONE, is_slow=True)
def killed_in_c(context: Context) -> float:
    return _kill(context, "stay_in_c", ("began-0",))


@fault("exit of the interpreter, idle workers", ends_interpreter=True, is_slow=True)
def left_idle(context: Context) -> float:
    return _leave(context, "leave_idle")


@fault(
    "exit of the interpreter, busy worker", _NO_BACKGROUND, patience=CLOSE_PATIENCE, ends_interpreter=True, is_slow=True
)
def left_busy(context: Context) -> float:
    return _leave(context, "leave_busy")


def _leave(context: Context, program: str) -> float:
    """Let a program exit with open envs; return the seconds that this took."""
    caller = context.call(program)
    facts = caller.read()
    gone = check_gone([caller.process.pid, *facts["pids"]])
    caller.finish()
    return gone - float(facts["ending"])
