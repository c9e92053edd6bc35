"""The base of wrappers that process every result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from parallelenv.contract.arguments import check_align
from parallelenv.contract.env_ids import parse_ids
from parallelenv.contract.spaces import Structure, object_array
from parallelenv.errors import ResetNeededError, UsageError
from parallelenv.results import StepBatch, StepResult
from parallelenv.wrappers.answer_rows import aligned, batch_of, row_of, rows_of, unstacked
from parallelenv.wrappers.base import ParallelWrapper
from parallelenv.wrappers.refused_answers import (
    RefusedResults,
    attach_partial,
    is_unanswered,
    partition_results,
    refused_in,
)

if TYPE_CHECKING:
    from parallelenv.engine.assemble import Align

AnswerHook = Callable[[Any, tuple[int, ...]], Any]
"""A function of batched states and their env ids."""


class AnswerWrapper(ParallelWrapper):
    """Base of wrappers that read or change results: override `began` for resets and `answered` for steps.

    Each result passes through once, batched, whichever method returns it (`step`, `recv`, `step_wait`), for any number
    of envs and any ``align``. If an env fails, the others' results in ``error.partial`` pass through too.

    To reject the results of some envs, raise with `refuse` or `refuse_begun`; the other envs keep theirs. After any
    other exception ``error.partial`` is the whole result from inside, batched, and outer wrappers leave it unchanged.
    ``error.refused`` maps the ids of rejected envs to their results, and `missed` is called with these ids.

    Args:
        env: A `ParallelEnv`, or another wrapper.
    """

    _refusing: BaseException | None = None
    """The exception that `refuse` is raising. Unlike others, it has its ``partial`` already."""

    def began(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        """Return what a reset should return.

        Args:
            states: First states of these envs, batched.
            env_ids: The envs, in the order of the states.
        """
        return states

    def answered(self, result: StepResult) -> StepResult:
        """Return what a step should return. ``result`` is the result from inside; its infos may be changed."""
        return result

    def missed(self, env_ids: tuple[int, ...], has_begun: bool) -> None:
        """Handle envs whose result was refused, here or inside, so that episodes are not mixed up.

        Args:
            env_ids: Envs whose episode has ended or begun.
            has_begun: Whether they are in a new episode; otherwise they need a reset.
        """

    def refuse(self, error: BaseException, result: StepResult, env_ids: Collection[int]) -> NoReturn:
        """Raise an error that concerns some envs of a result. The others keep theirs.

        Args:
            error: The error. Its ``partial`` becomes this wrapper's result for the others, and its ``refused`` the
                results of these envs: ``(state, reward, done, info)`` by env id.
            result: The whole result.
            env_ids: The envs to refuse.
        """
        structure = self._raw_structure()
        others, theirs = partition_results(result, env_ids, structure)
        refused = RefusedResults.of(theirs, structure)
        attach_partial(error, others, refused)
        self._miss(refused)
        if len(others.env_ids):
            self._answer_rest(error, lambda: self._answer_step(others, "item"))
        self._refusing = error
        raise error

    def keep(self, error: BaseException, answer: Any) -> None:
        """Set ``error.partial`` for an error that concerns no env's result.

        Args:
            error: The error, to be raised by `began` or `answered`.
            answer: What they would have returned.
        """
        attach_partial(error, answer, RefusedResults())
        self._refusing = error

    def refuse_begun(
        self, error: BaseException, states: Any, env_ids: Sequence[int], refused_ids: Collection[int]
    ) -> NoReturn:
        """Raise an error that concerns the first states of some envs. See `refuse`.

        Args:
            error: The error. Its ``refused`` becomes the states of these envs, by env id.
            states: First states.
            env_ids: Env ids of the states.
            refused_ids: The envs to refuse.
        """
        structure = self._raw_structure()
        left = [row for row, env_id in enumerate(env_ids) if env_id not in refused_ids]
        others, other_ids = rows_of(structure, states, left), tuple(env_ids[row] for row in left)
        attach_partial(error, others, _first_states(structure, states, env_ids, refused_ids))
        self.missed(tuple(refused_ids), True)
        if left:
            self._answer_rest(error, lambda: self._answer_reset(others, other_ids))
        self._refusing = error
        raise error

    def _structure_now(self) -> Structure:
        """Return the structure of this wrapper's states."""
        return Structure(self.single_observation_space)

    def _raw_structure(self) -> Structure:
        """Return the structure of the wrapped object's states."""
        return Structure(self.env.single_observation_space)

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes. See `ParallelEnv.reset`."""
        env_ids = self.chosen(id)
        self._refuse_handed_over()
        try:
            states = self.env.reset(id, seed=seed, options=options)
        except BaseException as error:
            if hasattr(error, "partial"):
                self._see_begun(error, env_ids)
            raise
        return self._answer_reset(states, env_ids)

    def _answer_reset(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        try:
            return self._of_living(states, env_ids, self._see_first)
        except BaseException as error:
            refused = refused_in(error) or RefusedResults()
            self._set_beside_exhausted(error, tuple(env_id for env_id in env_ids if env_id not in refused))
            raise

    def _of_living(self, states: Any, env_ids: tuple[int, ...], look: AnswerHook) -> Any:
        """Return ``look``'s result for envs that are not exhausted, and ``None`` for the others."""
        living = self._living(env_ids)
        if not living or len(living) == len(env_ids):
            return look(states, env_ids) if living else states
        batch = batch_of(self.env.single_observation_space, [states[place] for place in living])
        return self._beside_exhausted(look(batch, tuple(env_ids[place] for place in living)), env_ids)

    def _living(self, env_ids: Sequence[int]) -> list[int]:
        """Return the positions of envs that are not exhausted."""
        places: list[int] = np.flatnonzero(~self.exhausted[list(env_ids)]).tolist()
        return places

    def _beside_exhausted(self, states: Any, env_ids: Sequence[int]) -> Any:
        """Return one state per env: this wrapper's states in order, and ``None`` for exhausted envs."""
        rows: list[Any] = [None] * len(env_ids)
        living = self._living(env_ids)
        for place, state in zip(living, unstacked(states, self._structure_now(), len(living)), strict=True):
            rows[place] = state
        return object_array(rows)

    def _set_beside_exhausted(self, error: BaseException, env_ids: Sequence[int]) -> None:
        """Add ``None`` for exhausted envs to an error's ``partial``."""
        if hasattr(error, "partial") and 0 < len(self._living(env_ids)) < len(env_ids):
            attach_partial(error, self._beside_exhausted(error.partial, env_ids))

    def _see_first(self, states: Any, env_ids: tuple[int, ...]) -> Any:
        try:
            return self.began(states, env_ids)
        except BaseException as error:
            if self._refusing is not error:  # raised by user code
                attach_partial(error, states, _first_states(self._raw_structure(), states, env_ids, env_ids))
                self.missed(env_ids, True)
            self._refusing = None
            raise

    def _see_begun(self, error: BaseException, env_ids: Sequence[int]) -> None:
        """Process the first states in ``error.partial`` after some envs failed in a reset."""
        refused: RefusedResults = refused_in(error) or RefusedResults()
        self.missed(tuple(refused), True)
        left = tuple(env_id for env_id in env_ids if env_id not in refused and self.have_begun((env_id,)))
        if left or not refused:
            partial = error.partial  # type: ignore[attr-defined]
            self._answer_rest(error, lambda: self._answer_reset(partial, left))

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs. See `ParallelEnv.step`."""
        return self._seen(align, self.env.step, action, id)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.send`."""
        self._refuse_handed_over()
        self.env.send(action, id)

    def step_async(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.step_async`."""
        self._refuse_handed_over()
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
        """Return the processed result of a call, which is batched until `answered` has processed it."""
        check_align(align)
        self._refuse_handed_over()
        try:
            result = call(*args)
        except BaseException as error:
            partial = getattr(error, "partial", None)
            if isinstance(partial, StepResult):
                self._see_partial(error, partial, align)
            raise
        return self._answer_step(result, align)

    def _see_partial(self, error: BaseException, partial: StepResult, align: Align) -> None:
        """Process ``error.partial``, the results of the other envs."""
        refused: RefusedResults = refused_in(error) or RefusedResults()
        self._miss(refused)
        if is_unanswered(partial, refused):
            self._shape_partial(error, align)
        else:
            self._answer_rest(error, lambda: self._answer_step(partial, align))

    def _answer_step(self, result: StepResult, align: Align) -> StepResult | StepBatch:
        """Return the processed result of a step, aligned as requested."""
        try:
            return aligned(self.answered(result), align, self.single_observation_space)
        except BaseException as error:
            if self._refusing is not error:  # raised by user code
                refused = RefusedResults.of(result, self._raw_structure())
                attach_partial(error, result, refused)
                self._miss(refused)
            self._refusing = None
            self._shape_partial(error, align)
            raise

    def _shape_partial(self, error: BaseException, align: Align) -> None:
        """Align ``error.partial``, except results that this wrapper did not process."""
        partial: Any = getattr(error, "partial", None)
        if not len(partial.env_ids) or not is_unanswered(partial, refused_in(error) or RefusedResults()):
            attach_partial(error, aligned(partial, align, self.single_observation_space))

    def _answer_rest(self, error: BaseException, answer: Callable[[], Any]) -> None:
        """Replace ``error.partial`` by the processed results. If processing raises too, add a note."""
        refused = refused_in(error) or RefusedResults()
        try:
            partial = answer()
        except Exception as another:  # noqa: BLE001 (of users' functions too: the first error may not be lost)
            error.add_note(f"And of what is left: {another}")
            partial = getattr(another, "partial", getattr(error, "partial", None))
            refused = RefusedResults({**refused, **(refused_in(another) or {})})
        attach_partial(error, partial, refused if refused else None)

    def _miss(self, refused: RefusedResults) -> None:
        """Call `missed` for episodes that ended in a refused step."""
        restarted = tuple(env_id for env_id, was_restarted in refused.ended.items() if self.restarts or was_restarted)
        over = tuple(env_id for env_id in refused.ended if env_id not in restarted)
        if restarted:
            self.missed(restarted, True)
        if over:
            self.missed(over, False)

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


def _first_states(
    structure: Structure, states: Any, env_ids: Sequence[int], refused_ids: Collection[int]
) -> RefusedResults:
    return RefusedResults(
        {env_id: row_of(structure, states, row) for row, env_id in enumerate(env_ids) if env_id in refused_ids}
    )
