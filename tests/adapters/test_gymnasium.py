"""Masks, infos, attributes, frames and failures of the adapter for Gymnasium."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from conftest import MakeEnv
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from modes import LOCAL, THREADS, here_and_in_processes, in_modes

from adapters.envs import Drawn, Echo, Fragile, Looped, Once, Varied
from adapters.neighbours import Twins
from parallelenv import ParallelEnv
from parallelenv.errors import ArgumentError, ClosedError, UsageError
from parallelenv.results import difference
from parallelenv.testing.envs import Old

ZEROS = np.zeros(3, dtype=np.int64)
ONE_ONE = np.array([0, 1, 0])


# -------------------------------------------------------------------- basics


@here_and_in_processes
def test_adapter_is_a_vector_env_and_closes_its_parallel_env(make: Any) -> None:
    env = make(autoreset_mode=AutoresetMode.SAME_STEP)
    assert issubclass(type(env), gym.vector.VectorEnv)
    assert env.unwrapped is env
    assert "autoreset_mode" not in Looped.metadata
    for timeout in ("x", -1, float("nan"), True):
        with pytest.raises(ArgumentError, match="a number of seconds, 0 or more, or None for 3 s. Nothing was closed"):
            env.close(timeout)
    assert not env.closed
    env.close(0)
    assert env.closed
    assert env.parallel_env.closed


@here_and_in_processes
def test_adapter_steps_the_envs_of_its_parallel_env(make_env: MakeEnv) -> None:
    ours = make_env([Looped] * 3, asynchronous="restart")
    ours.reset()
    ours.pause([1])
    env: Any = ours.to_gymnasium()  # which has its own done policy, and resumes paused envs
    env.reset()
    assert env.step(ZEROS)[0].tolist() == [[1], [1], [1]]
    assert ours.get_env_attr("state") == [1, 1, 1]
    assert ours.step(ZEROS).dones.all()  # the same envs, by the same rules
    assert env.step(ZEROS)[0].tolist() == [[0], [0], [0]]
    assert "to_gymnasium('NextStep'" in repr(ours)
    assert difference(ours.to_gymnasium().step(ZEROS), env.step(ZEROS)) is not None
    env.reset()
    assert env.step(ZEROS)[0].tolist() == [[1], [1], [1]], "the reset took the place of that due in the step"
    with pytest.raises(UsageError, match=r"was handed over by to_gymnasium\('NextStep'.*Make another"):
        ours.to_gymnasium("Disabled")
    with pytest.raises(ArgumentError, match="SameStep"):
        ours.rollout(lambda states: ZEROS[: len(states)], 3)


@here_and_in_processes
def test_adapters_form_of_results_cannot_be_requested_by_users(make: Any) -> None:
    env = make([partial(Looped, 99)] * 3)
    env.reset()
    for _ in range(4):
        env.step(ZEROS)
    (align,) = env.parallel_env.engine.plans
    with pytest.raises(ArgumentError, match="align=.* is not known; expected 'item'"):
        env.parallel_env.step(ZEROS, align=align)


@here_and_in_processes
def test_pending_autoresets_are_saved_and_reported_in_reset_infos(make: Any) -> None:
    env, other = make([partial(Varied, mean=2.0)] * 3), make([partial(Varied, mean=2.0)] * 3)
    env.reset(seed=1)
    while not (ended := env.parallel_env.done).any():
        env.step(ZEROS)
    assert other.parallel_env.load_state(env.parallel_env.save_state()) == ()
    answer = env.step(ZEROS)
    assert difference(answer, other.step(ZEROS)) is None
    told = np.array([info["first"] for info in env.parallel_env.reset_infos])
    assert told[ended].tolist() == answer[-1]["first"][ended].tolist()
    for _ in range(20):
        assert difference(env.step(ZEROS), other.step(ZEROS)) is None


# -------------------------------------------------------------------- masks, seeds and options


@in_modes(*LOCAL)
def test_stepping_an_ended_env_without_reset_raises(make: Any) -> None:
    env = make([Looped, partial(Looped, 9), Looped], "Disabled")
    env.reset()
    env.step(ZEROS)
    ended = env.step(ZEROS)[2]
    with pytest.raises(ResetNeeded, match=r"envs \[0, 2\] have ended.*reset_mask"):
        env.step(ZEROS)
    with pytest.raises(ResetNeeded, match=r"envs \[0, 2\] have ended"):
        env.step_async(ZEROS)
    options = {"reset_mask": ended}
    env.reset(options=options)
    assert options == {"reset_mask": ended}, "the caller's dict is unchanged"
    assert env.step(ZEROS)[0].tolist() == [[1], [3], [1]]
    assert env.step(ZEROS)[2].any()
    env.close()
    with pytest.raises(ClosedError):
        env.step(ZEROS)


# -------------------------------------------------------------------- spaces


SINGLE = Box(0, 50, (1,), np.float32)


class Bounded(Looped):
    def __init__(self, high: float, size: int = 1) -> None:
        super().__init__()
        self.observation_space = Box(0, high, (size,), np.float32)


@here_and_in_processes
@pytest.mark.parametrize("observation_mode", ["different", (Box(0, 50, (3, 1), np.float32), SINGLE)])
def test_observation_mode_allows_different_bounds(observation_mode: Any, make_env: MakeEnv) -> None:
    env_fns = [partial(Bounded, 10 + number) for number in range(3)]
    env = make_env(env_fns)
    with pytest.raises(ArgumentError, match=r"env 1 is Box.*give observation_mode='different'"):
        env.to_gymnasium()
    theirs = SyncVectorEnv(env_fns, observation_mode=observation_mode)
    twins = Twins(env.to_gymnasium(observation_mode=observation_mode), theirs)
    twins.same("observation_space", "single_observation_space")
    twins.reset(seed=1)
    twins.step(ZEROS)


THREE = [partial(Bounded, 10)] * 3
DIFFERENT = {"observation_mode": "different"}
SHAPES = r"of 3 envs in Box\(0.0, 50.0, \(1,\), float32\) have the shapes"


@pytest.mark.parametrize(
    ("env_fns", "arguments", "error", "message"),
    [
        (THREE, {"observation_mode": (Box(0, 50, (2, 1), np.float32), SINGLE)}, ArgumentError, SHAPES),
        (THREE, {"observation_mode": (Box(0, 50, (3, 1), np.float64), SINGLE)}, ArgumentError, SHAPES),
        (THREE, {"observation_mode": (Discrete(3), SINGLE)}, ArgumentError, SHAPES),
        ([Looped, partial(Bounded, 9, 2)], DIFFERENT, ArgumentError, "env 1 is Box.*with other shapes or dtypes"),
        ([partial(Old, 0)], DIFFERENT, ArgumentError, "env 0 declares no observation_space.*spaces="),
        ([Looped, partial(Echo, Discrete(3))], {}, RuntimeError, "The action_space of env 1 is"),
        ([Looped], {"autoreset_mode": "next"}, ValueError, r"'next' is not known; expected .*'NextStep', 'SameStep'"),
        ([Looped], {"observation_mode": "any"}, ValueError, "observation_mode='any' is not known"),
    ],
)
def test_envs_or_modes_that_do_not_fit_are_refused(
    env_fns: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    with ParallelEnv(env_fns) as env, pytest.raises(error, match=message):
        env.to_gymnasium(**arguments)


SOME = np.array([True, True, False])
MASK = r"shape \(3,\) and dtype bool"
Refused = tuple[type[Exception], str, Callable[[Any], Any]]
BAD: dict[str, Refused] = {
    "too few seeds": (ValueError, "2 seeds were given for 3 envs", lambda env: env.reset(seed=[1, 2])),
    "a mask that is a list": (TypeError, MASK, lambda env: env.reset(options={"reset_mask": [True] * 3})),
    "a mask of numbers": (TypeError, MASK, lambda env: env.reset(options={"reset_mask": np.ones(3)})),
    "a short mask": (ValueError, r"of shape \(2,\)\. Give", lambda env: env.reset(options={"reset_mask": SOME[:2]})),
    "a mask without True": (ValueError, MASK, lambda env: env.reset(options={"reset_mask": np.zeros(3, bool)})),
    "too few actions": (ValueError, "2 actions", lambda env: env.step(ZEROS[:2])),
    "too many actions": (ValueError, "4 actions", lambda env: env.step(np.zeros(4, int))),
    "too few values": (ValueError, "2 items for 3 envs", lambda env: env.set_attr("length", [1, 2])),
    "no such attribute": (AttributeError, "Bounded has no attribute 'nonsense'", lambda env: env.get_attr("nonsense")),
    "no such method": (AttributeError, "no attribute 'nonsense'", lambda env: env.call("nonsense", 1)),
}
BYPASS = r"would bypass this vector env\. Use its own "
OURS: dict[str, Refused] = {
    "seeds for a mask": (ValueError, "2 seeds", lambda env: env.reset(seed=[1, 2], options={"reset_mask": SOME})),
    "options that are a number": (ArgumentError, "is not a dict. Give a dict", lambda env: env.reset(options=5)),
    "reset by call": (ValueError, BYPASS + "reset", lambda env: env.call("reset")),
    "step by call": (ValueError, BYPASS + "step", lambda env: env.call("step")),
    "close by call": (ValueError, BYPASS + "close", lambda env: env.call("close")),
}


@here_and_in_processes
@pytest.mark.parametrize("what", [*BAD, *OURS])
def test_bad_arguments_are_refused_with_the_errors_of_sync_vector_env(what: str, make: Any) -> None:
    expected, message, call = {**BAD, **OURS}[what]
    ours = make([partial(Bounded, 9)] * 3)
    ours.reset()
    ours.step(ZEROS)
    with pytest.raises(expected, match=message):
        call(ours)
    assert ours.step(ZEROS)[0].tolist() == [[2], [2], [2]], "nothing was done"
    if what in BAD and not gym.__version__.startswith(("1.1.", "1.2.", "1.3.")):  # these raised other errors, or none
        theirs = SyncVectorEnv([partial(Bounded, 9)] * 3)
        theirs.reset()
        with pytest.raises(expected) as caught:
            call(theirs)
        assert caught.type is expected


# -------------------------------------------------------------------- attributes, methods, frames


@here_and_in_processes
def test_attributes_methods_and_frames_equal_those_of_sync_vector_env(make: Any) -> None:
    twins = Twins(make([Drawn] * 3), SyncVectorEnv([Drawn] * 3))
    twins.same("render_mode", "metadata")
    twins.reset(seed=7)
    twins.step(ZEROS)
    twins.render()
    twins.call("add", 1, other=0.5)
    for values in (9, [5, 6, 7]):
        twins.set_attr("length", values)
        twins.call("length")
        twins.get_attr("length")
    twins.same("np_random_seed", "np_random")


@in_modes(THREADS)
def test_frames_are_rendered_one_at_a_time(make: Any) -> None:
    class Canvas(Looped):
        drawing = 0

        def render(self) -> Any:
            Canvas.drawing += 1
            time.sleep(0.01)
            most = Canvas.drawing
            Canvas.drawing -= 1
            return most

    env = make([Canvas] * 3)
    assert env.render() == env.call("render") == (1, 1, 1)


@here_and_in_processes
@pytest.mark.parametrize("autoreset_mode", ["NextStep", "SameStep"])
def test_episode_of_restarted_env_is_truncated(autoreset_mode: str, make: Any) -> None:
    env = make([partial(Fragile, 9)] * 3, autoreset_mode, on_failure="restart")
    env.reset()
    env.step(ZEROS)
    observations, rewards, terminations, truncations, infos = env.step(ONE_ONE)
    assert (observations.tolist(), rewards.tolist()) == ([[2], [0], [2]], [4, 0, 4])
    assert (terminations.tolist(), truncations.tolist()) == ([False] * 3, [False, True, False])
    last_infos = infos if autoreset_mode == "NextStep" else infos["final_info"]
    assert isinstance(last_infos["failure"][1], KeyError)
    assert "final_obs" not in infos  # the last state is unknown
    assert env.step(ZEROS)[0].tolist() == [[3], [0 if autoreset_mode == "NextStep" else 1], [3]]


@here_and_in_processes
def test_env_that_fails_in_its_automatic_reset_ends_no_episode(make: Any) -> None:
    env = make([partial(Looped, 9), partial(Once, 1), partial(Looped, 9)], on_failure="restart")
    env.reset()
    assert env.step(ZEROS)[2].tolist() == [False, True, False]
    observations, rewards, terminations, truncations, infos = env.step(ZEROS)
    assert (observations.tolist(), rewards.tolist()) == ([[2], [0], [2]], [4, 0, 4])
    assert not (terminations | truncations).any()
    assert isinstance(infos["failure"][1], KeyError)
    assert infos["_was_reset"].tolist() == [False, True, False]
    assert env.parallel_env.reset_infos[1] == {"was_reset": True}
    assert env.step(ZEROS)[2].tolist() == [False, True, False]
    found = env.parallel_env.engine.table.stats.summary()
    assert (found.num_steps, found.num_episodes, found.mean_length) == (8, 2, 1.0)
