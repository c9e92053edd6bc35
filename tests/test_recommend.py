"""The choice of ``para_mode="auto"`` from given times, and its reason."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from modes import ORACLE, PROCESSES, THREADS
from test_env_rng import Chances
from test_trial import Witness

from parallelenv import ParallelEnv, recommend, registry
from parallelenv.__main__ import main
from parallelenv.autotune import recommend as recommending
from parallelenv.autotune.recommend import Candidate, Recommendation, Trial
from parallelenv.errors import ArgumentError, InvalidEnvError
from parallelenv.results import difference
from parallelenv.testing.contract import items

US, MS = 1e-6, 1e-3


@dataclass(frozen=True)
class Kind:
    """An env on an ideal machine: seconds of a step, of computing in it, and of making one."""

    step: float
    compute: float
    releases_gil: bool = False
    making: float = 0.0

    def seconds(self, num_envs: int, candidate: Candidate, cores: int, busy: float) -> float:
        """Return the seconds of a step of all envs."""
        workers, share = candidate.workers, -(-num_envs // candidate.workers)
        if candidate.mode == ORACLE:
            return busy + 10 * US + num_envs * self.step
        if candidate.mode == THREADS and not self.releases_gil:
            return busy + 50 * US + 31 * US * workers + num_envs * self.step
        slower = 1.5 if busy and workers >= cores else 1.0  # a worker shares its core with the caller
        work = max(share * self.step, num_envs * self.compute / min(workers, cores)) * slower
        call = {THREADS: 50 * US + 31 * US * workers, PROCESSES: 20 * US + 8 * US * (workers - len(candidate.options))}
        return max(busy, call[candidate.mode] + work)


BRIEF = Kind(5 * US, 5 * US)
SHORT = Kind(100 * US, 100 * US)
LONG = Kind(1 * MS, 1 * MS)
RELEASING = replace(LONG, releases_gil=True)
WAITING = Kind(5 * MS, 20 * US, releases_gil=True)
WAITING_WITH_LOCK = replace(WAITING, releases_gil=False)
SLOW = Kind(10.0, 10.0)
SLOW_WAITING = Kind(10.0, 0.0, releases_gil=True)
SLOW_TO_MAKE = replace(SHORT, making=5.0)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let trials find the times of a kind of env; return the pools that they open."""

    def pretend(kind: Kind, cores: int = 2) -> list[str]:
        opened: list[str] = []

        def open_pool(self: Trial, candidate: Candidate) -> Any:
            opened.append(name(candidate))
            busy = self._busy
            seconds = kind.seconds(len(self.factories), candidate, cores, busy)
            closing = SimpleNamespace(close=lambda: None)
            figures = {"seconds": seconds, "mean": lambda: seconds, "speedup": lambda loop: loop.seconds / seconds}
            return SimpleNamespace(time=lambda: None, env=closing, **figures)

        monkeypatch.setattr(Trial, "_first_steps", lambda self: (kind.making, kind.step, kind.compute))
        monkeypatch.setattr(Trial, "_open", open_pool)
        monkeypatch.setattr(Trial, "run", Trial.run_here)  # not in another process
        monkeypatch.setattr(recommending, "usable_cores", lambda: cores)
        return opened

    return pretend


def name(candidate: Candidate | Recommendation) -> str:
    workers = candidate.workers if isinstance(candidate, Candidate) else candidate.num_cpus
    return " ".join([candidate.mode, str(workers), *candidate.options])


Pretend = Callable[..., list[str]]


# -------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("kind", "num_envs", "cores", "options", "label"),
    [
        (BRIEF, 4, 2, {}, "dummy 1"),
        (BRIEF, 16, 2, {}, "subproc 2 caller_steps"),
        (BRIEF, 256, 2, {}, "subproc 2"),
        (BRIEF, 64, 64, {}, "subproc 8 caller_steps"),
        (LONG, 1, 2, {}, "dummy 1"),
        (LONG, 64, 16, {}, "subproc 16"),
        (LONG, 16, 8, {"num_cpus": 3}, "subproc 3"),
        (LONG, 16, 2, {"num_cpus": 1}, "dummy 1"),
        (RELEASING, 16, 4, {}, "thread 4"),
        (WAITING, 16, 2, {}, "thread 16"),
        (WAITING, 16, 2, {"num_cpus": 5}, "thread 5"),
        (WAITING, 1000, 2, {}, f"thread {recommending.MOST_WORKERS}"),
        (WAITING_WITH_LOCK, 16, 2, {}, "subproc 16"),
        (SLOW, 16, 2, {}, "subproc 2"),
        (SLOW_WAITING, 16, 2, {}, "thread 16"),
        (SLOW_TO_MAKE, 16, 2, {}, "subproc 2"),
        (replace(BRIEF, making=5.0), 16, 2, {}, "subproc 2"),
        # a busy caller keeps a core
        (BRIEF, 2, 2, {"caller_busy": True}, "dummy 1"),
        (LONG, 1, 2, {"caller_busy": True}, "subproc 1"),
        (LONG, 16, 2, {"caller_busy": True}, "subproc 1"),
        (LONG, 16, 4, {"caller_busy": True}, "subproc 3"),
    ],
)
def test_fastest_mode_and_number_of_workers_are_chosen(
    kind: Kind, num_envs: int, cores: int, options: dict[str, Any], label: str, pretend: Pretend
) -> None:
    pretend(kind, cores)
    assert name(recommend(["CartPole-v1"] * num_envs, **options)) == label


def test_no_further_pool_is_opened_after_the_time_limit(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = pretend(LONG)
    monkeypatch.setattr(recommending, "_LIMIT", -1.0)
    assert recommend(["CartPole-v1"] * 16).mode == ORACLE
    assert opened == ["dummy 1"]


@pytest.mark.parametrize(("seconds", "mode"), [(15.5 * MS, ORACLE), (15 * MS, THREADS)])
def test_mode_must_be_clearly_faster_than_a_simpler_one(
    seconds: float, mode: str, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(LONG)
    monkeypatch.setattr(Kind, "seconds", lambda _, num_envs, one, *rest: 16 * MS if one.mode == ORACLE else seconds)
    assert recommend(["CartPole-v1"] * 16).mode == mode


# -------------------------------------------------------------------- the recommendation


@pytest.mark.parametrize(
    ("kind", "arguments", "reason"),
    [
        (
            BRIEF,
            {"para_mode": PROCESSES, "num_cpus": 2, "caller_steps": True},
            r"A step takes 5\.62 µs\. 16 envs made 235,000 steps/s in subproc with caller_steps and 2 workers, 211,000 "
            r"in subproc with 2 workers, 178,000 in dummy\. The caller steps some of the envs itself; those .*",
        ),
        (
            WAITING,
            {"para_mode": THREADS, "num_cpus": 16},
            r"A step takes 5 ms, mostly waiting\. 16 envs made 2,880 steps/s in thread with 16 workers, 200 in dummy\.",
        ),
        (
            Kind(1 * US, 1 * US),
            {"para_mode": ORACLE, "num_cpus": 1},
            r"A step takes 1\.62 µs\. 16 envs made 615,000 steps/s in dummy\. No other possible mode can be "
            r"clearly faster\.",
        ),
        (
            SLOW,
            {"para_mode": PROCESSES, "num_cpus": 2},
            r"A step takes 10 s\. 16 envs made 0\.1 steps/s in dummy\. 0\.2 are estimated for subproc with 2 workers, "
            r"which was not tried because these envs are slow\.",
        ),
    ],
)
def test_recommendation_is_one_usable_line(kind: Kind, arguments: Any, reason: str, pretend: Pretend) -> None:
    pretend(kind)
    found = recommend(["CartPole-v1"] * 16)
    assert found.arguments == arguments
    assert re.fullmatch(reason, found.reason)
    assert str(found) == ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + f": {found.reason}"
    assert found.step_cost == pytest.approx(kind.step, abs=1 * US)
    assert found.releases_gil in (None, kind.releases_gil)
    with ParallelEnv(["CartPole-v1"] * 16, **found.arguments) as env:
        assert env.num_workers == found.num_cpus


def test_reason_mentions_copies_of_instances(pretend: Pretend) -> None:
    pretend(LONG)
    assert recommend([Witness() for _ in range(4)]).reason.endswith(" Workers get copies of the instances.")
    assert recommend([Witness()]).reason.endswith(" Copies of them were tried.")


@pytest.mark.parametrize(
    ("envs", "num_cpus", "error", "message"),
    [
        ("CartPole-v1", None, InvalidEnvError, "single env"),
        ([42], None, InvalidEnvError, "42"),
        (["CartPole-v1"], -1, ArgumentError, "num_cpus=-1 must be an int of at least 1"),
    ],
)
def test_recommend_refuses_invalid_arguments(envs: Any, num_cpus: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recommend(envs, num_cpus=num_cpus)


@pytest.mark.parametrize(("kind", "mode"), [(LONG, ORACLE), (RELEASING, THREADS)])
def test_unpicklable_envs_get_an_in_process_mode(kind: Kind, mode: str, pretend: Pretend) -> None:
    pretend(kind)
    lock = threading.Lock()

    def make() -> Witness:
        with lock:
            return Witness()

    text = r"processes cannot be used: they cannot be pickled \(TypeError: cannot"
    with pytest.warns(UserWarning, match=text) if mode == ORACLE else contextlib.nullcontext():
        found = recommend([make] * 16)
    assert found.mode == mode
    assert (mode == ORACLE) == bool(re.search(text, found.reason))


def test_recommend_starts_no_process_in_a_daemonic_one(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(LONG)
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    env = Witness()
    for envs in (["CartPole-v1"] * 16, [env]):
        with pytest.warns(UserWarning, match="this is a daemonic process of multiprocessing"):
            recommend(envs)
    assert env.notes == ["made"]


# -------------------------------------------------------------------- para_mode="auto"


@pytest.mark.parametrize("source", ["CartPole-v1", Witness])
def test_trial_of_auto_mode_does_not_change_results(source: Any) -> None:
    def play(mode: str) -> list[Any]:
        with ParallelEnv([source] * 16, mode, "restart") as env:
            assert (env.recommendation is None) == (mode == ORACLE)
            return [env.reset(seed=7), *(items(env.step([number % 2] * 16)) for number in range(20))]

    assert difference(play(ORACLE), play(registry.AUTO)) is None


class Torched(Witness):
    def step(self, action: Any) -> Any:
        sys.modules["torch"].default_generator.random()
        return super().step(action)


def test_trial_of_auto_mode_does_not_advance_global_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Chances(0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(default_generator=generator))
    state = generator.get_state()
    with pytest.warns(UserWarning, match="KeyError: 'torch'"):  # other processes have no such module
        recommend([Torched] * 2)
    assert generator.get_state() == state


def test_auto_mode_uses_and_shows_the_recommendation(pretend: Pretend) -> None:
    pretend(BRIEF)
    with ParallelEnv(["CartPole-v1"] * 16, "auto", "restart") as env:
        assert (env.para_mode, env.asynchronous) == (PROCESSES, "restart")
        begin = "<parallelenv.ParallelEnv of 16 envs, para_mode='auto' (subproc, caller_steps), asynchronous="
        assert repr(env).startswith(begin)
        assert "\n" not in repr(env)
    assert env.recommendation is not None  # after close too
    assert env.recommendation.label == "subproc, caller_steps"
    pretend(LONG)
    for options, num_workers in ({"caller_busy": True}, 1), ({"num_cpus": 5}, 3):  # a busy caller keeps a core
        with ParallelEnv(["CartPole-v1"] * 3, "auto", **options) as env:
            assert env.num_workers == num_workers


@pytest.mark.parametrize("kind", [RELEASING, SLOW_WAITING])
def test_auto_mode_with_seed_globals_never_chooses_threads(kind: Kind, pretend: Pretend) -> None:
    pretend(kind)
    with ParallelEnv([Witness] * 4, "auto", num_cpus=2, seed_globals=True) as env:
        assert env.para_mode == PROCESSES
        assert env.recommendation is not None
        assert "Threads cannot be used: they share the generators of which seed_globals=" in env.recommendation.reason


def test_auto_mode_refuses_restarts_of_instances_before_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recommending, "choose", Mock(side_effect=AssertionError))
    with pytest.raises(InvalidEnvError, match="env 0 was given as a live instance, .*Give an env fn"):
        ParallelEnv([Witness()], "auto", on_failure="restart")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"start_method": "fork"},
            r"start_method='fork' is not an option of para_mode='auto', which only accepts caller_busy, because other "
            r"options depend on the mode that it chooses\. Give that mode, which recommend\(envs\) returns\.",
        ),
        ({"caller_steps": True}, "caller_steps=True is not an option of para_mode='auto'"),
        ({"caller_busy": "yes"}, "caller_busy='yes' must be True or False"),
        (
            {"num_gpus": 0.5},
            r"num_gpus=0\.5 is not possible with para_mode='auto': only Ray's workers can have GPUs, and 'auto' never "
            r"chooses Ray\. Give para_mode='ray', or leave num_gpus at 0\.",
        ),
    ],
)
def test_auto_refuses_options_of_only_some_modes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ParallelEnv(["CartPole-v1"], "auto", **arguments)


def test_unknown_mode_error_lists_auto() -> None:
    with pytest.raises(ArgumentError, match=r"para_mode='auot' is not known.*'auto'\)\. Did you mean 'auto'\?"):
        ParallelEnv(["CartPole-v1"], "auot")
    assert registry.AUTO not in registry.known_modes()


def test_recommend_command_prints_recommendations(pretend: Pretend, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(LONG)
    assert main(["recommend", "CartPole-v1", "Acrobot-v1", "--num-envs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["CartPole-v1:", "Acrobot-v1:"]
    assert all("para_mode='subproc', num_cpus=2: A step takes 1 ms" in line for line in lines)
    assert main(["recommend", "CartPole-v1", "--num-cpus", "1"]) == 0
    assert "para_mode='dummy'" in capsys.readouterr().out
    assert main(["recommend", "NoSuchEnv-v0"]) == 2
