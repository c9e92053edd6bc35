"""Exceptions in envs, dead workers, timeouts and Ctrl-C, in every mode."""

from __future__ import annotations

import asyncio
import copy
import pickle
import signal
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, RAISE, WAIT, Fragile, TwoArguments, fragile, interrupt, when_begun
from gymnasium.error import ResetNeeded
from modes import IN_CALLER, IN_WORKERS, LOCAL, ORACLE, PROCESSES, in_modes
from scripts import run

from parallelenv import ParallelEnv
from parallelenv.contract import interrupts
from parallelenv.errors import (
    ClosedError,
    EnvContractError,
    EnvError,
    InvalidEnvError,
    UnpicklableError,
    UsageError,
    WorkerDiedError,
    WorkerTimeoutError,
)

LARGE = b"x" * 100_000  # does not fit into a pipe


@pytest.fixture
def env(make_env: MakeEnv, tmp_path: Path) -> ParallelEnv:
    """Four envs in two workers, after a reset."""
    env = make_env(fragile(tmp_path), num_cpus=2)
    env.reset()
    return env


def test_failure_is_assigned_to_its_env_among_several_commands(env: ParallelEnv) -> None:
    env.send([RAISE, GO_ON], id=[0, 1])
    env.send([GO_ON], id=[3])
    assert env.step([GO_ON], id=[2]).states[0].tolist() == [2, 1]
    with pytest.raises(ZeroDivisionError, match="env 0") as caught:
        env.recv(min_envs=3)
    assert "Raised by env 0 in step" in caught.value.__notes__[0]
    assert sorted(caught.value.partial.env_ids.tolist()) == [1, 3]  # type: ignore[attr-defined]


def test_equal_failures_are_merged(env: ParallelEnv) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        env.customized_method("raise_this", {"kind": "os"}, id=[3, 1, 2])
    error: Any = caught.value
    assert "Raised by env 1 and 2 other envs in raise_this(), " in error.__notes__[-1]
    assert error.env_ids == (1, 2, 3)
    assert [type(one) for one in error.failures.values()] == [FileNotFoundError] * 3
    assert error.failures[1] is error
    assert error.partial == {}
    with pytest.raises(BaseExceptionGroup, match="4 envs failed") as both:
        env.customized_method("raise_this", [{"kind": kind} for kind in ("os", "two", "os", "two")])
    group: Any = both.value
    assert [type(one) for one in group.exceptions] == [FileNotFoundError, TwoArguments]
    assert "env 1 and 1 other env" in group.exceptions[1].__notes__[-1]
    assert group.env_ids == (0, 1, 2, 3)
    assert (group.exceptions[0].errno, group.exceptions[0].filename) == (2, "level.txt")
    assert [type(group.failures[env_id]) for env_id in range(4)] == [FileNotFoundError, TwoArguments] * 2


class Liar(Fragile):
    """Returns something wrong from its step, according to its action."""

    def __init__(self, answers: list[Any], number: int = 0) -> None:
        super().__init__(number)
        self.answers = answers

    def step(self, action: Any) -> Any:
        return self.answers[action]


class OwnSpace(gym.spaces.Box):
    """A space of an unknown class."""


class LiarInOwnSpace(Liar):
    observation_space = OwnSpace(-1, 1, (2,), np.float64)


RIGHT: tuple[Any, ...] = np.zeros(2), 0.0, False, False, {}


@pytest.mark.parametrize("done_policy", [None, "restart"])
@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        (Liar, (np.zeros(3), *RIGHT[1:]), r"shape \(3,\) and dtype float64, but the observation space is Box"),
        (Liar, (np.zeros(2, complex), *RIGHT[1:]), "dtype complex128"),
        (LiarInOwnSpace, (np.zeros(3), *RIGHT[1:]), r"the state is of shape \(3,\)"),
        (Liar, RIGHT[:3], r"tuple of 3; a gymnasium.Env returns .*Four items"),
        (Liar, (*RIGHT[:4], "all is well"), "returned the info 'all is well'; an info is a dict"),
        (Liar, None, "returned a NoneType"),
    ],
    ids=["shape", "dtype", "own space", "three items", "info", "nothing"],
)
def test_wrong_result_of_a_step_raises_contract_error_and_does_not_affect_other_envs(
    make_env: MakeEnv, kind: Any, answer: Any, message: str, done_policy: Any
) -> None:
    env = make_env([partial(kind, [RIGHT, answer], number) for number in range(3)], asynchronous=done_policy)
    env.reset()
    with pytest.raises(EnvContractError, match=message) as caught:
        env.step([0, 1, 0])
    assert caught.value.partial.env_ids.tolist() == [0, 2]  # type: ignore[attr-defined]
    env.reset(1)
    assert env.step([0, 0, 0]).states.shape == (3, 2)
    with pytest.raises(EnvContractError, match=message) as caught:
        env.step([1, 1, 1])
    assert caught.value.env_ids == (0, 1, 2)


class OneWay:
    """Can be pickled, but not unpickled, as many exceptions of libraries can."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Sealed(Fragile):
    """Returns such an object, or takes it; results of other envs are large enough to be sent out of band."""

    def step(self, action: Any) -> Any:
        state, reward, *_ = super().step(GO_ON)
        info = {"load": [np.full(20_000, float(self.number))], "sealed": OneWay() if action == RAISE else None}
        return state, reward, False, False, info

    def give(self) -> Any:
        return [np.ones(20_000), OneWay()] if self.number == 1 else np.full(20_000, self.number)

    def take(self, thing: Any = None) -> int:
        return self.number


class SealedInOwnSpace(Sealed):
    """Its results have two parts, because no array of the batch holds its states."""

    observation_space = OwnSpace(-np.inf, np.inf, (2,), np.float64)


@pytest.mark.parametrize("kind", [Sealed, SealedInOwnSpace])
def test_object_that_fails_to_unpickle_affects_only_its_env_and_call(make_env: MakeEnv, mode: str, kind: Any) -> None:
    env = make_env([partial(kind, number) for number in range(4)], num_cpus=2)
    env.reset()
    with pytest.raises(UnpicklableError, match="no number") as caught:
        env.step([GO_ON, RAISE, GO_ON, GO_ON])  # in an info
    assert mode not in IN_CALLER or "The result contains a OneWay" in str(caught.value)
    rest: Any = caught.value.partial  # type: ignore[attr-defined]
    assert rest.env_ids.tolist() == [0, 2, 3]
    assert [info["load"][0][-1] for info in rest.infos] == [0, 2, 3]
    assert "Raised by env 1" in "".join(caught.value.__notes__)
    env.reset(1)
    with pytest.raises(UnpicklableError, match="no number") as caught:
        env.customized_method("give")  # in a result
    rest = caught.value.partial  # type: ignore[attr-defined]
    assert {env_id: value[-1] for env_id, value in rest.items()} == {0: 0, 2: 2, 3: 3}
    with pytest.raises(UnpicklableError, match="no number"):
        env.customized_method("take", {"thing": OneWay()})
    with pytest.raises(UnpicklableError, match="no number"):
        env.set_env_attr("thing", OneWay())
    assert env.customized_method("take") == [0, 1, 2, 3]
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [2, 1, 2, 2]
    with pytest.raises(UnpicklableError, match="no number"):
        env.reset(options={"thing": OneWay()})
    env.reset()
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [1, 1, 1, 1]


class Locked(Fragile):
    """An action ends its episode, with an info that cannot be copied."""

    def step(self, action: Any) -> Any:
        state, reward, *_ = super().step(GO_ON)
        ends = action == RAISE
        return state, reward, ends, False, {"lock": threading.Lock()} if ends else {}


def test_env_whose_last_result_cannot_be_copied_is_not_stepped_past_its_end(make_env: MakeEnv) -> None:
    env = make_env([partial(Locked, number) for number in range(4)], asynchronous="restart", num_cpus=2)
    env.reset()
    with pytest.raises(UnpicklableError, match="The result contains a lock") as caught:
        env.step([GO_ON, RAISE, GO_ON, GO_ON])
    assert "Raised by env 1 in the copying of its result" in caught.value.__notes__[0]
    assert caught.value.partial.states.tolist() == [[0, 1], [2, 1], [3, 1]]  # type: ignore[attr-defined]
    with pytest.raises(ResetNeeded, match="env 1 has no"):
        env.step([GO_ON] * 4)
    env.reset(1)
    assert env.step([GO_ON] * 4).states[:, 1].tolist() == [2, 1, 2, 2]


def test_registered_env_that_fails_to_unpickle_affects_only_pools_that_use_it(make_env: MakeEnv, mode: str) -> None:
    gym.register("Foreign-v0", entry_point=type("Maker", (OneWay,), {"__call__": lambda self: Fragile(0)})())
    try:
        assert make_env(["CartPole-v1"]).reset().shape == (1, 4)
        if mode in IN_WORKERS:
            with pytest.raises(ValueError, match="no number"):
                make_env(["Foreign-v0"])
    finally:
        del gym.registry["Foreign-v0"]


class Looped(Fragile):
    def give(self) -> Any:
        loop: list[Any] = [threading.Lock()]
        loop.insert(0, {"loop": loop})
        return loop


@in_modes(*LOCAL)
def test_result_that_contains_itself_and_a_lock_is_refused(make_env: MakeEnv) -> None:
    env = make_env([partial(Looped, number) for number in range(2)], timeout=20.0)
    with pytest.raises(UnpicklableError, match="The result contains a (lock|dict)"):
        env.customized_method("give", id=1)
    with pytest.raises(UnpicklableError, match="of type (lock|dict), cannot be copied"):
        env.customized_method("give", {"loop": Looped(0).give()}, id=1)
    assert env.customized_method("pid", id=1)


@in_modes(PROCESSES)
def test_large_argument_for_a_worker_that_hangs_is_not_sent(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2, timeout=0.5)
    env.reset()
    with pytest.raises(WorkerTimeoutError):
        env.step([WAIT, GO_ON, GO_ON, GO_ON])
    with pytest.raises(WorkerTimeoutError, match=r"envs 0, 1 did not answer .* still busy .* nothing was sent"):
        env.set_env_attr("weights", LARGE)
    assert env.get_env_attr("weights", id=[2, 3]) == [None] * 2
    (tmp_path / "go").touch()
    env.set_env_attr("weights", LARGE)
    assert env.get_env_attr("weights") == [LARGE] * 4
    assert env.recv(4).states[:, 1].tolist() == [1] * 4


@in_modes(PROCESSES)
def test_worker_that_hangs_is_not_sent_more_commands_than_its_pipe_holds(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2, timeout=1.5)
    env.reset()
    env.send([WAIT], id=0)
    message = "envs 0, 1 did not answer .* still busy .* nothing was sent"
    with pytest.raises(WorkerTimeoutError, match=message):
        list(map(env.send_reset, [1] * 1000))
    (tmp_path / "go").touch()
    env.send_reset(1)
    assert sorted(env.recv(2, timeout=30).states.tolist()) == [[0, 1], [1, 0]]


@in_modes(PROCESSES)
def test_ctrl_c_ends_the_wait_for_a_worker_that_needs_a_large_argument(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2)
    env.reset()

    def send_both() -> None:
        env.send([WAIT, GO_ON, GO_ON, GO_ON])
        env.set_env_attr("weights", LARGE)

    with when_begun(tmp_path, 0, interrupt), pytest.raises(KeyboardInterrupt):
        send_both()
    (tmp_path / "go").touch()
    assert env.recv(4).states[:, 1].tolist() == [1] * 4
    assert env.get_env_attr("weights") == [None] * 4


@in_modes(PROCESSES)
def test_worker_that_dies_before_it_gets_a_large_argument_is_reported(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2)
    env.reset()
    env.send([EXIT], id=[0])
    with pytest.raises(WorkerDiedError, match="exit code is 7") as caught:
        env.set_env_attr("weights", LARGE)
    assert caught.value.env_ids == (0, 1)
    assert env.get_env_attr("weights", id=[2, 3]) == [LARGE] * 2


class Holding(Exception):
    """An exception that does not pickle."""

    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


class Holder(Fragile):
    def hold(self) -> None:
        raise Holding


def test_exception_that_cannot_be_pickled_keeps_its_text_and_traceback(make_env: MakeEnv, mode: str) -> None:
    env = make_env([partial(Holder, number) for number in range(2)])
    with pytest.raises(EnvError if mode in IN_WORKERS else Holding, match="held") as caught:
        env.customized_method("hold", id=1)
    text = "".join(traceback.format_exception(caught.value))
    assert [part for part in ("Holding: held", "raise Holding", "Raised by env 1") if part not in text] == [], text
    assert env.customized_method("pid", id=1)


def test_sigint_handler_of_the_user_is_kept(env: ParallelEnv) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: seen.append(signum))
    try:
        ours = signal.getsignal(signal.SIGINT)
        env.step([GO_ON] * 4)
        assert signal.getsignal(signal.SIGINT) is ours
        interrupt()
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_delayed_interrupt_reaches_a_handler_of_an_event_loop_once() -> None:
    seen: list[int] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, seen.append, 1)
        with interrupts.DeferSignals():
            interrupt()
        for _ in range(5):
            await asyncio.sleep(0)
        loop.remove_signal_handler(signal.SIGINT)

    asyncio.run(play())
    assert seen == [1]


def test_sigint_handler_of_a_program_that_embeds_python_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_get_handler", lambda number: None)  # Python does not know such a handler
    before = signal.getsignal(signal.SIGINT)
    with interrupts.DeferSignals():
        assert signal.getsignal(signal.SIGINT) is before


def test_restart_of_a_healthy_env_rebuilds_only_that_env(env: ParallelEnv) -> None:
    env.set_env_attr("steps", 5)
    assert env.restart([3, 1]) == (1, 3)
    assert env.get_env_attr("steps") == [5, 0, 5, 0]
    env.pause(1)
    assert env.restart() == (0, 1, 2, 3)


def test_failed_env_rebuild_is_raised_and_can_be_retried(make_env: MakeEnv, tmp_path: Path) -> None:
    broken = tmp_path / "broken"

    def make(number: int) -> Fragile:
        if number == 1 and broken.exists():
            raise OSError("no such level")
        return Fragile(number)

    env = make_env([partial(make, number) for number in range(2)], num_cpus=1)
    env.reset()
    broken.touch()
    with pytest.raises(OSError, match="no such level"):
        env.restart([0, 1])
    with pytest.raises(ResetNeeded, match=r"envs \[0, 1\]"):
        env.step([GO_ON] * 2)
    env.reset(0)
    assert env.step([GO_ON], 0)[0].tolist() == [[0, 1]]
    with pytest.raises(TypeError, match=r"could not be rebuilt. Try restart\(\) again"):
        env.reset(1)
    broken.unlink()
    assert env.restart(1) == (1,)
    assert env.reset().tolist() == [[0, 0], [1, 0]]


@in_modes(*IN_CALLER)
def test_env_instance_in_the_same_process_cannot_be_rebuilt(mode: str) -> None:
    message = "env 0 was given as a live instance.*Give an env fn"
    with ParallelEnv([Fragile(0), Fragile(1)], mode) as env:
        env.reset()
        env.send([GO_ON], 0)
        with pytest.raises(InvalidEnvError, match=message):
            env.restart(0)
        assert env.recv().states.tolist() == [[0, 1]]
        assert env.step([GO_ON] * 2)[0].tolist() == [[0, 2], [1, 1]]
    with pytest.raises(InvalidEnvError, match="Give an env fn"):
        ParallelEnv([Fragile(0)], mode, on_failure="restart")


def test_flags_and_rewards_of_unusual_types(make_env: MakeEnv) -> None:
    flags = [1, np.array([True]), np.array([True, False]), "yes"]
    rewards = [10**400, np.float32(0.5), 1, 1]
    answers = [(RIGHT[0], reward, flag, False, None) for reward, flag in zip(rewards, flags, strict=True)]
    env = make_env([partial(Liar, answers, number) for number in range(4)], asynchronous="continue")
    env.reset()
    with pytest.raises(ExceptionGroup, match="terminated and truncated are bools") as caught:
        env.step([0, 1, 2, 3])
    assert caught.value.partial.rewards.tolist() == [10**400, 0.5]  # type: ignore[attr-defined]
    assert env.done.tolist() == [True, True, False, False]


def test_flags_may_be_tensors(make_env: MakeEnv) -> None:
    torch = pytest.importorskip("torch")
    flags = [torch.tensor(True), torch.tensor([False]), torch.zeros(2)]
    env = make_env([partial(Liar, [(RIGHT[0], 1.0, flag, flag, {}) for flag in flags]) for _ in range(3)])
    env.reset()
    with pytest.raises(EnvContractError, match=r"bools; step\(\) returned of shape \(2,\)"):
        env.step([0, 1, 2])
    assert env.done.tolist() == [True, True, True]


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


SHARED = ValueError("one object, raised by many")


def test_exceptions_that_are_immutable_or_shared_are_raised(make_env: MakeEnv) -> None:
    class Strict(Fragile):
        def step(self, action: Any) -> Any:
            raise SHARED if action == GO_ON else Frozen(self.number)

    env = make_env([partial(Strict, number) for number in range(2)], num_cpus=2)
    env.reset()
    with pytest.raises(Frozen) as caught:
        env.step([RAISE], 1)
    assert caught.value.code == 1
    assert "Raised by env 1" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="one object") as shared:
        env.step([GO_ON, GO_ON])
    assert shared.value.env_ids == (0, 1)  # type: ignore[attr-defined]


def test_env_failing_to_close_does_not_block_restart_or_close(make_env: MakeEnv, tmp_path: Path) -> None:
    class Stuck(Fragile):
        def close(self) -> None:
            Path(self.folder, f"closed-{self.number}").touch()
            raise SystemExit("not today")

    env = make_env([partial(Stuck, number, str(tmp_path)) for number in range(3)], num_cpus=1)
    env.reset()
    assert env.restart(1) == (1,)
    env.close()
    assert {path.name for path in tmp_path.iterdir()} == {"closed-0", "closed-1", "closed-2"}


@pytest.mark.parametrize("call", ["step", "rollout"])
def test_close_during_a_call_raises_closed_error(make_env: MakeEnv, tmp_path: Path, call: str) -> None:
    env = make_env(fragile(tmp_path), num_cpus=2, asynchronous="restart")
    closing: list[Future[None]] = []

    def act(states: Any) -> Any:
        return [WAIT if state[0] == 0 and state[1] == 20 else GO_ON for state in states]

    def play() -> None:
        states = env.reset()
        while call == "step":
            states = env.step(act(states)).states
        env.rollout(act, 10**7, progress=False)

    def close() -> None:
        (tmp_path / "go").touch()
        closing.append(other.submit(env.close))

    with ThreadPoolExecutor() as other:
        with when_begun(tmp_path, 0, close), pytest.raises(ClosedError, match="closed"):
            play()
        assert closing[0].exception() is None
    assert env.closed


def test_close_all_closes_every_env_even_if_closing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = [ParallelEnv([Fragile(0)], ORACLE) for _ in range(3)]
    close = ParallelEnv.close

    def fail(self: ParallelEnv) -> None:
        close(self)
        raise OSError("not well")

    monkeypatch.setattr(ParallelEnv, "close", fail)
    with pytest.raises(BaseExceptionGroup, match="Errors were raised while closing") as caught:
        ParallelEnv.close_all()
    assert len(caught.value.exceptions) >= 3
    assert all(env.closed for env in envs)


_USED_AT_EXIT = """
import atexit, sys
from parallelenv import ParallelEnv
made = []

def use():
    try:
        made[0].step([0, 0])
    except Exception as error:
        print(type(error).__name__, made[0].closed)

atexit.register(use)  # called after the handlers that are registered later, which close the workers
made.append(ParallelEnv(["CartPole-v1"] * 2, sys.argv[1], num_cpus=2))
made[0].reset(seed=0)
made[0].step([0, 0])
"""


@pytest.mark.parametrize("mode", LOCAL)
def test_use_when_the_interpreter_has_ended_the_workers_raises_closed_error(mode: str) -> None:
    output, errors, status = run(_USED_AT_EXIT, mode)
    assert (output.split(), errors, status) == (["ClosedError", "True"], "", 0)


def test_results_are_writable_and_share_no_memory(make_env: MakeEnv) -> None:
    class Sharing:
        def __init__(self) -> None:
            self.constant = np.arange(3.0)
            self.constant.flags.writeable = False

        def reset(self) -> Any:
            return self.constant

        def step(self, action: Any) -> Any:
            return self.constant, 0.0, False, {"same": self.constant}

    env = make_env([Sharing, Sharing])
    env.reset()
    for state, _, _, info in env.step([0, 0], align="batch"):
        info["same"][0] = 7
        state[1] = 5
        assert state.tolist() == [0, 5, 2]


def test_arrays_in_objects_of_classes_that_no_module_has_are_writable(make_env: MakeEnv) -> None:
    class Weights:
        def __init__(self) -> None:
            self.array = np.arange(3.0)
            self.array.flags.writeable = False

    class Weighted(Fragile):
        def give(self) -> Any:
            return Weights()

    env = make_env([partial(Weighted, number) for number in range(2)])
    for weights in env.customized_method("give"):
        weights.array[0] = 5
        assert weights.array.tolist() == [5, 1, 2]


def test_rows_of_tensors_are_copied_without_the_other_rows(make_env: MakeEnv) -> None:
    torch = pytest.importorskip("torch")

    class Viewing:
        def __init__(self) -> None:
            self.data = torch.ones(50, 4)

        def reset(self) -> Any:
            return self.data[0]

        def step(self, action: Any) -> Any:
            return self.data[1], action.untyped_storage().nbytes(), False, {}

    env = make_env([Viewing, Viewing], num_cpus=1)
    env.reset()
    for state, nbytes, *_ in env.step(torch.zeros(2, 4), align="batch"):
        assert state.tolist() == [1] * 4
        assert state.untyped_storage().nbytes() == nbytes == 16


def test_parallel_env_cannot_be_copied_or_pickled(env: ParallelEnv) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnpicklableError, match=r"cannot be copied or pickled.*load_state\(env\.save_state\(\)\)"):
            copied(env)


def test_nested_call_does_not_release_the_thread_guard(env: ParallelEnv) -> None:
    def policy(states: Any) -> list[int]:
        env.get_env_attr("steps")  # starts and ends within run_episodes()
        with ThreadPoolExecutor() as intruder:
            refused = intruder.submit(env.get_env_attr, "steps").exception()
        assert isinstance(refused, UsageError)
        assert "while another thread is in run_episodes() of this ParallelEnv" in str(refused)
        env.close()  # one step is enough
        return [GO_ON] * len(states)

    with pytest.raises(ClosedError, match=r"closed while run_episodes\(\) was running"):
        env.run_episodes(policy, 4, progress=False)
