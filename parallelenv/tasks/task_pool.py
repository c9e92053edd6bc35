"""A `ParallelEnv` of samplers, with the calls that only tasks have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parallelenv.contract import arguments
from parallelenv.contract.messages import show
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.engine.assemble import batch_states
from parallelenv.engine.guard import single_threaded
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError
from parallelenv.tasks.sampler_env import TaskEnv, make_task_env


@short_tracebacks
class TaskPool(ParallelEnv):
    """A `ParallelEnv` whose envs are samplers of tasks: an episode of an env is a task of its sampler.

    Everything else is as there. `ParallelEnv.from_samplers` makes one.
    """

    def next_task(self, id: Any = None, **kwargs: Any) -> Any:
        """Begin the next task of each sampler, whatever has come of the one before: a `reset` under another name.

        Args:
            id: Which envs.
            **kwargs: Go to ``next_task`` of each sampler; for others per env there is ``reset(options=[...])``.

        Returns:
            First states, as `reset`; ``None`` in the place of those whose sampler has no more.

        Raises:
            As `reset`.
        """
        return self.reset(id, options=kwargs or None)

    def all_done(self) -> bool:
        """Whether no task is under way: every sampler waits for `next_task`, or has no more.

        If a task that ends is followed by the next one at once, only the latter: ``while not env.all_done()`` then
        plays all tasks there are, also where all envs end one in the same step.
        """
        return self.all_exhausted() if self.engine.stepper.goes_on else super().all_done()

    @single_threaded
    def reset_all(self) -> None:
        """Let every sampler go back to its first task, paused or exhausted ones too. All then need a `next_task`.

        Steps under way are dropped. The samplers' random generators stay as they are.

        Raises:
            BaseException: What a sampler raised.
        """
        self.engine.stepper.end_episodes("invoke", self.engine.env_ids, [("_rewind", (), {})] * self.num_envs, None)

    @single_threaded
    def set_seeds(self, seeds: int | Sequence[int | None]) -> list[int | None]:
        """Seed every sampler at once, for the tasks that it gives from now on; `seed` waits for the next reset.

        Args:
            seeds: Int ``s``: that of env i gets ``s + i``. A list: one per env; ``None``: it goes on as it is.

        Returns:
            The seed of each, in env id order.

        Raises:
            ArgumentError: If it is neither; nothing was seeded.
            BaseException: What a sampler raised.
        """
        spread = arguments.spread_seeds(seeds, self.engine.env_ids, self.num_envs, whole=True)
        seeded = [env_id for env_id in self.engine.env_ids if spread[env_id] is not None]
        self.engine.pool.ask("invoke", seeded, [("_reseed", (spread[env_id],), {}) for env_id in seeded])
        self.engine.stepper.note_seeds(self.engine.env_ids, spread)
        return spread

    @single_threaded
    def get_observations(self, id: Any = None) -> Any:
        """Return what is seen of each task now. Nothing is stepped.

        Args:
            id: Which envs.

        Returns:
            States as `reset` gives them; ``None`` in the place of an env that is exhausted.

        Raises:
            ResetNeededError: If an env has no task yet; nothing was asked.
            EnvBusyError: If a step of one is under way.
            EnvContractError: If what a task shows does not fit the space.
            BaseException: What a task raised; ``error.partial`` maps the others' ids to what is seen of theirs.
        """
        env_ids = self.engine.ids(id)
        self.engine.stepper.refuse_unready(env_ids)
        values = self.engine.pool.ask("invoke", env_ids, [("_observe", (), {})] * len(env_ids)).values
        if not env_ids:
            return self.engine.stepper.latest_states(())
        return batch_states(self.engine.pool.layout, values, env_ids, self.engine.stepper.episodes.exhausted)


def make_env_fns(make_sampler_fn: Any, sampler_fn_args: Any) -> list[Callable[[], TaskEnv]]:
    """Return an env fn for each sampler.

    Raises:
        ArgumentError: If the function cannot be called, or the arguments are no sequence of dicts with names in them.
    """
    if not callable(make_sampler_fn):
        raise ArgumentError(
            f"make_sampler_fn={show(make_sampler_fn)} cannot be called. Give a function that returns a TaskSampler."
        )
    expected = (
        "Give a list with a dict of keyword arguments of make_sampler_fn for each env, [{}] * 4 if it takes none."
    )
    if isinstance(sampler_fn_args, (str, bytes, Mapping)) or not isinstance(sampler_fn_args, Sequence):
        raise ArgumentError(f"sampler_fn_args={show(sampler_fn_args)} is no list. {expected}")
    if not sampler_fn_args:
        raise ArgumentError(f"sampler_fn_args is empty. {expected}")
    for place, one in enumerate(sampler_fn_args):
        if not isinstance(one, Mapping) or not all(isinstance(name, str) for name in one):
            raise ArgumentError(f"sampler_fn_args[{place}] is {show(one)}, no dict of keyword arguments. {expected}")
    return [functools.partial(make_task_env, make_sampler_fn, one) for one in sampler_fn_args]
