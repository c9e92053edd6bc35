"""A `ParallelEnv` of samplers, with methods for tasks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from parallelenv.contract.arguments import Ids, spread_seeds
from parallelenv.contract.batch import Batch, gather_states
from parallelenv.contract.error_text import show
from parallelenv.contract.failures import Failure, raise_failures
from parallelenv.contract.protocol import Extra, MethodCall
from parallelenv.contract.spaces import State, object_array
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.engine.assemble import list_states
from parallelenv.engine.thread_guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, EnvContractError
from parallelenv.tasks.sampler_env import TaskEnv, make_task_env
from parallelenv.worker.row_writer import RowWriter


@short_tracebacks
class TaskPool(ParallelEnv):
    """A `ParallelEnv` whose envs are task samplers: one episode is one task. See `ParallelEnv.from_samplers`."""

    def next_task(self, id: Ids = None, **kwargs: object) -> State:
        """Start the next task of each sampler, even if the current task has not ended. This is the same as `reset`.

        Args:
            id: Which envs.
            **kwargs: Passed to ``next_task`` of each sampler. To give each env different arguments, use
                ``reset(options=[...])``.

        Returns:
            First states, as from `reset`; ``None`` for samplers without another task.
        """
        return self.reset(id, options=kwargs or None)

    def all_done(self) -> bool:
        """Return whether no task is in progress: each sampler waits for `next_task` or has no more tasks.

        If the next task starts automatically, the result is true only when no sampler has any more tasks. A loop
        ``while not env.all_done()`` therefore runs all tasks, even if the tasks of all envs end in the same step.
        """
        return self.all_exhausted() if self.engine.done_policy.autoreset else super().all_done()

    @single_threaded
    def reset_all(self) -> None:
        """Reset all samplers to their first task, including those of paused envs and those that have no more tasks.

        Call `next_task` afterwards to start the tasks. Steps in flight are dropped. The samplers' random generators are
        not changed.

        Raises:
            BaseException: Any exception raised by a sampler.
        """
        engine, calls = self.engine, [MethodCall("_rewind")] * self.num_envs
        engine.pool.ask("call", engine.env_ids, calls, announce=lambda _: engine.drop_episodes(engine.env_ids))

    @single_threaded
    def set_seeds(self, seeds: int | Sequence[int | None]) -> list[int | None]:
        """Seed samplers immediately, and drop the seeds that were given for the next resets of these envs.

        Args:
            seeds: An int ``s`` gives env i the seed ``s + i``. A list has one seed per env; envs with ``None`` are not
                seeded.

        Returns:
            The seed of each sampler, in env id order.

        Raises:
            ArgumentError: If ``seeds`` is neither an int nor such a list. In that case, nothing is seeded.
            BaseException: Any exception raised by a sampler.
        """
        spread = spread_seeds(seeds, self.engine.env_ids, whole=True)
        seeded = [env_id for env_id in self.engine.env_ids if spread[env_id] is not None]
        self.engine.call_each(seeded, [MethodCall("sampler.set_seed", (spread[env_id],)) for env_id in seeded])
        self.engine.forget_seeds(seeded)
        if self.engine.recovery is not None:
            self.engine.recovery.remember_seeds(self.engine.env_ids, spread)
        return spread

    @single_threaded
    def get_observations(self, id: Ids = None) -> State:
        """Return the current observations of the tasks, without stepping them.

        Returns:
            States, as from `reset`; ``None`` for samplers that had no further task to start.

        Raises:
            ResetNeededError: If an env must be reset first. In that case, no observations are requested.
            EnvBusyError: If a step of an env is in flight.
            EnvContractError: If an observation does not fit the space.
            BaseException: Any exception raised by a task; ``error.partial`` maps the ids of the other envs to their
                observations.
        """
        env_ids = self.engine.ids(id)
        self.engine.refuse_busy(env_ids)
        self.engine.table.refuse_without_episode(env_ids)
        found = self.engine.pool.ask("call", env_ids, [MethodCall("_observe")] * len(env_ids)).values
        if not env_ids:
            return self.engine.latest_states(())
        # The observations are written to a batch of their own, which converts them as the pool's batch converts states.
        batch = Batch.private(self.engine.pool.layout)
        writer, failures, extras = RowWriter(batch), [], dict[int, Extra]()
        for env_id in self.engine.table.without_exhausted(env_ids):
            try:
                extras[env_id] = Extra(loose=writer.store_state(env_id - writer.first, found.get(env_id)))
            except EnvContractError as error:
                failures.append(Failure(error, env_id, "get_observations()"))
        raise_failures(failures, {env_id: found.get(env_id) for env_id in extras})
        if len(extras) == len(env_ids):
            return gather_states(batch, env_ids, batch.rows(env_ids), extras, copy=True)
        states = dict(zip(extras, list_states(batch, list(extras), extras), strict=True))
        return object_array([states.get(env_id) for env_id in env_ids])


def make_env_fns(make_sampler_fn: object, sampler_fn_args: object) -> list[Callable[[], TaskEnv]]:
    """Return, for each sampler, a function that makes its env."""
    if not callable(make_sampler_fn):
        raise ArgumentError(
            f"make_sampler_fn={show(make_sampler_fn)} cannot be called. Give a function that returns a TaskSampler."
        )
    expected = (
        "Give a list with a dict of keyword arguments of make_sampler_fn for each env; [{}] * 4 if it takes none."
    )
    if isinstance(sampler_fn_args, (str, bytes, Mapping)) or not isinstance(sampler_fn_args, Sequence):
        raise ArgumentError(f"sampler_fn_args={show(sampler_fn_args)} is not a list. {expected}")
    if not sampler_fn_args:
        raise ArgumentError(f"sampler_fn_args is empty. {expected}")
    for place, one in enumerate(sampler_fn_args):
        if not isinstance(one, Mapping) or not all(isinstance(name, str) for name in one):
            raise ArgumentError(f"sampler_fn_args[{place}] is {show(one)}, not a dict of keyword arguments. {expected}")
    return [functools.partial(make_task_env, make_sampler_fn, one) for one in sampler_fn_args]
