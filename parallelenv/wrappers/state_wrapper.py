"""The base of wrappers that change states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium

from parallelenv.contract.copying import deep_copy
from parallelenv.contract.spaces import batched
from parallelenv.errors import UsageError
from parallelenv.results import StepResult
from parallelenv.wrappers.answer_rows import Space, SteppedRows, batch_of, check_states, unstacked
from parallelenv.wrappers.answer_wrapper import AnswerWrapper
from parallelenv.wrappers.base import ParallelWrapper

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class StateWrapper(AnswerWrapper):
    """Base of wrappers that change states: override `process`, which gets the states of all envs in a result.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        observation_space: Space of one env's processed state; ``None`` means unchanged.
    """

    def __init__(
        self, env: ParallelEnv | ParallelWrapper, observation_space: gymnasium.Space[Any] | None = None
    ) -> None:
        super().__init__(env)
        self.raw_space: Space = env.single_observation_space
        self.single_observation_space = self.raw_space if observation_space is None else observation_space
        self.observation_space = batched(self.single_observation_space, len(env))
        self.observation_spaces = (
            env.observation_spaces
            if observation_space is None
            else [deep_copy(observation_space) for _ in range(len(env))]
        )

    def process(self, states: Any) -> Any:
        """Return processed states.

        Called with the states of `reset`, `step` and `recv`, without envs that have none, and a second time with those
        in ``info["ended_state"]``.

        Args:
            states: Batched as `ParallelEnv.step` returns them, for any number of envs.

        Returns:
            An array whose first axis is the env axis, or a dict or tuple of such arrays.

        Raises:
            UsageError: If a subclass does not override it.
            BaseException: Any other; ``error.partial`` has the unprocessed result, see `AnswerWrapper`.
        """
        raise UsageError(f"{type(self).__name__} lacks process(states). Write it: it returns states in another form.")

    def on_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return the first states, processed."""
        return self._processed(states, len(env_ids))

    def on_step(self, result: StepResult) -> StepResult:
        """Return the result with its states processed, including last states of episodes."""
        return self.processed(SteppedRows(result, self.raw_space))

    def processed(self, stepped: SteppedRows) -> StepResult:
        """Return the result with its states processed, including last states of episodes.

        Raises:
            ArgumentError: If `process` returns something other than a batch of states of the space.
        """
        if stepped.all_rest:
            return stepped.result
        states = self._processed(stepped.states, len(stepped.env_ids))
        infos = [info for info in stepped.infos[stepped.dones] if info.get("ended_state") is not None]
        if infos and self.restarts:
            ended = self._processed(batch_of(self.raw_space, [info["ended_state"] for info in infos]), len(infos))
            for info, state in zip(infos, unstacked(ended, self.single_observation_space, len(infos)), strict=True):
                info["ended_state"] = state
        return stepped.with_states(states, self.single_observation_space)

    def get_observations(self, id: Any = None) -> Any:
        """Return the processed current observations of tasks. See `TaskPool.get_observations`."""
        env: Any = self.env
        return self._without_exhausted(
            lambda states, env_ids: self._processed(states, len(env_ids)), env.get_observations(id), self.chosen(id)
        )

    def _processed(self, states: Any, num_states: int) -> Any:
        processed = self.process(states)
        check_states(self.single_observation_space, processed, num_states)
        return processed
