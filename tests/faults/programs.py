"""Programs of an interpreter that is killed, interrupted or starved: ``python -m faults.programs``.

Each program reports its progress in lines of JSON; times are those of `time.monotonic`, which all
processes of a machine share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from signal import SIGINT, default_int_handler, signal
from typing import Any

import psutil
from modes import ON_RAY

from faults.context import Column, Context, begin_all, kill, step_all
from faults.envs import NUM_ENVS, Faulty, actions, faulty
from parallelenv import ParallelEnv
from parallelenv.errors import EnvBusyError, EnvInterruptedError, WorkerDiedError, WorkerTimeoutError

MANY = 8
"""Number of workers requested where the limits allow fewer."""


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def pids(*envs: ParallelEnv) -> list[int]:
    """Return the workers' processes, without this one."""
    return sorted({pid for env in envs for pid in env.customized_method("pid")} - {os.getpid()})


def interrupted(call: Callable[[], Any]) -> float:
    """Make a call that is interrupted, and return the time at which it raised."""
    try:
        call()
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("there was no KeyboardInterrupt")


def keep_cluster(context: Context) -> None:
    """Start Ray for the whole program, if it is needed: else it ends with the first pool."""
    if context.mode in ON_RAY:
        import ray

        # "local": another Ray may run on this machine.
        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)
        context.options.clear()


def interrupt_step(context: Context) -> None:
    env = context.make()
    told = interrupted(lambda: env.step(actions("wait")))
    with contextlib.suppress(EnvBusyError):
        env.step(actions())
        raise AssertionError("step() did not say that there is one under way")
    context.release()
    try:
        assert sorted(env.recv(min_envs=NUM_ENVS).env_ids.tolist()) == list(range(NUM_ENVS))
    except EnvInterruptedError:  # the caller itself was stepping the env
        env.reset(0)
    tell(told=told, usable=step_all(env))


def interrupt_reset(context: Context) -> None:
    env = context.make()
    told = interrupted(lambda: env.reset(options={"do": "wait"}))
    context.release()
    tell(told=told, usable=begin_all(env))


def interrupt_constructor(context: Context) -> None:
    keep_cluster(context)
    told = interrupted(lambda: context.make(faulty(context.folder, number=0, birth="wait")))
    begun = {int(path.read_text()) for path in context.folder.glob("began-?")}
    tell(told=told, usable=begin_all(context.make()), pids=sorted(begun - {os.getpid()}))
    sys.stdin.readline()  # the test looks for them while this process is alive


def interrupt_close(context: Context) -> None:
    keep_cluster(context)
    env = context.make(faulty(context.folder, number=0, end="wait"))
    workers = pids(env)
    with contextlib.suppress(KeyboardInterrupt):
        env.close()
    told = time.monotonic()
    env.close()
    assert env.closed
    tell(told=told, usable=begin_all(context.make()), pids=workers)
    sys.stdin.readline()


def stay(context: Context, how: str) -> None:
    env = context.make()
    tell(pids=pids(env))
    if how == "idle":
        sys.stdin.readline()
    env.step(actions("wait", "go", "wait") if how == "busy" else actions("hang_with_the_lock"))


def leave(context: Context, how: str) -> None:
    envs = [context.make(), context.make()]
    workers = pids(*envs)
    if how == "busy":
        envs[0].send(actions("wait"))
    tell(pids=workers, ending=time.monotonic())


def lack_stdin(context: Context, who: str) -> None:
    """Run without standard input, as a daemon does; the next descriptor is 0 then. Or make an env that closes it."""
    if who == "caller":
        sys.stdin.close()
        with contextlib.suppress(OSError):
            os.close(0)
    keep_cluster(context)
    began = time.monotonic()
    env = context.make()
    env.step(actions("close_stdin"))
    step_all(env)
    env.restart(0)
    usable = begin_all(env)
    step_all(context.make())
    tell(told=began, usable=usable)


def lack(context: Context, what: str, spare: str) -> None:
    """Request many workers with too few resources, and then a few with enough."""
    many = [partial(Faulty, number, str(context.folder)) for number in range(MANY)]
    with _limited(what, int(spare)):
        complaint = _complaint(partial(context.make, many, num_cpus=MANY))
    told = time.monotonic()
    tell(complaint=complaint, told=told, usable=begin_all(context.make()))


def _complaint(make: Callable[[], Any]) -> str:
    try:
        make()
    except Exception as error:  # noqa: BLE001 (several workers raise a group)
        return str(error)
    return "nothing"


def lack_files_at_restart(context: Context, what: str) -> None:
    """Restart with too few descriptors, after a death or in a hang."""
    env = context.make(timeout=0.2 if what == "hang" else None)
    if what == "death":
        kill(env.customized_method("pid", id=0)[0])
    with contextlib.suppress(WorkerDiedError, WorkerTimeoutError):
        env.step(actions("wait" if what == "hang" else "go"))
    with _limited("files", 1):
        complaint = _complaint(partial(env.restart, 0))
    told = time.monotonic()
    assert env.restart(0) == (0, 1)
    tell(complaint=complaint, told=told, usable=begin_all(env))


@contextlib.contextmanager
def _limited(what: str, spare: int) -> Iterator[None]:
    """Limit this process, and afterwards lift the limit, also for helpers started in the meantime."""
    if what == "processes":  # the limit counts the user's threads
        limit, tasks = psutil.RLIMIT_NPROC, psutil.process_iter(["uids", "num_threads"])
        allowed = spare + sum(one.info["num_threads"] for one in tasks if one.info["uids"].real == os.getuid())
    else:  # the number below which so many descriptors are free
        limit, used = psutil.RLIMIT_NOFILE, {int(path.name) for path in Path("/proc/self/fd").iterdir()}
        allowed = next(itertools.islice((number for number in itertools.count() if number not in used), spare, None))
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (allowed, before[1]))
    try:
        yield
    finally:
        for process in itertools.chain([psutil.Process()], psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(limit, before)


KEPT: list[Context] = []
"""Keeps the envs of `leave` open until the interpreter ends."""


def main() -> None:
    signal(SIGINT, default_int_handler)  # ignored if the tests run in the background
    program, mode, start_method, folder, *details = sys.argv[1:]
    column = Column(mode, start_method)
    options = {"ray_init": {"address": "local", "num_cpus": 2}} if mode in ON_RAY else {}
    context = Context(column, Path(folder), options)
    globals()[program](context, *details)
    KEPT.append(context)
    if program != "leave":
        context.close()


if __name__ == "__main__":
    main()
