"""The choice of ``para_mode="auto"``, and its reason. No time is asserted."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from test_measure import Spaceless, Witness

import parallelenv
from parallelenv import ParallelEnv, recommend, registry
from parallelenv.autotune import measure
from parallelenv.autotune import recommend as recommending
from parallelenv.autotune.costs import (
    MOST_WORKERS,
    Candidate,
    EnvMeasurements,
    Resources,
    candidates,
    simplest_of_fastest,
)
from parallelenv.cli import main
from parallelenv.contract.value_difference import difference
from parallelenv.errors import ArgumentError, InvalidEnvError, UnknownModeError, UnknownOptionError

US, MS = 1e-6, 1e-3
BRIEF = EnvMeasurements(5 * US, 5 * US)
LONG = EnvMeasurements(1 * MS, 1 * MS, lock_free=0.0)
RELEASING = EnvMeasurements(1 * MS, 1 * MS, lock_free=1.0)
WAITING = EnvMeasurements(5 * MS, 20 * US, lock_free=1.0)
WAITING_WITH_LOCK = EnvMeasurements(5 * MS, 20 * US, lock_free=0.0)


# -------------------------------------------------------------------- the estimate


@pytest.mark.parametrize(
    ("figures", "resources", "label"),
    [
        (BRIEF, Resources(1, 2), "dummy 1"),
        (BRIEF, Resources(4, 2), "dummy 1"),
        (BRIEF, Resources(16, 2), "subproc 2 caller_steps"),
        (BRIEF, Resources(256, 2), "subproc 2 caller_steps"),
        (LONG, Resources(1, 2), "dummy 1"),
        (LONG, Resources(16, 2), "subproc 2"),
        (LONG, Resources(16, 4), "subproc 4"),
        (LONG, Resources(64, 16), "subproc 16"),
        (LONG, Resources(16, 1), "dummy 1"),
        (LONG, Resources(16, 8, workers=3), "subproc 3"),
        (LONG, Resources(2, 8, workers=3), "subproc 2 caller_steps"),
        (LONG, Resources(16, 2, workers=1), "dummy 1"),
        (LONG, Resources(16, 2, may_leave=False), "dummy 1"),
        (RELEASING, Resources(16, 4), "thread 4"),
        (RELEASING, Resources(16, 4, may_leave=False), "thread 4"),
        (WAITING, Resources(16, 2), "thread 16"),
        (WAITING, Resources(16, 1), "thread 16"),
        (WAITING, Resources(1000, 2), f"thread {MOST_WORKERS}"),
        (WAITING, Resources(16, 2, workers=4), "thread 4"),
        (WAITING_WITH_LOCK, Resources(16, 2), "subproc 16"),
        (WAITING_WITH_LOCK, Resources(16, 2, may_leave=False), "dummy 1"),
    ],
)
def test_estimate_selects_mode_and_number_of_workers(
    figures: EnvMeasurements, resources: Resources, label: str
) -> None:
    best = simplest_of_fastest(candidates(figures, resources))
    assert " ".join([best.mode, str(best.workers), *best.options]) == label


def test_infos_and_texts_increase_the_cost_of_other_processes() -> None:
    silent, talkative = EnvMeasurements(6 * US, 6 * US), EnvMeasurements(6 * US, 6 * US, extra_nbytes=4000)
    assert simplest_of_fastest(candidates(silent, Resources(8, 2))).leaves
    assert not simplest_of_fastest(candidates(talkative, Resources(8, 2))).leaves


def test_large_states_take_longer_in_every_mode() -> None:
    small, large = EnvMeasurements(5 * US, 5 * US, 1.0), EnvMeasurements(5 * US, 5 * US, 1.0, state_nbytes=100_000)
    pairs = list(zip(candidates(small, Resources(16, 2)), candidates(large, Resources(16, 2)), strict=True))
    assert len(pairs) == 4
    assert all(before.seconds < after.seconds for before, after in pairs)


def test_mode_must_be_clearly_faster_than_a_simpler_one() -> None:
    simple = Candidate("simple", 1, 1.04)
    assert simplest_of_fastest([simple, Candidate("quick", 2, 1.0)]) is simple
    assert simplest_of_fastest([simple, Candidate("quick", 2, 0.9)]).mode == "quick"


@pytest.mark.parametrize("figures", [BRIEF, LONG, RELEASING, WAITING, WAITING_WITH_LOCK])
def test_candidates_are_known_modes_without_ray(figures: EnvMeasurements) -> None:
    for candidate in candidates(figures, Resources(16, 2)):
        assert candidate.mode in registry.known_modes()
        assert "ray" not in candidate.mode
        registry.make_backend(candidate.mode, candidate.options)


# -------------------------------------------------------------------- the recommendation


def pretend(monkeypatch: pytest.MonkeyPatch, figures: EnvMeasurements, cores: int = 2) -> None:
    """Let trials return given measurements, on a machine with a given number of cores."""
    monkeypatch.setattr(measure, "measure", lambda *_: figures)
    monkeypatch.setattr(recommending, "usable_cores", lambda: cores)


@pytest.mark.parametrize(
    ("figures", "arguments", "reason"),
    [
        (
            BRIEF,
            {"para_mode": "subproc", "num_cpus": 2, "caller_steps": True},
            r"A step takes 5 µs; a state has 0 bytes\. 2 workers are estimated to be 1\.\d times as fast as a plain "
            r"loop, with 16 envs on 2 cores\. The caller steps a share of the envs itself, which are not isolated .*",
        ),
        (LONG, {"para_mode": "subproc", "num_cpus": 2}, r"A step takes 1 ms and holds the GIL; .* 2 workers are .*"),
        (
            WAITING,
            {"para_mode": "thread", "num_cpus": 16},
            r"A step takes 5 ms, mostly waiting, and releases the GIL; .*\. 16 workers are .* times as fast as .*",
        ),
        (
            EnvMeasurements(1 * US, 1 * US),
            {"para_mode": "dummy", "num_cpus": 1},
            r".* With 16 envs on 2 cores no mode open to them is clearly faster than a plain loop\.",
        ),
    ],
)
def test_recommendation_is_one_line_with_usable_arguments(
    figures: EnvMeasurements, arguments: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, figures)
    found = recommend(["CartPole-v1"] * 16)
    assert found.arguments == arguments
    assert re.fullmatch(reason, found.reason)
    assert str(found) == ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + f": {found.reason}"
    assert (found.step_cost, found.releases_gil) == (figures.step_cost, figures.releases_gil)
    with ParallelEnv(["CartPole-v1"] * 16, **found.arguments) as env:
        assert env.num_hosts == found.num_cpus


def test_reason_mentions_copies_of_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, LONG)
    assert recommend([Witness() for _ in range(4)]).reason.endswith(" Workers get copies of the instances.")
    assert recommend([Witness()]).reason.endswith(" Copies of the instances were tried.")


def test_num_cpus_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, WAITING)
    assert recommend(["CartPole-v1"] * 16, num_cpus=5).num_cpus == 5
    with ParallelEnv(["CartPole-v1"] * 3, "auto", num_cpus=5) as env:
        assert env.num_workers == env.num_hosts == 3
    with pytest.raises(ArgumentError, match="num_cpus=-1 must be an int of at least 1"):
        recommend(["CartPole-v1"], num_cpus=-1)


def test_recommend_refuses_invalid_envs() -> None:
    with pytest.raises(InvalidEnvError, match="single env"):
        recommend("CartPole-v1")
    with pytest.raises(InvalidEnvError):
        recommend([42])


@pytest.mark.parametrize("figures", [LONG, RELEASING])
def test_unpicklable_envs_get_an_in_process_mode(figures: EnvMeasurements, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, figures)
    lock = threading.Lock()

    def make() -> Witness:
        with lock:
            return Witness()

    found = recommend([make] * 16)
    assert found.mode == ("thread" if figures.releases_gil else "dummy")
    if found.mode == "dummy":
        assert "Other processes are out of the question: they do not pickle (TypeError: cannot" in found.reason


def test_recommendation_in_a_daemonic_process_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, LONG)
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    assert "this process is a daemonic one of multiprocessing" in recommend(["CartPole-v1"] * 16).reason
    env = Witness()
    assert "this process is a daemonic one of multiprocessing" in recommend([env]).reason
    assert env.notes == ["made"]


def test_recommend_is_public() -> None:
    assert {"recommend", "Recommendation"} <= set(parallelenv.__all__)
    assert isinstance(recommend([Spaceless]), parallelenv.Recommendation)


# -------------------------------------------------------------------- para_mode="auto"


def play(env: ParallelEnv) -> list[Any]:
    answers = [env.reset(seed=7)]
    for number in range(20):
        result = env.step([number % 2] * len(env))
        answers.append((result.states, result.rewards, result.terminated, result.truncated, list(result.infos)))
    return answers


@pytest.mark.parametrize(
    ("figures", "label"),
    [
        (None, None),  # any result of a trial
        (EnvMeasurements(1 * US, 1 * US), "dummy"),
        (LONG, "subproc"),
        (BRIEF, "subproc, caller_steps"),
        (WAITING, "thread"),
    ],
)
@pytest.mark.parametrize("source", ["CartPole-v1", Witness])
def test_results_of_auto_mode_equal_those_of_dummy_mode(
    figures: EnvMeasurements | None, label: str | None, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParallelEnv([source] * 16, "dummy", "restart") as loop:
        assert loop.recommendation is None
        expected = play(loop)
    if figures is not None:
        pretend(monkeypatch, figures)
    with ParallelEnv([source] * 16, "auto", "restart") as env:
        assert difference(expected, play(env)) is None
        assert env.recommendation is not None
        assert label in (None, env.recommendation.label)
        assert (env.para_mode, env.asynchronous) == (env.recommendation.mode, "restart")
        begin = f"<parallelenv.ParallelEnv of 16 envs, para_mode='auto' ({env.recommendation.label}), asynchronous="
        assert repr(env).startswith(begin)
        assert "\n" not in repr(env)
    assert env.recommendation is not None  # after close too


def test_make_accepts_auto() -> None:
    with ParallelEnv.make("CartPole-v1", 2, "auto", max_episode_steps=3) as env:
        assert env.recommendation is not None
        assert env.reset(seed=0).shape == (2, 4)


def test_auto_mode_does_not_step_env_instances_during_construction() -> None:
    envs = [Witness(), Witness()]
    with ParallelEnv(envs, "auto") as env:
        assert env.recommendation is not None
        assert envs[0].notes == ["made"]
        env.reset(seed=0)


def test_auto_accepts_no_options() -> None:
    expected = (
        r"start_method='fork' is no option of para_mode='auto', which accepts none: they differ between the modes "
        r"that it may choose\. Name the mode; recommend\(envs\) says which one it would be\."
    )
    with pytest.raises(UnknownOptionError, match=expected):
        ParallelEnv(["CartPole-v1"], "auto", start_method="fork")
    with pytest.raises(UnknownOptionError, match="caller_steps=True is no option of para_mode='auto'"):
        ParallelEnv.make("CartPole-v1", 2, "auto", backend_options={"caller_steps": True})


def test_auto_refuses_num_gpus() -> None:
    expected = (
        r"num_gpus=0\.5 cannot be kept with para_mode='auto': only Ray's workers are given GPUs, and it never chooses "
        r"Ray\. Name the mode, para_mode='ray', or leave num_gpus at 0\."
    )
    with pytest.raises(ArgumentError, match=expected):
        ParallelEnv(["CartPole-v1"], "auto", num_gpus=0.5)


def test_unknown_mode_error_lists_auto() -> None:
    with pytest.raises(UnknownModeError, match=r"para_mode='auot' is not known.*'auto'\)\. Did you mean 'auto'\?"):
        ParallelEnv(["CartPole-v1"], "auot")
    assert registry.known_words() == (*registry.known_modes(), "auto")
    assert registry.AUTO not in registry.known_modes()


def test_recommend_command_prints_recommendations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, LONG)
    assert main(["recommend", "CartPole-v1", "Acrobot-v1", "--num-envs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["CartPole-v1:", "Acrobot-v1:"]
    assert all("para_mode='subproc', num_cpus=2: A step takes 1 ms" in line for line in lines)
    assert main(["recommend", "CartPole-v1", "--num-cpus", "1"]) == 0
    assert "para_mode='dummy'" in capsys.readouterr().out
    assert main(["recommend", "NoSuchEnv-v0"]) == 2


def test_compare_command_refuses_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "CartPole-v1", "--modes", "auto"]) == 2
    assert "--modes auto is not known; expected some of dummy, " in capsys.readouterr().err
