"""Bases of wrappers: one that sees every answer, and one that changes states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from parallelenv.arguments import check_align
from parallelenv.errors import HandedOverError, MissingMethodError, ParallelEnvError, ResetNeededError
from parallelenv.ids import parse_ids
from parallelenv.ownership import own
from parallelenv.results import StepBatch, StepResult
from parallelenv.spaces import batched
from parallelenv.wrappers.answers import Acting, Space, aligned, batch_of, row_of
from parallelenv.wrappers.base import ParallelWrapper

if TYPE_CHECKING:
    from parallelenv.answers import Align
    from parallelenv.env import ParallelEnv


class AnswerWrapper(ParallelWrapper):
    """Base of wrappers that look at what envs answer, or change it: `began` sees resets, and `answered` steps.

    They see every answer once, batched, whichever call it comes from (`step`, `recv`, `step_wait`), of however many
    envs and in whatever ``align``; and if an env fails, those of the others, which the error has as its ``partial``.

    Args:
        env: As in `ParallelWrapper`.
    """

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return what a reset is to answer.

        Args:
            states: First states of these envs, batched.
            env_ids: The envs, in the order of the states.
        """
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Return what a step is to answer. ``result``: what it has answered; its infos may be changed."""
        return result

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes, as `ParallelEnv.reset`."""
        env_ids = self.chosen(id)
        self._refuse_handed_over()
        try:
            states = self.env.reset(id, seed=seed, options=options)
        except BaseException as error:
            if hasattr(error, "partial"):
                begun = tuple(env_id for env_id in env_ids if self.have_begun((env_id,)))
                object.__setattr__(error, "partial", self.began(error.partial, begun))
            raise
        return self.began(states, env_ids)

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs, as `ParallelEnv.step`."""
        return self._seen(align, self.env.step, action, id)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return the results of steps, as `ParallelEnv.recv`."""
        return self._seen(align, self.env.recv, min_envs, max_envs, timeout)

    def step_wait(self, timeout: float | None = None, align: Align = "item") -> Any:
        """Return the result of a step that was begun, as `ParallelEnv.step_wait`."""
        return self._seen(align, self.env.step_wait, timeout)

    def _seen(self, align: Align, call: Any, *args: Any) -> StepResult | StepBatch:
        """Return what a call answers, batched whatever ``align`` is until `answered` has seen it."""
        check_align(align)
        self._refuse_handed_over()
        try:
            result = call(*args)
        except BaseException as error:
            partial = getattr(error, "partial", None)
            if isinstance(partial, StepResult):
                self._see_partial(error, partial, align)
            raise
        return self._shaped(result, align)

    def _see_partial(self, error: BaseException, partial: StepResult, align: Align) -> None:
        """See what is left of a call. What is wrong with that too is a note of the error that is there already."""
        try:
            object.__setattr__(error, "partial", self._shaped(partial, align))
        except ParallelEnvError as another:
            error.add_note(f"And of what is left: {another}")

    def _shaped(self, result: StepResult, align: Align) -> StepResult | StepBatch:
        return aligned(self.answered(result), align, self.single_observation_space)

    def chosen(self, id: Any) -> tuple[int, ...]:
        """Return the env ids that an ``id`` argument means."""
        if id is not None:
            return parse_ids(id, len(self))
        return tuple(np.flatnonzero(~self.paused).tolist())

    @property
    def restarts(self) -> bool:
        """Whether an env that ends begins its next episode in the same step."""
        return bool(self.unwrapped._asynchronous == "restart")

    def have_begun(self, env_ids: Sequence[int]) -> bool:
        """Whether all of these envs have an episode."""
        try:
            self.unwrapped._refuse_fresh(env_ids)
        except ResetNeededError:
            return False
        return True

    def _refuse_handed_over(self) -> None:
        contract = self.unwrapped._contract
        if contract is not None:
            raise HandedOverError(
                f"The ParallelEnv in {type(self).__name__} was handed over by {contract} and follows its rules, which "
                "this wrapper does not know. Make another ParallelEnv from the same list of env fns."
            )


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
            env.observation_spaces if observation_space is None else [own(observation_space) for _ in range(len(env))]
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
        """
        raise MissingMethodError(
            f"{type(self).__name__} lacks process(states). Write it: it returns states in another form."
        )

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return first states, processed."""
        return self.process(states)

    def answered(self, result: StepResult) -> StepResult:
        """Return an answer whose states are processed, last ones of episodes too."""
        return self.processed(Acting(result, self.raw_space))

    def processed(self, acting: Acting) -> StepResult:
        """Return an answer whose states are processed, last ones of episodes too."""
        if self.restarts:
            self._process_ended([info for info in acting.infos[acting.dones] if info.get("ended_state") is not None])
        return acting.result if acting.is_nobody else acting.with_states(self.process(acting.states))

    def _process_ended(self, infos: Sequence[dict[str, Any]]) -> None:
        if infos:
            processed = self.process(batch_of(self.raw_space, [info["ended_state"] for info in infos]))
            for row, info in enumerate(infos):
                info["ended_state"] = own(row_of(processed, row))
