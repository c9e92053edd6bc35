"""The caller's side of every call on the envs of a `ParallelEnv`."""

from __future__ import annotations

import _thread
import math
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.arguments import parse_ids
from parallelenv.contract.env_specs import EnvFactory
from parallelenv.contract.protocol import Backend
from parallelenv.engine.assemble import Align
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.event_loop import sleep_until_woken
from parallelenv.engine.recovery import Recovery
from parallelenv.engine.stepper import ResetArgumentsOfEach, ResetTicket, Stepper
from parallelenv.engine.thread_guard import Guard, single_threaded, single_threaded_in
from parallelenv.engine.tickets import Request, name_envs
from parallelenv.engine.worker_pool import Pool
from parallelenv.errors import AbsentAttributeError, HandedOverError
from parallelenv.results import StepResult

_MOMENT = 0.05
"""Seconds after which a finalizer has surely returned."""


class Engine:
    """The interface of a `ParallelEnv` for adapters, wrappers, collectors and displays: `ParallelEnv.engine`.

    An adapter holds the `ParallelEnv`, sets its own rules for the end of episodes by `hand_over`, and keeps no state of
    episodes itself. So attributes, rendering, `ParallelEnv.restart` and `ParallelEnv.save_state` still work beside it,
    and closing one closes the other.

    Args:
        backend: Where the workers live.
        env_factories: One per env, in env id order.
        done_policy: What happens when an episode ends.
        asynchronous: The same, as the user wrote it.
        spaces: Observation and action space of every env; ``None``: those that envs declare.
        copy: Whether states are copied for the user.
        timeout: Seconds that a call may take; ``None`` means no limit.
        max_restarts: How often an env that fails is restarted; ``None``: never.
        seed: Seed of the first episodes: that of env i is ``seed + i``.
        **pool_arguments: Further arguments of `Pool`.

    Attributes:
        pool: The workers.
        stepper: Resets and steps.
        guard: Refuses calls of other threads.
        env_ids: Ids of all envs.
        seeds: Seed of each env's next reset, by env id.
        contract: The call that handed the envs over to an adapter; ``None`` if none did.
        asynchronous: The done policy, as the user wrote it; after `hand_over` the contract.

    Raises:
        BaseException: What an env's constructor raised; nothing is left running.
    """

    def __init__(
        self,
        backend: Backend,
        env_factories: Sequence[EnvFactory],
        done_policy: DonePolicy,
        asynchronous: str | None,
        *,
        spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None,
        copy: bool,
        timeout: float | None,
        max_restarts: int | None,
        seed: int | None,
        **pool_arguments: Any,
    ) -> None:
        self.guard = self._guard = Guard()
        self.asynchronous = asynchronous
        self.contract: str | None = None
        self._hints: dict[str, str] = {}  # by name of an absent attribute
        try:
            self.pool = Pool(backend, env_factories, timeout=timeout, seed=seed, **pool_arguments)
            self._finalizer = weakref.finalize(self, _close_dropped, self.pool)
            self.pool.build(done_policy.autoreset, spaces)
        except BaseException:
            backend.close((), 0.0)  # whatever was started, even if an interrupt came before `self.pool` was set
            raise
        self.env_ids = self.pool.env_ids
        self.num_envs = len(self.env_ids)
        recovery = None if max_restarts is None else Recovery(self.pool, max_restarts)
        self.stepper = Stepper(self.pool, done_policy, copy, timeout, recovery)
        seeds = arguments.spread_seeds(seed, self.env_ids, self.num_envs, whole=False)
        self.seeds: dict[int, int | None] = dict(enumerate(seeds))

    def close(self, timeout: float) -> None:
        """Close all envs and end all workers, which have ``timeout`` seconds to close their envs."""
        self.guard.is_closed = True
        self.pool.close(timeout)
        self._finalizer.detach()

    # ---------------------------------------------------------------- arguments of calls

    def ids(self, id: Any, everyone: bool = False) -> tuple[int, ...]:
        """Return the env ids of an ``id`` argument; ``None``: all envs that are not paused; with ``everyone`` all."""
        if id is not None:
            return parse_ids(id, self.num_envs)
        return self.env_ids if everyone else self.stepper.episodes.unpaused

    def beginnings(self, env_ids: Sequence[int], seed: Any, options: Any) -> ResetArgumentsOfEach:
        """Return seed and options for the next reset of each env. Arguments: see `ParallelEnv.reset`."""
        seeds = arguments.spread_seeds(seed, env_ids, self.num_envs, whole=False)
        if seed is None:
            seeds = [self.seeds.get(env_id) for env_id in env_ids]
        return list(zip(seeds, arguments.spread_options(options, env_ids), strict=True))

    def forget_seeds(self, env_ids: Sequence[int]) -> None:
        """Drop the seeds that were set for the next reset, since they are used."""
        for env_id in env_ids:
            self.seeds.pop(env_id, None)

    def end_reset(self, resetting: ResetTicket, timeout: float | None, align: Align = "item") -> Any:
        """Return the first states of episodes, and drop the seeds that were set for them."""
        states = self.stepper.finish_reset(resetting, timeout, align)
        self.forget_seeds(resetting.env_ids)
        return states

    # ---------------------------------------------------------------- operations on envs

    def ask_each(self, operation: str, env_ids: Sequence[int], each: Sequence[Any] | None = None) -> list[Any]:
        """Run an operation of the host with an argument for each env, and return the results in this order."""
        values = self.pool.ask(operation, env_ids, each).values
        return [values.get(env_id) for env_id in env_ids]

    def attribute_hint(self, key: str, env_id: int) -> str:
        """Return a hint at an existing attribute with a name similar to ``key``.

        The env is asked once per name: a search for similar names takes a millisecond.
        """
        if key not in self._hints:
            self._hints[key] = self.pool.try_asking("hint", (env_id,), None, key).values.get(env_id, "")
        return self._hints[key]

    # ---------------------------------------------------------------- for adapters

    @single_threaded_in("to_gymnasium(), to_sb3() or to_tianshou")
    def hand_over(
        self,
        contract: str,
        policy: DonePolicy,
        observation_space: gymnasium.Space[Any] | None = None,
        *,
        reward_dtype: np.dtype[Any] | None = None,
        always_copies: bool = False,
        broadcasts: bool = False,
        waits_by: str = "step_wait()",
    ) -> None:
        """Follow the contract of an adapter from now on. Envs may then be stepped before their first reset.

        Args:
            contract: The call that asked for it.
            policy: What happens when an episode ends.
            observation_space: Space to batch states in; ``None``: as before.
            reward_dtype: Dtype that rewards must fit as numbers; ``None``: any type is allowed.
            always_copies: Whether states are copied whatever ``copy`` was.
            broadcasts: See `Layout`.
            waits_by: Call that continues the wait for an interrupted or late step, for messages.

        Raises:
            HandedOverError: If another adapter has the envs.
            EnvBusyError: If a step is in flight.
            WorkerTimeoutError: If an env is still in a call that timed out.
        """
        if self.contract == contract:
            return
        if self.contract is not None:
            raise HandedOverError(
                f"{contract} was called, but this ParallelEnv was handed over by {self.contract} and follows its "
                "rules. Make another ParallelEnv from the same list of env fns."
            )
        terms: dict[str, Any] = {"always_copies": always_copies, "reward_dtype": reward_dtype}
        stepper = self.stepper.under(policy, **terms)
        old = self.pool.layout
        changes = {
            "observation_space": old.observation_space if observation_space is None else observation_space,
            "keeps_ended": policy.autoreset,
            "keeps_types": policy.autoreset,
            "broadcasts": broadcasts,
        }
        if any(getattr(old, name) is not value for name, value in changes.items()):
            self.pool.rearrange(old.changed(**changes))
            stepper = self.stepper.under(policy, **terms)
        stepper.episodes.share_score(self.stepper.episodes.score)
        stepper.episodes.begin_unknown()
        self.stepper = stepper
        self.pool.waits_by = waits_by
        self.contract = self.asynchronous = contract

    @single_threaded
    def step(self, action: Any) -> StepResult:
        """Step all envs, including paused ones, for which this raises."""
        return self.stepper.step(action, self.env_ids, "item")  # type: ignore[return-value]

    @single_threaded
    def step_async(self, action: Any) -> None:
        """Send a step of all envs."""
        self.stepper.begin(action, self.env_ids)

    @single_threaded
    def step_wait(self, timeout: float | None) -> StepResult:
        """Return the result of a step of all envs that was sent, or whose call was interrupted."""
        limit = arguments.check_timeout(timeout)
        return self.stepper.finish(self.env_ids, limit, "item")  # type: ignore[return-value]

    @single_threaded
    def reset_async(self, env_ids: Sequence[int], seed: Any, options: Any) -> ResetTicket:
        """Send resets; `reset_wait` waits for them. Seeds and options: see `ParallelEnv.reset`."""
        return self.stepper.begin_reset(env_ids, self.beginnings(env_ids, seed, options))

    @single_threaded
    def reset_wait(self, resetting: ResetTicket, timeout: float | None) -> Any:
        """Return the first states of episodes, batched."""
        return self.end_reset(resetting, arguments.check_timeout(timeout))

    @single_threaded_in("reset")
    def reset_each(self, env_ids: Sequence[int], seed: Any, options: Any) -> list[Any]:
        """Begin episodes and return the first states, one per env."""
        resetting = self.stepper.begin_reset(env_ids, self.beginnings(env_ids, seed, options))
        return self.end_reset(resetting, None, "batch")  # type: ignore[no-any-return]

    @property
    def under_way(self) -> list[int]:
        """Ids of envs with a step whose result was not delivered; none after `close`."""
        return [] if self.guard.is_closed else self.stepper.under_way

    @single_threaded_in("reset")
    def latest_states(self) -> Any:
        """Return the latest states of all envs, batched."""
        return self.stepper.latest_states()

    @single_threaded_in("reset")
    def refuse_fresh(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have no episode.

        Raises:
            ResetNeededError: If there are any.
        """
        self.stepper.episodes.refuse_fresh(env_ids)

    @single_threaded_in("reset")
    def refuse_unknown(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have no episode, or whose latest states are not known."""
        self.stepper.episodes.refuse_fresh(env_ids)
        self.stepper.episodes.refuse_unknown(env_ids)

    def envs(self, name: str, way: str) -> tuple[Any, ...]:
        """Return the envs themselves, in env id order.

        Args:
            name: Name of the attribute that the user asked for, for messages.
            way: What the user can call instead, wherever the envs live.

        Raises:
            AbsentAttributeError: If they do not live in this process, or were closed.
        """
        if self.guard.is_closed:
            raise AbsentAttributeError(f"{name} is absent: the ParallelEnv was closed, and its envs with it.")
        envs = self.pool.envs_here()
        if envs is None:
            raise AbsentAttributeError(f"{name} is absent: these envs live in other processes. Use {way}.")
        return envs

    @single_threaded_in("call")
    def call_async(self, operation: str, argument: Any, common: Any, id: Any = None) -> Request:
        """Send an operation of the host, with the same argument for each env; without ``id`` to all envs."""
        env_ids = self.ids(id, everyone=True)
        return self.pool.post(operation, env_ids, [argument] * len(env_ids), common)

    @single_threaded
    def call_wait(self, request: Request, timeout: float | None) -> list[Any]:
        """Return the results of `call_async`, in the order asked."""
        limit = arguments.check_timeout(timeout)
        self.pool.wait(request, self.stepper.timeout if limit is None else limit)
        request.raise_failures()
        return [request.values.get(env_id) for env_id in request.env_ids]

    @single_threaded_in("get_attr")
    def existing_attr(self, key: str, id: Any) -> list[Any]:
        """Return an attribute that all of the envs have.

        Raises:
            AbsentAttributeError: If an env does not have it.
        """
        env_ids = parse_ids(id, self.num_envs)
        arguments.check_name("key", key)
        values = self.pool.ask("get", env_ids, None, key).values
        without = [env_id for env_id in env_ids if env_id not in values]
        if without:
            have = "has" if len(without) == 1 else "have"
            hint = self.attribute_hint(key, without[0])
            raise AbsentAttributeError(
                f"{name_envs(without)} {have} no attribute {key!r}, nor has a wrapper around it.{hint}"
            )
        return [values[env_id][0] for env_id in env_ids]

    # ---------------------------------------------------------------- for event loops

    @single_threaded_in("arecv")
    def look(self, min_envs: int, timeout: float | None, begin: float) -> bool:
        """Return at once whether `take` has something to return. See `Stepper.look`."""
        return self.stepper.look(min_envs, timeout, begin)

    async def sleep_until_reply(self, timeout: float | None, begin: float, heartbeat: float, nap: float) -> None:
        """Let the event loop run until `look` may find a reply, or its timeout.

        Args:
            timeout: See `look`.
            begin: See `look`.
            heartbeat: Seconds after which to look anyway, for deaths and output that no reply reports.
            nap: The same where nothing wakes an event loop at a reply.
        """
        deadline = self.stepper.deadline(timeout, begin)
        left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        await sleep_until_woken(self.pool.fileno(), self.pool.wakers, min(heartbeat, left), min(nap, left))

    @single_threaded_in("arecv")
    def take(self, min_envs: int, max_envs: int | None, align: Align) -> Any:
        """Return the results that have arrived. See `Stepper.take`."""
        return self.stepper.take(min_envs, max_envs, align)


def _close_dropped(pool: Pool) -> None:
    """Close the pool of an unreferenced object.

    A KeyboardInterrupt meanwhile is raised in the caller a moment later: Python drops what a finalizer raises.
    """
    try:
        pool.close()
    except KeyboardInterrupt:
        threading.Timer(_MOMENT, _interrupt_main).start()


def _interrupt_main() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # interrupts a wait, too
    else:
        _thread.interrupt_main()
