"""Code written for another library's vector envs works with the adapters."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from modes import IN_CALLER, LOCAL, ORACLE, PROCESSES, here_and_in_processes, in_modes

from adapters.conftest import Adapter
from adapters.envs import Echo, Fragile, Looped, Typed
from adapters.neighbours import Twins, require
from parallelenv import ParallelEnv, ParallelEnvError, vector_entry_point
from parallelenv.errors import AbsentAttributeError, ActionError, ClosedError, MissingDependencyError, ResetNeededError
from parallelenv.results import difference


def envs_of(env: Any) -> list[Any]:
    """Return the envs as users of its library reach them."""
    return [worker.env for worker in env.workers] if hasattr(type(env), "workers") else list(env.envs)


@in_modes(*IN_CALLER, PROCESSES)
def test_envs_are_accessible_in_the_same_process_only(adapted: Adapter, mode: str, make_env: MakeEnv) -> None:
    env = adapted(make_env(["CartPole-v1"] * 3, num_cpus=2))
    if mode in IN_CALLER:
        envs_of(env)[1].unwrapped.gravity = 5.0
        assert env.parallel_env.get_env_attr("gravity") == [9.8, 5.0, 9.8]
    else:
        with pytest.raises(AbsentAttributeError, match=r"is absent: these envs live in other processes\. Use get_"):
            envs_of(env)
    env.close()
    with pytest.raises(AbsentAttributeError, match="is absent: the ParallelEnv was closed"):
        envs_of(env)


# -------------------------------------------------------------------- actions


BOX = Box(-2, 2, (1,), np.float32)
TWO = [np.int64(1), np.int64(2)]


@here_and_in_processes
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_box_actions_keep_their_dtype(dtype: Any, adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([partial(Echo, BOX)] * 2))
    env.reset()
    pushes = np.array([[0.1], [0.2]], dtype)
    env.step(pushes)
    assert difference(env.parallel_env.get_env_attr("action"), list(pushes)) is None


@here_and_in_processes
@pytest.mark.parametrize("dtype", [float, np.uint8])
def test_discrete_actions_may_be_whole_floats(dtype: Any, adapted: Adapter, make_env: MakeEnv) -> None:
    env = adapted(make_env([partial(Echo, Discrete(3))] * 2))
    env.reset()
    env.step(np.array([1, 2], dtype))
    assert difference(env.parallel_env.get_env_attr("action"), TWO) is None
    for refused in (np.array([0.5, 1]), np.array([np.nan, 1])):
        with pytest.raises(ActionError, match="without loss of meaning"):
            env.step(refused)


@here_and_in_processes
def test_parts_of_dict_actions_are_converted_alike(make_env: MakeEnv) -> None:
    env: Any = make_env([partial(Echo, Dict({"push": BOX, "gear": Discrete(3)}))] * 2).to_gymnasium()
    env.reset()
    pushes = np.array([[0.1], [0.2]])
    env.step({"push": pushes, "gear": np.array([1.0, 2.0])})
    received = [{"push": push, "gear": gear} for push, gear in zip(pushes, TWO, strict=True)]
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
    class Strict(Looped):
        def reset(self, seed: int | None, options: Any) -> Any:  # type: ignore[override]
            return super().reset(seed=seed, options=options)

    env = adapted(make_env([Strict] * 2))
    assert env.step(np.zeros(2, int))[0].tolist() == [[1], [1]]
    env.reset()  # gets all arguments that it needs
    env = adapted(make_env(["CartPole-v1"] * 2))
    with pytest.raises(gym.error.ResetNeeded, match="Cannot call env.step"):
        env.step(np.zeros(2, int))


@here_and_in_processes
def test_reset_mask_that_skips_env_without_state_is_refused(make_env: MakeEnv) -> None:
    env: Any = make_env([Fragile] * 2).to_gymnasium()
    mask = {"reset_mask": np.array([True, False])}
    for _ in range(2):
        with pytest.raises(ResetNeededError, match=r"latest states of envs \[1\] are not known"):
            env.reset(options=mask)
        with pytest.raises(KeyError):
            env.step(np.array([0, 1]))  # env 1 raises, so its state is still not known
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


def test_error_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "stable_baselines3":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.startswith(("stable_baselines3", "parallelenv.adapters.sb3"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with ParallelEnv(["CartPole-v1"]) as env:
        with pytest.raises(MissingDependencyError, match="pip install stable-baselines3"):
            env.to_sb3()
        env.reset(seed=1)  # still usable
        env.step([0])


# -------------------------------------------------------------------- the vector entry point


@pytest.mark.parametrize(("env", "arguments"), [(Looped, {"length": 9}), ("CartPole-v1", {})])
def test_vector_entry_point_makes_envs_with_a_time_limit(env: Any, arguments: Any) -> None:
    given = {"max_episode_steps": 4, "parallel_kwargs": {"num_cpus": 1}, **arguments}
    vector_env = vector_entry_point(2, env=env, para_mode=PROCESSES, autoreset_mode="SameStep", **given)
    assert vector_env.parallel_env.num_workers == 1
    vector_env.reset()
    truncations = [vector_env.step([0, 0])[3].tolist() for _ in range(4)]
    assert truncations[2:] == [[False, False], [True, True]]
    vector_env.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": Looped, "num_envs": 0}, "num_envs=0"),
        ({"env": Looped, "para_mode": PROCESSES, "autoreset_mode": "never"}, "autoreset_mode='never' is not known"),
        ({"env": Looped()}, "is itself an env.*Give a registered id"),
        ({"env": Looped, "parallel_kwargs": 5}, "parallel_kwargs=5 is not a dict"),
        ({"env": Looped, "parallel_kwargs": {"para_mode": ORACLE}}, r"parallel_kwargs contains \['para_mode'\]"),
        ({"env": Looped, "parallel_kwargs": {"envs": [Looped]}}, r"parallel_kwargs contains \['envs'\]"),
    ],
)
def test_vector_entry_point_refuses_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ParallelEnvError, match=message):
        vector_entry_point(**{"num_envs": 2, **arguments})


@pytest.mark.neighbours
@pytest.mark.filterwarnings("ignore")  # RLlib's own, many
def test_env_runner_of_rllib_samples_episodes() -> None:
    ppo, runners = require("ray.rllib.algorithms.ppo"), require("ray.rllib.env.single_agent_env_runner")
    config = (
        ppo.PPOConfig()
        .environment(
            env=lambda config: vector_entry_point(**config), env_config={"env": "CartPole-v1", "para_mode": PROCESSES}
        )
        .env_runners(num_envs_per_env_runner=4, gym_env_vectorize_mode="vector_entry_point")
    )
    runner = runners.SingleAgentEnvRunner(config=config)
    with runner.env.unwrapped.parallel_env as env:
        episodes = runner.sample(num_timesteps=400, random_actions=True)
    assert env.num_envs == 4
    assert 400 <= sum(map(len, episodes)) < 410
    assert all(sum(episode.get_rewards()) == len(episode) for episode in episodes)
