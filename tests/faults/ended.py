"""Callers that are interrupted, killed, or exit, each in a separate interpreter."""

from __future__ import annotations

from functools import partial

from modes import ON_RAY, ORACLE

from faults.context import CLOSE_PATIENCE, ENDS_INTERPRETER, NO_WORKERS, STARTS_POOL, Context, check_gone, fault

_GONE = 2.0
"""Seconds after the death of the caller within which its workers should be gone."""


def _interrupt(program: str, begun: str, context: Context) -> float:
    """Send SIGINT to the process group once an env has made a file; return the seconds until all step again."""
    caller = context.call(program)
    caller.await_file(begun)
    moment = caller.interrupt()
    facts = caller.read()
    gone = check_gone(facts["pids"]) if "pids" in facts else 0.0
    caller.finish()
    return float(max(facts["told"], facts["usable"], gone) - moment)


def _kill(how: str, begun: tuple[str, ...], context: Context) -> float:
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


def _leave(how: str, context: Context) -> float:
    """Let a program exit with open envs; return the seconds that it took."""
    caller = context.call("leave", how)
    facts = caller.read()
    gone = check_gone([caller.process.pid, *facts["pids"]])
    caller.finish()
    return gone - float(facts["ending"])


for _name, _begun, _limit, _more in (
    ("step", "began-0", 1.0, {}),
    ("reset", "began-0", 1.0, {}),
    ("constructor", "began-0", 1.0, STARTS_POOL),
    ("close", "closed-0", 1.0 + CLOSE_PATIENCE, STARTS_POOL),
):
    _add = fault(f"Ctrl-C in {_name}", limit=_limit, more=_more, is_slow=True)
    _add(partial(_interrupt, f"interrupt_{_name}", _begun))


for _name, _how, _files in (
    ("idle workers", "idle", ()),
    ("busy workers", "busy", ("began-0", "began-2")),
    ("worker in C code that keeps the GIL", "in C", ("began-0",)),
):
    _add = fault(f"SIGKILL of the caller, {_name}", NO_WORKERS, limit=_GONE, is_slow=_how != "busy")
    _add(partial(_kill, _how, _files))
fault("exit of the interpreter, idle workers", more=ENDS_INTERPRETER, is_slow=True)(partial(_leave, "idle"))
_add = fault(
    "exit of the interpreter, busy worker",
    (ORACLE,),  # nothing happens in the background
    limit=1.0 + CLOSE_PATIENCE,
    more=ENDS_INTERPRETER,
    is_slow=True,
)
_add(partial(_leave, "busy"))
