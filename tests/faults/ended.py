"""Callers that are interrupted, killed, or exit, each in a separate interpreter."""

from __future__ import annotations

from modes import ON_RAY, ORACLE

from faults.context import CLOSE_PATIENCE, ENDS_INTERPRETER, NO_WORKERS, STARTS_POOL, Context, check_gone, fault

_GONE = 2.0
"""Seconds after the death of the caller within which its workers should be gone."""


@fault("Ctrl-C in step", "interrupt_step", "began-0", is_slow=True)
@fault("Ctrl-C in reset", "interrupt_reset", "began-0", is_slow=True)
@fault("Ctrl-C in the constructor", "interrupt_constructor", "began-0", is_slow=True, more=STARTS_POOL)
@fault("Ctrl-C in close", "interrupt_close", "closed-0", is_slow=True, limit=1.0 + CLOSE_PATIENCE, more=STARTS_POOL)
def interrupted(context: Context, program: str, begun: str) -> float:
    """Send SIGINT to the process group once an env has made a file; return the seconds until all step again."""
    caller = context.call(program)
    caller.await_file(begun)
    moment = caller.interrupt()
    facts = caller.read()
    gone = check_gone(facts["pids"]) if "pids" in facts else 0.0
    caller.finish()
    return float(max(facts["told"], facts["usable"], gone) - moment)


@fault("SIGKILL of the caller, idle workers", "idle", impossible=NO_WORKERS, limit=_GONE, is_slow=True)
@fault("SIGKILL of the caller, busy workers", "busy", "began-0", "began-2", impossible=NO_WORKERS, limit=_GONE)
@fault(
    "SIGKILL of the caller, worker in C code that keeps the GIL",
    *("in C", "began-0"),
    impossible=NO_WORKERS,
    limit=_GONE,
    is_slow=True,
)
def killed(context: Context, how: str, *begun: str) -> float:
    """Kill a program; return the seconds until its workers have exited."""
    caller = context.call("stay", how)
    workers = caller.read()["pids"]
    for name in begun:
        caller.await_file(name)
    moment = caller.kill()
    gone = check_gone(workers)
    # Ray's own processes exit half a minute later.
    caller.check_nothing_left(with_processes=context.mode not in ON_RAY)
    return gone - moment


@fault("exit of the interpreter, idle workers", "idle", more=ENDS_INTERPRETER, is_slow=True)
@fault(
    "exit of the interpreter, busy worker",
    "busy",
    impossible=(ORACLE,),  # nothing happens in the background
    limit=1.0 + CLOSE_PATIENCE,
    more=ENDS_INTERPRETER,
    is_slow=True,
)
def left(context: Context, how: str) -> float:
    """Let a program exit with open envs; return the seconds that it took."""
    caller = context.call("leave", how)
    facts = caller.read()
    gone = check_gone([caller.process.pid, *facts["pids"]])
    caller.finish()
    return gone - float(facts["ending"])
