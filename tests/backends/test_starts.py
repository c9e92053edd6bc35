"""The start of a process changes nothing that other threads of the caller see, and needs little of the system."""

from __future__ import annotations

import _posixsubprocess
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from scripts import environment, run

from parallelenv import ParallelEnv
from parallelenv.backends._fork_server_client import SERVERS
from parallelenv.backends._process import open_pipe
from parallelenv.contract.packed_worker_spec import environment_variables
from parallelenv.errors import WorkerStartError
from parallelenv.testing.envs import Counter

METHODS = ["forkserver", "spawn", "fork"]


@pytest.mark.parametrize("method", METHODS)
def test_start_leaves_environment_and_main_module_as_they_are(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    monkeypatch.setattr(SERVERS, "root", None)  # otherwise, it has been started already
    main: Any = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "main.py", raising=False)
    spec = object()
    monkeypatch.setattr(main, "__spec__", spec)
    seen: list[object] = []

    def looking(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        seen.append((dict(os.environ) == before, main.__dict__.get("__file__"), main.__spec__ is spec))
        return function(*arguments, **options)

    # One of these is called in the middle of the start, whatever the start method is.
    for module, name in (
        (signal, "pthread_sigmask"),
        (os, "fork"),
        (subprocess, "_fork_exec"),
        (_posixsubprocess, "fork_exec"),
    ):
        monkeypatch.setattr(module, name, partial(looking, getattr(module, name)))
    before = dict(os.environ)
    with ParallelEnv([Counter], "subproc", start_method=method) as env:
        env.reset()
    if SERVERS.root is not None:
        SERVERS.root.end()
    assert len(seen) > 1
    assert set(seen) == {(True, "main.py", True)}


# With `fork`, a pool that is made while another thread's pool is closed used to lose descriptors of its own.
THREADS = """
import sys, threading, traceback
import gymnasium as gym
from parallelenv import ParallelEnv

def make():
    try:
        for _ in range(int(sys.argv[2])):
            with ParallelEnv(["CartPole-v1"] * 2, "subproc", num_cpus=2, start_method=sys.argv[1]) as env:
                env.reset()
    except BaseException:
        traceback.print_exc()

threads = [threading.Thread(target=make) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(("method", "number"), [("forkserver", 8), ("fork", 8), ("spawn", 1)])
def test_threads_can_make_pools_at_once(method: str, number: int) -> None:
    assert run(THREADS, method, str(number)) == ("", "", 0)


def test_start_method_of_multiprocessing_can_be_chosen_after_a_start() -> None:
    script = """
import multiprocessing
from parallelenv import ParallelEnv
with ParallelEnv(["CartPole-v1"], "subproc", start_method={!r}) as env:
    env.reset()
multiprocessing.set_start_method("spawn")
"""
    for method in METHODS:
        assert run(script.format(method)) == ("", "", 0)


def test_variable_that_disappears_meanwhile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETING", "1")
    names = list(os.environ)
    monkeypatch.delenv("FLEETING")
    monkeypatch.setattr(type(os.environ), "__iter__", lambda self: iter(names))
    assert environment_variables().keys() == {*names} - {"FLEETING"}


def test_fork_waits_while_another_thread_closes_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the child would close the connection again, and thereby a descriptor with the same number."""
    closed, finish = threading.Event(), threading.Event()

    def close_slowly(connection: Any) -> None:
        os.close(connection.fileno())
        closed.set()
        finish.wait(10)

    connection, other = open_pipe()
    monkeypatch.setattr(Connection, "_close", close_slowly)
    number = connection.fileno()
    closing = threading.Thread(target=connection.close)
    closing.start()
    assert closed.wait(10)
    ends = os.pipe()  # like another thread that starts a process
    assert number in ends
    timer = threading.Timer(0.2, finish.set)
    timer.start()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.fstat(number)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for thread in (closing, timer):
        thread.join()
    other.close()
    for end in ends:
        os.close(end)


def test_forked_child_closes_its_copies_of_connections() -> None:
    ours, theirs = open_pipe()
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    ours.close()
    assert theirs.poll(10)
    with pytest.raises((EOFError, ConnectionError)):
        theirs.recv()
    process.kill()
    process.join()
    process.close()
    theirs.close()


USE = """
import os, sys
from parallelenv import ParallelEnv
with ParallelEnv(["CartPole-v1"] * 2, "subproc", num_cpus=2, start_method=sys.argv[1]) as env:
    shape = env.reset().shape
    env.step([0, 0])
with open(sys.argv[2], "w") as file:
    print(*shape, env.closed, file=file)
"""


@pytest.mark.parametrize("closed", ["<&-", "<&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("method", METHODS)
def test_standard_descriptors_may_be_closed(method: str, closed: str, tmp_path: Path) -> None:
    script, answer = tmp_path / "script.py", tmp_path / "answer"
    script.write_text(USE)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, str(script), method, str(answer)]
    subprocess.run(command, env=environment(), timeout=60, check=False)
    assert answer.read_text() == "2 4 True\n"


@pytest.mark.parametrize("method", METHODS)
def test_deleted_working_directory_is_named(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    if method == "fork":
        with ParallelEnv([Counter], "subproc", start_method=method) as env:
            env.reset()
        return
    match = r"does not exist any more.*/gone \(deleted\).*os\.chdir\(\)\.$"
    with pytest.raises(WorkerStartError, match=match if sys.platform == "linux" else "does not exist any more"):
        ParallelEnv([Counter], "subproc", start_method=method)


def test_working_directory_that_cannot_be_entered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # the superuser may enter each folder
    with pytest.raises(WorkerStartError, match=f"may not enter the working directory '{os.getcwd()}'"):
        ParallelEnv([Counter], "subproc")


@pytest.mark.parametrize(("number", "advises"), [(errno.EAGAIN, True), (errno.EMFILE, True), (errno.EACCES, False)])
def test_limits_are_named_only_if_one_may_be_reached(
    number: int, advises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", fail)
    with pytest.raises(WorkerStartError, match=os.strerror(number)) as caught:
        ParallelEnv([Counter], "subproc", start_method="spawn")
    assert ("ulimit" in str(caught.value)) == advises


@pytest.mark.skipif(shutil.which("unshare") is None, reason="only Linux has namespaces of mounts")
@pytest.mark.parametrize("method", METHODS)
def test_workers_start_without_proc(method: str, tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text("from parallelenv.testing.envs import Counter\nclass Env(Counter): pass\n")
    script, answer = tmp_path / "script.py", tmp_path / "answer"
    script.write_text(USE.replace('["CartPole-v1"]', "[__import__('my_envs').Env]"))
    hiding = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs none /proc && exec "$@"',
        "sh",
    ]
    if subprocess.run([*hiding, "true"], capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("this system forbids to hide /proc")
    command = [*hiding, sys.executable, str(script), method, str(answer)]
    done = subprocess.run(command, env=environment(), timeout=60, check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert answer.read_text().endswith(" True\n")
