"""Envs one at a time: what stands for a state or an action where there is none, and whose turn it is in a stream."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from parallelenv.contract.arguments import check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.failures import put
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.engine.engine import Engine
from parallelenv.engine.guard import single_threaded_in
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult


class Signal(enum.StrEnum):
    """What stands for a state or an action where there is none. It equals its text: ``TERMINATED == "terminated"``."""

    TERMINATED = "terminated"
    RESET = "reset"
    CLOSE = "close"

    def __repr__(self) -> str:
        """Return what is written in code."""
        return self.name


TERMINATED: Final = Signal.TERMINATED
"""Instead of a state: the episode has ended, and no other has begun."""
RESET: Final = Signal.RESET
"""Instead of an action: begin an episode."""
CLOSE: Final = Signal.CLOSE
"""Instead of an action: leave this env out from now on."""


class StreamPolicy:
    """A policy that acts for whoever is ready.

    Args:
        policy: As in `ParallelEnv.stream`.

    Raises:
        ArgumentError: If it cannot be called, or wants what is remembered of envs that are not all there.
    """

    def __init__(self, policy: Callable[..., Any]) -> None:
        check_policy(policy)
        self._policy = policy
        try:
            names = inspect.signature(policy).parameters.keys()
        except (TypeError, ValueError):  # a builtin without a signature
            names = {}.keys()
        if not names.isdisjoint(("rnn_state", "done")):
            raise ArgumentError(
                "stream() asks the policy for whoever is ready, so it cannot hand it an rnn_state. Let the policy take "
                "env_ids, and keep by these what it remembers, or use rollout() or run_episodes()."
            )
        self._takes_ids = "env_ids" in names

    def act(self, env_ids: Array, states: Any) -> Any:
        """Return one action per env."""
        return self._policy(states, env_ids=env_ids) if self._takes_ids else self._policy(states)


@short_tracebacks
def streamed(
    engine: Engine,
    actor: StreamPolicy,
    num_steps: int | None,
    min_envs: int,
    max_envs: int | None,
    timeout: float | None,
) -> Iterator[tuple[Array, StepResult]]:
    """Let a policy act for the envs that are ready, and yield what they answer. Arguments as in `ParallelEnv.stream`.

    The next steps are sent before an answer is yielded: envs work while the caller does.
    """
    turns = _Turns(engine, actor)
    left = math.inf if num_steps is None else num_steps
    left -= turns.act(None, left)
    while not engine.guard.is_closed and turns.is_under_way():
        result = turns.receive(min_envs, max_envs, timeout)
        try:
            left -= turns.act(result, left)
        except BaseException as error:
            put(error, "partial", result)
            raise
        yield result.env_ids, result


class _Turns:
    """The calls of a stream, between which the caller may do what it likes.

    Args:
        engine: Of the envs.
        actor: The policy.
    """

    def __init__(self, engine: Engine, actor: StreamPolicy) -> None:
        self._engine = engine
        self._guard = engine.guard
        self._actor = actor

    @single_threaded_in("stream")
    def act(self, result: StepResult | None, most: float) -> int:
        """Let the policy act for envs that wait for an action, at most so many; return how many that were."""
        stepper = self._engine.stepper
        waiting = stepper.waiting()
        if result is not None:  # in the order in which they have answered
            came = {env_id: place for place, env_id in enumerate(result.env_ids.tolist())}
            waiting.sort(key=lambda env_id: came.get(env_id, len(came)))
        env_ids = tuple(waiting[: int(min(most, len(waiting)))])
        if env_ids:
            states = stepper.states_of(env_ids, result)
            stepper.send(self._actor.act(np.array(env_ids, dtype=np.int64), states), env_ids)
        return len(env_ids)

    @single_threaded_in("stream")
    def is_under_way(self) -> bool:
        """Whether anything was sent and not received."""
        return self._engine.stepper.is_under_way

    @single_threaded_in("recv")
    def receive(self, min_envs: int, max_envs: int | None, timeout: float | None) -> StepResult:
        """Return what has come; its states outlive the next call."""
        stepper = self._engine.stepper
        return stepper.detached(stepper.receive(min_envs, max_envs, timeout, "item"))  # type: ignore[arg-type]
