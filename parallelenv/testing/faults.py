"""Tests of failures and of `close`."""

from __future__ import annotations

import gc
import os
import signal
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallelenv.env import ParallelEnv
from parallelenv.errors import ClosedError, EnvError, WorkerDiedError
from parallelenv.testing.base import Contract, Make
from parallelenv.testing.envs import Counter
from parallelenv.testing.odd_envs import (
    FailingEnv,
    KeywordTroubleError,
    Sleeper,
    TroubleError,
    UncopyableError,
    Witness,
)
from parallelenv.testing.scenario import NUM_ENVS, assert_same, five_env_fns

ONES = [1] * NUM_ENVS
_PATIENCE = 10.0  # seconds


def failing_env_fns(where: str, numbers: Sequence[int]) -> list[Any]:
    """Return env fns, some of whose envs raise."""
    return [partial(FailingEnv, number, where if number in numbers else "") for number in range(NUM_ENVS)]


def _notes(error: BaseException) -> str:
    return "".join(getattr(error, "__notes__", ()))


class FaultContract(Contract):
    """A failure in an env keeps its type, names the env and does not affect other envs."""

    def test_failed_step_does_not_affect_other_envs(self, make: Make, make_oracle: Make) -> None:
        """The others' results are in ``error.partial``, and all envs can be stepped again."""
        env, oracle = make(failing_env_fns("step", [2])), make_oracle(failing_env_fns("", []))
        for one in (env, oracle):
            one.reset(seed=1)
            one.step(ONES)
        with pytest.raises(TroubleError) as caught:
            env.step(ONES)
        assert caught.value.number == 2
        assert "env 2 in step" in _notes(caught.value)
        assert 'raise TroubleError(self.number, "step")' in "".join(traceback.format_exception(caught.value))
        expected, found = oracle.step(ONES), caught.value.partial  # type: ignore[attr-defined]
        assert found.env_ids.tolist() == [0, 1, 3, 4]
        assert_same(expected.states[[0, 1, 3, 4]], found.states)
        assert_same(expected.rewards[[0, 1, 3, 4]], found.rewards)
        assert env.step(ONES).states[:, 1].tolist() == [3, 3, 2, 3, 3]

    def test_several_failures_are_raised_as_one_exception_group(self, make: Make) -> None:
        """In one exception group."""
        env = make(failing_env_fns("step", [0, 3]))
        env.reset()
        env.step(ONES)
        env.send(ONES)
        with pytest.raises(BaseExceptionGroup) as caught:
            env.recv(min_envs=NUM_ENVS)
        errors: Any = caught.value.exceptions
        assert sorted(error.number for error in errors) == [0, 3]
        assert sorted(caught.value.partial.env_ids.tolist()) == [1, 2, 4]  # type: ignore[attr-defined]
        assert env.get_env_attr("count") == [1, 2, 2, 1, 2]

    def test_failed_reset_does_not_affect_other_envs(self, make: Make) -> None:
        """The others can be reset and stepped."""
        env = make(failing_env_fns("reset", [1]))
        with pytest.raises(TroubleError) as caught:
            env.reset()
        assert "env 1 in reset" in _notes(caught.value)
        env.reset([0, 2, 3, 4])
        assert env.step([1] * 4, [0, 2, 3, 4]).states[:, 1].tolist() == [1] * 4
        env.set_env_attr("where", "", 1)
        env.reset(1)
        assert env.step([1], 1).states[0, :2].tolist() == [1, 1]

    @pytest.mark.parametrize("kind", ["plain", "keyword", "uncopyable", "exit"])
    def test_failed_method_does_not_affect_other_envs(self, kind: str, make: Make) -> None:
        """Its exception keeps its type; one that cannot be copied is described as text."""
        types: dict[str, Any] = {
            "plain": TroubleError,
            "keyword": KeywordTroubleError,
            "exit": SystemExit,
            "uncopyable": (UncopyableError, EnvError),
        }
        env = make(failing_env_fns("method", [3]))
        with pytest.raises(types[kind]) as caught:
            env.customized_method("method", {"kind": kind})
        assert "env 3 in method()" in _notes(caught.value)
        if kind == "uncopyable":
            assert "UncopyableError" in repr(caught.value)
        assert caught.value.partial == {0: 0, 1: 1, 2: 2, 4: 4}
        assert env.customized_method("method", id=[4, 0]) == [4, 0]

    def test_partial_contains_methods_that_returned_none(self, make: Make) -> None:
        """``error.partial`` has ``None`` for them."""
        env = make(failing_env_fns("quiet", [0]))
        with pytest.raises(TroubleError) as caught:
            env.customized_method("quiet")
        assert caught.value.partial == {1: None, 2: None, 3: None, 4: None}  # type: ignore[attr-defined]

    def test_failed_constructor_closes_envs_already_made(self, make: Make, tmp_path: Path) -> None:
        """Envs already made are closed."""
        env_fns = [
            partial(Witness, 0, str(tmp_path)),
            *failing_env_fns("init", [1])[1:4],
            partial(Witness, 4, str(tmp_path)),
        ]
        with pytest.raises(TroubleError) as caught:
            make(env_fns)
        assert "env 1" in _notes(caught.value)
        for number in (0, 4):
            assert _read_lines(tmp_path / str(number)) == ["made", "closed"]

    @pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signals between processes here")
    def test_death_of_worker_raises_worker_died_error(self, make: Make) -> None:
        """Envs of other workers remain usable; `restart` rebuilds the dead one's."""
        env = make(five_env_fns(Sleeper))
        env.reset()
        first, last = env.customized_method("process", id=[0, 4])
        if first == os.getpid():
            pytest.skip("the envs of this mode live in the caller's process")
        os.kill(last, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match="env") as caught:
            env.step([0] * NUM_ENVS)
        assert time.monotonic() - began < _PATIENCE
        assert 4 in caught.value.env_ids
        if first != last:
            assert env.get_env_attr("number", 0) == [0]
        rebuilt = env.restart(4)
        assert 4 in rebuilt
        env.reset()
        assert env.step([0] * NUM_ENVS).states[:, :2].tolist() == [[number, 1] for number in range(NUM_ENVS)]


class CloseContract(Contract):
    """Tests of `close`."""

    def test_close_closes_each_env_once(self, make: Make, tmp_path: Path) -> None:
        """Errors in closing are not reported, and `close` may be repeated."""
        env = make(five_env_fns(Witness, str(tmp_path)))
        assert not env.closed
        env.close()
        assert env.closed
        env.close()
        assert [_read_lines(tmp_path / str(number)) for number in range(NUM_ENVS)] == [["made", "closed"]] * NUM_ENVS

    def test_every_call_after_close_is_refused(self, make: Make) -> None:
        """Immediately."""
        env = make(five_env_fns(Counter))
        with env:
            env.reset()
        calls: dict[str, tuple[Any, ...]] = {
            "reset": (),
            "seed": (1,),
            "step": (ONES,),
            "send": (ONES,),
            "recv": (),
            "pause": (0,),
            "resume": (),
            "restart": (0,),
            "get_env_attr": ("count",),
            "set_env_attr": ("count", 1),
            "customized_method": ("name",),
            "render": (),
        }
        for name, arguments in calls.items():
            with pytest.raises(ClosedError, match=name):
                getattr(env, name)(*arguments)

    def test_close_does_not_wait_for_a_step(self, make: Make, tmp_path: Path) -> None:
        """Not for long; the envs are closed afterwards."""
        env = make([*five_env_fns(Sleeper)[:4], partial(Witness, 4, str(tmp_path))], num_cpus=2)
        env.reset()
        env.send([20, 0, 0, 0, 1])
        began = time.monotonic()
        env.close()
        assert time.monotonic() - began < _PATIENCE
        assert _read_lines(tmp_path / "4")[-1] == "closed"

    def test_unreferenced_env_is_closed_by_garbage_collection(self, tmp_path: Path) -> None:
        """Without a call of `close`."""
        options = {"num_cpus": 2, **self.backend_options}
        env = ParallelEnv(five_env_fns(Witness, str(tmp_path)), self.para_mode, **options)
        env.reset()
        del env
        gc.collect()
        assert [_read_lines(tmp_path / str(number))[-1] for number in range(NUM_ENVS)] == ["closed"] * NUM_ENVS


def _read_lines(path: Path) -> list[str]:
    return path.read_text().split()
