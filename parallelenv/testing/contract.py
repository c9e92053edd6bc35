"""Tests of a backend, as one class, and a fixed sequence of calls for comparing two modes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
import pytest
from gymnasium.vector.utils import concatenate, create_empty_array

from parallelenv import errors
from parallelenv.contract.batch import Array
from parallelenv.contract.env_specs import EnvFn
from parallelenv.contract.spaces import Action, State
from parallelenv.contract.worker_info import get_worker_info
from parallelenv.engine.assemble import Align
from parallelenv.env import ParallelEnv
from parallelenv.registry import ParaMode
from parallelenv.results import StepBatch, StepResult, difference
from parallelenv.testing import envs as zoo

NUM_ENVS = 5
DONE_POLICIES = (None, "idle", "restart", "continue")
LENGTHS = (4, 7, 3, 6, 4)  # the episodes of two envs end at the same time


def five_env_fns(kind: Callable[..., object], *arguments: object) -> list[EnvFn]:
    """Return five env fns. Each calls ``kind`` with the env's number, the ``arguments`` and an episode length."""
    return [partial(kind, number, *arguments, length=length) for number, length in enumerate(LENGTHS)]


_CLASSES: dict[str, Callable[..., object]] = {
    "array": zoo.Counter,
    "dict": zoo.Sheet,
    "tuple": zoo.Pair,
    "text": zoo.Words,
    "sequence": zoo.Chain,
    "graph": zoo.Net,
    "old": zoo.Old,
    "ragged": zoo.Ragged,
    "tensor": zoo.Tensors,
}
_MIXED = ("array", "old", "text", "dict", "ragged")
KINDS: dict[str, Callable[[], list[Any]]] = {
    **{name: partial(five_env_fns, kind) for name, kind in _CLASSES.items()},
    "mixed": lambda: [five_env_fns(_CLASSES[kind])[number] for number, kind in enumerate(_MIXED)],
    "instances": lambda: [zoo.Wrapped(env_fn()) for env_fn in five_env_fns(zoo.Counter)],
    "registered": lambda: ["CartPole-v1"] * NUM_ENVS,
}
"""Functions that return five envs or env fns, by the special feature of the envs."""

ONES = [1] * NUM_ENVS
_PATIENCE = 10.0  # seconds
_CALLS: Sequence[tuple[Any, ...]] = (
    ("customized_method", "name"),
    ("customized_method", "name", {"prefix": "x" * 300_000}, [4, 1]),
    ("customized_method", "name", [{"sleep": 0.2}, {"prefix": "x"}, {"sleep": 0.1}], [4, 0, 2]),  # 4 is the last to end
    ("customized_method", "part.double", {"by": 3}, slice(3, None)),
    ("customized_method", "shout", None, [1]),
    ("get_env_attr", "notes"),
    ("customized_method", "notes.clear"),
    ("set_env_attr", "label", "set"),
    ("set_env_attr", "length", 9),
    ("set_env_attr", "unheard", {"of": [1]}, [3, 0]),
    ("set_env_attr", "part.level", 7, 2),
    *(("get_env_attr", name) for name in ("label", "env.label", "length", "unwrapped.length", "part.level", "notes")),
    ("get_env_attr", "unwrapped.unheard", [0, 3]),
    ("get_env_attr", "extra"),
    ("get_env_attr", "extra", [3, 2], "?"),
    ("get_env_attr", "render_mode", None, "?"),  # present, with the value None
    ("render", [3, 1]),
)


class Make(Protocol):
    """A function that makes a `ParallelEnv`, which is closed after the test."""

    def __call__(self, envs: Sequence[object], asynchronous: Any = None, **kwargs: object) -> ParallelEnv: ...


class BackendContract:
    """Tests of a backend. Give your subclass a name that pytest collects.

    The tests do not cover ``on_failure="restart"``, `ParallelEnv.save_state`, ``seed_globals``, `ParallelEnv.profile`
    and vector envs.

    Attributes:
        para_mode: The mode under test: its name or a backend class.
        backend_options: Options of the mode.
        starts_slowly: Whether workers start slowly. If true, fewer combinations are tested.
    """

    para_mode: Any = None
    backend_options: Mapping[str, object] = {}
    starts_slowly: bool = False

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        """Yield a function that makes a `ParallelEnv` in the mode under test, with two workers by default."""
        yield from _maker(self.para_mode, self.backend_options)

    @pytest.fixture
    def make_oracle(self) -> Iterator[Make]:
        """Yield a function that makes a `ParallelEnv` in the mode ``dummy``, which is correct by definition."""
        yield from _maker("dummy", {})

    # ---------------------------------------------------------------- results

    @pytest.mark.parametrize("kind", KINDS)
    def test_results_equal_those_of_the_oracle(self, kind: str, make: Make, make_oracle: Make) -> None:
        """Results equal those in the mode ``dummy`` bit for bit.

        This holds for all kinds of envs, done policies, forms of ``id`` and worker counts.
        """
        if kind == "tensor":
            pytest.importorskip("torch")
        row = list(KINDS).index(kind)
        if kind == "tensor":  # every worker imports torch
            combinations: list[tuple[Any, int]] = [("restart", 2)]
        elif self.starts_slowly:
            combinations = [("restart", 3 if row == 0 else 2), ((None, "idle", "continue")[row % 3], 1)]
        else:  # five envs divide unevenly by two and by three
            combinations = [(policy, 1 + (row + column) % 3) for column, policy in enumerate(DONE_POLICIES)]
        for done_policy, num_cpus in combinations:
            with make(KINDS[kind](), done_policy, num_cpus=num_cpus) as env:
                found = play(env, overwrites=True)
            context = f"asynchronous={done_policy!r}, num_cpus={num_cpus}, "
            found.check_unchanged(context)
            found.assert_equals(play(make_oracle(KINDS[kind](), done_policy)), context)

    def test_views_equal_copies(self, make: Make, make_oracle: Make) -> None:
        """With ``copy=False``, the states that a call returns remain valid until the next call."""
        play(make(KINDS["dict"](), "restart", copy=False)).assert_equals(play(make_oracle(KINDS["dict"](), "restart")))

    def test_rollout_equals_that_of_the_oracle(self, make: Make, make_oracle: Make) -> None:
        """Rollouts of a recurrent policy, and steps after them, equal those in the mode ``dummy`` bit for bit."""
        env, oracle = make(five_env_fns(zoo.Counter), "restart"), make_oracle(five_env_fns(zoo.Counter), "restart")
        for each in (env, oracle):
            each.reset(seed=2)
        arguments: Any
        for arguments in ({"num_steps": 11}, {"num_episodes": 7, "id": [4, 0, 2]}):
            assert_same(vars(oracle.rollout(_counting, **arguments)), vars(env.rollout(_counting, **arguments)))
            assert_same(list(oracle.step(ONES)), list(env.step(ONES)))

    def test_calls_equal_those_of_the_oracle(self, make: Make, make_oracle: Make) -> None:
        """Results of env methods, values of env attributes, and frames equal those in the mode ``dummy``.

        This holds even for the methods and attributes of wrapped envs.
        """
        records = []
        for env in (make_oracle(five_env_fns(zoo.wrapped_toolbox)), make(five_env_fns(zoo.wrapped_toolbox))):
            env.reset()
            records.append(AnswerRecord(overwrites=env.para_mode != "dummy"))
            for name, *arguments in _CALLS:
                records[-1].add(f"{name} {str(arguments)[:60]}", getattr(env, name)(*arguments))
        records[1].assert_equals(records[0])

    def test_calls_affect_only_the_envs_in_id(self, make: Make, tmp_path: Path) -> None:
        """Each env in ``id`` is called once, and no other env is called."""
        env = make(five_env_fns(zoo.Witness, str(tmp_path)))
        env.reset()
        env.reset([3, 0])
        env.step([1, 1], [1, 3])
        expected = [["reset"], ["stepped"], [], ["reset", "stepped"], []]
        assert _read_records(tmp_path) == [["made", "reset", *more] for more in expected]

    # ---------------------------------------------------------------- ownership

    def test_results_of_different_envs_share_no_objects(self, make: Make) -> None:
        """Results share no objects even if the envs themselves do."""
        env = make(five_env_fns(zoo.Toolbox), num_cpus=1)
        env.reset()
        infos = env.step(ONES).infos
        infos[0]["list"].append(3)
        infos[1]["array"][:] = 7
        assert [len(info["list"]) for info in infos] == [3, 2, 2, 2, 2]
        assert [info["array"].tolist() for info in infos[[0, 2]]] == [[0, 0]] * 2

    def test_values_kept_by_envs_are_independent_of_the_caller(self, make: Make) -> None:
        """Each env writes into its own copy of the arguments, which does not change when the caller's arguments do."""
        env = make(five_env_fns(zoo.Toolbox))
        value = [1]
        env.set_env_attr("box", values=[value] * NUM_ENVS)
        value.append(2)
        env.get_env_attr("box")[0].append(3)
        assert env.get_env_attr("box") == [[1]] * NUM_ENVS
        one: dict[str, Any] = {"items": [0], "array": np.ones(3)}
        given = (one, [one, copy.deepcopy(one)])
        before = copy.deepcopy(given)
        assert env.customized_method("spoil", given[0]) == [2] * NUM_ENVS
        assert env.customized_method("spoil", given[1], [3, 1]) == [2, 2]
        assert_same(before, given)
        one["items"].append(4)
        env.customized_method("own_box")[2].append("mine")
        assert env.get_env_attr("box") == [[0, number] for number in range(NUM_ENVS)]

    def test_uncopyable_argument_is_refused(self, make: Make) -> None:
        """An argument that cannot be copied raises an error before anything is sent to a worker."""
        env = make(five_env_fns(zoo.Toolbox))
        stream = (item for item in range(1))
        with pytest.raises(errors.UnpicklableError, match=r"env 4.*generator"):
            env.set_env_attr("box", values=["new", "new", "new", "new", stream])
        with pytest.raises(errors.UnpicklableError, match="env 3"):
            env.customized_method("name", [{}, {"prefix": stream}], [0, 3])
        assert env.get_env_attr("box") == [None] * NUM_ENVS
        assert env.get_env_attr("notes") == [[]] * NUM_ENVS

    def test_shared_arrays_are_read_only_and_keep_their_values(self, make: Make) -> None:
        """Shared arrays keep their values when the caller changes the originals and when envs are rebuilt."""
        arrays: dict[str, Array] = {
            "table": np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::-1],
            "nothing": np.zeros((0, 2)),
            "number": np.array(2.5),
            "words": np.array(["some", "thing"]),
        }
        before = {name: array.copy() for name, array in arrays.items()}
        env = make([zoo.InfoEnv] * NUM_ENVS, shared=arrays)
        assert_same(before, arrays)
        arrays["table"][:] = 0
        assert_same([before] * NUM_ENVS, env.customized_method("look"))
        env.restart()
        assert_same([before] * NUM_ENVS, env.customized_method("look"))

    def test_get_worker_info_works_in_every_env_method(self, make: Make) -> None:
        """`get_worker_info` works in an env's constructor, ``reset``, ``step`` and other methods.

        Envs in the same worker get different worker infos.
        """
        env = make([zoo.InfoEnv] * NUM_ENVS, "restart", seed=20)
        env.reset()
        env.step(ONES)
        told = env.customized_method("ask")
        assert get_worker_info() is None
        workers = [one["made"][2] for one in told]
        assert workers == sorted(workers)
        assert set(workers) == set(range(env.num_workers))
        for env_id, one in enumerate(told):
            place = (env_id, NUM_ENVS, workers[env_id], env.num_workers, 20 + env_id)
            assert one == {"made": place, "reset": place, "step": place, "asked": place, "in a thread": None}

    def test_printed_lines_are_shown(self, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
        """Lines that an env prints have been shown by the time the `ParallelEnv` is closed."""
        with make(five_env_fns(zoo.Toolbox)) as env:
            env.customized_method("say", {"text": "greetings from"}, [4, 0])
        printed = capfd.readouterr().out  # threads print their line breaks separately
        assert [printed.count(f"greetings from {number}") for number in (0, 4)] == [1, 1]

    # ---------------------------------------------------------------- requests in flight

    def test_each_sent_step_is_received_once(self, make: Make) -> None:
        """``recv`` returns at most ``max_envs`` results, and at least ``min_envs`` if that many are in flight."""
        env = make(five_env_fns(zoo.Counter))
        env.reset()
        env.send(ONES)
        first = env.recv(min_envs=3, max_envs=4).env_ids.tolist()
        assert 3 <= len(first) <= 4
        assert sorted(first + env.recv(min_envs=9).env_ids.tolist()) == [0, 1, 2, 3, 4]
        with pytest.raises(errors.NothingInFlightError):
            env.recv()

    def test_other_calls_are_possible_while_steps_are_in_flight(self, make: Make) -> None:
        """A call during a step sees the env as it is after the step, and the results of the two are not mixed up."""
        env = make(five_env_fns(zoo.Sleeper))
        env.reset()
        env.send([10, 0, 0, 0, 10])
        assert env.customized_method("nap", {"sleep": 0.0, "answer": "a"}, [4, 3]) == ["a4", "a3"]
        assert env.get_env_attr("count", [0, 2, 4]) == [1, 1, 1]
        assert {env_id: landed[0][0] for env_id, landed in drain(env).items()} == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}

    def test_large_messages_do_not_block_each_other(self, make: Make) -> None:
        """One worker gets five commands, each larger than a pipe's buffer, and returns equally large results."""
        env = make(five_env_fns(zoo.Ragged), num_cpus=1)
        env.reset(seed=1)
        large = [np.full(50_000, float(number)) for number in range(NUM_ENVS)]
        for number in range(NUM_ENVS):
            env.send([large[number]], number)
        landed = drain(env)
        for number in range(NUM_ENVS):
            assert_same(large[number], landed[number][3]["action"])

    def test_many_small_messages_do_not_block_each_other(self, make: Make) -> None:
        """One worker gets more commands than a pipe holds, and executes each, before the caller waits for a result."""
        env = make(five_env_fns(zoo.Counter), num_cpus=1)
        env.reset()
        for _ in range(600):
            env.send_reset()  # drops the reset before
        assert env.recv(min_envs=NUM_ENVS).states[:, 1].tolist() == [0] * NUM_ENVS
        assert env.get_env_attr("episode") == [601] * NUM_ENVS

    def test_no_env_starves(self, make: Make) -> None:
        """Results of all envs are received, even if each env gets a new action as soon as its result is received."""
        env = make(five_env_fns(zoo.Counter), "restart", num_cpus=NUM_ENVS)
        env.reset()
        env.send(ONES)
        counts = np.zeros(NUM_ENVS, np.int64)
        while counts.min() < 3 and counts.sum() < 5000:  # the OS decides which workers get a core
            (env_id,) = env.recv(1, 1).env_ids
            counts[env_id] += 1
            env.send([1], env_id)
        assert counts.min() >= 3, counts

    def test_arecv_can_be_awaited_and_cancelled(self, make: Make) -> None:
        """Other asyncio tasks run while ``arecv`` waits, and no result is lost if ``arecv`` is cancelled."""
        env = make(five_env_fns(zoo.Sleeper), num_cpus=NUM_ENVS)
        env.send_reset()

        async def receive() -> list[int]:
            received: list[int] = (await env.arecv(NUM_ENVS)).env_ids.tolist()
            env.send([0, 0, 0, 30, 0])
            waiting = asyncio.ensure_future(env.arecv(NUM_ENVS))
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # already finished if the caller runs the envs
                received += (await waiting).env_ids.tolist()
            while len(received) < 2 * NUM_ENVS:
                received += (await env.arecv(max_envs=1)).env_ids.tolist()
            with pytest.raises(errors.NothingInFlightError):
                await env.arecv()
            return received

        assert sorted(asyncio.run(receive())) == sorted(2 * list(range(NUM_ENVS)))

    # ---------------------------------------------------------------- timeouts and interrupts

    def test_step_can_be_received_after_timeout(self, make: Make, tmp_path: Path) -> None:
        """When ``recv`` times out, it raises an error, and no result is lost."""
        gate, is_late = tmp_path / "gate", False
        env = make(five_env_fns(zoo.Gated, str(gate), zoo.place()))
        env.reset()
        env.send([0, 1, 0, 0, 0])
        received: list[int] = []
        try:
            while len(received) < NUM_ENVS:
                received += env.recv(timeout=0.1).env_ids.tolist()
        except errors.WorkerTimeoutError:
            is_late = True
        gate.mkdir()
        received += drain(env, timeout=30)
        assert sorted(received) == [0, 1, 2, 3, 4]
        assert env.step([0] * NUM_ENVS).states[:, 1].tolist() == [2] * NUM_ENVS
        assert env.get_env_attr("has_waited", 1) == [is_late]

    def test_late_result_is_never_returned_by_a_later_call(self, make: Make, tmp_path: Path) -> None:
        """When a call to ``customized_method`` times out, it raises an error, and its result is dropped later."""
        gate, is_late = tmp_path / "gate", False
        env = make(five_env_fns(zoo.Gated, str(gate), zoo.place()), timeout=0.8)
        calls = [{"answer": "late", "waits": number == 1} for number in range(NUM_ENVS)]
        try:
            assert env.customized_method("pass_gate", calls) == [f"late{number}" for number in range(NUM_ENVS)]
        except errors.WorkerTimeoutError:
            is_late = True
        gate.mkdir()
        for _ in range(20):
            with contextlib.suppress(errors.WorkerTimeoutError):
                answers = env.customized_method("pass_gate", {"answer": "new"})
                assert answers == [f"new{number}" for number in range(NUM_ENVS)]
                assert env.get_env_attr("has_waited", 1) == [is_late]
                return
        raise AssertionError("An env that no longer had to wait did not return within 16 s.")

    @pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals between processes here")
    def test_envs_are_usable_after_an_interrupt(self, make: Make, make_oracle: Make) -> None:
        """After an interrupt, ``step()`` raises an error until ``recv()`` has returned the results in flight.

        After that, ``reset()`` and ``step()`` work as usual.
        """
        if threading.current_thread() is not threading.main_thread():
            pytest.skip("interrupts come to the main thread only")
        env, oracle = make(five_env_fns(zoo.Interrupter)), make_oracle(five_env_fns(zoo.Interrupter))
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step([0, os.getpid(), 0, 0, 0])
        with pytest.raises(errors.EnvBusyError, match=r"recv\(min_envs="):
            env.step([0] * NUM_ENVS)
        expected = list(range(NUM_ENVS))
        try:
            received = list(drain(env, min_envs=NUM_ENVS))
        except errors.EnvInterruptedError as error:  # the caller itself was stepping the env
            received = error.partial.env_ids.tolist()  # type: ignore[attr-defined]
            expected.remove(1)
        assert sorted(received) == expected
        assert_same(oracle.reset(seed=2), env.reset(seed=2))
        assert_same(oracle.step([0] * NUM_ENVS).rewards, env.step([0] * NUM_ENVS).rewards)

    # ---------------------------------------------------------------- failures and deaths

    def test_failed_step_does_not_affect_other_envs(self, make: Make, make_oracle: Make) -> None:
        """The results of the other envs are in ``error.partial``, and all envs can be stepped again."""
        env, oracle = make(_failing_env_fns("step", [2])), make_oracle(_failing_env_fns("", []))
        for one in (env, oracle):
            one.reset(seed=1)
            one.step(ONES)
        with pytest.raises(zoo.TroubleError, match="step of 2") as caught:
            env.step(ONES)
        assert caught.value.number == 2
        assert "env 2 in step" in _notes(caught.value)
        assert "raise TroubleError(self.number, where)" in "".join(traceback.format_exception(caught.value))
        expected, found = oracle.step(ONES), caught.value.partial  # type: ignore[attr-defined]
        assert found.env_ids.tolist() == [0, 1, 3, 4]
        assert_same(expected.states[[0, 1, 3, 4]], found.states)
        assert_same(expected.rewards[[0, 1, 3, 4]], found.rewards)
        assert env.step(ONES).states[:, 1].tolist() == [3] * NUM_ENVS

    def test_failed_reset_does_not_affect_other_envs(self, make: Make) -> None:
        """The other envs can be stepped, and the env whose reset failed can be reset again."""
        env = make(_failing_env_fns("reset", [1]))
        with pytest.raises(zoo.TroubleError, match="reset of 1") as caught:
            env.reset()
        assert "env 1 in reset" in _notes(caught.value)
        assert env.step([1] * 4, [0, 2, 3, 4]).states[:, 1].tolist() == [1] * 4
        env.reset(1)
        assert env.step([1], 1).states[0, :2].tolist() == [1, 1]

    @pytest.mark.parametrize(
        ("method", "data", "types"),
        [
            ("method", {"kind": "plain"}, zoo.TroubleError),
            ("method", {"kind": "uncopyable"}, (zoo.TroubleError, errors.EnvError)),  # `EnvError` if it is sent
            ("method", {"kind": "exit"}, errors.EnvError),  # `SystemExit` would end the caller's program
            ("uncopyable", {"only": 3}, errors.UnpicklableError),  # the return value is uncopyable
        ],
    )
    def test_failed_method_does_not_affect_other_envs(self, method: str, data: object, types: Any, make: Make) -> None:
        """The exception keeps its type if it can be copied. ``error.partial`` has the results of the other envs."""
        env = make(_failing_env_fns("method", [3]))
        with pytest.raises(types) as caught:
            env.customized_method(method, data)
        assert "env 3" in _notes(caught.value)
        if isinstance(caught.value, errors.EnvError):
            assert ("SystemExit" if data == {"kind": "exit"} else "TroubleError") in str(caught.value)
        assert caught.value.partial == {0: 0, 1: 1, 2: 2, 4: 4}
        assert env.customized_method("method", id=[4, 0]) == [4, 0]

    def test_failed_constructor_closes_envs_already_made(self, make: Make, tmp_path: Path) -> None:
        """If an env's constructor fails, envs already made are closed, in the same worker and in other workers."""
        env_fns = _failing_env_fns("init", [1])
        env_fns[0], env_fns[4] = five_env_fns(zoo.Witness, str(tmp_path))[::4]
        with pytest.raises(zoo.TroubleError) as caught:
            make(env_fns)
        assert "env 1" in _notes(caught.value)
        assert _read_records(tmp_path) == [["made", "closed"]] * 2

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signals between processes here")
    def test_death_of_worker_raises_worker_died_error(self, make: Make) -> None:
        """Envs of other workers remain usable; `restart` rebuilds the envs of the dead worker."""
        env = make(five_env_fns(zoo.Sleeper))
        env.reset()
        first, last = env.customized_method("process", id=[0, 4])
        if first == os.getpid():
            pytest.skip("the envs of this mode live in the caller's process")
        os.kill(last, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(errors.WorkerDiedError, match="env") as caught:
            env.step([0] * NUM_ENVS)
        assert time.monotonic() - began < _PATIENCE
        assert 4 in caught.value.env_ids
        if first != last:
            assert env.get_env_attr("number", 0) == [0]
        assert 4 in env.restart(4)
        env.reset()
        assert env.step([0] * NUM_ENVS).states[:, :2].tolist() == [[number, 1] for number in range(NUM_ENVS)]

    # ---------------------------------------------------------------- close

    def test_close_closes_each_env_once(self, make: Make, tmp_path: Path) -> None:
        """Errors that envs raise in ``close`` are not reported, and `ParallelEnv.close` may be called again."""
        env = make(five_env_fns(zoo.Witness, str(tmp_path)))
        assert not env.closed
        env.close()
        assert env.closed
        env.close()
        assert _read_records(tmp_path) == [["made", "closed"]] * NUM_ENVS

    def test_close_works_while_a_step_is_in_flight(self, make: Make, tmp_path: Path) -> None:
        """`ParallelEnv.close` closes the envs even while a step is in flight."""
        env = make([*five_env_fns(zoo.Sleeper)[:4], partial(zoo.Witness, 4, str(tmp_path))])
        env.reset()
        env.send([20, 0, 0, 0, 1])
        began = time.monotonic()
        env.close()
        assert time.monotonic() - began < _PATIENCE
        assert _read_records(tmp_path)[0][-1] == "closed"

    def test_unreferenced_env_is_closed_by_garbage_collection(self, tmp_path: Path) -> None:
        """No call to `ParallelEnv.close` is needed."""
        options: Any = {"num_cpus": 2, **self.backend_options}
        env = ParallelEnv(five_env_fns(zoo.Witness, str(tmp_path)), self.para_mode, **options)
        env.reset()
        del env
        gc.collect()
        assert [lines[-1] for lines in _read_records(tmp_path)] == ["closed"] * NUM_ENVS


def _maker(para_mode: ParaMode, options: Mapping[str, object]) -> Iterator[Make]:
    with contextlib.ExitStack() as made:  # closes every env, even if closing another one raises an error

        def make(envs: Sequence[object], asynchronous: Any = None, **kwargs: object) -> ParallelEnv:
            arguments: Any = {"num_cpus": 2, **options, **kwargs}
            return made.enter_context(ParallelEnv(envs, para_mode, asynchronous, **arguments))

        yield make


def _counting(states: State, rnn_state: Array | None, done: Array) -> tuple[Array, Array, dict[str, Array]]:
    """A policy whose recurrent state counts the steps of each episode.

    The action depends on this count, and the count is also returned as an extra.
    """
    count = np.where(done, 0, 0 if rnn_state is None else rnn_state)
    return (count + states[:, 0].astype(np.int64)) % 5, count + 1, {"count": count}


def _failing_env_fns(where: str, numbers: Sequence[int]) -> list[EnvFn]:
    """Return five env fns. Envs whose number is in ``numbers`` raise an error in ``where``. See `zoo.FailingEnv`."""
    return [partial(zoo.FailingEnv, number, where if number in numbers else "") for number in range(NUM_ENVS)]


def _notes(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))


def _read_records(folder: Path) -> list[list[str]]:
    return [path.read_text().split() for path in sorted(folder.iterdir())]


# ---------------------------------------------------------------- playing a fixed sequence of calls


class Actions:
    """Draws actions that depend only on the envs' spaces and the seed."""

    def __init__(self, env: ParallelEnv, seed: int) -> None:
        self._spaces = [copy.deepcopy(space) for space in env.action_spaces]
        self._common = env.single_action_space
        self._chance = np.random.default_rng(seed)
        for space in self._spaces:
            if space is not None:
                space.seed(int(self._chance.integers(1000)))

    def draw(self, env_ids: Sequence[int], *, batched: bool = False) -> Action:
        """Return a list of one action per env.

        With ``batched``, if all envs share an action space other than ``Text``, return a single batched action instead,
        as Gymnasium's vector envs expect.
        """
        spaces = [self._spaces[env_id] for env_id in env_ids]
        drawn = [float(self._chance.normal()) if space is None else space.sample() for space in spaces]
        space = self._common
        if batched and drawn and space is not None and not isinstance(space, gymnasium.spaces.Text):
            empty: Any = create_empty_array(space, len(drawn))
            return concatenate(space, drawn, empty)
        return drawn


class AnswerRecord:
    """The results of calls, and a copy of each result, which is made when the result is added.

    With ``overwrites``, every third result is overwritten after it has been copied. Users may do this too, so it must
    not affect later results.
    """

    def __init__(self, *, overwrites: bool = False) -> None:
        self._overwrites = overwrites
        self._kept: dict[str, object] = {}
        self._copies: dict[str, object] = {}

    def add(self, call: str, answer: object) -> None:
        """Add the result of a call."""
        label, answer = f"{len(self._copies)}: {call}", items(answer)
        self._copies[label] = copy.deepcopy(answer)
        if self._overwrites and len(self._copies) % 3 == 0:
            _overwrite(answer)
        else:
            self._kept[label] = answer

    def check_unchanged(self, context: str = "") -> None:
        """Fail if a result has changed since it was added."""
        copies = {label: self._copies[label] for label in self._kept}
        assert_same(copies, self._kept, f"{context}an earlier result, ")

    def assert_equals(self, expected: AnswerRecord, context: str = "") -> None:
        """Fail if the results differ from those of ``expected``."""
        assert_same(expected._copies, self._copies, f"{context}result ")


def _overwrite(value: object) -> None:
    if isinstance(value, np.ndarray) and value.dtype != object:
        value.fill(value.dtype.type(1))
    elif isinstance(value, (dict, list, tuple, np.ndarray)):
        for child in list(value.values()) if isinstance(value, dict) else value:
            _overwrite(child)
    if isinstance(value, dict):
        value["overwritten"] = True
    if isinstance(value, list):
        value.append("overwritten")


def items(answer: object) -> object:
    """Return a dict of all fields if a result is a `StepResult` or `StepBatch`; return any other result unchanged."""
    if not isinstance(answer, (StepResult, StepBatch)):
        return answer
    names = ("states", "rewards", "dones", "infos") if isinstance(answer, StepResult) else ()
    parts = dict(zip(names, answer, strict=True)) if names else {"batch": list(answer)}
    return {**parts, **{name: getattr(answer, name) for name in ("terminated", "truncated", "env_ids", "restarted")}}


def assert_same(expected: object, found: object, where: str = "") -> None:
    """Fail unless two values are equal bit for bit; the message says where they first differ."""
    first = difference(expected, found, where)
    if first is not None:
        raise AssertionError(f"{first} (expected against found)")


_ID_FORMS: Sequence[Any] = (
    None,
    3,
    [4, 0],
    None,
    (1, 2, 3),
    np.array([2, 0, 4]),
    np.int64(2),
    slice(1, None, 2),
    None,
    np.array([False, True, True, False, True]),
    slice(None, None, -1),
    [],
    None,
)
"""Every form of ``id``, in an order in which all envs make progress."""


def play(env: ParallelEnv, seed: int = 3, *, overwrites: bool = False) -> AnswerRecord:
    """Make a fixed sequence of calls to ``env`` and return their results."""
    record = AnswerRecord(overwrites=overwrites)
    actions = Actions(env, seed)
    record.add("spaces", [*env.observation_spaces, *env.action_spaces])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium's own envs warn about steps after the end of an episode
        record.add("reset", env.reset(seed=seed))
        record.add("reset_infos", env.reset_infos)
        for turn, form in enumerate(_ID_FORMS):
            selected: Any = slice(None) if form is None else list(form) if isinstance(form, tuple) else form
            env_ids = np.atleast_1d(np.arange(NUM_ENVS)[selected]).tolist()
            action = actions.draw(env_ids, batched=turn % 3 == 1)
            align: Align = "item" if turn % 2 else "batch"
            record.add(f"step, id={form}, {align=}", env.step(action, form, align))
            record.add("done", [env.done, env.has_done(), env.all_done()])
            if turn % 5 == 4:
                over = np.flatnonzero(env.done)[::-1].tolist()
                record.add(f"reset, id={over}", env.reset(over, seed=[turn + env_id for env_id in over]))
                record.add("reset_infos", [env.reset_infos, env.done])
        options = [None if space is None else {"level": 3} for space in env.observation_spaces]  # not for `Old`
        env.send_reset(seed=[5, None, 7, 8, 9], options=options)
        record.add("sent reset", drain(env))
        record.add("reset_infos", env.reset_infos)
        for ids in ([1, 3], [4, 0, 2]):
            env.send(actions.draw(ids), ids)
        env.send_reset([3, 0], seed=9)  # drops the steps of envs 3 and 0; those of the others stay in flight
        record.add("reset", env.reset([4], seed=6))
        record.add("send and recv", drain(env, max_envs=2))
        record.add("step", env.step(actions.draw(range(NUM_ENVS))))
    record.add("number", env.get_env_attr("number", default="absent"))
    return record


def drain(env: ParallelEnv, **arguments: Any) -> dict[int, Any]:
    """Receive results until nothing is in flight.

    Returns:
        A dict that maps the id of each env whose results were received to its latest state, reward, done, info,
        terminated and truncated.
    """
    landed: dict[int, Any] = {}
    while True:
        try:
            batch = env.recv(align="batch", **arguments)
        except errors.NothingInFlightError:
            return landed
        for row, env_id in enumerate(batch.env_ids.tolist()):
            landed[env_id] = (*batch[row], bool(batch.terminated[row]), bool(batch.truncated[row]))
