"""What is sent now and received later: by many envs at once, one at a time, or awaited; and who is left out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.arguments import MISSING
from parallelenv.contract.batch import Array
from parallelenv.contract.messages import show
from parallelenv.engine.assemble import Align
from parallelenv.engine.guard import exclusive
from parallelenv.errors import ArgumentError, InvalidIdError, WorkerTimeoutError
from parallelenv.familiar import Familiar
from parallelenv.results import StepBatch, StepResult
from parallelenv.rollouts.evaluation import Evaluation, evaluate
from parallelenv.rollouts.length import Goal
from parallelenv.rollouts.stream import CLOSE, RESET, TERMINATED, Actor, Signal, streamed

_LONGEST_NAP = 0.2
"""Seconds after which an awaited answer is looked for again, at the latest."""
_SHORTEST_NAP = 5e-4
_NAP = 1 / 8
"""So much of the time waited so far may pass until the next look: an answer is found that much too late at most."""


class Traffic(Familiar):
    """The part of a `ParallelEnv` that need not wait."""

    @exclusive
    def send(self, action: Any, id: Any = None) -> None:
        """Start a step of envs and return without waiting; `recv` gives the results.

        Raises:
            As `step`, before anything was sent.
        """
        self._stepper.send(action, self._ids(id))

    @exclusive
    def send_reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> None:
        """Start to begin new episodes and return without waiting; `recv` gives the first states.

        An undelivered step of these envs is dropped. In the answer each has its first state, reward 0, is not done,
        and its info is that of the reset, with ``info["reset"]`` ``True`` and, since nothing ended in this call, no
        ``info["ended_state"]``.

        Args:
            id: Which envs.
            seed: As in `reset`.
            options: As in `reset`.

        Raises:
            ArgumentError: If ``seed`` or ``options`` do not fit; nothing was sent.
            WorkerDiedError: If an env has lost its worker; nothing was sent.
        """
        env_ids = self._ids(id)
        self._stepper.send_reset(env_ids, self._beginnings(env_ids, seed, options))
        self._forget_seeds(env_ids)

    @overload
    def recv(
        self,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
        align: Literal["item"] = "item",
    ) -> StepResult: ...
    @overload
    def recv(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Literal["batch"]
    ) -> StepBatch: ...
    @overload
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, *, align: Literal["batch"]
    ) -> StepBatch: ...
    @exclusive
    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> StepResult | StepBatch:
        """Return the results of envs that have finished their step or reset, first come, first served.

        Args:
            min_envs: Wait until so many are ready, or all that are under way if those are fewer.
            max_envs: Give at most so many; the rest stays for the next call.
            timeout: Seconds to wait; ``None`` means the pool's own timeout.
            align: As in `step`.

        Returns:
            As `step`; ``env_ids`` says whose rows they are.

        Raises:
            NothingInFlightError: If nothing was sent.
            WorkerTimeoutError: If fewer than ``min_envs`` finished in time; nothing is lost.
            BaseException: What an env raised; ``error.partial`` is the others' result.
        """
        arguments.check_align(align)
        arguments.check_window(min_envs, max_envs)
        return self._stepper.receive(min_envs, max_envs, arguments.check_timeout(timeout), align)

    @overload
    async def arecv(
        self,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
        align: Literal["item"] = "item",
    ) -> StepResult: ...
    @overload
    async def arecv(
        self, min_envs: int, max_envs: int | None, timeout: float | None, align: Literal["batch"]
    ) -> StepBatch: ...
    @overload
    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, *, align: Literal["batch"]
    ) -> StepBatch: ...
    async def arecv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> StepResult | StepBatch:
        """Do as `recv`, but let others run on the event loop meanwhile. To be cancelled loses nothing.

        It looks for answers again and again, and the longer it waits the more rarely, but at least every 0.2 s: one is
        found when at most an eighth more time has passed. No thread waits. In mode ``"dummy"`` the envs step in it.

        Raises:
            NothingInFlightError: If nothing is under way, also because another task has received it.
            As `recv`.
        """
        arguments.check_align(align)
        arguments.check_window(min_envs, max_envs)
        limit = arguments.check_timeout(timeout)
        begin = time.monotonic()
        while True:
            if self._look(min_envs, limit, begin):
                # Others have their turn, and whoever has cancelled this while envs stepped in it, by Ctrl-C say, is
                # heard as long as the answer is still here: a task that is cancelled and then returns loses it.
                await asyncio.sleep(0)
                result = self._take(min_envs, max_envs, align)
                if result is not None:
                    return result
            waited = time.monotonic() - begin
            nap = min(_LONGEST_NAP, max(_SHORTEST_NAP, waited * _NAP))
            await asyncio.sleep(nap if limit is None else max(0.0, min(nap, limit - waited)))

    @exclusive
    def _look(self, *arguments: Any) -> bool:
        return self._stepper.look(*arguments)

    @exclusive
    def _take(self, min_envs: int, max_envs: int | None, align: Align) -> StepResult | StepBatch | None:
        return self._stepper.take(min_envs, max_envs, align)

    # ---------------------------------------------------------------- one at a time

    def get_state(self, timeout: float | None = None) -> tuple[Any, int] | None:
        """Return the state of the env that has waited longest for an action, and its id.

        This and `send_action` are `recv` and `send` for one env at a time, beginning with `send_reset`. Rewards, flags
        and infos are in what ``recv(1, 1, align="batch")`` returns instead.

        Args:
            timeout: Seconds to wait; ``None`` means the pool's own timeout.

        Returns:
            ``(state, env_id)``; instead of the state `TERMINATED` where an episode has ended and no other has begun:
            with any policy but ``"restart"``, and of an env that is exhausted. ``None`` after ``timeout`` seconds.

        Raises:
            As `recv`; `WorkerTimeoutError` only of the pool's own timeout.
        """
        try:
            batch = self.recv(1, 1, timeout, "batch")
        except WorkerTimeoutError:
            if timeout is None:
                raise
            return None
        (state, _, is_done, _), env_id = batch[0], int(batch.env_ids[0])
        has_begun = self._stepper.goes_on and env_id not in self._stepper.episodes.exhausted
        return (state if has_begun or not is_done else TERMINATED), env_id

    def send_action(self, action: Any, env_id: int) -> None:
        """Start what one env is to do next, and return without waiting.

        Args:
            action: For its step. `RESET` or ``"reset"``: it begins an episode, as by `send_reset`. `CLOSE` or
                ``"close"``: it is left out from now on, as by `pause`, so that `resume` takes it in again; its memory
                goes with the `ParallelEnv`. (`send` takes such a text for an action.)
            env_id: Of the env.

        Raises:
            InvalidIdError: If it is not one id.
            ArgumentError: If the action is `TERMINATED`, which is none.
            As `send`.
        """
        if len(self._ids(env_id)) != 1:
            raise InvalidIdError(
                f"env_id={show(env_id)} is not the id of one env. Give an int, or use send(actions, id)."
            )
        word = action if isinstance(action, str) else None  # an array would be compared item by item
        if word == RESET:
            self.send_reset(env_id)
        elif word == CLOSE:
            self.pause(env_id)
        elif isinstance(action, Signal):
            raise ArgumentError(f"action={show(action)} is no action. Give one of the env's, RESET or CLOSE.")
        else:
            self.send([action], env_id)

    # ---------------------------------------------------------------- with a policy here

    def stream(
        self,
        policy: Callable[..., Any],
        num_steps: int | None = None,
        *,
        min_envs: int = 1,
        max_envs: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[tuple[Array, StepResult]]:
        """Let a policy act, in this process, for whoever is ready: ``for env_ids, result in env.stream(policy)``.

        Every env that is not paused, has nothing under way and has not ended is given an action as soon as the loop
        comes round. So episodes go on where they are, an env that is paused is left out when its answer is in, and one
        that is resumed, or reset by `send_reset` in the loop, joins again. The next steps are on their way before an
        answer is handed out. Leave the loop whenever you like: `recv`, or the next stream, gives what is under way.

        Args:
            policy: ``policy(states)`` returns one action per env; states as in `step`. If it has a parameter
                ``env_ids``, it is told whose they are.
            num_steps: So many steps are made, of all envs together; then the loop ends, and nothing is under way.
                ``None``: it ends when no env can go on, or this object is closed.
            min_envs: As in `recv`.
            max_envs: As in `recv`.
            timeout: As in `recv`.

        Yields:
            What `recv` returns, with its ``env_ids`` before it.

        Raises:
            ArgumentError: If an argument has no usable value.
            ResetNeededError: If an env that is not paused has no episode.
            BaseException: What an env raised, as in `recv`, or what the policy raised; ``error.partial`` is then the
                result that was not handed out.
        """
        arguments.check_window(min_envs, max_envs)
        if num_steps is not None:
            arguments.check_positive("num_steps", num_steps)
        return streamed(self, Actor(policy), num_steps, min_envs, max_envs, arguments.check_timeout(timeout))

    @exclusive
    def _act(self, actor: Actor, result: StepResult | None, most: float) -> int:
        """Let a policy act for those whose turn it is, ``most`` of them; return how many that were."""
        waiting = self._stepper.waiting()
        if result is not None:  # who has come first goes first
            came = {env_id: place for place, env_id in enumerate(result.env_ids.tolist())}
            waiting.sort(key=lambda env_id: came.get(env_id, len(came)))
        env_ids = tuple(waiting[: int(min(most, len(waiting)))])
        if env_ids:
            states = self._stepper.states_of(env_ids, result)
            self._stepper.send(actor.act(np.array(env_ids, dtype=np.int64), states), env_ids)
        return len(env_ids)

    @exclusive
    def _is_under_way(self) -> bool:
        return self._stepper.is_under_way

    @exclusive
    def _detached(self, result: StepResult) -> StepResult:
        return self._stepper.detached(result)

    @exclusive
    def run_episodes(
        self,
        policy: Callable[..., Any],
        num_episodes: int,
        id: Any = None,
        *,
        seed: Any = None,
        options: Any = None,
        progress: bool = True,
    ) -> Evaluation:
        """Play whole episodes with a policy in this process, and return how they went.

        Each env plays its share, an equal one, the first envs one more if it does not come out even, and then rests
        while the others play on. Who plays how much is settled beforehand, so short episodes are not preferred. All
        envs with a share begin with a reset, whatever they were at, and need one afterwards. What ``asynchronous`` says
        does not matter. `rollout` is quicker where the policy can travel to the workers, and keeps all steps.

        Args:
            policy: As in `rollout`, but it is called here, with the states of all envs that still play.
            num_episodes: Of all envs together.
            id: Which envs.
            seed: Of the first reset, as in `reset`.
            options: Of the first reset, as in `reset`.
            progress: As in `rollout`.

        Returns:
            An `Evaluation`.

        Raises:
            ArgumentError: If ``num_episodes`` is no int of at least 1, no envs are asked, or another argument does not
                fit; nothing was sent.
            EnvBusyError, EnvPausedError: As `step`.
            BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
        """
        env_ids = self._ids(id)
        arguments.check_positive("num_episodes", num_episodes)
        if not env_ids:
            raise ArgumentError("run_episodes() has no envs to play with: id is empty, or all are paused.")
        each = self._beginnings(env_ids, seed, options)
        goal = Goal.of(None, num_episodes)
        return evaluate(self._stepper, policy, goal, env_ids, each, self._forget_seeds, bool(progress))

    # ---------------------------------------------------------------- who is left out

    @exclusive
    def pause(self, id: Any = MISSING) -> None:
        """Leave envs out of calls without ``id``, and refuse to step them, until `resume`.

        What one has under way goes on, and `recv` gives it.

        Args:
            id: Which envs; ``None``: all.

        Raises:
            ArgumentError: If it is not given.
        """
        if id is MISSING:
            raise ArgumentError("pause() was called without id. Give which envs to leave out: pause(3), pause([0, 2]).")
        self._stepper.pause(self._ids(id, everyone=True))

    @exclusive
    def resume(self, id: Any = None) -> None:
        """Take paused envs in again; without ``id`` all of them."""
        self._stepper.episodes.resume(self._ids(id, everyone=True))

    def _forget_seeds(self, env_ids: Sequence[int]) -> None:
        """Take note that seeds which were set for the next reset are used up."""
        for env_id in env_ids:
            self._seeds.pop(env_id, None)
