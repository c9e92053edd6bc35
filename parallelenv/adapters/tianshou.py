"""A `ParallelEnv` with the methods that Tianshou's collectors call. This module does not import Tianshou."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np

from parallelenv.adapters.common import AdapterCalls, ByHand, convert_partial, positions, raises_first
from parallelenv.contract import arguments
from parallelenv.contract.arguments import Ids, Options, Seeds
from parallelenv.contract.batch import Array
from parallelenv.contract.protocol import MethodCall
from parallelenv.contract.spaces import Env, object_array
from parallelenv.contract.tracebacks import reports_failures, short_tracebacks, warn_user
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

TianshouStep = tuple[Array, Array, Array, Array, Array]


class Worker(NamedTuple):
    """An entry of `TianshouVectorEnv.workers`. Each entry holds one env."""

    env: Env


@raises_first
class TianshouVectorEnv:
    """A vector env for Tianshou, returned by `ParallelEnv.to_tianshou`. Its methods match those of `BaseVectorEnv`.

    Except for ``step(None)`` and `reset` without ``env_id``, calls on an env whose step is in flight raise
    `EnvBusyError` and have no effect. Negative ids count from the end.

    Attributes:
        parallel_env: The `ParallelEnv`.
        env_num: Number of envs.
        is_async: Whether a step may return before all envs have finished.
        action_space, observation_space, metadata: Lists with one item per env.
    """

    def __init__(self, env: ParallelEnv, wait_num: int | None = None, timeout: float | None = None) -> None:
        self.parallel_env = env
        self.env_num = len(env)
        if wait_num is not None:
            arguments.check_positive("wait_num", wait_num)
            if wait_num > self.env_num:
                raise ArgumentError(f"wait_num={wait_num}, but there are {self.env_num} envs. Give at most that many.")
        self.wait_num = self.env_num if wait_num is None else int(wait_num)
        self.timeout = arguments.check_timeout(timeout)
        for env_id, space in enumerate(env.observation_spaces):
            if isinstance(space, gymnasium.spaces.Tuple):
                raise InvalidEnvError(
                    f"The observation space of env {env_id} is {space}; Tianshou does not accept tuples. Make it a "
                    "Dict, or wrap the env in gymnasium.wrappers.FlattenObservation."
                )
        self._calls = AdapterCalls(env, "to_tianshou()", ByHand(), waits_by="step(None)")
        self.is_async = self.wait_num != self.env_num or self.timeout is not None
        if self.is_async and env.engine.pool.lone_host is None and env.num_workers < len(env):
            warn_user(
                f"to_tianshou() with wait_num or timeout: {len(env)} envs share {env.num_workers} workers, and an env "
                "waits for the envs before it in the same worker. For one worker per env, as in Tianshou, give "
                "num_cpus=len(envs) to the ParallelEnv."
            )
        self.action_space = env.action_spaces
        self.observation_space = env.observation_spaces
        self.metadata = [dict(facts.metadata) for facts in env.engine.pool.facts]

    def __len__(self) -> int:
        return self.env_num

    @property
    def is_closed(self) -> bool:
        """True if the `ParallelEnv` is closed."""
        return self.parallel_env.closed

    @property
    @short_tracebacks
    def workers(self) -> tuple[Worker, ...]:
        """One `Worker` per env; the attribute ``env`` of a `Worker` is the env object.

        Raises:
            AbsentAttributeError: If the envs live in other processes, or have been closed.
        """
        return tuple(map(Worker, self._calls.envs("workers", "get_env_attr() or set_env_attr()")))

    @property
    def waiting_id(self) -> list[int]:
        """Ids of envs with a step in flight, even if the step is late or the wait for it was interrupted."""
        return self.parallel_env.engine.in_flight

    @property
    def ready_id(self) -> list[int]:
        """Ids of envs without a step in flight."""
        return sorted(set(range(self.env_num)).difference(self.waiting_id))

    # ---------------------------------------------------------------- episodes

    def reset(self, env_id: Ids = None, *, seed: Seeds = None, options: Options = None) -> tuple[Array, Array]:
        """Start new episodes. Without ``env_id``, all envs are reset, and any steps in flight are dropped.

        If ``seed`` is an int, it is the seed of every env, as in Tianshou; a list has one seed per env.

        Returns:
            Observations and infos, in the order of ``env_id``. Observations are stacked; dicts and observations of
            different shapes become an object array. Infos are an object array of dicts.
        """
        env_ids = list(range(self.env_num)) if env_id is None else self._ready(env_id)
        seeds = [seed] * len(env_ids) if isinstance(seed, (int, np.integer)) else seed
        states = self._calls.reset_each(env_ids, seeds, options)
        infos = self.parallel_env.reset_infos
        return _stacked(states), object_array([infos[one] for one in env_ids])

    def step(self, action: object, id: Ids = None) -> TianshouStep:
        """Step envs, by default all envs; if ``is_async``, return the results of the envs that finish first.

        ``action`` has one action per env. If ``is_async``, or if Ctrl-C interrupted an earlier step, ``action`` may be
        ``None``: the call then only waits for steps in flight.

        Returns:
            Five arrays with one row for each env whose step has finished: observations, rewards, terminated (bool),
            truncated (bool) and infos. Observations and infos have the same form as those of `reset`, and
            ``info["env_id"]`` is the id of the row's env.

        Raises:
            ActionError: If the actions are invalid. No env has been stepped.
            ResetNeededError: If an env lost its episode because its worker died. No env has been stepped.
            NothingInFlightError: If ``is_async``, and there is nothing to wait for.
            BaseException: Any exception raised by an env. ``error.partial`` is the return value with only the rows of
                the other envs; ``error.partial.env_ids`` has the ids of these envs.
        """
        try:
            if action is None:
                if not self.is_async and not self.waiting_id:
                    raise ActionError(
                        "action=None only waits, and there is nothing to wait for. Give wait_num or timeout."
                    )
                batch = self._received()
            elif self.is_async:
                self.parallel_env.send(action, self._ready(id))
                batch = self._received()
            else:
                batch = self.parallel_env.step(action, self._ready(id), "batch")
        except BaseException as error:
            convert_partial(error, self._convert)
            raise
        return self._convert(batch)

    def _received(self) -> StepBatch:
        wanted = max(1, min(self.wait_num, len(self.waiting_id)))
        try:
            return self.parallel_env.recv(wanted, timeout=self.timeout, align="batch")
        except WorkerTimeoutError as error:
            if self.timeout is None or reports_failures(error):  # otherwise, the wait has only ended early
                raise
        except NothingInFlightError as error:
            if reports_failures(error):
                raise
            raise NothingInFlightError("No step is in flight to wait for. Give actions.") from None
        return self.parallel_env.recv(1, align="batch")

    def _convert(self, batch: StepBatch) -> TianshouStep:
        states, rewards, _, infos = zip(*batch, strict=True) if batch else ((), (), (), ())
        for env_id, info in zip(batch.env_ids.tolist(), infos, strict=True):
            info["env_id"] = env_id
        return _stacked(states), _stacked(rewards), batch.terminated, batch.truncated, object_array(infos)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[list[int | None]]:
        """Reset all envs with seeds, and seed their action spaces.

        Return one list per env, which contains the env's seed.

        If ``seed`` is an int, env i gets the seed ``seed + i``. A list has one seed per env. With ``None``, the envs
        are reset without seeds, and the action spaces are seeded at random.
        """
        everyone = self._ready(None)
        seeds = arguments.spread_seeds(seed, everyone, whole=False)
        self._calls.reset_each(everyone, seeds, None)
        for space, one in zip(self.action_space, seeds, strict=True):
            if space is not None:
                space.seed(one)
        return [[one] for one in seeds]

    # ---------------------------------------------------------------- attributes and frames

    @property
    def spec(self) -> list[Any]:
        """A list with the spec of each env."""
        return self.get_env_attr("spec")

    @property
    def reward_range(self) -> list[Any]:
        """A list with the reward range of each env; raises an `AttributeError` if an env has no reward range."""
        return self.get_env_attr("reward_range")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Return an attribute of each env, looked up through wrappers.

        Raises:
            AttributeError: If an env lacks the attribute.
        """
        return self._calls.existing_attr(key, self._ready(id))

    def set_env_attr(self, key: str, value: object, id: Ids = None) -> None:
        """Set an attribute of each env, on the outermost wrapper that has it, or else on the innermost env."""
        env_ids = self._ready(id)
        self.parallel_env.set_env_attr(key, values=[value] * len(env_ids), id=env_ids)

    def render(self, **kwargs: object) -> list[object]:
        """Return a list with the result of each env's ``render(**kwargs)``."""
        self._ready(None)
        ticket = self._calls.call_async(MethodCall("render", (), kwargs))
        return self._calls.call_wait(ticket, None)

    def close(self) -> None:
        """Close the `ParallelEnv`. This method can be called more than once."""
        self.parallel_env.close()

    def _ready(self, id: Ids) -> list[int]:
        """Return the env ids that ``id`` selects; raise `EnvBusyError` if any of the envs has a step in flight."""
        env_ids = positions(id, self.env_num, "id")
        waiting = self.waiting_id
        busy = [env_id for env_id in env_ids if env_id in waiting] if waiting else []
        if busy:
            raise EnvBusyError(
                f"envs {busy} have a step in flight. Wait for it with step(None), or drop all such steps with reset()."
            )
        return env_ids


def _stacked(values: Sequence[Any]) -> Array:
    """Stack values into one array, as Tianshou does; dicts and values of different shapes become an object array."""
    try:
        return np.stack(values)
    except ValueError:
        return object_array(values)
