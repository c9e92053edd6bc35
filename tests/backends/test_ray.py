"""Tests of the Ray modes alone: start of the cluster, resources, failures and shutdown."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import psutil
import pytest
import threadpoolctl
from fragile import EXIT, GO_ON, WAIT, fragile
from scripts import run

from parallelenv import ParallelEnv, progress
from parallelenv.backends import _ray_cluster, ray_subproc
from parallelenv.backends._ray_actors import ActorCalls, RayChannel, RayHost, RelayedReply
from parallelenv.backends._ray_cluster import Cluster
from parallelenv.backends.ray import RayBackend, StartedWorker
from parallelenv.backends.ray_subproc import RaySubprocBackend
from parallelenv.contract.codec import DONE, Message
from parallelenv.contract.cpu_cores import usable_cores
from parallelenv.contract.protocol import Command
from parallelenv.errors import ArgumentError, WorkerDiedError, WorkerStartError, WorkerTimeoutError
from parallelenv.testing.envs import Counter


class Small(Counter):
    def threads(self) -> tuple[str | None, set[int]]:
        return os.environ.get("OMP_NUM_THREADS"), {one["num_threads"] for one in threadpoolctl.threadpool_info()}

    def has_imported(self, module: str) -> bool:
        return module in sys.modules


in_ray_modes = pytest.mark.parametrize("mode", ["ray", "ray-subproc"], indirect=True)
in_ray_subproc = pytest.mark.parametrize("mode", ["ray-subproc"], indirect=True)
both_ways = pytest.mark.parametrize("direct", [True, False])


@in_ray_subproc
def test_workers_of_an_actor_have_the_preloaded_modules(mode: str) -> None:
    with ParallelEnv([Small] * 2, mode, num_cpus=2, preload=["wave"]) as env:
        assert env.customized_method("has_imported", {"module": "wave"}) == [True] * 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_slow_start_is_announced_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience, is_shown in ((0.0, True), (60.0, False)):
        monkeypatch.setattr(progress, "_PATIENCE", patience)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        threads = threading.active_count()
        with progress.announce_if_slow("Waiting for Ray ..."):
            while is_shown and "Waiting for Ray ..." not in terminal.getvalue():
                time.sleep(0.01)
        assert threading.active_count() <= threads + 1  # tqdm has one of its own
        assert terminal.getvalue().split("\r")[-1] == ""
        assert bool(terminal.getvalue()) == is_shown


@in_ray_modes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_gpus": 1000}, r"1000 GPU.*the cluster has 0"),
        (
            {"ray_options": {"scheduling_strategy": "SPREAD", "resources": {"flux": 1}}},
            r"1 of 1 Ray actors could not be placed: one needs 1 flux \(the cluster has 0, 0 of them free\)"
            r".*Change ray_options\.",
        ),
        ({"ray_options": {"accelerator_type": "A100"}}, r"accelerator_type:A100 \(the cluster has 0"),
        (
            {"ray_options": {"label_selector": {"zone": "moon"}, "scheduling_strategy": "SPREAD"}},
            r"not started within 2 s.*'moon'.*or the nodes that fit are in use\.",
        ),
    ],
)
def test_actor_that_cannot_be_scheduled_raises(
    mode: str, arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ray_cluster, "START_TIMEOUT", 1.0)
    monkeypatch.setattr(_ray_cluster, "LONGEST_START", 1.5)
    launching = patch.object(RayBackend, "_launch", autospec=True, side_effect=RayBackend._launch)
    with launching as launch, pytest.raises(WorkerStartError, match=message):
        ParallelEnv([Small], mode, **arguments)
    assert launch.call_count == 1  # a second try would take as long again


@in_ray_modes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"direct": "yes"}, "direct='yes' must be True or False"),
        ({"direct": None}, "direct=None must be True or False"),
        ({"ray_options": {"num_cpus": "many"}}, "ray_options=.*'many'.*were rejected by Ray"),
        ({"ray_options": {"no_such_option": 1}}, "ray_options=.*were rejected by Ray"),
    ],
)
def test_invalid_arguments_are_refused(mode: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParallelEnv([Small], mode, **arguments)
    if mode == "ray":
        with pytest.raises(ArgumentError, match="name 'one', which 2 actors cannot share"):
            ParallelEnv([Small] * 2, mode, num_cpus=2, ray_options={"name": "one"})


@in_ray_modes
def test_failed_construction_releases_its_placement_group(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.util

    make_group = ray.util.placement_group

    def make_group_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        group = make_group(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return group

    with monkeypatch.context() as patched:
        patched.setattr(_ray_cluster, "START_TIMEOUT", 1.0)
        with pytest.raises(WorkerStartError, match=r"flux=1.*the cluster has 0.*ray_options"):
            ParallelEnv([Small] * 2, mode, num_cpus=2, ray_options={"resources": {"flux": 1}})
        patched.setattr(ray.util, "placement_group", make_group_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            ParallelEnv([Small], mode, num_cpus=1)
    with ParallelEnv([Small] * 4, mode, num_cpus=4) as env:  # the cluster has 4
        assert env.reset().shape == (4, 3)


@pytest.mark.parametrize("mode", ["ray"], indirect=True)
def test_actor_that_does_not_start_raises(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stillborn(RayHost):
        def __init__(self, *arguments: Any) -> None:
            raise OSError("no room for a worker")

    monkeypatch.setattr(RayBackend, "actor_class", Stillborn)
    with pytest.raises(WorkerStartError, match=r"A Ray actor did not start\. Ray reports: (.|\n)*no room for a worker"):
        ParallelEnv([Small], mode)


@pytest.mark.parametrize("mode", ["ray"], indirect=True)
def test_actor_that_dies_while_it_starts_is_started_once_more(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Fragile(RayHost):
        def __init__(self, caller: Any, num_workers: int, starts: Path) -> None:
            super().__init__(caller, num_workers)
            with starts.open("a") as file:
                file.write("started\n")
            if len(starts.read_text().split()) == 1:
                os._exit(1)

    starts = tmp_path / "starts"
    monkeypatch.setattr(RayBackend, "actor_class", Fragile)
    monkeypatch.setattr(RayBackend, "actor_arguments", (starts,))
    with ParallelEnv([Small], mode) as env:
        assert env.reset().shape == (1, 3)
    assert starts.read_text().split() == ["started"] * 2


@pytest.mark.parametrize("mode", ["ray"], indirect=True)
def test_actors_on_this_machine_connect_however_long_the_path_of_the_temporary_folder_is(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with ParallelEnv([Small], mode) as env:
        assert "1 of 1 actors reached directly" in repr(env)


@in_ray_subproc
@both_ways
def test_workers_of_one_actor_reply_hang_and_die_independently(mode: str, direct: bool, tmp_path: Path) -> None:
    with ParallelEnv(fragile(tmp_path), mode, num_cpus=2, timeout=1.0, direct=direct) as env:
        env.reset()
        pids = env.customized_method("pid")
        with pytest.raises(WorkerTimeoutError) as late:
            env.step([WAIT, GO_ON, GO_ON, GO_ON])
        assert late.value.env_ids == (0, 1)
        assert env.recv(min_envs=2).env_ids.tolist() == [2, 3]
        assert env.get_env_attr("number", [3, 2]) == [3, 2]
        env.send([EXIT, GO_ON], [2, 3])
        with pytest.raises(WorkerDiedError) as dead:
            env.recv()
        assert dead.value.env_ids == (2, 3)
        assert (dead.value.pid, dead.value.exitcode) == (pids[2], 7)
        assert env.restart([2]) == (2, 3)
        assert env.reset([3, 2]).tolist() == [[3, 0], [2, 0]]
        Path(tmp_path, "go").touch()
        assert env.recv(min_envs=2).states.tolist() == [[0, 1], [1, 1]]
        assert env.customized_method("pid", id=[0, 1]) == pids[:2]


@in_ray_subproc
@both_ways
def test_death_of_actor_fails_all_of_its_workers(mode: str, direct: bool, tmp_path: Path) -> None:
    with ParallelEnv(fragile(tmp_path), mode, num_cpus=2, direct=direct) as env:
        env.reset()
        workers = [psutil.Process(pid) for pid in env.customized_method("pid")]
        (actor,) = env.engine.pool.backend._started  # type: ignore[attr-defined]
        process = psutil.Process(actor.pid)
        process.kill()
        process.wait()
        env.send([GO_ON] * 4)
        with pytest.raises(ExceptionGroup) as caught:
            env.recv(min_envs=4)
        assert caught.value.env_ids == (0, 1, 2, 3)  # type: ignore[attr-defined]
        for error, pid in zip(caught.value.exceptions, (workers[0].pid, workers[2].pid), strict=True):
            assert isinstance(error, WorkerDiedError)
            assert error.pid == pid
            assert "Ray reports: The actor died" in str(error)
        assert psutil.wait_procs(workers, timeout=2.0)[1] == []
        assert env.restart([0]) == (0, 1)
        assert env.restart([3]) == (2, 3)
        env.reset()
        assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1] * 4


def kill_actor(env: ParallelEnv) -> None:
    """Kill the first actor, and wait until its workers have ended and the `ParallelEnv` has noticed that."""
    pool, slot = env.engine.pool, env.engine.pool.backend._slots[0]  # type: ignore[attr-defined]
    workers = [psutil.Process(pool.processes[env_id].pid) for env_ids in slot.env_ids for env_id in env_ids]
    psutil.Process(slot.actor.pid).kill()
    psutil.wait_procs(workers)
    with pytest.raises((WorkerDiedError, ExceptionGroup)):
        env.reset()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc to see what Ray has set")
@in_ray_subproc
def test_workers_of_one_actor_share_its_cores_even_after_its_death(mode: str) -> None:
    with ParallelEnv([Small] * 2, mode, num_cpus=2) as env:
        expected = [(None, {max(1, usable_cores() // 2)})] * 2
        assert env.customized_method("threads") == expected
        kill_actor(env)
        assert [env.restart([env_id]) for env_id in (0, 1)] == [(0,), (1,)]
        assert env.customized_method("threads") == expected
    options = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "2"}}}
    with ParallelEnv([Small] * 2, mode, num_cpus=2, ray_options=options) as env:
        assert [variable for variable, _ in env.customized_method("threads")] == ["2"] * 2


@in_ray_modes
def test_dead_actor_is_forgotten_when_it_is_replaced(mode: str) -> None:
    with ParallelEnv([Small] * 2, mode, num_cpus=2) as env:
        backend: Any = env.engine.pool.backend
        dead, number = backend._started[0], len(backend._started)
        kill_actor(env)
        assert f"{number - 1} of {number - 1} actors reached directly" in repr(env)
        env.restart()
        assert f"{number} of {number} actors reached directly" in repr(env)
        if mode == "ray":  # the other mode starts the workers of an actor one by one
            assert dead not in backend._started
            assert dead.lifeline.closed


@both_ways
@pytest.mark.parametrize("mode", ["ray"], indirect=True)
def test_actor_whose_death_is_not_known_yet_keeps_its_connections(mode: str, direct: bool) -> None:
    with ParallelEnv([Small] * 2, mode, num_cpus=2, direct=direct, timeout=20.0) as env:
        env.reset()
        first, second = (psutil.Process(env.engine.pool.processes[env_id].pid) for env_id in range(2))
        first.kill()
        first.wait()
        with pytest.raises(WorkerDiedError):
            env.step([0], id=[0])
        second.kill()
        second.wait()
        env.restart(0)
        env.reset(0)
        with pytest.raises(WorkerDiedError):
            env.step([0], id=[1])
        env.restart(1)
        assert env.reset().shape[0] == 2


@in_ray_modes
def test_transfer_of_a_result_can_be_interrupted_and_has_the_time_limit_of_its_call(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    fetching = threading.Event()

    def stall(call: Any, *, timeout: float = 20.0) -> Any:
        fetching.set()
        threading.Event().wait(timeout)
        raise ray.exceptions.GetTimeoutError

    def interrupt() -> None:
        fetching.wait(20)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    with ParallelEnv([Small] * 4, mode, num_cpus=2, direct=False, timeout=5.0) as env:
        before = env.reset()
        with monkeypatch.context() as patched:
            patched.setattr(ray, "get", stall)
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                env.step([0] * 4)
            interrupting.join()
            with pytest.raises(WorkerTimeoutError):
                env.recv(min_envs=4, timeout=0.5)
            assert time.monotonic() - began < 15.0
        assert env.recv(min_envs=4).states.shape == before.shape
        assert env.step([0] * 4).dones.shape == (4,)


@in_ray_modes
@both_ways
def test_a_step_is_one_call_of_each_remote_actor_and_none_of_a_near_one(mode: str, direct: bool) -> None:
    with ParallelEnv([Small] * 4, mode, num_cpus=2, direct=direct) as env:
        env.reset()
        assert (env.engine.pool.backend.fileno() is None) == (not direct)
        actors = env.engine.pool.backend._started  # type: ignore[attr-defined]
        before = [one.calls._next_call for one in actors]
        for _ in range(3):  # no episode ends
            env.step([0] * 4)
        assert [one.calls._next_call - number for one, number in zip(actors, before, strict=True)] == [
            0 if direct else 3
        ] * (2 if mode == "ray" else 1)
    import ray

    assert ray.is_initialized()  # it was not started by the pool


def test_incomplete_hand_over_of_workers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    actor: Any = MagicMock(commands=ours)
    wanted = [StartedWorker((0,), 0, 0)]
    monkeypatch.setattr(ray_subproc, "_HAND_OVER_TIMEOUT", 0.01)
    with pytest.raises(WorkerStartError, match="has not given its workers to the caller within 0 s"):
        RaySubprocBackend().connect(actor, wanted)
    theirs.close()
    with pytest.raises(WorkerStartError, match="ended before it had given its workers to the caller"):
        RaySubprocBackend().connect(actor, wanted)
    ours.close()


def test_replies_of_a_host_are_received_in_the_order_of_its_commands() -> None:
    calls: Any = {name: [RelayedReply(number, Message(DONE, number))] for number, name in enumerate("abc", 1)}
    actor: Any = MagicMock()
    actor.handle.relay.remote.side_effect = list(calls)
    actor.calls = ActorCalls(actor)
    channel = RayChannel(actor, 0, 0, (0,))
    received = []
    for number in (1, 2, 3):
        channel.send(channel.pack(Command(number, "set", (0,), [5], "extra")))
        actor.calls.flush()
    for name in "bac":
        actor.calls.finish(name, calls[name])
        received.append([channel.receive().number for _ in range(len(channel.arrived))])
    assert received == [[], [1, 2], [3]]


SCRIPT = """
import os, signal, sys, warnings
from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError
handler, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)

def make(env="CartPole-v1", ray_options=None, **ray_init):
    return ParallelEnv([env] * 4, sys.argv[1], ray_options=ray_options or {}, ray_init=ray_init)

try:
    make(no_such_argument=1)
except ArgumentError as error:
    print(*str(error).split())
assert dict(os.environ) == environment
with make(num_cpus=2) as env:
    import ray
    print(env.reset(seed=1).shape, ray.is_initialized(), signal.getsignal(signal.SIGTERM) is handler)
node = ray.get_runtime_context().get_node_id()
for wrong in {"env": lambda: 1 // 0}, {"ray_options": {"no_such_option": 1}}:  # they do not stay members
    try:
        make(**wrong, num_cpus=2)
    except (ZeroDivisionError, ArgumentError):
        print(ray.get_runtime_context().get_node_id() == node)
if sys.argv[1] == "ray":
    with make(num_cpus=3) as env:
        print(ray.cluster_resources()["CPU"])
        with warnings.catch_warnings(record=True) as caught:
            make(num_cpus=2).close()
            make().close()  # without ray_init, any Ray will do
        print(ray.cluster_resources()["CPU"], *(f"{warning.lineno}: {warning.message}" for warning in caught))
ray.shutdown()
print({name for name in set(os.environ) - set(environment) if not name.startswith(("RAY_", "PYTHONBREAKPOINT"))})
"""


SHUT_DOWN = """
import os, sys
import ray
from parallelenv import ParallelEnv
from parallelenv.errors import WorkerDiedError, WorkerStartError

def start():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR")

def is_told(env, call, *args):
    told = set()
    try:
        getattr(env, call)(*args)
    except* (WorkerDiedError, WorkerStartError) as group:
        told = {"Ray was shut down after this ParallelEnv was made." in str(error) for error in group.exceptions}
    return told == {True}

before = dict(os.environ)
start()
by_ray = set(os.environ) - set(before)
for again in (False, True):
    options = {"num_cpus": 1, "ray_options": {"num_cpus": 0.1}, "asynchronous": "restart"}
    envs = [ParallelEnv(["CartPole-v1"] * 2, word, on_failure=failure, direct=direct, **options)
            for word in ("ray", "ray-subproc") for direct in (True, False) for failure in ("raise", "restart")]
    for env in envs:
        env.reset(seed=1)
    ray.shutdown()
    if again:
        start()
        late = ParallelEnv(["CartPole-v1"] * 2, "ray")
    for env in envs:
        assert is_told(env, "step", [1, 1]) and is_told(env, "restart") and is_told(env, "reset"), env
        env.close()
    assert ray.is_initialized() == again
    if again:
        late.reset()
        late.close()
    else:
        start()
ray.shutdown()
os.environ["MINE"] = "1"
with ParallelEnv(["CartPole-v1"] * 2, "ray", ray_init={"num_cpus": 2}):
    os.environ["MINE"] = "2"
print(ray.is_initialized(), os.environ["MINE"], set(os.environ) - set(before) - by_ray)
"""


@pytest.mark.long
def test_ray_may_be_shut_down_while_a_pool_is_open() -> None:
    pytest.importorskip("ray")
    out, err, _ = run(SHUT_DOWN, timeout=110)
    assert out.splitlines()[-1:] == ["True 2 {'MINE'}"], err


@pytest.mark.parametrize("word", ["ray", "ray-subproc"])
def test_cluster_started_by_a_pool_is_quiet_and_reused_by_the_next(word: str) -> None:
    pytest.importorskip("ray")
    out, err, _ = run(SCRIPT, word, timeout=100)
    refused, *others = out.splitlines()
    assert refused.startswith("ray_init={'no_such_argument': 1} was rejected by Ray"), err
    unused = "ray_init={'num_cpus': 2} is not used, because this process is already connected to Ray."
    again = ["3.0", f"3.0 8: {unused} Close every ParallelEnv that uses Ray first."]
    again = again if word == "ray" else []  # with other arguments, unless another pool uses it
    assert others == ["(4, 4) True True", "True", "True", *again, "set()"], err
    assert err == ""


@in_ray_modes
def test_ray_init_after_a_ray_init_of_the_user_is_reported(mode: str) -> None:
    with pytest.warns(UserWarning, match=r"^ray_init={'num_cpus': 1} is not used, .* Call ray\.shutdown\(\) first"):
        ParallelEnv([Small], mode, ray_init={"num_cpus": 1}).close()


def test_pool_that_is_collected_while_another_one_joins_ray_does_not_block_it(monkeypatch: pytest.MonkeyPatch) -> None:
    present: Any = object.__new__(Cluster)
    vars(present).update(is_own=False, _is_users=True, _arguments={}, _num_members=1)
    monkeypatch.setattr(Cluster, "_present", present)

    def collect(cluster: Cluster) -> bool:
        cluster.leave()
        return True

    monkeypatch.setattr(Cluster, "is_connected", property(collect))
    joining = threading.Thread(target=Cluster.join, args=({},), daemon=True)
    joining.start()
    joining.join(10.0)
    assert not joining.is_alive()
    assert present._num_members == 1


def test_warning_as_error_leaves_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    present: Any = object.__new__(Cluster)
    vars(present).update(is_own=True, _is_users=True, _arguments={}, _num_members=1)
    monkeypatch.setattr(Cluster, "_present", present)
    monkeypatch.setattr(Cluster, "is_connected", True)
    with pytest.raises(UserWarning, match="is not used"):
        Cluster.join({"num_cpus": 1})
    assert present._num_members == 1


def test_ray_start_timeout_is_not_reported_as_argument_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def time_out(**arguments: Any) -> None:
        raise RuntimeError("the node timed out during startup")

    monkeypatch.setattr(ray, "init", time_out)
    for arguments in ({}, {"num_cpus": 1}):
        with pytest.raises(WorkerStartError, match="could not be started or joined .*timed out.* try again"):
            _ray_cluster._connect(arguments)


def test_starting_ray_does_not_consume_global_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    drawn: list[float] = []
    monkeypatch.setattr(ray, "init", lambda **_: drawn.append(random.random()))
    random.seed(3)
    _ray_cluster._connect({})
    assert drawn == [random.random()]
