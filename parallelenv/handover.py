"""How a `ParallelEnv` is handed over to an adapter, and what adapters do with it.

An adapter borrows: it holds the `ParallelEnv`, sets what happens when an episode ends to what its contract says,
and keeps nothing of where episodes are. So attributes, rendering, `restart` or `save_state` work as before beside
it, and closing one closes the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from parallelenv.calls import Calls
from parallelenv.contract import arguments
from parallelenv.contract.arguments import parse_ids
from parallelenv.engine.assemble import Align
from parallelenv.engine.done_policies import Policy
from parallelenv.engine.engine import Begins, Resetting
from parallelenv.engine.guard import exclusive
from parallelenv.engine.tickets import Request, name_envs
from parallelenv.errors import AbsentAttributeError, HandedOverError, MissingDependencyError
from parallelenv.results import StepResult
from parallelenv.rollouts.rollout import Roller

if TYPE_CHECKING:
    import gymnasium

    from parallelenv.adapters.gymnasium import GymnasiumVectorEnv
    from parallelenv.adapters.sb3 import SB3VecEnv
    from parallelenv.adapters.tianshou import TianshouVectorEnv
    from parallelenv.env import ParallelEnv


class Adaptable(Calls):
    """A `ParallelEnv` as far as adapters need to know it. Whoever calls its private methods is one."""

    _roller: Roller
    _asynchronous: Any

    def __init__(self) -> None:
        super().__init__()
        self._seeds: dict[int, int | None] = {}
        self._contract: str | None = None

    # ---------------------------------------------------------------- for users

    def to_gymnasium(
        self,
        autoreset_mode: Literal["NextStep", "SameStep", "Disabled"] | str | gymnasium.vector.AutoresetMode = "NextStep",
        *,
        observation_mode: Literal["same", "different"] | tuple[gymnasium.Space[Any], gymnasium.Space[Any]] = "same",
    ) -> GymnasiumVectorEnv:
        """Return a `gymnasium.vector.VectorEnv` that steps these envs, for whatever takes one.

        From now on an ended episode is followed as ``autoreset_mode`` says, whatever ``asynchronous`` was; all envs are
        to be reset. Closing the vector env closes this object. Of ``copy=False`` observations are as of ``copy=False``
        in Gymnasium's own vector envs: valid until the next call, and writeable. Infos and ``final_obs`` are always the
        caller's.

        Args:
            autoreset_mode: ``"NextStep"``: the step after the end of an episode resets that env, ignores its action,
                and has reward 0. ``"SameStep"``: it is reset within the step that ends it; ``infos["final_obs"]`` and
                ``infos["final_info"]`` are what the end was. ``"Disabled"``: you reset, with
                ``reset(options={"reset_mask": terminations | truncations})``.
            observation_mode: ``"same"``: the envs share one observation space. ``"different"``: their spaces have the
                same shapes and dtypes, but other bounds. Or the batched and the single space, given by you.

        Raises:
            SpacesError: If an env declares no spaces, or others than ``observation_mode`` allows.
            ArgumentError: If a mode is not known.
            EnvBusyError: If a step is under way.
            WorkerTimeoutError: If an env is still at a call that took too long.
            HandedOverError: If another adapter has this object.
        """
        from parallelenv.adapters.gymnasium import GymnasiumVectorEnv

        return GymnasiumVectorEnv(cast("ParallelEnv", self), autoreset_mode, observation_mode)

    def to_sb3(self) -> SB3VecEnv:
        """Return a `VecEnv` of Stable-Baselines3 that steps these envs, for its algorithms and wrappers.

        From now on an ended env is reset within the step that ends it, whatever ``asynchronous`` was; all envs are to
        be reset. Closing the `VecEnv` closes this object. Observations are copied also with ``copy=False``: the
        algorithms keep the latest ones while they step, and would store, and learn from, the next ones in their place.

        Raises:
            MissingDependencyError: If Stable-Baselines3 is not installed.
            SpacesError: If the envs declare no spaces, or different ones.
            ArgumentError: If the envs have different render modes.
            EnvBusyError: If a step is under way.
            WorkerTimeoutError: If an env is still at a call that took too long.
            HandedOverError: If another adapter has this object.
        """
        try:
            from parallelenv.adapters.sb3 import SB3VecEnv
        except ModuleNotFoundError as error:
            if error.name != "stable_baselines3":
                raise
            raise MissingDependencyError(
                "to_sb3() needs the package stable-baselines3, which is not installed. Install it with: "
                "pip install stable-baselines3"
            ) from None
        return SB3VecEnv(cast("ParallelEnv", self))

    def to_tianshou(self, wait_num: int | None = None, timeout: float | None = None) -> TianshouVectorEnv:
        """Return what Tianshou's collectors and wrappers take for one of its vector envs.

        From now on nothing happens when an episode ends, whatever ``asynchronous`` was: collectors reset. All envs
        are to be reset. Closing it closes this object. Observations are copied, whatever ``copy`` was.

        Args:
            wait_num: So many envs a step waits for; the others go on with theirs. ``None``: all.
            timeout: Seconds after which a step returns what is there, at least of one env; ``None``: none.

        Warns:
            UserWarning: If either is given and envs share workers, in which one waits for another.

        Raises:
            ArgumentError: If ``wait_num`` is no int from 1 to the number of envs, or ``timeout`` not positive.
            InvalidEnvError: If an env has a `Tuple` observation space, which Tianshou cannot batch.
            EnvBusyError: If a step is under way.
            WorkerTimeoutError: If an env is still at a call that took too long.
            HandedOverError: If another adapter has this object.
        """
        from parallelenv.adapters.tianshou import TianshouVectorEnv

        return TianshouVectorEnv(cast("ParallelEnv", self), wait_num, timeout)

    # ---------------------------------------------------------------- for adapters

    @exclusive
    def _hand_over(
        self,
        contract: str,
        policy: Policy,
        observation_space: gymnasium.Space[Any] | None = None,
        *,
        reward_dtype: np.dtype[Any] | None = None,
        always_copies: bool = False,
        broadcasts: bool = False,
        waits_by: str = "step_wait()",
    ) -> None:
        """Follow the contract of an adapter from now on. A step goes to the envs also before their first reset.

        Args:
            contract: The call that asked for it.
            policy: What happens when an episode ends.
            observation_space: What states are batched in; ``None``: as before.
            reward_dtype: What rewards have to be numbers of; ``None``: they may be anything.
            always_copies: Whether states are copied whatever ``copy`` was.
            broadcasts: As in `Layout`.
            waits_by: What waits on for a step that was interrupted, or is late.
        """
        if self._contract == contract:
            return
        if self._contract is not None:
            raise HandedOverError(
                f"{contract} was called, but this ParallelEnv was handed over by {self._contract} and follows its "
                "rules. Make another ParallelEnv from the same list of env fns."
            )
        terms: dict[str, Any] = {"always_copies": always_copies, "reward_dtype": reward_dtype}
        stepper = self._stepper.under(policy, **terms)
        old = self._pool.layout
        changes = {
            "observation_space": old.observation_space if observation_space is None else observation_space,
            "keeps_ended": policy.autoreset,
            "keeps_types": policy.autoreset,
            "broadcasts": broadcasts,
        }
        if any(getattr(old, name) is not value for name, value in changes.items()):
            self._pool.rearrange(old.changed(**changes))
            stepper = self._stepper.under(policy, **terms)
        vars(self).pop("observation_space", None)  # it is cached
        stepper.episodes.share_score(self._stepper.episodes.score)
        stepper.episodes.begin_unknown()
        self._roller = self._roller.under(policy, stepper)
        self._stepper = stepper
        self._pool.waits_by = waits_by
        self._contract = self._asynchronous = contract

    @exclusive
    def _step(self, action: Any) -> StepResult:
        """Step all envs, paused ones too: which is refused."""
        return self._stepper.step(action, self._everyone, "item")  # type: ignore[return-value]

    @exclusive
    def _step_async(self, action: Any) -> None:
        """Begin a step of all envs."""
        self._stepper.begin(action, self._everyone)

    @exclusive
    def _step_wait(self, timeout: float | None) -> StepResult:
        """Return what has come of a step of all envs that was begun, or whose call was interrupted."""
        limit = arguments.check_timeout(timeout)
        return self._stepper.finish(self._everyone, limit, "item")  # type: ignore[return-value]

    @exclusive
    def _reset_async(self, env_ids: Sequence[int], seed: Any, options: Any) -> Resetting:
        """Begin to begin episodes. Seeds and options as in `ParallelEnv.reset`."""
        return self._stepper.begin_reset(env_ids, self._beginnings(env_ids, seed, options))

    @exclusive
    def _reset_wait(self, resetting: Resetting, timeout: float | None) -> Any:
        """Return the first states of episodes."""
        return self._end_reset(resetting, arguments.check_timeout(timeout))

    @exclusive
    def _reset_each(self, env_ids: Sequence[int], seed: Any, options: Any) -> list[Any]:
        """Begin episodes and return the first states, one per env."""
        resetting = self._stepper.begin_reset(env_ids, self._beginnings(env_ids, seed, options))
        return self._end_reset(resetting, None, "batch")  # type: ignore[no-any-return]

    @property
    def _under_way(self) -> list[int]:
        """Ids of envs with a step whose result was not delivered; none once this is closed."""
        return [] if self._is_closed else self._stepper.under_way

    @exclusive
    def _latest_states(self) -> Any:
        """Return the latest states of all envs, batched."""
        return self._stepper.latest_states()

    @exclusive
    def _refuse_fresh(self, env_ids: Sequence[int]) -> None:
        """Refuse envs that have no episode."""
        self._stepper.episodes.refuse_fresh(env_ids)

    @exclusive
    def _refuse_unknown(self, env_ids: Sequence[int]) -> None:
        """Refuse envs whose latest states are not known."""
        self._stepper.episodes.refuse_fresh(env_ids)
        self._stepper.episodes.refuse_unknown(env_ids)

    @property
    def _copies(self) -> bool:
        """Whether states that are returned are copies."""
        return self._stepper.copies

    def _envs(self, name: str, way: str) -> tuple[Any, ...]:
        """Return the envs themselves, in env id order.

        Args:
            name: What the user calls them, for messages.
            way: What reaches them wherever they are.

        Raises:
            AbsentAttributeError: If they do not live in this process, or not any more.
        """
        if self._is_closed:
            raise AbsentAttributeError(f"{name} is absent: the ParallelEnv was closed, and its envs with it.")
        envs = self._pool.envs_here()
        if envs is None:
            raise AbsentAttributeError(f"{name} is absent: these envs live in other processes. Use {way}.")
        return envs

    @exclusive
    def _call_async(self, operation: str, argument: Any, common: Any, id: Any = None) -> Request:
        """Ask envs, without ``id`` all of them, for an operation of the host with the same argument for each."""
        env_ids = self._everyone if id is None else parse_ids(id, self._num_envs)
        return self._pool.post(operation, env_ids, [argument] * len(env_ids), common)

    @exclusive
    def _call_wait(self, request: Request, timeout: float | None) -> list[Any]:
        """Return what they answer, in the order asked."""
        limit = arguments.check_timeout(timeout)
        self._pool.wait(request, self._stepper.timeout if limit is None else limit)
        request.raise_failures()
        return [request.values.get(env_id) for env_id in request.env_ids]

    @exclusive
    def _existing_attr(self, key: str, id: Any) -> list[Any]:
        """Return an attribute that all of the envs have.

        Raises:
            AbsentAttributeError: If one has not.
        """
        env_ids = parse_ids(id, self._num_envs)
        arguments.check_name("key", key)
        values = self._pool.ask("get", env_ids, None, key).values
        without = [env_id for env_id in env_ids if env_id not in values]
        if without:
            whom = f"{name_envs(without)} has" if len(without) == 1 else f"{name_envs(without)} have"
            hint = self._hint(key, without[0])
            raise AbsentAttributeError(f"{whom} no attribute {key!r}, nor has a wrapper around it.{hint}")
        return [values[env_id][0] for env_id in env_ids]

    # ---------------------------------------------------------------- for both

    def _beginnings(self, env_ids: Sequence[int], seed: Any, options: Any) -> Begins:
        """Return seed and options of each env that is to begin an episode."""
        seeds = arguments.spread_seeds(seed, env_ids, self._num_envs, whole=False)
        if seed is None:
            seeds = [self._seeds.get(env_id) for env_id in env_ids]
        return list(zip(seeds, arguments.spread_options(options, env_ids), strict=True))

    def _end_reset(self, resetting: Resetting, timeout: float | None, align: Align = "item") -> Any:
        """Return the first states of episodes; seeds that were set for these are used up."""
        states = self._stepper.finish_reset(resetting, timeout, align)
        for env_id in resetting.env_ids:
            self._seeds.pop(env_id, None)
        return states
