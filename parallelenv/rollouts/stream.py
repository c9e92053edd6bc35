"""Independent stepping of envs: signals used instead of states and actions, and the loop of `ParallelEnv.stream`."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from parallelenv.contract.arguments import Policy, check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.failures import put
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.engine.thread_guard import single_threaded_in
from parallelenv.errors import ActionError, ArgumentError
from parallelenv.results import StepResult
from parallelenv.worker.rollout_recorder import policy_parameters

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine


class Signal(enum.StrEnum):
    """A value used instead of a state or an action. Each signal equals its text: ``TERMINATED == "terminated"``."""

    TERMINATED = "terminated"
    RESET = "reset"
    CLOSE = "close"

    def __repr__(self) -> str:
        return self.name


TERMINATED: Final = Signal.TERMINATED
"""Signal used instead of a state: the episode has ended, and no new episode has started."""
RESET: Final = Signal.RESET
"""Signal used instead of an action: start an episode."""
CLOSE: Final = Signal.CLOSE
"""Signal used instead of an action: pause the env."""


class Stream:
    """The loop of `ParallelEnv.stream`, in which the policy acts for the envs that are ready."""

    def __init__(self, engine: Engine, policy: Policy) -> None:
        check_policy(policy)
        names = policy_parameters(policy).keys()
        if not names.isdisjoint(("rnn_state", "done")):
            raise ArgumentError(
                "stream() calls the policy for the envs that are ready, so it cannot give it an rnn_state. Let it "
                "take env_ids and keep its own state by env id, or use rollout() or run_episodes()."
            )
        self._engine, self._guard = engine, engine.guard
        self._policy, self._takes_ids = policy, "env_ids" in names

    @short_tracebacks
    def results(
        self, num_steps: int | None, min_envs: int, max_envs: int | None, timeout: float | None
    ) -> Iterator[tuple[Array, StepResult]]:
        """Run the policy, and yield each result with its env ids. See `ParallelEnv.stream` for the arguments.

        The next steps are sent before a result is yielded, so envs step while the caller works.
        """
        left = math.inf if num_steps is None else num_steps
        left -= self._act(None, left)
        while self._engine.has_in_flight:  # not after `close`
            result = self._receive(min_envs, max_envs, timeout)
            try:
                left -= self._act(result, left)
            except BaseException as error:
                put(error, "partial", result)
                raise
            yield result.env_ids, result
            if left and not (self._engine.has_in_flight or self._guard.is_closed):
                # The caller may have reset or resumed envs. If an env now needs a reset, the stream ends.
                table = self._engine.table
                if set(table.needing_reset()).difference(table.exhausted).isdisjoint(table.unpaused):
                    left -= self._act(None, left)

    @single_threaded_in("stream")
    def _act(self, result: StepResult | None, most: float) -> int:
        """Send actions to at most ``most`` of the envs that wait for an action; return the number of actions sent."""
        engine, table = self._engine, self._engine.table
        engine.pool.enter_planned()
        received = [] if result is None else result.env_ids.tolist()
        idle = received
        if table.unpaused is not table.env_ids or len(received) + len(table.tickets) < len(table.env_ids):
            idle = [env_id for env_id in table.unpaused if env_id not in table.tickets]
        table.refuse_without_episode(idle)
        waiting = list(table.choose(idle)[0])
        if idle is not received:  # first the envs in `result`, in its order
            came = {env_id: place for place, env_id in enumerate(received)}
            waiting.sort(key=lambda env_id: came.get(env_id, len(came)))
        env_ids = tuple(waiting[: int(min(most, len(waiting)))])
        if env_ids:
            states = engine.states_of(env_ids, result)
            known = {"env_ids": np.array(env_ids, dtype=np.int64)} if self._takes_ids else {}
            actions = self._guard.call_user(self._policy, states, **known)
            is_triple = type(actions) is tuple and len(actions) == 3 and actions[1] is None
            if is_triple and engine.pool.layout.action_space is not None:  # without a space, `None` may be an action
                raise ActionError(
                    "The policy returned a tuple (actions, None, extras), as for rollout(), but stream() takes actions "
                    "alone. Return only the actions."
                )
            engine.submit_step(actions, env_ids, separately=True)
        return len(env_ids)

    @single_threaded_in("recv")
    def _receive(self, min_envs: int, max_envs: int | None, timeout: float | None) -> StepResult:
        """Wait for results and return them, with states that later calls do not overwrite."""
        result: Any = self._engine.receive(min_envs, max_envs, timeout, "item")
        if not self._engine.copies:
            flags = result.terminated, result.truncated, result.env_ids, result.restarted
            result = StepResult(deep_copy(result.states), result.rewards, result.dones, result.infos, *flags)
        return result  # type: ignore[no-any-return]
