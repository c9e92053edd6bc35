"""The repr of a `ParallelEnv` in a notebook, which has no side effects."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree.ElementTree import fromstring

import pytest
from conftest import MakeEnv
from fragile import EXIT, GO_ON, WAIT, fragile, when_begun
from modes import IN_CALLER, ORACLE, PROCESSES, here_and_in_processes, in_modes

from parallelenv import ParallelEnv
from parallelenv.contract.worker_info import ProcessInfo, this_process
from parallelenv.engine.episode_stats import EpisodeSummary
from parallelenv.errors import WorkerDiedError
from parallelenv.notebook.repr import LOOKS, ReprData, WorkerRow, repr_data
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import CheckFinite

IPython = pytest.importorskip("IPython")
PROBES = ["_repr_html_", "_ipython_display_", "_ipython_canary_method_should_not_exist_", "_repr_png_", "_repr_svg_"]


def counters(*numbers: int, length: int = 3) -> list[Any]:
    return [lambda number=number: Counter(number, length) for number in numbers]


def bundle(env: Any) -> dict[str, str]:
    """Return the outputs that IPython would show."""
    from IPython.core.formatters import DisplayFormatter

    formatter = DisplayFormatter()
    formatter.active_types = list(formatter.format_types)
    found, _ = formatter.format(env)  # type: ignore[no-untyped-call]
    return dict(found)


def states_of(env: ParallelEnv) -> list[str]:
    return repr_data(env, "").states


def test_repr_shows_envs_episodes_steps_and_workers(make_env: MakeEnv, mode: str) -> None:
    env = make_env(counters(0, 1, 2, 3), asynchronous="restart", num_cpus=2)
    env.reset(seed=0)
    for _ in range(10):
        env.step([1] * 4)
    found = bundle(env)
    text, page = found["text/plain"], found["text/html"]
    assert text.startswith(f"{env!r}\n  envs      4 running\n")
    assert re.search(r"episodes  12 ended; mean of the last 12: return -?[\d.]+, length 3\n", text)
    assert "  so far    40 steps of all envs together\n" in text
    env.send_reset()
    env.recv(min_envs=4)
    assert bundle(env)["text/plain"].count("40 steps") == 1, "resets do not count"
    assert {element.tag for element in fromstring(page).iter()} == {"div", "span", "code", "table", "tr", "td", "th"}
    assert page.count('title="env ') == 4
    workers = repr_data(env, "").workers
    assert len(workers) == (1 if mode == ORACLE else 2)
    assert sum((worker.env_ids for worker in workers), ()) == (0, 1, 2, 3)
    for worker in workers:
        assert worker.process.is_near
        assert (worker.process == this_process()) == (mode in IN_CALLER)
        assert (worker.memory or 0) > 2**20


@here_and_in_processes
def test_repr_shows_each_env_state_in_its_colour_and_sign(make_env: MakeEnv) -> None:
    env = make_env(counters(0, 1, 2, 3, length=2), asynchronous="idle", num_cpus=2)
    assert states_of(env) == ["needs reset"] * 4
    assert "4 need reset" in bundle(env)["text/plain"]
    env.reset([0, 1, 2], seed=0)
    assert states_of(env) == ["running", "running", "running", "needs reset"]
    env.step([1, 1], [0, 1])
    env.step([1, 1], [0, 1])
    env.pause([1])
    assert states_of(env) == ["done", "paused", "running", "needs reset"]
    env.send([1], [2])
    assert states_of(env) == ["done", "paused", "busy", "needs reset"]
    page = env._repr_mimebundle_()["text/html"]
    for env_id, state in enumerate(("done", "paused", "busy", "needs reset")):
        assert re.search(rf'title="env {env_id}: {state}" [^>]*{LOOKS[state].colour}">{LOOKS[state].sign}<', page)
        assert f"</span> 1 {state}</span>" in page
    assert LOOKS["failed"].colour not in page
    env.recv()
    env.engine.table.exhausted.add(2)
    assert states_of(env)[2] == "exhausted"
    assert len({look.colour for look in LOOKS.values()}) == len({look.sign for look in LOOKS.values()}) == len(LOOKS)


@pytest.mark.parametrize(
    ("states", "standing", "text"),
    [
        (["needs reset"], (1, 1, -1.5, 1.0), "1 needs reset / 1 step / 1 ended: return -1.5, length 1"),
        (
            ["running"] * 2,
            (1234567, 4321, 123456.7, 2048.5),
            "2 running / 1,234,567 steps of all envs together / "
            "4,321 ended; mean of the last 100: return 123,457, length 2,048",
        ),
        (["done"] * 2, (0, 4, None, 2.0), "2 done / 4 ended; mean of the last 4: length 2"),  # rewards are not numbers
    ],
)
def test_numbers_in_the_text(states: list[str], standing: tuple[Any, ...], text: str) -> None:
    _, *lines = ReprData("", states, EpisodeSummary(*standing), []).text().splitlines()
    assert " / ".join(line[12:] for line in lines) == text


@in_modes(PROCESSES)
def test_repr_shows_envs_of_a_dead_worker_as_failed(make_env: MakeEnv) -> None:
    env = make_env(fragile(Path()), num_cpus=2)
    env.reset(seed=0)
    with pytest.raises(WorkerDiedError):
        env.step([EXIT, GO_ON, GO_ON, GO_ON])
    assert states_of(env) == ["failed", "failed", "running", "running"]
    assert "2 running, 2 failed (worker died)" in bundle(env)["text/plain"]
    assert [worker.env_ids for worker in repr_data(env, "").workers] == [(2, 3)]
    env.restart([0])
    assert states_of(env) == ["needs reset", "needs reset", "running", "running"]
    found = {env_id: worker.process.pid for worker in repr_data(env, "").workers for env_id in worker.env_ids}
    assert [found[env_id] for env_id in range(4)] == env.customized_method("pid")


def test_markup_in_texts_is_escaped() -> None:
    with CheckFinite(ParallelEnv(counters(0, 1))) as env:
        assert bundle(env)["text/html"].count("&lt;CheckFinite around &lt;parallelenv.ParallelEnv of 2 envs") == 1
    portrait = ReprData("<script>alert('&')</script>", ["running"], EpisodeSummary(0, 0, None, None), [])
    assert "<script>alert('&')</script>" in "".join(fromstring(portrait.html()).itertext())


def test_html_of_thousands_of_envs_stays_small() -> None:
    workers = [WorkerRow((index,), ProcessInfo(1, "elsewhere"), None) for index in range(500)]
    portrait = ReprData("many", ["running"] * 5000, EpisodeSummary(1, 0, None, None), workers)
    assert len(portrait.html()) < 60_000
    assert "... and 4,744 more" in portrait.html()
    for part in ("... and 484 more workers", "1 on elsewhere", "5,000 running"):
        assert part in portrait.text()


def test_probing_for_repr_methods_sends_nothing_to_workers(make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_env(counters(0, 1))
    env.reset(seed=0)

    with monkeypatch.context() as patched:
        for name in ("submit", "pump"):
            patched.setattr(env.engine.pool, name, Mock(side_effect=AssertionError("a worker was asked")))
        for name in PROBES:
            assert not hasattr(env, name)
        assert set(bundle(env)) == {"text/plain", "text/html"}
        assert dir(env)


@in_modes(*IN_CALLER)
def test_repr_is_shown_while_another_thread_steps(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path))
    env.reset(seed=0)
    seen: list[str] = []

    def look() -> None:
        seen.extend([*states_of(env), bundle(env)["text/plain"]])
        (tmp_path / "go").touch()

    with when_begun(tmp_path, 0, look):
        env.step([WAIT, GO_ON, GO_ON, GO_ON])
    assert seen[:4] == ["busy"] * 4
    assert "4 busy" in seen[4]
    assert states_of(env) == ["running"] * 4


def test_repr_of_a_closed_env_is_grey_and_keeps_its_counts(make_env: MakeEnv) -> None:
    env = make_env(counters(0, 1), asynchronous="restart")
    env.reset(seed=0)
    for _ in range(3):
        env.step([1, 1])
    env.close()
    found = bundle(env)
    text, page = found["text/plain"], found["text/html"]
    for part in ("closed>", "envs      2 closed", "2 ended"):
        assert part in text
    assert "pid" not in text
    assert "running" not in text + page
    assert LOOKS["closed"].colour in page
    assert LOOKS["running"].colour not in page


def test_repr_of_an_env_whose_constructor_failed() -> None:
    env = ParallelEnv.__new__(ParallelEnv)
    with pytest.raises(ZeroDivisionError):
        env.__init__([lambda: 1 / 0])  # type: ignore[misc]
    assert env._repr_mimebundle_() == {"text/plain": "<parallelenv.ParallelEnv, not constructed>"}


def test_memory_of_ended_or_remote_processes_is_unknown() -> None:
    assert ProcessInfo(0, this_process().machine).memory() is None
    assert ProcessInfo(os.getpid(), "elsewhere").memory() is None
    assert ProcessInfo(2**22 + 1, this_process().machine).memory() is None
    assert (this_process().memory() or 0) > 2**20


def test_steps_that_only_reset_an_env_do_not_count(make_env: MakeEnv) -> None:
    vector_env = make_env(counters(0, 1)).to_gymnasium("NextStep")
    vector_env.reset()
    for _ in range(8):
        vector_env.step([1, 1])
    summary = vector_env.parallel_env.engine.table.stats.summary()
    assert (summary.num_steps, summary.num_episodes, summary.mean_length) == (2 * 6, 4, 3)
