"""Code written for another library's vector envs works with the adapters."""

from __future__ import annotations

import re
import sys
import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from modes import IN_CALLER, LOCAL, PROCESSES, here_and_in_processes, in_modes

from adapters.conftest import Adapter
from adapters.envs import Looped, Typed
from adapters.twins import Twins
from parallelenv import ParallelEnv
from parallelenv.errors import AbsentAttributeError, ActionError, ClosedError, MissingDependencyError, ResetNeededError
from parallelenv.results import difference


class Strict(Looped):
    """Its reset has no defaults."""

    def reset(self, seed: int | None, options: Any) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, options=options)


@here_and_in_processes
def test_reset_gets_all_arguments_that_it_needs(adapted: Adapter, make_env: MakeEnv) -> None:
    adapted(make_env([Strict] * 2)).reset()


# -------------------------------------------------------------------- the envs themselves


def envs_of(env: Any) -> list[Any]:
    """Return the envs as users of its library reach them."""
    return [worker.env for worker in env.workers] if hasattr(type(env), "workers") else list(env.envs)


@in_modes(*IN_CALLER)
def test_envs_in_the_same_process_are_accessible(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env(["CartPole-v1"] * 3, num_cpus=2))
    envs_of(env)[1].unwrapped.gravity = 5.0
    assert env.parallel_env.get_env_attr("gravity") == [9.8, 5.0, 9.8]
    env.close()
    with pytest.raises(AbsentAttributeError, match="is absent: the ParallelEnv was closed"):
        envs_of(env)


@in_modes(PROCESSES)
def test_envs_in_other_processes_are_not_accessible(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Looped] * 2))
    with pytest.raises(AbsentAttributeError, match=r"is absent: these envs live in other processes\. Use get_"):
        envs_of(env)


# -------------------------------------------------------------------- actions


class Echo(Looped):
    """Keeps its latest action."""

    def __init__(self, action_space: Any) -> None:
        super().__init__(9)
        self.action_space = action_space

    def step(self, action: Any) -> Any:
        self.action = action
        return super().step(0)


BOX = Box(-2, 2, (1,), np.float32)
PUSHES = [np.array([[0.1], [0.2]], dtype) for dtype in (np.float64, np.float32, np.float16)]
TWO = [np.int64(1), np.int64(2)]


@here_and_in_processes
@pytest.mark.parametrize(
    ("space", "actions", "received"),
    [
        *((BOX, pushes, list(pushes)) for pushes in PUSHES),
        (Discrete(3), np.array([1.0, 2.0]), TWO),
        (Discrete(3), np.array([1, 2], np.uint8), TWO),
    ],
)
def test_box_actions_keep_their_dtype_and_discrete_actions_may_be_whole_floats(
    space: Any, actions: Any, received: Any, adapted: Adapter, make_env: MakeEnv
) -> None:
    env = adapted(make_env([partial(Echo, space)] * 2))
    env.reset()
    env.step(actions)
    assert difference(env.parallel_env.get_env_attr("action"), received) is None
    if space != BOX:
        for refused in (np.array([0.5, 1]), np.array([np.nan, 1])):
            with pytest.raises(ActionError, match="without loss of meaning"):
                env.step(refused)


@here_and_in_processes
def test_box_parts_of_dict_actions_keep_their_dtype(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Echo, Dict({"push": BOX, "gear": Discrete(3)}))] * 2).to_gymnasium()
    env.reset()
    env.step({"push": PUSHES[0], "gear": np.array([1.0, 2.0])})
    received = [{"push": push, "gear": gear} for push, gear in zip(PUSHES[0], TWO, strict=True)]
    assert difference(env.parallel_env.get_env_attr("action"), received) is None


@here_and_in_processes
def test_every_call_after_close_is_refused(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Looped] * 2))
    env.reset()
    with pytest.raises(ActionError, match="is a single action"):
        env.step(1)
    env.step([0, 0])
    env.close()
    env.close()
    calls: dict[str, Any] = {
        **dict.fromkeys(("reset", "step_wait", "reset_wait", "call_wait", "reset_async"), ()),
        **dict.fromkeys(("step", "step_async"), ([0, 0],)),
        **dict.fromkeys(("get_attr", "has_attr", "get_env_attr", "call", "call_async"), ("length",)),
        **dict.fromkeys(("set_attr", "set_env_attr"), ("length", 1)),
        **({"seed": (1,), "render": ()} if hasattr(env, "env_num") else {}),
        "env_method": ("add", 1),
        "env_is_wrapped": (gym.Wrapper,),
    }
    for name in calls.keys() & set(dir(type(env))):
        with pytest.raises(ClosedError, match="on a closed ParallelEnv"):
            getattr(env, name)(*calls[name])
    with pytest.raises(ClosedError, match=r"^to_gymnasium\(\), to_sb3\(\) or to_tianshou\(\) was called on a closed"):
        env.parallel_env.to_gymnasium()


# -------------------------------------------------------------------- episodes


@here_and_in_processes
def test_step_before_the_first_reset_is_passed_to_the_envs(adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([Looped] * 2))
    assert env.step(np.zeros(2, int))[0].tolist() == [[1], [1]]
    env = adapted(make_env(["CartPole-v1"] * 2))
    with pytest.raises(gym.error.ResetNeeded, match="Cannot call env.step"):
        env.step(np.zeros(2, int))


@here_and_in_processes
def test_reset_mask_that_skips_env_without_state_is_refused(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 2).to_gymnasium()
    mask = {"reset_mask": np.array([True, False])}
    with pytest.raises(ResetNeededError, match=r"latest states of envs \[1\] are not known"):
        env.reset(options=mask)
    env.step(np.zeros(2, int))
    assert env.reset(options=mask)[0].tolist() == [[0], [1]]
    with pytest.raises(ResetNeededError, match="have no running episode"):  # unchanged without an adapter
        make_env([Looped] * 2).step([0, 0])


@here_and_in_processes
@pytest.mark.parametrize(
    ("space", "state"),
    [
        (Discrete(5), 2),
        (Discrete(5), np.int64(2)),
        (Box(0, 9, (2,), np.float32), np.array([1.1, 2.2])),
        (Box(0, 9, (2,), np.float32), [1.5, 2.5]),
        (Dict({"a": Discrete(5), "b": Box(0, 9, (1,))}), {"a": 2, "b": np.ones(1, np.float32)}),
    ],
)
def test_final_obs_has_the_type_that_the_env_returned(space: Any, state: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Typed, space, state)]
    theirs = SyncVectorEnv(env_fns, autoreset_mode="SameStep")
    twins = Twins(make_env(env_fns).to_gymnasium("SameStep"), theirs)
    twins.reset()
    twins.step([1])


@in_modes(*LOCAL)
def test_states_are_writable_with_copy_false(make_env: MakeEnv) -> None:
    env: Any = make_env([Looped] * 2, copy=False).to_gymnasium()
    for states in (env.reset()[0], env.step([0, 0])[0]):
        states[0] = 7
    env.step_async([0, 0])
    env.step_wait()[0][:] = 7
    parts = make_env([partial(Typed, Dict({"a": Box(0, 9, (1,))}), {"a": np.ones(1, np.float32)})], copy=False)
    parts.to_gymnasium().reset()[0]["a"][0] = 7


# -------------------------------------------------------------------- Tianshou


@here_and_in_processes
def test_tianshou_accepts_negative_ids(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Looped, length) for length in (5, 6, 7)]).to_tianshou()
    env.reset()
    env.step(np.zeros(3, int))
    assert env.reset([-1])[0].tolist() == [[0]]
    assert env.step([0], -1)[-1][0]["env_id"] == 2
    assert env.get_env_attr("length", [-1, 0]) == [7, 5]
    env.set_env_attr("length", [1, 2], -1)
    assert env.get_env_attr("length") == [5, 6, [1, 2]]


@in_modes(PROCESSES)
def test_tianshou_async_mode_warns_if_envs_share_workers(make_env: MakeEnv) -> None:
    message = re.escape("3 envs share 2 workers")
    with pytest.warns(UserWarning, match=f"{message}.*num_cpus=len\\(envs\\)") as caught:
        make_env([Looped] * 3, num_cpus=2).to_tianshou(wait_num=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_env([Looped] * 3, num_cpus=3).to_tianshou(timeout=1.0)
        make_env([Looped] * 3, num_cpus=2).to_tianshou()
        ParallelEnv([Looped] * 3).to_tianshou(wait_num=2).close()  # dummy mode has one worker


class _Nowhere:
    """An import hook that hides Stable-Baselines3."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".", maxsplit=1)[0] == "stable_baselines3":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "parallelenv.adapters.sb3", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Nowhere(), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "stable_baselines3"]:
        monkeypatch.delitem(sys.modules, name)
    with ParallelEnv(["CartPole-v1"]) as env:
        with pytest.raises(MissingDependencyError, match="pip install stable-baselines3"):
            env.to_sb3()
        env.reset(seed=1)  # still usable
        env.step([0])
