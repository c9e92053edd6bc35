"""Names and arguments of other libraries: methods that exist here, too, and hints for the rest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from conftest import MakeEnv
from fragile import GO_ON, WAIT, fragile
from gymnasium.vector import AutoresetMode
from modes import IN_BACKGROUND, ORACLE, PROCESSES, in_modes

from parallelenv import ParallelEnv, ParallelWrapper
from parallelenv.errors import (
    ArgumentError,
    EnvBusyError,
    InvalidEnvError,
    NothingInFlightError,
    ParallelEnvError,
    WorkerTimeoutError,
)
from parallelenv.results import difference
from parallelenv.testing.contract import items
from parallelenv.testing.envs import Counter
from parallelenv.wrappers import NormalizeRewards, NormalizeStates, RecordEpisodeStatistics

made: list[int] = []


class Noted(Counter):
    """Records that it was made, and accepts an argument that other libraries do not pass to envs."""

    def __init__(self, number: int = 0, seed: int = 0) -> None:
        super().__init__(number)
        self.seed_given = seed
        made.append(number)


class Greedy(Counter):
    def __init__(self, **everything: Any) -> None:
        super().__init__(0)
        self.everything = everything


@pytest.fixture(autouse=True)
def registered() -> Any:
    made.clear()
    creators: dict[str, Any] = {"Noted-v0": Noted, "Greedy-v0": Greedy, "Lost-v0": "no_such_module:Env"}
    for name, creator in creators.items():
        gym.register(name, creator)
    yield
    for name in creators:
        del gym.registry[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("observation_space", r"Give spaces=\(observation_space, action_space\)"),
        ("action_space", r"Give spaces=\(observation_space, action_space\)"),
        ("context", "Give start_method='spawn'"),
        ("max_concurrency", "Give num_cpus"),
        ("num_workers", "Give num_cpus"),
        ("autoreset", "Give asynchronous='restart'"),
        ("shared_memory", "Leave it out"),
        ("autoreset_mode", r"an argument of to_gymnasium\(\); without an adapter give asynchronous='restart'"),
        ("num_envs", r"ParallelEnv\.make\(id, num_envs=n\)"),
        ("render_mode", r"ParallelEnv\.make\(id, num_envs=n, \.\.\.\) passes it on"),
    ],
)
@pytest.mark.parametrize("para_mode", [ORACLE, PROCESSES, "auto"])
def test_argument_of_another_library_gets_a_hint(name: str, hint: str, para_mode: str) -> None:
    foreign: dict[str, Any] = {name: 5}
    with pytest.raises(ArgumentError, match=f"{name}=5 is not an option of para_mode='{para_mode}'.*{hint}"):
        ParallelEnv([Noted] * 2, para_mode, **foreign)
    assert made == []


@pytest.mark.parametrize(
    ("argument", "word", "hint"),
    [
        ("para_mode", "sync", f"'sync' is '{ORACLE}' here"),
        ("para_mode", "async", f"'async' is '{PROCESSES}' here"),
        ("para_mode", f"{PROCESSES}+caller_steps", f"Give para_mode='{PROCESSES}', caller_steps=True"),
        ("para_mode", "nonsense", r"'auto'\)\.$"),
        ("asynchronous", "SameStep", "is 'restart' here"),
        ("asynchronous", "SAME_STEP", "is 'restart' here"),
        ("asynchronous", AutoresetMode.SAME_STEP, "is 'restart' here"),
        ("asynchronous", "NextStep", r"is to_gymnasium\('NextStep'\) here"),
        ("asynchronous", "Disabled", "is 'continue' here"),
        ("asynchronous", "nonsense", r"'continue'\)\.$"),
    ],
)
def test_only_mode_of_another_library_gets_a_hint(argument: str, word: Any, hint: str) -> None:
    given: dict[str, Any] = {argument: word}
    with pytest.raises(ArgumentError, match=f"{argument}=.*is not known.*{hint}"):
        ParallelEnv([Noted], **given)


# ---------------------------------------------------------------- make


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("n_envs", "Here it is num_envs"),
        ("wrapper_class", "Wrap each env where it is made"),
        ("env_kwargs", r"\*\*env_kwargs"),
        ("vec_env_cls", "Give a mode"),
        ("vectorization_mode", "Give a mode"),
        ("vec_env_kwargs", "Give its items"),
        ("monitor_dir", "VecMonitor"),
        ("start_method", "in backend_options"),
    ],
)
def test_make_refuses_foreign_arguments_before_envs_are_made(name: str, hint: str) -> None:
    foreign: dict[str, Any] = {name: "x"}
    with pytest.raises(ArgumentError, match=rf"{name}='x' is not an argument of ParallelEnv.*Noted-v0\. .*{hint}"):
        ParallelEnv.make("Noted-v0", 2, **foreign)
    assert made == []


def test_make_passes_arguments_that_gymnasium_or_the_env_accepts() -> None:
    with ParallelEnv.make("Noted-v0", 2, number=3, max_episode_steps=1) as env:
        assert env.get_env_attr("number") == [3, 3]
        assert [spec.max_episode_steps for spec in env.get_env_attr("spec")] == [1, 1]
    with ParallelEnv.make("Greedy-v0", 1, n_envs=5) as env:
        assert env.get_env_attr("everything") == [{"n_envs": 5}]
    spec = gym.spec("Noted-v0")
    spec.kwargs["seed"] = 1
    with ParallelEnv.make(spec, seed=2) as env:
        assert env.get_env_attr("seed_given") == [1]  # the argument of make() is for resets
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):  # not an error of this package
        ParallelEnv.make("Lost-v0", 1, seed=5)


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        (Noted, r"\[Noted\] \* n"),
        (lambda: Noted(1), r"\[env_fn\] \* n"),
        (partial(Noted, 3), r"\[env_fn\] \* n"),
        (Counter(0), r"\[make\(\) for _ in range\(n\)\]"),
    ],
)
def test_single_env_error_suggests_a_list(env: Any, hint: str) -> None:
    with pytest.raises(InvalidEnvError, match=f"is neither a registered id nor an EnvSpec.*{hint}"):
        ParallelEnv.make(env, 2)
    with pytest.raises(InvalidEnvError, match=rf"is a single env( fn)?\. Give ParallelEnv a list .*: {hint}"):
        ParallelEnv(env)
    assert made == []


def test_id_and_env_are_not_mixed_up() -> None:
    with pytest.raises(InvalidEnvError, match="Give ParallelEnv a list; each item is"):
        ParallelEnv.make(None, 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidEnvError, match=r"\['CartPole-v1'\] \* n, or use ParallelEnv\.make\('CartPole-v1', num"):
        ParallelEnv("CartPole-v1")


# ---------------------------------------------------------------- names


def test_attribute_of_another_library_gets_a_hint() -> None:
    hints = {
        "metadata": r"If the envs have it: .*get_env_attr\('metadata'\)",
        "render_mode": r"get_env_attr\('render_mode'\)",
        "spec": r"get_env_attr\('spec'\)",
        "env_method": "Here it is customized_method",
        "get_attr": "Here it is get_env_attr",
        "obs_rms": "Here it is state_statistics",
        "is_async": "result of to_tianshou",
        "is_closed": "Here it is closed",
        "num_unpaused_tasks": "Here it is num_unpaused",
        "to_gym": r"Here it is to_gymnasium\(\)",
        "evaluate": r"run_episodes\(policy, num_episodes=n\).*customized_method\('evaluate'\)",
        "pause_at": r"Here it is pause\(id\)",
        "resume_all": r"Here it is resume\(\)",
        "reset_single_env": r"Here it is reset\(id\)",
        "step_at": r"Here it is step\(\[action\], id, align='batch'\)",
        "async_step": r"Here it is step_async\(actions\)",
        "wait_step": r"Here it is step_wait\(align='batch'\)",
        "call_at": r"Here it is call\(name, \[arguments\], id\)",
        "attr_at": r"Here it is attr\(name, id\)",
        "command_at": r"Here it is command\(name, data, id\)",
        "next_task_at": r"Here it is next_task\(id\), a method of the result of ParallelEnv\.from_samplers\(\)",
        "training": r"env\.frozen = True",
        "frozen": "NormalizeStates and NormalizeRewards; this has neither",
    }
    with ParallelEnv([Counter]) as env:
        for one in (env, RecordEpisodeStatistics(env)):
            for name, hint in hints.items():
                assert not hasattr(one, name)
                with pytest.raises(AttributeError, match=f"has no attribute '{name}'. .*{hint}") as caught:
                    getattr(one, name)
                assert isinstance(caught.value, ParallelEnvError)
                assert caught.value.name == name


def test_absent_attributes_are_not_looked_up_in_workers() -> None:
    env: Any = ParallelEnv([Counter])
    env.close()  # asking an env now would raise a ClosedError
    for name in ("_repr_html_", "_ipython_canary_method_should_not_exist_", "number"):
        assert not hasattr(env, name)
    assert "closed" in env._repr_mimebundle_()["text/plain"]
    assert not hasattr(ParallelWrapper(env), "_repr_html_")


def test_attribute_error_in_a_property_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="'_engine'"):
        ParallelEnv.__new__(ParallelEnv).num_envs  # noqa: B018


FREEZE = r"NormalizeRewards has no attribute '{}' to set.*Set env\.frozen = True on the outermost wrapper"


def wrapped() -> Any:
    return NormalizeRewards(NormalizeStates(ParallelEnv([Counter])))


@pytest.mark.parametrize(
    ("make", "name", "hint"),
    [
        (partial(ParallelEnv, [Counter]), "asynchronous", r"'{}' to set.*ParallelEnv\(envs, asynchronous=\.\.\.\)"),
        (partial(ParallelEnv, [Counter]), "para_mode", r"'{}' to set.*ParallelEnv\(envs, para_mode=\.\.\.\)"),
        (partial(ParallelEnv, [Counter]), "num_cpus", r"'{}' to set.*another one: ParallelEnv\(envs, num_cpus="),
        (partial(ParallelEnv, [Counter]), "gravity", r"'{}' to set.*set_env_attr\('gravity', value\)"),
        (partial(ParallelEnv, [Counter]), "done", "ParallelEnv.{} is read-only"),
        (wrapped, "training", FREEZE),
        (wrapped, "update_running_mean", FREEZE),
        (wrapped, "norm_reward", "NormalizeRewards has no attribute '{}' to set.*Leave out NormalizeRewards"),
        (wrapped, "asynchronous", "NormalizeRewards has no attribute '{}' to set.*Make another one"),
    ],
)
def test_read_only_unknown_and_foreign_attributes_cannot_be_set(make: Any, name: str, hint: str) -> None:
    with make() as env:
        with pytest.raises(AttributeError, match=hint.format(name)):
            setattr(env, name, "new")
        assert getattr(env, name, None) != "new"


def test_attributes_can_be_replaced_and_subclasses_have_their_own() -> None:
    class Named(ParallelEnv):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.title = "mine"

    class Learning(ParallelWrapper):
        training = True

    with Learning(Named([Counter])) as env:
        inner: Any = env.env
        inner.render = str
        assert (inner.title, inner.render()) == ("mine", "")
        env.training = False
        assert not env.training
        env.note = "mine"  # type: ignore[attr-defined]
        assert env.note == "mine"


def test_frozen_must_be_a_bool() -> None:
    with NormalizeStates(ParallelEnv([Counter])) as env:
        with pytest.raises(ArgumentError, match="frozen='yes' must be True or False"):
            env.frozen = "yes"  # type: ignore[assignment]
        with pytest.raises(ArgumentError, match="frozen=None must be True or False"):
            NormalizeRewards(env, frozen=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------- methods with the names of other libraries


ENV_FNS = [partial(Counter, number, 3) for number in range(3)]


@pytest.mark.parametrize("asynchronous", [None, "idle", "restart"])
def test_step_async_and_step_wait_equal_step(asynchronous: Any, make_env: MakeEnv) -> None:
    plain, env = ParallelEnv(ENV_FNS, ORACLE, asynchronous), make_env(ENV_FNS, asynchronous=asynchronous)
    plain.reset(seed=1)
    env.reset(seed=1)
    for step in range(5):
        id: Any = [2, 0] if step % 2 else None
        actions = [step % 4] * (2 if id else 3)
        align: Any = "batch" if step == 2 else "item"
        env.step_async(actions, id)
        expected, found = plain.step(actions, id, align), env.step_wait(align=align)
        assert difference(items(expected), items(found)) is None
    plain.close()


def test_step_wait_without_step_async_is_refused(make_env: MakeEnv) -> None:
    env = make_env(ENV_FNS)
    env.reset(seed=1)
    with pytest.raises(NothingInFlightError, match=r"Call step_async\(\) first"):
        env.step_wait()
    env.step_async([0, 0, 0])
    with pytest.raises(EnvBusyError, match=r"recv\(min_envs=3\), or drop it with reset"):
        env.step_async([0, 0, 0])
    with pytest.raises(ArgumentError, match="timeout=-1"):
        env.step_wait(-1)
    env.step_wait(30)
    with pytest.raises(NothingInFlightError, match="step_async"):
        env.step_wait()
    env.step_async([0, 0, 0])
    env.reset()
    with pytest.raises(NothingInFlightError, match=r"No step of envs \[0, 1, 2\] is in flight"):
        env.step_wait()


@in_modes(*IN_BACKGROUND)
def test_step_wait_does_not_wait_for_other_envs(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(fragile(tmp_path), num_cpus=4)
    env.reset()
    env.send([WAIT, WAIT], [0, 2])
    env.step_async([GO_ON, GO_ON], [3, 1])
    assert env.step_wait(20).env_ids.tolist() == [3, 1]
    env.step_async([WAIT, GO_ON], [3, 1])
    with pytest.raises(WorkerTimeoutError) as caught:
        env.step_wait(0.1)
    assert 3 in caught.value.env_ids
    assert not {0, 2}.intersection(caught.value.env_ids)
    (tmp_path / "go").touch()
    assert env.step_wait().env_ids.tolist() == [3, 1]
    assert sorted(env.recv(min_envs=2).env_ids.tolist()) == [0, 2]


def test_step_wait_returns_no_result_of_another_call(make_env: MakeEnv) -> None:
    env = make_env(ENV_FNS)
    env.reset()
    for other in (lambda: env.send_reset(1), lambda: (env.recv(min_envs=3), env.send([0, 0, 0]))):
        env.step_async([0, 0, 0])
        other()
        with pytest.raises(NothingInFlightError, match=r"No step of envs .* is in flight"):
            env.step_wait()
        env.recv(min_envs=3)


def test_step_wait_after_step_async_of_no_envs(make_env: MakeEnv) -> None:
    env = make_env(ENV_FNS)
    env.reset()
    env.pause([0, 1, 2])
    env.step_async([])
    assert difference(items(env.step([])), items(env.step_wait())) is None


def test_get_images_returns_rendered_frames(make_env: MakeEnv) -> None:
    env = make_env([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2)
    env.reset(seed=1)
    assert difference(env.get_images(), env.render()) is None
    assert len(env.get_images(1)) == 1
    assert env.unwrapped is env
