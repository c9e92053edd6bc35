"""Episodes and steps: who may be stepped, what is under way, what has come of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from parallelenv.actions import ActionReader
from parallelenv.batch import Array, has_true
from parallelenv.chunks import Chunk
from parallelenv.errors import (
    EnvBusyError,
    EnvContractError,
    EnvPausedError,
    NothingInFlightError,
    ResetNeededError,
)
from parallelenv.failures import Failure, noted, raise_failures
from parallelenv.flights import Flights, Landed
from parallelenv.ownership import own
from parallelenv.policy import Policy
from parallelenv.pool import NO_FAILURES, Pool
from parallelenv.protocol import NOTHING, Extra
from parallelenv.recovery import Recovery
from parallelenv.requests import Request
from parallelenv.results import StepBatch, StepResult, by_env, by_item, ended_state, gather_states, list_states
from parallelenv.saving import Progress

Align = Literal["item", "batch"]
Begins = Sequence[tuple[int | None, dict[str, Any] | None]]
"""Seed and options of each env that is to begin an episode."""


@dataclass(slots=True)
class Resetting:
    """A reset under way: which envs, how, and what they were asked."""

    env_ids: Sequence[int]
    each: Begins
    request: Request


class Stepper:
    """Steps and resets the envs of a pool under a policy.

    Args:
        pool: Where the envs are.
        policy: What happens when an episode ends.
        copy: Whether states are copied for the user.
        timeout: Seconds that a step may take; ``None`` means for ever.
        recovery: What restarts envs that fail; ``None`` if nothing does.

    Attributes:
        done: ``(num_envs,)`` bool: whose last answer was done, or who was ended by the policy.
        paused: ``(num_envs,)`` bool.
        unpaused: Env ids that are not paused, ascending.
        reset_infos: The info of each env's latest reset.
        timeout: Seconds that a call may take, unless it is given others.
    """

    def __init__(
        self, pool: Pool, policy: Policy, copy: bool, timeout: float | None, recovery: Recovery | None
    ) -> None:
        num_envs = len(pool.env_ids)
        self._pool = pool
        self._policy = policy
        self._copy = copy
        self.timeout = timeout
        self._recovery = recovery
        self._actions = ActionReader(pool.layout)
        self._flights = Flights()
        # The latest step, from before its first message leaves until the user has the result.
        # If something comes in between, the next call finds it here.
        self._unsettled: tuple[Sequence[int], Request] | None = None
        # Envs whose latest call was a step that came to its end: nothing is to be looked into before the
        # next. Every other call unsets it.
        self._proven: Sequence[int] | None = None
        self._terminated = np.zeros(num_envs, dtype=bool)
        self._truncated = np.zeros(num_envs, dtype=bool)
        self._fresh = set(pool.env_ids)  # who was never reset, or lost its state
        # Who was not stepped since it was reset, or since it was loaded, and whether its row has its state.
        self._unstepped: dict[int, bool] = {}
        self.done = np.zeros(num_envs, dtype=bool)
        self.paused = np.zeros(num_envs, dtype=bool)
        self.unpaused = pool.env_ids
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def under(self, policy: Policy) -> Stepper:
        """Return a stepper of the same pool with another policy. All envs then need a reset.

        Raises:
            EnvBusyError: If a step is under way.
        """
        self._settle()
        self._refuse_busy(self._pool.env_ids)
        if self._recovery is not None:
            self._recovery.forget(self._pool.env_ids)
        return Stepper(self._pool, policy, self._copy, self.timeout, self._recovery)

    # ---------------------------------------------------------------- episodes

    def begin_reset(self, env_ids: Sequence[int], each: Begins) -> Resetting:
        """Begin to begin new episodes.

        Args:
            env_ids: The envs, in the order of the answer. Undelivered steps of theirs are dropped.
            each: Seed and options of each.
        """
        self._settle()
        if self._recovery is not None:
            self._recovery.note_seeds(env_ids, [seed for seed, _ in each])
            self._mend_unasked(env_ids, self._pool.obituaries(env_ids), self._recovery)
        return Resetting(env_ids, each, self._post_reset(env_ids, each))

    def finish_reset(self, resetting: Resetting, timeout: float | None, align: Align = "item") -> Any:
        """Return the first states: batched, or with align ``"batch"`` a list with one per env.

        Args:
            resetting: What was begun.
            timeout: Seconds; ``None`` means the pool's own.
            align: As in `step`.

        Raises:
            WorkerTimeoutError: If they do not come in time. This can be called again.
            BaseException: What an env raised; ``error.partial`` has the states of the others, whose
                episodes have begun.
        """
        env_ids, request = resetting.env_ids, self._await_reset(resetting, timeout)
        failures, extras = request.failures, request.values
        good = tuple(env_id for env_id in env_ids if env_id not in failures) if failures else env_ids
        rows = self._pool.batch.rows(good)
        if align == "batch":
            states: Any = list_states(self._pool.batch, good, extras)
        else:
            states = gather_states(self._pool.batch, good, rows, extras, self._copy)
        for env_id in good:
            self.reset_infos[env_id] = extras.get(env_id, NOTHING).info or {}
        for record in (self.done, self._terminated, self._truncated):
            record[rows] = False
        self._unstepped.update(dict.fromkeys(good, True))
        self._fresh.difference_update(good)
        request.raise_failures(partial=states)
        return states

    def _post_reset(self, env_ids: Sequence[int], each: Begins) -> Request:
        def announce(request: Request) -> None:
            self._flights.forget(env_ids)
            self._fresh.update(env_ids)  # and so they stay if anything goes wrong

        failed = NO_FAILURES if self._recovery is None else self._pool.obituaries(env_ids)
        return self._pool.post("reset", env_ids, each, None, announce, failed)

    def _await_reset(self, resetting: Resetting, timeout: float | None) -> Request:
        """Wait for resets; with a recovery ask again and again until no worker dies or hangs of it."""
        while True:
            self._await(resetting.request, timeout)
            failures = resetting.request.failures
            lost = {env_id: failure for env_id, failure in failures.items() if failure.is_of_worker}
            if self._recovery is None or not lost:
                return resetting.request
            self._mend_unasked(resetting.env_ids, lost, self._recovery)
            resetting.request = self._post_reset(resetting.env_ids, resetting.each)

    def _mend_unasked(self, env_ids: Sequence[int], lost: Mapping[int, Failure], recovery: Recovery) -> None:
        """Restart envs of which the user wants a new episode anyway, and need not know that they were lost."""
        _, left = recovery.mend(lost)
        recovery.forget(env_ids)
        raise_failures([left[env_id] for env_id in sorted(left)], partial=None)

    def _await(self, request: Request, timeout: float | None) -> None:
        """Wait for hosts to answer.

        Args:
            request: What they were asked.
            timeout: Seconds; ``None`` means the pool's own, and then a recovery restarts envs that are late.

        Raises:
            WorkerTimeoutError: If they do not in time. It can be waited for again.
        """
        if timeout is None and self._recovery is not None:
            self._pool.wait_or_give_up(request)
        else:
            self._pool.wait(request, self.timeout if timeout is None else timeout)

    def latest_states(self) -> Any:
        """Return the latest states of all envs, batched.

        Raises:
            UnpicklableError: If a part of a state cannot be copied from its worker.
        """
        everyone, batch = self._pool.env_ids, self._pool.batch
        has_loose = any(array is None for array in batch.states)
        extras = self._pool.ask("look", everyone).values if has_loose else {}
        return gather_states(batch, everyone, batch.rows(everyone), extras, self._copy)

    def refuse_fresh(self, env_ids: Iterable[int]) -> None:
        """Raise `ResetNeededError` if any of these envs has no episode."""
        fresh = [env_id for env_id in env_ids if env_id in self._fresh] if self._fresh else []
        if fresh:
            raise ResetNeededError(
                f"envs {fresh} have no running episode. Call reset() or reset({fresh}) before stepping."
            )

    def restart(self, env_ids: Sequence[int]) -> tuple[int, ...]:
        """Rebuild envs and return the ids of all that were; they need a reset."""
        self._settle()
        request = self._pool.rebuild(env_ids, self._note_rebuilt)
        rebuilt = tuple(sorted({*request.env_ids, *request.values}))
        request.raise_failures(partial=tuple(env_id for env_id in rebuilt if env_id not in request.failures))
        return rebuilt

    def _note_rebuilt(self, env_ids: Sequence[int]) -> None:
        self._flights.forget(env_ids)
        self._fresh.update(env_ids)
        if self._recovery is not None:
            self._recovery.forget(env_ids)

    def pause(self, env_ids: Sequence[int]) -> None:
        """Leave envs out until `resume`."""
        self._proven = None
        self.paused[list(env_ids)] = True
        self.unpaused = tuple(np.flatnonzero(~self.paused).tolist())

    def resume(self, env_ids: Sequence[int]) -> None:
        """Take envs in again."""
        self.paused[list(env_ids)] = False
        everyone = self._pool.env_ids
        self.unpaused = tuple(np.flatnonzero(~self.paused).tolist()) if self.paused.any() else everyone

    # ---------------------------------------------------------------- progress

    def progress(self) -> Progress:
        """Return where the episodes are.

        Raises:
            EnvBusyError: If a step is under way.
        """
        self._settle()
        self._refuse_busy(self._pool.env_ids)
        flags = self.done.copy(), self._terminated.copy(), self._truncated.copy(), self.paused.copy()
        return Progress(*flags, tuple(sorted(self._fresh)), tuple(map(own, self.reset_infos)))

    def go_on_from(self, progress: Progress, lost: Collection[int]) -> tuple[int, ...]:
        """Take over where episodes are; ``lost`` envs have none. Undelivered steps are dropped.

        Returns:
            Ids of all envs that need a reset.
        """
        self._settle()
        everyone = self._pool.env_ids
        self._flights.forget(everyone)
        if self._recovery is not None:
            self._recovery.forget(everyone)
        self.done[:], self._terminated[:], self._truncated[:] = progress.done, progress.terminated, progress.truncated
        self._fresh = {*progress.fresh, *lost}
        self._unstepped = dict.fromkeys(everyone, False)
        self.reset_infos = list(map(own, progress.reset_infos))
        self.resume(everyone)
        self.pause(np.flatnonzero(progress.paused).tolist())
        return tuple(sorted(self._fresh))

    # ---------------------------------------------------------------- steps

    def step(self, action: Any, env_ids: Sequence[int], align: Align) -> StepResult | StepBatch:
        """Step envs and return what they answered."""
        stepped, request = self._launch(action, env_ids)
        if request is None:
            return self._deliver(Landed(env_ids, stepped, {}, {}), align)
        self._await(request, None)
        result = self._deliver(Landed(env_ids, stepped, request.values, request.failures), align)
        self._proven = env_ids
        return result

    def begin(self, action: Any, env_ids: Sequence[int]) -> None:
        """Begin a step of all of these envs, for `finish`."""
        self._launch(action, env_ids)

    def finish(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        """Return what envs answered to a step that was begun, or sent, or whose call was interrupted.

        Args:
            env_ids: All of the envs, in the order of the answer.
            timeout: Seconds; ``None`` means the pool's own.
            align: As in `step`.

        Raises:
            NothingInFlightError: If no step of one of them is under way.
            WorkerTimeoutError: If they do not answer in time. This can be called again.
        """
        if self._unsettled is None or self._unsettled[0] is not env_ids:
            self._settle()
            return self._collect(env_ids, timeout, align)
        request = self._unsettled[1]
        self._await(request, timeout)
        return self._deliver(Landed(env_ids, request.env_ids, request.values, request.failures), align)

    def _collect(self, env_ids: Sequence[int], timeout: float | None, align: Align) -> StepResult | StepBatch:
        flights = self._flights
        missing = [env_id for env_id in env_ids if env_id not in flights]
        if missing:
            raise NothingInFlightError(f"No step of envs {missing} is in flight. Begin one first.")
        self._await_landing(len(flights), timeout)
        return self._deliver(flights.part(env_ids), align)

    def send(self, action: Any, env_ids: Sequence[int]) -> None:
        """Begin a step of envs."""
        _, request = self._launch(action, env_ids)
        self._unsettled = None
        self._flights.adopt(env_ids, request)

    def receive(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Align
    ) -> StepResult | StepBatch:
        """Return what envs answered that have finished their step.

        ``timeout``: as in `ParallelEnv.recv`.
        """
        self._settle()
        flights = self._flights
        if not flights:
            raise NothingInFlightError("recv() was called, but no step is in flight. Call send() first.")
        self._await_landing(min(min_envs, len(flights)), timeout)
        return self._deliver(flights.landed(max_envs), align)

    def _await_landing(self, wanted: int, timeout: float | None) -> None:
        """Wait until so many envs have finished their step. ``timeout`` and errors: as in `_await`."""
        flights = self._flights
        limit = self.timeout if timeout is None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        while flights.num_landed < wanted:
            if self._pool.pump(deadline):
                continue
            late = self._pool.late(flights.running, limit, "step")
            if timeout is not None or self._recovery is None:
                raise late
            for request in flights.requests:
                self._pool.give_up(request, late)

    def _launch(self, action: Any, env_ids: Sequence[int]) -> tuple[Sequence[int], Request | None]:
        """Send a step to the envs that take part in it; return them and their request.

        Raises:
            EnvBusyError: If one has an undelivered step.
            EnvPausedError: If one is paused.
            WorkerDiedError: If one has lost its worker.
            ResetNeededError: If one has no episode to step in.
            ActionError: If the actions do not fit. In all cases nothing was sent.
        """
        if env_ids is not self._proven:
            self._settle()
            self._check(env_ids)
        self._proven = None
        stepped, chosen = self._choose(env_ids) if self._policy.skips_done else (env_ids, None)
        each = None
        if self._actions.fills_batch:
            self._actions.put_rows(self._pool.batch, action, env_ids, stepped, chosen)
        else:
            each = self._actions.read_objects(action, env_ids, chosen)
        if not stepped:
            return stepped, None

        if self._unstepped:
            self._note_stepped(stepped)

        def announce(request: Request) -> None:
            self._unsettled = (env_ids, request)

        failed = self._recovery.ailing(stepped) if self._recovery is not None else NO_FAILURES
        who_begins = self._ended(stepped) if self._policy.resets_next else self._policy.autoreset
        return stepped, self._pool.post("step", stepped, each, who_begins, announce, failed)

    def _ended(self, env_ids: Sequence[int]) -> tuple[int, ...] | Literal[False]:
        """Return those of the envs that ended in their latest step, ``False`` if there are none."""
        return tuple(env_id for env_id in env_ids if self.done[env_id]) if has_true(self.done) else False

    def _settle(self) -> None:
        """Take charge of a step whose call did not come to its end."""
        self._proven = None
        if self._unsettled is not None:
            env_ids, request = self._unsettled
            self._flights.adopt(env_ids, request)
            self._unsettled = None

    def _refuse_busy(self, env_ids: Sequence[int]) -> None:
        busy = [env_id for env_id in env_ids if env_id in self._flights] if self._flights else []
        if busy:
            raise EnvBusyError(
                f"envs {busy} have a step under way whose result was not received (sent, interrupted or late). "
                "Get it with recv(), or drop it with reset()."
            )

    def _check(self, env_ids: Sequence[int]) -> None:
        self._refuse_busy(env_ids)
        if env_ids is not self.unpaused and self.paused.any():
            paused = [env_id for env_id in env_ids if self.paused[env_id]]
            if paused:
                raise EnvPausedError(f"envs {paused} are paused. Call resume({paused}) first, or leave them out.")
        if self._recovery is None:
            self._pool.refuse_dead(env_ids)
        self.refuse_fresh(env_ids)

    def _choose(self, env_ids: Sequence[int]) -> tuple[Sequence[int], list[int] | None]:
        """Return the envs that will be stepped, and their positions if some will not be."""
        if not has_true(self.done):
            return env_ids, None
        chosen = [position for position, env_id in enumerate(env_ids) if not self.done[env_id]]
        return [env_ids[position] for position in chosen], chosen

    def _note_stepped(self, env_ids: Sequence[int]) -> None:
        for env_id in env_ids:
            self._unstepped.pop(env_id, None)

    # ---------------------------------------------------------------- rollouts

    def begin_rollout(self, env_ids: Sequence[int]) -> Array:
        """Refuse envs that cannot be stepped now, as a step does, or whose states are not known.

        Returns:
            ``(k,)`` bool: which of them are at the beginning of an episode.
        """
        self._settle()
        self._check(env_ids)
        unknown = [env_id for env_id in env_ids if self._unstepped.get(env_id) is False]
        if unknown:
            raise ResetNeededError(
                f"A rollout begins with the states of its envs, and those of envs {unknown} are not known since "
                "load_state(). Step or reset them first."
            )
        starts: Array = np.array([env_id in self._unstepped for env_id in env_ids], dtype=bool)
        return starts | self.done[list(env_ids)] if self._policy.autoreset else starts

    def lend(self, env_ids: Sequence[int]) -> None:
        """Let a rollout step envs. They need a reset if it does not give them back."""
        self._fresh.update(env_ids)
        self._note_stepped(env_ids)

    def take_back(self, env_ids: Iterable[int]) -> None:
        """Go on with envs where a rollout has brought them."""
        self._fresh.difference_update(env_ids)

    def note_chunk(self, chunk: Chunk) -> None:
        """Take over what the steps of a rollout have come to: of each env that made any, how the last one left it."""
        told = chunk.valid | chunk.flags.any(axis=2)
        columns = np.flatnonzero(told.any(axis=0))
        if not len(columns):
            return
        last = len(told) - 1 - told[::-1, columns].argmax(axis=0)
        terminated, truncated = chunk.flags[last, columns].T
        rows = np.array(chunk.env_ids)[columns] - self._pool.batch.layout.first
        self._terminated[rows], self._truncated[rows] = terminated, truncated
        self._policy.mark_done(self.done, rows, terminated | truncated)
        if self._policy.autoreset:
            for step, column in zip(chunk.ended.steps.tolist(), chunk.ended.columns.tolist(), strict=True):
                env_id = chunk.env_ids[column]
                self.reset_infos[env_id] = own(chunk.said.get((step, env_id), NOTHING).reset_info) or {}

    # ---------------------------------------------------------------- answers

    def _deliver(self, landed: Landed, align: Align) -> StepResult | StepBatch:
        """Shape what has landed for the user, and forget it.

        Raises:
            BaseException: What an env raised; ``error.partial`` has the others' results.
        """
        if landed.failures and self._recovery is not None:
            landed = self._mend(landed, self._recovery)
        failures = landed.failures
        if failures:
            landed = landed.without_failures()
        try:
            result = self._shape(landed, align)
        except (ValueError, TypeError) as error:  # from a user's own space, say
            self._settle()
            self._flights.forget([*landed.env_ids, *failures])
            raise EnvContractError(f"What the envs answered cannot be batched: {error}.") from error
        # Last, so that an interrupt before these lines loses nothing.
        self._unsettled = None
        if landed.restarted and self._recovery is not None:
            self._recovery.forget(landed.restarted)
        if self._flights:
            self._flights.forget([*landed.env_ids, *failures])
        if failures:
            self._fresh.update(env_id for env_id, failure in failures.items() if failure.operation != "step")
            raise_failures([failures[env_id] for env_id in sorted(failures)], partial=result)
        return result

    def _mend(self, landed: Landed, recovery: Recovery) -> Landed:
        """Restart what failed: it then counts as cut off, and its state is the first of its next episode."""
        mended, left = recovery.mend(landed.failures)
        batch, extras = self._pool.batch, dict(landed.extras)
        for env_id, (failure, begun) in mended.items():
            row = env_id - batch.layout.first
            batch.rewards[row] = 0.0
            batch.flags[row] = False, True
            info = {"failure": noted(failure)}
            extras[env_id] = Extra(info, begun.loose, reset_info=begun.info)
            self.reset_infos[env_id] = begun.info or {}
        self._fresh.difference_update(mended)
        return Landed(landed.env_ids, landed.stepped, extras, left, mended.keys())

    def _shape(self, landed: Landed, align: Align) -> StepResult | StepBatch:
        batch = self._pool.batch
        rows = batch.rows(landed.stepped)
        terminated, truncated = batch.terminated[rows].copy(), batch.truncated[rows].copy()
        dones = terminated | truncated
        if self._policy.resets_next and has_true(self.done):
            self._note_resets(landed)
        self._policy.mark_done(self.done, rows, dones)
        if self._policy.skips_done:  # else nobody is ever absent, and the flags need not be kept
            terminated, truncated = self._complete(landed, rows, terminated, truncated)
            dones = terminated | truncated
        infos = self._infos(landed, dones)
        if align == "batch":
            return by_env(batch, landed, rows, (terminated, truncated, dones), infos)
        return by_item(batch, landed, rows, (terminated, truncated, dones), infos, self._copy)

    def _note_resets(self, landed: Landed) -> None:
        """Keep the infos of envs that had ended before, and so were reset instead of stepped."""
        for env_id in landed.stepped:
            if self.done[env_id] and env_id not in landed.restarted:
                self.reset_infos[env_id] = own(landed.extras.get(env_id, NOTHING).info or {})

    def _complete(self, landed: Landed, rows: Any, terminated: Array, truncated: Array) -> tuple[Array, Array]:
        """Return the flags of all envs of an answer, also of those that were not stepped."""
        self._terminated[rows] = terminated
        self._truncated[rows] = truncated
        shown = self._pool.batch.rows(landed.env_ids)
        terminated, truncated = self._terminated[shown].copy(), self._truncated[shown].copy()
        # Who is done and did not terminate was cut off, by its env or by the policy.
        self._truncated |= self.done & ~self._terminated
        return terminated, truncated

    def _infos(self, landed: Landed, dones: Array) -> Array:
        """Return the infos, each a dict of its own, also where an env had nothing to say."""
        env_ids, extras = landed.env_ids, landed.extras
        infos = self._policy.plain_infos(len(env_ids))
        if len(landed.stepped) < len(env_ids):
            stepped = set(landed.stepped)
            for position, env_id in enumerate(env_ids):
                if env_id not in stepped:
                    infos[position] = {}
        if extras:
            for position, env_id in enumerate(env_ids):
                said = extras[env_id].info if env_id in extras else None
                if said:
                    infos[position] = {**said, **infos[position]}
        if self._policy.autoreset:
            for position in dones.nonzero()[0].tolist():
                env_id = env_ids[position]
                extra = extras.get(env_id, NOTHING)
                reset_info = extra.reset_info or {}
                self.reset_infos[env_id] = own(reset_info) if reset_info else {}
                is_known = env_id not in landed.restarted
                ended = ended_state(self._pool.batch, env_id, extra) if is_known else None
                self._policy.describe_end(infos[position], ended, reset_info)
        return infos
