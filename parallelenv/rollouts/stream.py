"""Envs one at a time: what stands for a state or an action where there is none, and whose turn it is in a stream."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from parallelenv.contract.arguments import check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.failures import put
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.errors import ArgumentError
from parallelenv.results import StepResult

if TYPE_CHECKING:
    from parallelenv.traffic import Traffic


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


class Actor:
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
    env: Traffic, actor: Actor, num_steps: int | None, min_envs: int, max_envs: int | None, timeout: float | None
) -> Iterator[tuple[Array, StepResult]]:
    """Let a policy act for whoever is ready, and yield what they answer. Arguments as in `ParallelEnv.stream`.

    The next steps are sent before an answer is yielded: envs work while the caller does.
    """
    left = math.inf if num_steps is None else num_steps
    left -= env._act(actor, None, left)
    while not env.closed and env._is_under_way():
        result = env._detached(env.recv(min_envs, max_envs, timeout))
        try:
            left -= env._act(actor, result, left)
        except BaseException as error:
            put(error, "partial", result)
            raise
        yield result.env_ids, result
