"""A `ParallelEnv` as Tianshou's collectors know vector envs. Needs nothing of Tianshou: they go by the methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np

from parallelenv.adapters.partial import raises_first, retell
from parallelenv.adapters.positions import positions
from parallelenv.contract import arguments
from parallelenv.contract.batch import Array
from parallelenv.contract.spaces import object_array
from parallelenv.contract.tracebacks import short_tracebacks, warn_user
from parallelenv.engine.done_policies import ByHand
from parallelenv.errors import (
    ActionError,
    ArgumentError,
    EnvBusyError,
    InvalidEnvError,
    NothingInFlightError,
    WorkerTimeoutError,
)
from parallelenv.results import StepBatch

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

Ids: TypeAlias = "int | Sequence[int] | Array | None"
TianshouStep = tuple[Array, Array, Array, Array, Array]


class Worker(NamedTuple):
    """What `TianshouVectorEnv.workers` has of an env."""

    env: Any


@raises_first
class TianshouVectorEnv:
    """What `ParallelEnv.to_tianshou` returns. Its methods take and return what those of `BaseVectorEnv` do.

    Args:
        env: Whose envs are stepped.
        wait_num: As in `ParallelEnv.to_tianshou`.
        timeout: As in `ParallelEnv.to_tianshou`.

    Attributes:
        parallel_env: Whose envs are stepped.
        env_num: Number of envs.
        is_async: Whether a step may return before all envs have finished theirs.
        action_space: One per env.
        observation_space: One per env.
        metadata: One per env.
    """

    def __init__(self, env: ParallelEnv, wait_num: int | None = None, timeout: float | None = None) -> None:
        self.parallel_env = env
        self.env_num = len(env)
        self.wait_num = _check_wait_num(wait_num, self.env_num)
        self.timeout = arguments.check_timeout(timeout)
        for env_id, space in enumerate(env.observation_spaces):
            if isinstance(space, gymnasium.spaces.Tuple):
                raise InvalidEnvError(
                    f"The observation space of env {env_id} is {space}, and Tianshou takes no tuples. Make it a Dict, "
                    "or wrap the env in gymnasium.wrappers.FlattenObservation."
                )
        env.engine.hand_over("to_tianshou()", ByHand(), waits_by="step(None)")
        self.is_async = self.wait_num != self.env_num or self.timeout is not None
        if self.is_async:
            _warn_of_shared_workers(env)
        self.action_space = env.action_spaces
        self.observation_space = env.observation_spaces
        self.metadata = [dict(facts.metadata) for facts in env.engine.pool.facts]

    def __len__(self) -> int:
        """Return the number of envs."""
        return self.env_num

    @property
    def is_closed(self) -> bool:
        """Whether this or the `ParallelEnv` was closed."""
        return self.parallel_env.closed

    @property
    @short_tracebacks
    def workers(self) -> tuple[Worker, ...]:
        """Each with its ``env``, if the envs live in this process.

        Raises:
            AbsentAttributeError: If they do not.
        """
        return tuple(map(Worker, self.parallel_env.engine.envs("workers", "get_env_attr() or set_env_attr()")))

    @property
    def waiting_id(self) -> list[int]:
        """Ids of envs with a step under way: begun, late, or interrupted."""
        return self.parallel_env.engine.under_way

    @property
    def ready_id(self) -> list[int]:
        """Ids of the other envs."""
        waiting = set(self.waiting_id)
        return [env_id for env_id in range(self.env_num) if env_id not in waiting]

    # ---------------------------------------------------------------- episodes

    def reset(self, env_id: Ids = None, *, seed: Any = None, options: Any = None) -> tuple[Array, Array]:
        """Begin episodes.

        Args:
            env_id: Which envs, by default all; steps of theirs that are under way are then dropped.
            seed: As Tianshou has it: an int is the same seed for every env. A list: one per env.
            options: Of each env's ``reset``.

        Returns:
            Observations and infos, in the order of ``env_id``: observations stacked, or an object array if they are
            dicts or of different shapes, and an object array of dicts.

        Raises:
            EnvBusyError: If a step of one that is named is under way; nothing was reset.
            BaseException: What an env raised.
        """
        env_ids = list(range(self.env_num)) if env_id is None else self._ready(env_id)
        seeds = [seed] * len(env_ids) if isinstance(seed, (int, np.integer)) else seed
        states = self.parallel_env.engine.reset_each(env_ids, seeds, options)
        infos = self.parallel_env.reset_infos
        return _stacked(states), object_array([infos[one] for one in env_ids])

    def step(self, action: Any, id: Ids = None) -> TianshouStep:
        """Step envs; if ``is_async``, return what has come of the steps of those that are the first to finish.

        Args:
            action: One per env; ``None``: only wait for steps that are under way, if ``is_async`` or after Ctrl-C.
            id: Which envs, by default all.

        Returns:
            Observations and infos as in `reset`, between them rewards ``(k,)``, terminated and truncated ``(k,)`` bool.
            ``info["env_id"]`` says whose they are.

        Raises:
            ActionError: If the actions do not fit.
            EnvBusyError: If a step of one is under way.
            ResetNeededError: If one lost its episode with its worker. In all cases nothing was stepped.
            NothingInFlightError: If there is nothing to wait for.
            BaseException: What an env raised. ``error.partial`` is what this would have returned, with rows of the
                others alone, whose ids are its ``env_ids``.
        """
        try:
            batch = self._stepped(action, id)
        except BaseException as error:
            retell(error, self._told)
            raise
        return self._told(batch)

    def _stepped(self, action: Any, id: Ids) -> StepBatch:
        if action is None:
            if not self.is_async and not self.waiting_id:
                raise ActionError("action=None only waits, and there is nothing to wait for. Give wait_num or timeout.")
            return self._received()
        env_ids = self._ready(id)
        if not self.is_async:
            return self.parallel_env.step(action, env_ids, "batch")
        self.parallel_env.send(action, env_ids)
        return self._received()

    def _received(self) -> StepBatch:
        wanted = max(1, min(self.wait_num, len(self.waiting_id)))
        try:
            return self.parallel_env.recv(wanted, timeout=self.timeout, align="batch")
        except WorkerTimeoutError:
            if self.timeout is None:  # it is the pool's own, for an env that hangs
                raise
        except NothingInFlightError:
            raise NothingInFlightError("No step is under way that could be waited for. Give actions.") from None
        return self.parallel_env.recv(1, align="batch")

    def _told(self, batch: StepBatch) -> TianshouStep:
        states, rewards, _, infos = zip(*batch, strict=True) if batch else ((), (), (), ())
        for env_id, info in zip(batch.env_ids.tolist(), infos, strict=True):
            info["env_id"] = env_id
        return _stacked(states), _stacked(rewards), batch.terminated, batch.truncated, object_array(infos)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int | None]]:
        """Reset all envs with seeds, and seed their ``action_space``.

        Args:
            seed: Int ``s``: env i gets ``s + i``. A list: one per env. ``None``: random ones.

        Returns:
            A list with its seed per env.
        """
        everyone = self._ready(None)
        seeds = arguments.spread_seeds(seed, everyone, self.env_num, whole=False)
        self.parallel_env.engine.reset_each(everyone, seeds, None)
        for space, one in zip(self.action_space, seeds, strict=True):
            if space is not None:
                space.seed(one)
        return [[one] for one in seeds]

    # ---------------------------------------------------------------- attributes and frames

    @property
    def spec(self) -> list[Any]:
        """One per env."""
        return self.get_env_attr("spec")

    @property
    def reward_range(self) -> list[Any]:
        """One per env, if they have any."""
        return self.get_env_attr("reward_range")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Return an attribute of envs, looked up through wrappers.

        Raises:
            AttributeError: If an env has none of that name.
            EnvBusyError: If a step of one is under way.
        """
        return self.parallel_env.engine.existing_attr(key, self._ready(id))

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of envs, on the wrapper that has it, else on the innermost env; the same value for all.

        Raises:
            EnvBusyError: If a step of one is under way.
        """
        env_ids = self._ready(id)
        self.parallel_env.set_env_attr(key, values=[value] * len(env_ids), id=env_ids)

    def render(self, **kwargs: Any) -> list[Any]:
        """Return what each env's ``render`` returns for these arguments.

        Raises:
            EnvBusyError: If a step is under way.
        """
        self._ready(None)
        request = self.parallel_env.engine.call_async("use", ((), kwargs), ("render", True))
        return self.parallel_env.engine.call_wait(request, None)

    def close(self) -> None:
        """Close the `ParallelEnv`. Harmless when repeated."""
        self.parallel_env.close()

    def _ready(self, id: Ids) -> list[int]:
        """Return the env ids that an argument names.

        Raises:
            EnvBusyError: If one has a step under way.
        """
        env_ids = list(range(self.env_num)) if id is None else positions(id, self.env_num, "id")
        waiting = self.waiting_id
        busy = [env_id for env_id in env_ids if env_id in waiting] if waiting else []
        if busy:
            raise EnvBusyError(
                f"envs {busy} have a step under way. Wait for it with step(None), or drop all that are with reset()."
            )
        return env_ids


def _check_wait_num(wait_num: Any, num_envs: int) -> int:
    if wait_num is None:
        return num_envs
    arguments.check_positive("wait_num", wait_num)
    if wait_num > num_envs:
        raise ArgumentError(f"wait_num={wait_num}, but there are {num_envs} envs. Give at most as many.")
    return int(wait_num)


def _warn_of_shared_workers(env: ParallelEnv) -> None:
    """Say that an env may be waited for since it shares a worker; a loop in this thread has one whatever is given."""
    if env.engine.pool.lone_host is None and env.num_hosts < len(env):
        warn_user(
            f"to_tianshou() with wait_num or timeout: {len(env)} envs share {env.num_hosts} workers, and of one worker "
            "an env is waited for until those before it have finished. Tianshou has a worker per env: give "
            "num_cpus=len(envs) to the ParallelEnv."
        )


def _stacked(values: Sequence[Any]) -> Array:
    """Return values as one array, as Tianshou does: dicts, and what has different shapes, as objects."""
    try:
        return np.stack(values)
    except ValueError:
        return object_array(values)
