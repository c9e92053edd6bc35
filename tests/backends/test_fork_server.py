"""Packages of envs are imported once, in the process that workers are forked from."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from holdings import fork_server_pids, survivors
from scripts import start

from parallelenv import ParallelEnv
from parallelenv.autotune import doctor
from parallelenv.backends import _fork_server
from parallelenv.backends._fork_server_client import SERVERS
from parallelenv.errors import EnvError, WorkerDiedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each worker imports by itself")
NUM_WORKERS = 3

# Each import adds a line with the process's id to a file.
PACKAGE = """
import os
with open({imports!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
import gymnasium as gym
{body}

class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(9)
    def reset(self, *, seed=None, options=None):
        return 0, {{}}
    def step(self, action):
        return 0, 0.0, False, False, {{}}
    def evaluate(self, text):
        return eval(text, globals())
"""


class Package:
    def __init__(self, folder: Path, name: str, body: str) -> None:
        self.name = name
        self.folder = folder / name
        self._imports = folder / f"{name}-imports"
        self.folder.mkdir()
        (self.folder / "part.py").write_text("value = 1\n")
        self.write(body)
        self._imports.touch()

    def write(self, body: str) -> None:
        (self.folder / "__init__.py").write_text(PACKAGE.format(imports=str(self._imports), body=body))

    def env(self) -> Any:
        return importlib.import_module(self.name).Env

    def imported_in(self) -> list[int]:
        """Return the processes that have imported it, but for this one."""
        return [pid for line in self._imports.read_text().split() if (pid := int(line)) != os.getpid()]


MakePackage = Callable[..., Package]


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePackage]:
    monkeypatch.syspath_prepend(tmp_path)
    made: list[Package] = []

    def make(body: str = "") -> Package:
        made.append(Package(tmp_path, f"package_{os.getpid()}_{len(made)}_{tmp_path.name}", body))
        return made[-1]

    yield make
    for package in made:
        for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
            del sys.modules[name]


def run(env: Any, text: str = "os.getpid()", num_cpus: int = NUM_WORKERS, **options: Any) -> list[Any]:
    """Evaluate an expression in envs, by default in one worker each, and return the results."""
    with ParallelEnv([env] * NUM_WORKERS, "subproc", num_cpus=num_cpus, **options) as pool:
        pool.reset()
        return list(pool.customized_method("evaluate", {"text": text}))


def test_a_package_is_imported_once_for_all_workers_of_all_pools(make_package: MakePackage) -> None:
    package = make_package()
    workers = {pid for _ in range(3) for pid in run(package.env())}
    assert len(workers) == 3 * NUM_WORKERS
    (server,) = package.imported_in()
    assert server not in workers
    assert server in fork_server_pids()
    assert not any("fork-server" in child.name for child in multiprocessing.active_children())


def test_packages_of_lambdas_and_env_ids_are_imported_once(make_package: MakePackage) -> None:
    package, named = make_package(), make_package("gym.register('Named-v0', entry_point=lambda: Env())")
    module = importlib.import_module(package.name)
    run(lambda: module.Env().unwrapped)
    word = f"{named.name}:Named-v0"
    run(lambda: gym.make(word).unwrapped)
    assert len(package.imported_in()) == len(named.imported_in()) == 1


def test_preload_imports_modules_that_envs_import_later(make_package: MakePackage) -> None:
    package, late = make_package(), make_package()
    text = f"__import__({late.name!r}) and None"
    for _ in range(2):
        assert run(package.env(), text, preload=[late.name]) == [None] * NUM_WORKERS
    assert len(late.imported_in()) == 1


def test_preload_of_a_module_that_starts_a_thread_warns(make_package: MakePackage) -> None:
    unfit = make_package("import threading, time\nthreading.Thread(target=time.sleep, args=(9,)).start()")
    message = f"preload: importing {unfit.name} starts a thread, which forked workers cannot"
    with pytest.warns(UserWarning, match=message) as caught:
        run(make_package().env(), preload=[unfit.name])
    assert caught[0].filename == __file__


def test_preloaded_module_that_can_be_imported_only_after_another_is_not_refused_again(
    tmp_path: Path, make_package: MakePackage
) -> None:
    first, second = (f"{tmp_path.name}_{name}" for name in "ab")  # `make_package` makes the folder importable
    (tmp_path / f"{first}.py").write_text(f"import wave, {second}\nQ = 1\n")
    (tmp_path / f"{second}.py").write_text(f"from {first} import Q\n")
    package = make_package()
    with pytest.warns(UserWarning, match=f"preload: importing {first} raises ImportError"):
        run(package.env(), preload=[first, second])
    run(package.env(), preload=[first, second])  # no warning: the import of the second module has imported the first


@pytest.mark.parametrize("file", ["__init__.py", "part.py"])
def test_package_changed_on_disk_is_imported_again(make_package: MakePackage, file: str) -> None:
    package = make_package("from . import part")
    assert run(package.env(), "part.value") == [1] * NUM_WORKERS
    path = package.folder / file
    path.write_text(path.read_text() + ("part.value = 2222\n" if file == "__init__.py" else "value = 2222\n"))
    assert run(package.env(), "part.value") == [2222] * NUM_WORKERS
    assert len(package.imported_in()) == 2


def test_package_is_imported_again_if_environment_or_sys_path_changes(
    make_package: MakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make_package("import sys\nfound = os.environ.get('CHOICE'), sys.path[-1]")
    for number in range(2):
        monkeypatch.setenv("CHOICE", str(number))
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / str(number))])
        assert run(package.env(), "found") == [(str(number), str(tmp_path / str(number)))] * NUM_WORKERS
    assert len(package.imported_in()) == 2
    run(package.env())
    assert len(package.imported_in()) == 2


def test_workers_have_what_an_import_that_only_the_server_has_made_changes(
    make_package: MakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPPED", "1")
    body = "import sys\nos.environ['LEVEL'] = '1'\nos.environ.pop('DROPPED', None)\nsys.path.insert(0, '/levels')"
    package, other = make_package(body), make_package("level = os.environ.get('LEVEL'), os.environ.get('DROPPED')")
    gym.register("Foreign-v0", f"{package.name}:Env")
    try:
        text = "os.environ.get('LEVEL'), os.environ.get('DROPPED'), sys.path[0]"
        for _ in range(2):
            assert run("Foreign-v0", text) == [("1", None, "/levels")] * NUM_WORKERS
        text = f"({text}, __import__({other.name!r}).level)"  # in a server that is forked from the first
        assert run("Foreign-v0", text, preload=[other.name]) == [("1", None, "/levels", ("1", None))] * NUM_WORKERS
        assert len(package.imported_in()) == 1
        package.env()
        os.environ["LEVEL"] = "2"  # later than the caller's own import
        assert run("Foreign-v0", "os.environ['LEVEL']") == ["2"] * NUM_WORKERS
    finally:
        os.environ.pop("LEVEL", None)
        del gym.registry["Foreign-v0"]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_import_from_the_current_directory_like_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    name = f"twin_{os.getpid()}_{tmp_path.name}"
    for number, folder in enumerate(("first", "second")):
        (tmp_path / folder).mkdir()
        Package(tmp_path / folder, name, f"number = {number}")
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(multiprocessing.process, "ORIGINAL_DIR", str(tmp_path / "first"))
    monkeypatch.chdir(tmp_path / "second")
    gym.register("Twin-v0", f"{name}:Env")
    try:
        assert run("Twin-v0", "number", num_cpus=1, start_method=method) == [1] * NUM_WORKERS
    finally:
        del gym.registry["Twin-v0"]


ABROAD = f"if os.getpid() != {os.getpid()}:\n    "  # the caller imports it as well


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(30,)).start()", "starts a thread"),
        ("import subprocess; child = subprocess.Popen(['sleep', '30'])", "starts a process"),
        ("import socket; ends = socket.socketpair()", "opens a connection"),
        ("file = open(__file__)", "opens a file"),
    ],
)
def test_workers_import_packages_that_are_unsafe_to_fork(make_package: MakePackage, body: str, reason: str) -> None:
    package = make_package(ABROAD + f"import atexit; {body}")
    ends = "[one.kill() for one in [globals().get('child')] if one]"  # of the process
    for _ in range(2):
        workers = run(package.env(), f"({ends}, os.getpid())[1]")
        assert set(package.imported_in()[1:]) >= set(workers)
    assert len(package.imported_in()) == 1 + 2 * NUM_WORKERS
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            if child.name() == "sleep":
                child.kill()
    assert f"{package.name}, whose import {reason}" in doctor.describe()
    package.write("")  # fixed
    run(package.env())
    assert len(package.imported_in()) == 1 + 2 * NUM_WORKERS + 1
    assert f"{package.name} (0." in doctor.describe()


def test_files_that_forked_workers_can_share_do_not_prevent_forking(make_package: MakePackage, tmp_path: Path) -> None:
    logged = f"log = open({str(tmp_path / 'log')!r}, 'a')"
    mapped = "import mmap; file = open(__file__); data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()"
    unused = "loop = [open(__file__)]; loop.append(loop); del loop"
    package = make_package(
        ABROAD + f"null = open(os.devnull); memory = os.memfd_create('mine'); {logged}; {mapped}; {unused}"
    )
    run(package.env())
    assert len(package.imported_in()) == 1


def test_thread_that_ends_while_child_processes_are_listed_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: [str(os.getpid())])  # otherwise, it would fork
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "0" / "children"]))
    assert "starts a process" not in {what for what, _ in _fork_server._unforkable_resources()}


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("from . import part; raise KeyError('lost')", KeyError, "lost"),
        ("raise SystemExit(3)", EnvError, "SystemExit: 3"),
    ],
)
def test_exception_during_import_is_raised_by_the_worker(
    make_package: MakePackage, body: str, kind: type[BaseException], message: str
) -> None:
    package = make_package(ABROAD + body)
    with pytest.raises(kind, match=message) as caught:
        run(package.env())
    assert "Raised by env 0 and 2 other envs" in caught.value.__notes__[0]
    package.write("")
    run(package.env())


def test_caller_survives_import_that_exits_the_process(make_package: MakePackage) -> None:
    package = make_package(ABROAD + "os._exit(7)")
    with pytest.raises(Exception, match="exit code is 7"):
        run(package.env())
    assert f"{package.name}, whose import ends the process" in doctor.describe()


def test_output_of_an_import_is_shown_once(make_package: MakePackage, capfd: pytest.CaptureFixture[str]) -> None:
    body = "print('hello'); import logging; log = logging.getLogger(__name__)\n"
    body += "import sys; log.addHandler(logging.StreamHandler(sys.stdout))"
    package = make_package(ABROAD + body.replace("\n", "\n    "))
    for expected in ("[envs 0-2] hello\n", ""):
        run(package.env(), "log.warning('careful')", num_cpus=1)
        out, err = capfd.readouterr()
        lines = sorted(out.splitlines(keepends=True))
        assert "".join(line for line in lines if "careful" not in line) == expected
        assert [line for line in lines if "careful" in line] == [f"[env {n}] careful\n" for n in range(NUM_WORKERS)]
        assert err == ""


@pytest.mark.parametrize("silence", [True, False])
def test_no_warning_silences_warnings_of_imports(
    make_package: MakePackage, capfd: pytest.CaptureFixture[str], silence: bool
) -> None:
    body = "import warnings; warnings.warn('careful', stacklevel=1); warnings.filterwarnings('error', 'mine')"
    package = make_package(ABROAD + body)
    filters = "[one[0] for one in warnings.filters if one[2] is Warning and one[1] is None or one[0] == 'error']"
    assert run(package.env(), filters, no_warning=silence)[0] == (["ignore", "error"] if silence else ["error"])
    assert ("UserWarning: careful" in capfd.readouterr().out) == (not silence)
    assert run(package.env(), filters, no_warning=False)[0] == ["error"]


def test_random_numbers_of_workers_differ_unless_the_module_seeds_them(make_package: MakePackage) -> None:
    body = "import random\nimport numpy as np\nclass Holder:\n    numbers = np.random.default_rng({0})\n"
    free = make_package(body.format(""))
    seeded = make_package(body.format(3) + "random.seed(1)\nnp.random.seed(2)")
    for text in ("random.random()", "np.random.random()", "Holder.numbers.random()"):
        assert len({*run(free.env(), text), *run(free.env(), text)}) == 2 * NUM_WORKERS
        assert len({*run(seeded.env(), text), *run(seeded.env(), text)}) == 1
    assert run(seeded.env(), "random.random()")[0] == random.Random(1).random()


def test_workers_have_cwd_and_argv_of_caller_and_leak_no_descriptors(
    make_package: MakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make_package("import sys, multiprocessing")
    run(package.env())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mine", "--fast"])
    text = "os.getcwd(), sys.argv, multiprocessing.current_process().name, len(os.listdir('/proc/self/fd'))"
    found = run(package.env(), text)
    assert found[0][:3] == (str(tmp_path), ["mine", "--fast"], "parallelenv-worker")
    assert found == [found[0]] * NUM_WORKERS


def test_killed_workers_and_fork_servers_are_replaced_and_other_workers_keep_running(make_package: MakePackage) -> None:
    package = make_package()
    with ParallelEnv([package.env()] * 2, "subproc", num_cpus=2, on_failure="restart") as env:
        env.reset()
        os.kill(env.customized_method("evaluate", {"text": "os.getpid()"})[1], signal.SIGKILL)
        env.reset()
        assert len(package.imported_in()) == 1
        for pid in fork_server_pids():
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            assert env.step([0, 0]).dones.tolist() == [False] * 2
        run(package.env())
        assert env.step([0, 0]).dones.tolist() == [False] * 2
    assert len(package.imported_in()) == 2


def test_death_of_a_worker_and_close_do_not_wait_for_a_busy_server(make_package: MakePackage) -> None:
    package = make_package()
    with ParallelEnv([package.env()] * 2, "subproc", num_cpus=2) as env:
        env.reset()
        pid = env.customized_method("evaluate", {"text": "os.getpid()"})[0]
        (server,) = package.imported_in()
        wake = threading.Timer(30.0, os.kill, (server, signal.SIGCONT))
        wake.start()
        os.kill(server, signal.SIGSTOP)  # like an import, this prevents the server from noticing that workers end
        try:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match="How it exited is not known"):
                env.reset()
            env.close()
            assert wake.is_alive()
        finally:
            os.kill(server, signal.SIGCONT)
            wake.cancel()
            wake.join()


@pytest.mark.parametrize("is_busy", [True, False])
def test_wait_for_a_server_that_does_not_answer_can_be_interrupted(make_package: MakePackage, is_busy: bool) -> None:
    package = make_package()
    run(package.env())
    (pid,) = package.imported_in()
    (server,) = (one for one in SERVERS.servers if one.pid == pid)
    os.kill(pid, signal.SIGSTOP)
    # The limit of the test: when the server goes on, the call ends without an interrupt.
    wake = threading.Timer(20.0, os.kill, (pid, signal.SIGCONT))
    interrupting = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    for timer in (wake, interrupting):
        timer.start()
    held, finish = threading.Event(), threading.Event()

    def hold() -> None:  # as if the server imported a module for another thread
        with server._lock:
            held.set()
            finish.wait(30)

    holding = threading.Thread(target=hold if is_busy else held.set)
    holding.start()
    held.wait()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(package.env())
        assert wake.is_alive()
    finally:
        wake.cancel()
        finish.set()
        with contextlib.suppress(ProcessLookupError):  # it was ended
            os.kill(pid, signal.SIGCONT)
        for thread in (wake, interrupting, holding):
            thread.join()
    run(package.env())
    assert len(package.imported_in()) == (1 if is_busy else 2)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # newer Pythons, of fork
def test_forked_child_starts_its_own_fork_servers(make_package: MakePackage) -> None:
    package = make_package()
    run(package.env())
    child = multiprocessing.get_context("fork").Process(target=run, args=(package.env(),))
    child.start()
    child.join()
    assert child.exitcode == 0
    run(package.env())
    assert len(package.imported_in()) == 2


SCRIPT = """
import os, sys
from parallelenv import ParallelEnv
os.environ["CALLER"] = str(os.getpid())
sys.path.insert(0, sys.argv[1])
module = __import__(sys.argv[2])
def use():
    with ParallelEnv([module.Env] * 2, "subproc", num_cpus=2) as env:
        env.reset()
try:
    use()
except KeyboardInterrupt:
    os.environ["QUICK"] = "1"
    use()
    print("usable", flush=True)
"""
SLOW = "if 'QUICK' not in os.environ and os.getpid() != int(os.environ['CALLER']):\n    import time; time.sleep(60)"


@pytest.mark.parametrize("is_killed", [True, False])
def test_caller_is_killed_or_interrupted_during_an_import_in_the_fork_server(
    make_package: MakePackage, tmp_path: Path, is_killed: bool
) -> None:
    package = make_package(SLOW)
    with start(SCRIPT, str(tmp_path), package.name, start_new_session=True) as process:
        while len(package.imported_in()) < 2:  # the caller's, and the server's
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        if is_killed:
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3  # the tracker, the root, and the server
            process.kill()
            assert survivors([one.pid for one in family], patience=2) == []
        else:
            os.killpg(process.pid, signal.SIGINT)
            assert process.communicate(timeout=30) == ("usable\n", "")
            assert process.returncode == 0
