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
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from modes import ORACLE

from faults.columns import Column, begin_all, step_all
from faults.envs import NUM_ENVS, Faulty, actions, faulty
from parallelenv import ParallelEnv
from parallelenv.errors import EnvBusyError, EnvInterruptedError, ParallelEnvError, WorkerDiedError, WorkerTimeoutError

MANY = 8
"""Number of workers requested where the limits allow fewer."""


class Stage:
    """The context of a program."""

    def __init__(self, column: Column, folder: Path, number: int) -> None:
        self.number = number
        self.column = column
        self.folder = folder

    def keep_cluster(self) -> None:
        """Start Ray for the whole program, if it is needed: else it ends with the first pool."""
        if self.column.needs_ray:
            import ray

            # "local": another Ray may run on this machine.
            ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level=logging.ERROR)

    def make(self, env_fns: list[Any] | None = None, **options: Any) -> ParallelEnv:
        """Return four envs in two workers, which have been reset."""
        env = self.build(env_fns, **options)
        env.reset()
        return env

    def build(self, env_fns: list[Any] | None = None, **options: Any) -> ParallelEnv:
        if self.column.needs_ray:
            options["ray_init"] = {"address": "local", "num_cpus": 2}
        return self.column.make(self.folder, env_fns, **options)

    def release(self) -> None:
        (self.folder / "go").touch()

    def pids_of_begun(self) -> list[int]:
        """Return the processes of the envs that have started."""
        return [int(path.read_text()) for path in self.folder.glob("began-?")]


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


# ---------------------------------------------------------------- interrupts


def interrupt_step(stage: Stage) -> None:
    env = stage.make()
    told = interrupted(lambda: env.step(actions("wait")))
    with contextlib.suppress(EnvBusyError):
        env.step(actions())
        raise AssertionError("step() did not say that there is one under way")
    stage.release()
    if stage.column.mode == ORACLE:  # the interrupted step cannot be resumed
        with contextlib.suppress(EnvInterruptedError):
            env.recv(min_envs=NUM_ENVS)
            raise AssertionError("recv() did not say that the step was broken off")
        env.reset(0)
    else:
        assert sorted(env.recv(min_envs=NUM_ENVS).env_ids.tolist()) == list(range(NUM_ENVS))
    tell(told=told, usable=step_all(env))
    env.close()


def interrupt_reset(stage: Stage) -> None:
    env = stage.make()
    told = interrupted(lambda: env.reset(options={"do": "wait"}))
    stage.release()
    tell(told=told, usable=begin_all(env))
    env.close()


def interrupt_method(stage: Stage) -> None:
    env = stage.make()
    told = interrupted(lambda: env.customized_method("do", {"what": "wait"}))
    stage.release()
    assert env.customized_method("pid", id=[3, 0]) == [env.customized_method("pid", id=number)[0] for number in (3, 0)]
    tell(told=told, usable=step_all(env))
    env.close()


def interrupt_construction(stage: Stage) -> None:
    stage.keep_cluster()
    slow = faulty(stage.folder, number=0, birth="wait")
    told = interrupted(lambda: stage.build(slow))
    workers = stage.pids_of_begun()
    env = stage.build()
    tell(told=told, usable=begin_all(env), pids=[pid for pid in workers if pid != os.getpid()])
    sys.stdin.readline()  # the test looks for them while this process is alive
    env.close()


def interrupt_close(stage: Stage) -> None:
    stage.keep_cluster()
    env = stage.make(faulty(stage.folder, number=0, end="wait"))
    workers = pids(env)
    with contextlib.suppress(KeyboardInterrupt):
        env.close()
    told = time.monotonic()
    env.close()
    assert env.closed
    other = stage.build()
    tell(told=told, usable=begin_all(other), pids=workers)
    sys.stdin.readline()
    other.close()


def interrupt_recovery(stage: Stage) -> None:
    slow = faulty(stage.folder, number=0, birth="wait_if_requested")
    env = stage.make(slow, asynchronous="restart", on_failure="restart")
    (stage.folder / "slow").touch()
    told = interrupted(lambda: env.step(actions("fall")))
    stage.release()
    ended = []
    for result in (*_receive_all(env), env.step(actions())):  # envs of the same worker may report it later
        ended += result.env_ids[result.truncated].tolist()
    assert 0 in ended
    assert len(set(ended)) == len(ended)
    tell(told=told, usable=step_all(env))
    env.close()


def _receive_all(env: ParallelEnv) -> list[Any]:
    """Return the results of all envs for a step in flight."""
    results = [env.recv()]
    while sum(len(result.env_ids) for result in results) < NUM_ENVS:
        results.append(env.recv())
    return results


def interrupt_twice(stage: Stage) -> None:
    env = stage.make()
    first = interrupted(lambda: env.step(actions("wait", "wait")))

    def receive() -> None:
        tell(told=first)  # here, as the next interrupt comes at once
        env.recv(min_envs=NUM_ENVS)

    told = interrupted(receive)
    stage.release()
    tell(told=told, usable=begin_all(env))
    env.close()


# ---------------------------------------------------------------- ends


def stay_idle(stage: Stage) -> None:
    env = stage.make()
    tell(pids=pids(env))
    sys.stdin.readline()


def stay_busy(stage: Stage) -> None:
    env = stage.make()
    tell(pids=pids(env))
    env.step(actions("wait", "go", "wait"))


def stay_in_c(stage: Stage) -> None:
    env = stage.make()
    tell(pids=pids(env))
    env.step(actions("hang_with_the_lock"))


def leave_idle(stage: Stage) -> None:
    envs = [stage.make(), stage.make()]
    tell(pids=pids(*envs), ending=time.monotonic())
    _keep(envs)


def leave_busy(stage: Stage) -> None:
    env = stage.make()
    workers = pids(env)
    env.send(actions("hang"))
    tell(pids=workers, ending=time.monotonic())
    _keep([env])


def _keep(envs: list[ParallelEnv]) -> None:
    """Keep envs open until the interpreter exits."""
    sys.modules["__main__"].__dict__["kept"] = envs


# ---------------------------------------------------------------- standard input


def lose_stdin(stage: Stage) -> None:
    """Make an env that closes standard input."""
    env = stage.make()
    began = time.monotonic()
    env.step(actions("close_stdin"))
    step_all(env)
    env.restart(0)
    usable = begin_all(env)
    with stage.make() as other:
        step_all(other)
    tell(told=began, usable=usable)
    env.close()


def have_no_stdin(stage: Stage) -> None:
    """Run without standard input, as a daemon does; the next descriptor is 0 then."""
    sys.stdin.close()
    with contextlib.suppress(OSError):
        os.close(0)
    stage.keep_cluster()
    began = time.monotonic()
    env = stage.make()
    env.step(actions("close_stdin"))
    env.restart(0)
    tell(told=began, usable=begin_all(env))
    env.close()


# ---------------------------------------------------------------- limits


def lack_processes(stage: Stage) -> None:
    limit = _num_tasks(os.getuid()) + stage.number
    _lack(stage, partial(_limited, psutil.RLIMIT_NPROC, limit))


def lack_files(stage: Stage) -> None:
    _lack(stage, partial(_limited, psutil.RLIMIT_NOFILE, _highest_descriptor(stage.number)))


def _lack(stage: Stage, limited: Callable[[], AbstractContextManager[None]]) -> None:
    """Request many workers with too few resources, and then a few with enough."""
    many = [partial(Faulty, number, str(stage.folder)) for number in range(MANY)]
    with limited():
        complaint = _complaint(partial(stage.make, many, num_cpus=MANY))
    told = time.monotonic()
    with stage.make() as env:
        tell(complaint=complaint, told=told, usable=begin_all(env))


def _complaint(make: Callable[[], Any]) -> str:
    """Return the error of making envs."""
    try:
        make()
    except ParallelEnvError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (to be reported)
        return f"not ours: {type(error).__name__}: {error}"
    return "nothing"


def lack_files_after_a_death(stage: Stage) -> None:
    env = stage.make()
    os.kill(env.customized_method("pid", id=0)[0], signal.SIGKILL)
    with contextlib.suppress(WorkerDiedError):
        env.step(actions())
    _restart_with_too_little(env)


def lack_files_in_a_hang(stage: Stage) -> None:
    env = stage.make(timeout=0.2)
    with contextlib.suppress(WorkerTimeoutError):
        env.step(actions("hang"))
    _restart_with_too_little(env)


def _restart_with_too_little(env: ParallelEnv) -> None:
    with _limited(psutil.RLIMIT_NOFILE, _highest_descriptor(1)):
        complaint = _complaint(partial(env.restart, 0))
    told = time.monotonic()
    assert env.restart(0) == (0, 1)
    tell(complaint=complaint, told=told, usable=begin_all(env))
    env.close()


@contextlib.contextmanager
def _limited(limit: int, allowed: int) -> Iterator[None]:
    """Limit this process, and afterwards lift the limit, also for helpers started in the meantime."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (allowed, before[1]))
    try:
        yield
    finally:
        for process in itertools.chain([psutil.Process()], psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(limit, before)


def _num_tasks(uid: int) -> int:
    """Return the number of threads of a user, which count against the limit on processes."""
    found = psutil.process_iter(["uids", "num_threads"])
    return sum(process.info["num_threads"] for process in found if process.info["uids"].real == uid)


def _highest_descriptor(spare: int) -> int:
    """Return the number below which ``spare`` descriptors are free."""
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(free, spare, None))


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    program, mode, start_method, folder, number = sys.argv[1:]
    stage = Stage(Column(mode, None if start_method == "None" else start_method), Path(folder), int(number))
    globals()[program](stage)


if __name__ == "__main__":
    main()
