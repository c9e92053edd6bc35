"""The base of wrappers that change states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium

from parallelenv.contract.copying import deep_copy
from parallelenv.contract.spaces import Structure, batched
from parallelenv.errors import MissingMethodError
from parallelenv.results import StepResult
from parallelenv.wrappers.answers import Acting, Space, batch_of, check_states, row_of
from parallelenv.wrappers.base import ParallelWrapper
from parallelenv.wrappers.seeing import AnswerWrapper

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class StateWrapper(AnswerWrapper):
    """Base of wrappers that change states: `process` is called with those of all envs that answer.

    Args:
        env: As in `ParallelWrapper`.
        observation_space: The space of a processed state of one env; ``None``: it stays the same.
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
        """Return states in another form.

        Called for states of `reset`, `step` and `recv`, without those of envs that have none, and once more for
        those that are ``info["ended_state"]``.

        Args:
            states: Batched as `ParallelEnv.step` gives them; of any number of envs.

        Returns:
            An array whose first axis is that of the envs, or a dict or tuple of such arrays.

        Raises:
            MissingMethodError: If a subclass does not have it.
            BaseException: Anything else: the answer is kept as it was before, as `AnswerWrapper` says.
        """
        raise MissingMethodError(
            f"{type(self).__name__} lacks process(states). Write it: it returns states in another form."
        )

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return first states, processed."""
        return self._processed(states, len(env_ids))

    def answered(self, result: StepResult) -> StepResult:
        """Return an answer whose states are processed, last ones of episodes too."""
        return self.processed(Acting(result, self.raw_space))

    def get_observations(self, id: Any = None) -> Any:
        """Return what is seen of tasks, as `TaskPool.get_observations`, processed."""
        env: Any = self.env
        return self._of_living(
            env.get_observations(id), self.chosen(id), lambda states, env_ids: self._processed(states, len(env_ids))
        )

    def processed(self, acting: Acting) -> StepResult:
        """Return an answer whose states are processed, last ones of episodes too.

        Raises:
            SpacesError: If `process` returns what is no batch of states of the space.
        """
        ended = [info for info in acting.infos[acting.dones] if info.get("ended_state") is not None]
        last_states = self._last_states(ended) if ended and self.restarts else None
        result = acting.result
        if not acting.is_nobody:
            states = self._processed(acting.states, len(acting.env_ids))
            result = acting.with_states(states, self.single_observation_space)
        if last_states is not None:  # last, so that infos are as they were if process() raises
            structure = Structure(self.single_observation_space)
            for row, info in enumerate(ended):
                info["ended_state"] = deep_copy(row_of(structure, last_states, row))
        return result

    def _last_states(self, infos: Sequence[dict[str, Any]]) -> Any:
        return self._processed(batch_of(self.raw_space, [info["ended_state"] for info in infos]), len(infos))

    def _processed(self, states: Any, num_states: int) -> Any:
        processed = self.process(states)
        check_states(self.single_observation_space, processed, num_states)
        return processed
