"""Surroundings: standard input, limits of the machine, and a fork of the caller."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from typing import Any

import pytest
from modes import IN_CALLER, ON_RAY, ORACLE

from faults.context import STARTS_POOL, Context, begin_all, fault, step_all
from faults.envs import Vast, actions, faulty
from parallelenv.errors import ParallelEnvError, UsageError

_NO_FILES = (*IN_CALLER, *ON_RAY)  # takes no descriptors; Ray itself needs more
_NO_PROCESSES = (ORACLE, *ON_RAY)  # starts nothing; Ray itself needs more
_RIGHTS = "-all,+dac_override"
_AS_NOBODY = ("setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}")
"""Runs a command as a user with limited processes, unlike root, that may read everything that root may."""


@fault("an env closes stdin", "env", is_slow=True)
@fault("the caller has no stdin", "caller", is_slow=True)
def no_stdin(context: Context, who: str) -> float:
    caller = context.call("lack_stdin", who)
    facts = caller.read()
    caller.finish()
    return float(facts["usable"] - facts["told"])


@fault("too little memory", more=STARTS_POOL)
def no_memory(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises((ParallelEnvError, MemoryError), match=r"140,737,488,35\d,\d{3} bytes"):
        context.make(faulty(context.folder, Vast))
    told = time.monotonic()
    return max(told - began, begin_all(context.make()) - told)


@fault("a limit on processes", impossible=_NO_PROCESSES, is_slow=True)
def few_processes(context: Context) -> float:
    is_root = os.getuid() == 0
    if is_root and shutil.which("setpriv") is None:
        pytest.skip("root is not limited, and setpriv, which changes the user, is missing")
    if is_root:
        context.folder.chmod(0o777)
    prefix = _AS_NOBODY if is_root else ()
    return lacking(context, "lack processes", (20, 16, 14, 12, 3, 0), "ulimit -u", prefix)


@fault("a limit on descriptors", "lack files", (20, 6, 1, 0), impossible=_NO_FILES, is_slow=True)
@fault("a limit on descriptors at restart, after a death", "lack_files_at_restart", ("death",), impossible=_NO_FILES)
@fault("a limit on descriptors at restart, in a hang", "lack_files_at_restart", ("hang",), impossible=_NO_FILES)
def lacking(
    context: Context, program: str, details: tuple[Any, ...], advice: str = "ulimit -n", prefix: tuple[str, ...] = ()
) -> float:
    """Run a program that lacks something, and check that the error gives advice; return the longest recovery.

    It runs once with each detail. The last leaves too little free for certain.
    """
    recoveries = []
    for detail in details:
        caller = context.call(*program.split(), detail, prefix=prefix)
        facts = caller.read()
        recoveries.append(float(facts["usable"] - facts["told"]))
        is_enough = facts["complaint"] == "nothing" and detail != details[-1]
        assert is_enough or advice in facts["complaint"], f"with {detail} to spare: {facts['complaint']}"
        caller.finish(is_quiet=False)
    return max(recoveries)


@fault("fork of the caller")
def forked(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork in a process with threads
        child = os.fork()
    if child == 0:
        try:
            env.step(actions())
        except UsageError as error:
            os.write(writer, str(error).encode())
        env.close()
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as told:
        assert "in a process forked from the one that made this ParallelEnv" in told.read()
    return step_all(env) - began
