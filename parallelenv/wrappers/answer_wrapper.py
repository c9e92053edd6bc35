"""The base of wrappers that process every result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.arguments import check_align, parse_ids
from parallelenv.contract.failures import put
from parallelenv.errors import ResetNeededError, UsageError
from parallelenv.results import StepBatch, StepResult
from parallelenv.wrappers.answer_rows import aligned, batch_of, scattered
from parallelenv.wrappers.base import ParallelWrapper

if TYPE_CHECKING:
    from parallelenv.engine.assemble import Align


class AnswerWrapper(ParallelWrapper):
    """Base of wrappers that read or change results: override `on_reset`, `on_step` or `on_send`.

    Each result passes through once, batched, whichever method returns it (`step`, `recv`, `step_wait`), for any number
    of envs and any ``align``. If an env fails, the others' results in ``error.partial`` pass through too.

    An exception raised by a hook is raised as it is. Its ``partial`` is the result that the hook was given, its
    ``wrapper`` this wrapper. Wrappers outside of it never see that result, so all envs in it need a reset.

    Args:
        env: A `ParallelEnv`, or another wrapper.
    """

    def on_send(self, action: Any, id: Any) -> None:
        """Look at actions before they are sent; an error refuses them.

        Args:
            action: As given to `step`, `send` or `step_async`.
            id: Likewise.
        """

    def on_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return what a reset should return.

        Args:
            states: First states of these envs, batched.
            env_ids: The envs, in the order of the states. Exhausted envs are left out.
        """
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Return what a step should return. ``result`` is the result from inside; its infos may be changed."""
        return result

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes. See `ParallelEnv.reset`."""
        env_ids = self.chosen(id)
        self._refuse_handed_over()
        try:
            states = self.env.reset(id, seed=seed, options=options)
        except BaseException as error:
            if hasattr(error, "partial") and not hasattr(error, "wrapper"):
                begun = tuple(env_id for env_id in env_ids if self.have_begun((env_id,)))
                put(error, "partial", self._see_reset(error.partial, begun))
            raise
        return self._see_reset(states, env_ids)

    def _see_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        try:
            return self._without_exhausted(self.on_reset, states, env_ids)
        except BaseException as error:
            self._require_reset(error, states, env_ids)
            raise

    def _without_exhausted(
        self, look: Callable[[Any, tuple[int, ...]], Any], states: Any, env_ids: tuple[int, ...]
    ) -> Any:
        """Return ``look``'s result for envs that are not exhausted, and ``None`` for the others."""
        living = np.flatnonzero(~self.exhausted[list(env_ids)]).tolist()
        if len(living) == len(env_ids) or not living:
            return look(states, env_ids) if living else states
        batch = batch_of(self.env.single_observation_space, [states[place] for place in living])
        seen = look(batch, tuple(env_ids[place] for place in living))
        return scattered(seen, self.single_observation_space, living, len(env_ids))

    def _require_reset(self, error: BaseException, partial: Any, env_ids: Sequence[int]) -> None:
        """Complete an error of this wrapper, and mark the envs as in need of a reset."""
        put(error, "partial", partial)
        put(error, "wrapper", self)
        table = self.unwrapped.engine.table
        table.lose(table.living(env_ids))

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs. See `ParallelEnv.step`."""
        self._refuse_handed_over()
        self.on_send(action, id)
        return self._seen(align, self.env.step, action, id)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.send`."""
        self._refuse_handed_over()
        self.on_send(action, id)
        self.env.send(action, id)

    def step_async(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.step_async`."""
        self._refuse_handed_over()
        self.on_send(action, id)
        self.env.step_async(action, id)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return results of steps in flight. See `ParallelEnv.recv`."""
        return self._seen(align, self.env.recv, min_envs, max_envs, timeout)

    def step_wait(self, timeout: float | None = None, align: Align = "item") -> Any:
        """Return the results of the step in flight. See `ParallelEnv.step_wait`."""
        return self._seen(align, self.env.step_wait, timeout)

    def _seen(self, align: Align, call: Any, *args: Any) -> StepResult | StepBatch:
        """Return the processed result of a call, which is batched until `on_step` has processed it."""
        check_align(align)
        try:
            result = call(*args)
        except BaseException as error:
            partial = getattr(error, "partial", None)
            if isinstance(partial, StepResult) and not hasattr(error, "wrapper"):
                put(error, "partial", self._see_step(partial, align))
            raise
        return self._see_step(result, align)

    def _see_step(self, result: StepResult, align: Align) -> StepResult | StepBatch:
        try:
            return aligned(self.on_step(result), align, self.single_observation_space)
        except BaseException as error:
            self._require_reset(error, result, result.env_ids.tolist())
            raise

    def chosen(self, id: Any) -> tuple[int, ...]:
        """Return the env ids of an ``id`` argument."""
        if id is not None:
            return parse_ids(id, len(self))
        return tuple(np.flatnonzero(~self.paused).tolist())

    @property
    def restarts(self) -> bool:
        """Whether an env whose episode ends begins the next one in the same step."""
        return self.unwrapped.engine.begins_next_episodes

    def have_begun(self, env_ids: Sequence[int]) -> bool:
        """Return whether all of these envs have an episode."""
        try:
            self.unwrapped.engine.refuse_fresh(env_ids)
        except ResetNeededError:
            return False
        return True

    def _refuse_handed_over(self) -> None:
        contract = self.unwrapped.engine.contract
        if contract is not None:
            raise UsageError(
                f"The ParallelEnv in {type(self).__name__} was handed over by {contract} and follows its rules, which "
                "this wrapper does not know. Make another ParallelEnv from the same list of env fns."
            )
