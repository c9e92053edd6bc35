"""A `ParallelEnv` as a `VecEnv` of Stable-Baselines3. Only this file imports that package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from parallelenv.adapters.common import (
    AdapterCalls,
    EndedEpisode,
    SameStep,
    declared_spaces,
    positions,
    raises_first,
)
from parallelenv.contract import arguments
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import show
from parallelenv.contract.protocol import Lookup, MethodCall
from parallelenv.contract.spaces import Env, Info, State
from parallelenv.contract.tracebacks import short_tracebacks, warn_user
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

Indices = int | Iterable[int] | None
SB3Step = tuple[State, Array, Array, list[Info]]


@raises_first
class SB3VecEnv(VecEnv):
    """A Stable-Baselines3 vector env, returned by `ParallelEnv.to_sb3`.

    Its methods match those of `DummyVecEnv`, except that ``set_attr`` sets an attribute on the wrapper or env that has
    it, because setting it on the outermost wrapper would not affect the env. The caller may modify all returned values.
    ``parallel_env`` is the `ParallelEnv`.
    """

    def __init__(self, env: ParallelEnv) -> None:
        self.parallel_env = env
        observation_spaces = declared_spaces("observation_space", env)
        action_spaces = declared_spaces("action_space", env)
        modes = [facts.render_mode for facts in env.engine.pool.facts]
        if any(mode != modes[0] for mode in modes):
            raise ArgumentError(
                f"The envs have the render modes {modes}, but a VecEnv has one. Make them with the same one."
            )
        # SB3's algorithms keep the latest observations during a step, which would overwrite these if they were views.
        self._calls = AdapterCalls(
            env, "to_sb3()", SameStep(), reward_dtype=np.dtype(np.float32), always_copies=True, broadcasts=True
        )
        super().__init__(env.num_envs, *copy.deepcopy((observation_spaces[0], action_spaces[0])))
        self.metadata = dict(env.engine.pool.facts[0].metadata)

    # ---------------------------------------------------------------- episodes

    def reset(self) -> State:
        """Start new episodes with the seeds and options given to `seed` and `set_options`; return the observations."""
        seeds = None if all(seed is None for seed in self._seeds) else self._seeds
        options = [option or None for option in self._options]
        observations = self.parallel_env.reset(slice(None), seed=seeds, options=options)
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = self.parallel_env.reset_infos
        return observations

    def step(self, actions: object) -> SB3Step:
        """Step all envs, and reset envs whose episodes end. See `step_async` and `step_wait` for details."""
        return self._calls.converted(self._convert, self._calls.step, actions)

    def step_async(self, actions: object) -> None:
        """Start a step of all envs; if an error is raised, no step is started.

        ``actions`` has the shape ``(num_envs, *action_space.shape)``.

        Raises:
            ActionError: If the actions are invalid.
            PendingCallError: If another step is in flight.
            EnvBusyError: If an env is paused (see `ParallelEnv.pause`).
        """
        self._calls.converted(self._convert, self._calls.step_async, actions)

    def step_wait(self) -> SB3Step:
        """Return the result of the step in flight.

        Returns:
            Observations, rewards ``(num_envs,)`` float32, dones ``(num_envs,)`` bool, and a list with one info per env.
            For an env whose episode ended, the observation is the first of its next episode. Each info has
            ``"TimeLimit.truncated"``. The info of an env whose episode ended also has ``"terminal_observation"``; this
            is missing if the env was restarted after a failure, because its last observation is then unknown.

        Raises:
            NothingInFlightError: If no step is in flight.
            EnvContractError: If a reward is not a number, or is finite but overflows float32.
            BaseException: Any exception raised by an env. ``error.partial`` is the return value for the other envs
                only; ``error.partial.env_ids`` has their ids.
        """
        return self._calls.converted(self._convert, self._calls.step_wait, None)

    def _convert(self, result: StepResult) -> SB3Step:
        states, rewards, dones, infos = result
        listed: list[dict[Any, Any]] = infos.tolist()
        is_cut = (result.truncated & ~result.terminated).tolist()
        for position, (env_id, info) in enumerate(zip(result.env_ids.tolist(), listed, strict=True)):
            ending: EndedEpisode | None = info.pop(EndedEpisode, None)
            is_known = ending is None or ending.state is not None
            info["TimeLimit.truncated"] = is_cut[position] and is_known
            if ending is not None:
                self.reset_infos[env_id] = ending.reset_info
                if is_known:
                    info["terminal_observation"] = ending.state
        return states, rewards.astype(np.float32), dones, listed

    def close(self) -> None:
        """Close the `ParallelEnv`. This method can be called more than once."""
        self.parallel_env.close()

    # ---------------------------------------------------------------- attributes and methods

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of each env, looked up through wrappers.

        Raises:
            AttributeError: If an env lacks the attribute.
        """
        return self._each(indices, lambda ids: self._calls.existing_attr(attr_name, ids))

    def has_attr(self, attr_name: str) -> bool:
        """Return True if every env has the attribute ``attr_name``, even if its value cannot be copied."""
        arguments.check_name("attr_name", attr_name)
        return all(self._calls.look_up(Lookup(attr_name, "exists"), None))

    def set_attr(self, attr_name: str, value: object, indices: Indices = None) -> None:
        """Set an attribute of each env on the outermost wrapper that has it; if none has it, on the innermost env."""
        ids = list(dict.fromkeys(positions(indices, self.num_envs, "indices")))
        self.parallel_env.set_env_attr(attr_name, values=[value] * len(ids), id=ids)

    def env_method(
        self, method_name: str, *method_args: object, indices: Indices = None, **method_kwargs: object
    ) -> list[Any]:
        """Call a method of each env, looked up through wrappers, and return the results.

        Raises:
            AttributeError: If an env lacks the method.
        """
        arguments.check_name("method_name", method_name)
        call = MethodCall(method_name, method_args, method_kwargs)
        calls, ids = self._calls, positions(indices, self.num_envs, "indices")
        rounds = [ids] if len(set(ids)) == len(ids) else [[one] for one in ids]  # an env listed twice is called twice
        return [answer for some in rounds for answer in calls.call_wait(calls.call_async(call, some), None)]

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Return one bool per env: True if the env has a wrapper of the given class."""
        if not isinstance(wrapper_class, type):
            raise ArgumentError(f"wrapper_class={show(wrapper_class)} is not a class. Give the class of a wrapper.")
        how = Lookup(how="wrapper")
        return self._each(indices, lambda ids: self._calls.look_up(how, wrapper_class, ids))

    def get_images(self) -> Sequence[Array | None]:
        """Return one frame per env; if the render mode is not ``"rgb_array"``, every frame is ``None``."""
        if self.render_mode != "rgb_array":
            warn_user(f"The render mode is {self.render_mode!r}; images need 'rgb_array'.")
            return [None] * self.num_envs
        frames: list[Array | None] = self.parallel_env.render(slice(None))
        return frames

    @property
    @short_tracebacks
    def envs(self) -> tuple[Env, ...]:
        """The env objects. If the envs live in other processes, an `AbsentAttributeError` is raised."""
        return self._calls.envs("envs", "get_attr(), set_attr() or env_method()")

    def _each(self, indices: Indices, ask: Callable[[list[int]], Sequence[Any]]) -> list[Any]:
        ids = positions(indices, self.num_envs, "indices")
        asked = list(dict.fromkeys(ids))
        answers = dict(zip(asked, ask(asked), strict=True))
        return [answers[env_id] for env_id in ids]
