"""Surroundings: standard streams, limits of the machine, and other users of the same pool."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import time
import warnings

import pytest

from faults.columns import begin_all, step_all
from faults.context import Context, alive, check_gone, fault
from faults.envs import Vast, actions, faulty
from parallelenv.errors import ParallelEnvError, UsageError

_RAY_NEEDS_MORE = "Ray itself needs more"
_NO_FILES = {
    "dummy": "takes no descriptors",
    "thread": "takes no descriptors",
    "ray": _RAY_NEEDS_MORE,
    "ray-subproc": _RAY_NEEDS_MORE,
}
_NO_PROCESSES = {"dummy": "starts nothing", "ray": _RAY_NEEDS_MORE, "ray-subproc": _RAY_NEEDS_MORE}
_RIGHTS = "-all,+dac_override"
_AS_NOBODY = ("setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}")
"""Runs a command as a user whose processes are counted, root's are not, and who may read what root may."""


# ---------------------------------------------------------------- standard streams


@fault("an env prints from C")
def prints(context: Context) -> float:
    env = context.make()
    printed = io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(printed):
        env.step(actions("print_from_c"))
        seconds = step_all(env) - began
    if context.is_process:
        assert printed.getvalue() == "[envs 0-1] a line from C\n"
    return seconds


@fault("an env closes stdin", is_slow=True)
def closes_stdin(context: Context) -> float:
    return _run(context, "lose_stdin")


@fault("the caller has no stdin", is_slow=True)
def has_no_stdin(context: Context) -> float:
    return _run(context, "have_no_stdin")


def _run(context: Context, program: str) -> float:
    """Run a program that provokes its own fault; return the seconds that it needed."""
    caller = context.call(program)
    facts = caller.read()
    caller.finish()
    return float(facts["usable"] - facts["told"])


# ---------------------------------------------------------------- limits


@fault("too little memory")
def no_memory(context: Context) -> float:
    began = time.monotonic()
    with pytest.raises((ParallelEnvError, MemoryError), match=r"140,737,488,35\d,\d{3} bytes"):
        context.make(faulty(context.folder, Vast))
    told = time.monotonic()
    return max(told - began, begin_all(context.make()) - told)


@fault("a limit on processes", _NO_PROCESSES, is_slow=True)
def few_processes(context: Context) -> float:
    is_root = os.getuid() == 0
    if is_root and shutil.which("setpriv") is None:
        pytest.skip("root is not limited, and there is no setpriv to be someone else")
    if is_root:
        context.folder.chmod(0o777)
    return _lack(context, "lack_processes", (20, 16, 14, 12, 3, 0), "ulimit -u", _AS_NOBODY if is_root else ())


@fault("a limit on descriptors", _NO_FILES, is_slow=True)
def few_files(context: Context) -> float:
    return _lack(context, "lack_files", (20, 6, 1, 0), "ulimit -n")


@fault("a limit on descriptors at restart, after a death", _NO_FILES)
def few_files_after_a_death(context: Context) -> float:
    return _lack(context, "lack_files_after_a_death", (0,), "ulimit -n")


@fault("a limit on descriptors at restart, in a hang", _NO_FILES)
def few_files_in_a_hang(context: Context) -> float:
    return _lack(context, "lack_files_in_a_hang", (0,), "ulimit -n")


def _lack(context: Context, program: str, spare: tuple[int, ...], advice: str, prefix: tuple[str, ...] = ()) -> float:
    """Run a program that lacks something, each time with so much of it to spare; return the longest recovery.

    Args:
        context: How to run envs.
        program: Its name.
        spare: How much there is beyond what is used already, the last of which is certainly too little.
        advice: What the error must say.
        prefix: As in `Context.call`.
    """
    recoveries, wrong = [], []
    for number in spare:
        caller = context.call(program, number, prefix)
        facts = caller.read()
        recoveries.append(float(facts["usable"] - facts["told"]))
        if advice not in facts["complaint"] and (facts["complaint"] != "nothing" or number == spare[-1]):
            wrong.append(f"with {number} to spare: {facts['complaint']}")
        assert caller.process.wait() == 0, caller.errors()
        caller.check_nothing_left()
    assert not wrong, "\n".join(wrong)
    return max(recoveries)


# ---------------------------------------------------------------- other users


@fault("fork of the caller")
def forked(context: Context) -> float:
    env = context.make()
    began = time.monotonic()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, of fork beside threads
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


@fault("two threads at once")
def two_threads(context: Context) -> float:
    env = context.make()
    caught: list[BaseException] = []

    def intrude() -> None:
        try:
            env.get_env_attr("steps")
        except UsageError as error:
            caught.append(error)
        context.release()

    with context.once_begun(intrude) as moments:
        env.step(actions("wait"))
    assert "while another thread is in " in str(caught[0])
    return step_all(env) - moments[0]


@fault("dropped in a reference cycle")
def dropped(context: Context) -> float:
    env = context.column.make(context.folder)
    env.reset()
    workers = sorted(set(env.customized_method("pid")) - {os.getpid()})
    cycle = [env]
    cycle.append(cycle)  # type: ignore[arg-type]
    del env, cycle
    assert alive(workers) == workers
    began = time.monotonic()
    gc.collect()
    gone = check_gone(workers)
    assert all(context.has("closed", number) for number in range(4))
    return gone - began
