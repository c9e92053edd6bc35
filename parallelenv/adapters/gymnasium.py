"""A `ParallelEnv` as a `gymnasium.vector.VectorEnv`, and the entry point for `gymnasium.make_vec`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from parallelenv.adapters.common import (
    AdapterCalls,
    ByHand,
    EndedEpisode,
    NextStep,
    SameStep,
    declared_spaces,
    nothing_begun,
    raises_first,
    step_in_flight,
)
from parallelenv.contract import arguments
from parallelenv.contract.batch import Array, DType
from parallelenv.contract.env_specs import make_factories
from parallelenv.contract.error_text import show
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.protocol import MethodCall
from parallelenv.contract.spaces import Action, Env, Info, Space, State, describe_value, exact_dtype
from parallelenv.contract.tracebacks import reports_failures, short_tracebacks, warn_user
from parallelenv.engine.assemble import GatheredInfos
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.tickets import Ticket
from parallelenv.env import ParallelEnv
from parallelenv.errors import (
    ArgumentError,
    InvalidEnvError,
    PendingCallError,
    ResetNeededError,
    WorkerTimeoutError,
)
from parallelenv.registry import ParaMode
from parallelenv.results import StepResult

GymnasiumStep = tuple[State, Array, Array, Array, Info]
ObservationMode = Literal["same", "different"] | tuple[Space, Space]

_POLICIES: dict[AutoresetMode, type[DonePolicy]] = {
    AutoresetMode.NEXT_STEP: NextStep,
    AutoresetMode.SAME_STEP: SameStep,
    AutoresetMode.DISABLED: ByHand,
}


class _PendingCall(NamedTuple):
    """A call that an ``..._async`` method has started; ``ticket`` is ``None`` for a step."""

    name: str
    ticket: Ticket | None


@raises_first
class GymnasiumVectorEnv(VectorEnv[State, Action, Array]):
    """A Gymnasium vector env, returned by `ParallelEnv.to_gymnasium`.

    It behaves like Gymnasium's own vector envs, but without their bugs. In every autoreset mode, a step takes one round
    trip to the workers. After Ctrl-C or a timeout, `step_wait` returns the result of the step in flight, and `reset`
    drops that step. The attribute ``parallel_env`` is the `ParallelEnv` that runs the envs.
    """

    def __init__(
        self, env: ParallelEnv, autoreset_mode: str | AutoresetMode, observation_mode: ObservationMode = "same"
    ) -> None:
        words = tuple(known.value for known in AutoresetMode)
        if not isinstance(autoreset_mode, AutoresetMode) and autoreset_mode not in words:
            raise ArgumentError(f"autoreset_mode={autoreset_mode!r} is not known; expected one of {words}.")
        mode = AutoresetMode(autoreset_mode)
        self.num_envs = env.num_envs
        self.parallel_env = env
        batched, single = _observation_spaces(env, observation_mode)
        action_spaces = declared_spaces("action_space", env)
        shown = repr(observation_mode) if isinstance(observation_mode, str) else "..."
        adapter = f"to_gymnasium({mode.value!r}, observation_mode={shown})"
        self._calls = AdapterCalls(
            env, adapter, _POLICIES[mode](), single, reward_dtype=np.dtype(np.float64), align=GatheredInfos
        )
        self.observation_space, self.single_observation_space = copy.deepcopy((batched, single))
        self.single_action_space = copy.deepcopy(action_spaces[0])
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        facts = env.engine.pool.facts[0]
        self.metadata = {**facts.metadata, "autoreset_mode": mode}
        self.render_mode = facts.render_mode
        self.autoreset_mode = mode
        self.observation_mode = observation_mode
        self._refuses_ended = mode is AutoresetMode.DISABLED
        self._lends = not env.engine.copies
        self._begun: _PendingCall | None = None
        self._is_awaited = False  # True if only the matching ..._wait may be called next

    # ---------------------------------------------------------------- episodes

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Info | None = None
    ) -> tuple[State, Info]:
        """Start new episodes. Return the observations of all envs, and the infos of the envs that were reset.

        The observation of an env that was not reset is its latest observation.

        Args:
            seed: Int ``s`` gives env i the seed ``s + i``. A list has one seed per env.
            options: One dict, passed to the ``reset`` of every env that is reset. The key ``"reset_mask"`` is not
                passed on; its value is a mask ``(num_envs,)`` bool of the envs to reset. By default, all envs are
                reset. The dict is not changed.

        Raises:
            ArgumentError: If seeds, options or mask are invalid; nothing was reset.
            PendingCallError: If the ``..._wait`` for an earlier ``..._async`` has not been called yet, or if the mask
                leaves out an env whose step was interrupted or timed out; nothing was reset.
            ResetNeededError: If the mask leaves out an env that has been neither reset nor stepped yet, or that lost
                its episode because its worker died; nothing was reset.
            BaseException: Any exception raised by an env.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(self, seed: int | Sequence[int | None] | None = None, options: Info | None = None) -> None:
        """Start a `reset`; `reset_wait` returns the result. See `reset` for the arguments and errors."""
        self._refuse_awaited("reset")
        if options is not None and not isinstance(options, dict):
            raise ArgumentError(f"options={show(options)} is not a dict. Give a dict for each env's reset.")
        engine = self.parallel_env.engine
        chosen = list(engine.env_ids)
        seeds = None if seed is None else arguments.spread_seeds(seed, chosen, whole=True)
        if options is not None and "reset_mask" in options:
            mask = options["reset_mask"]
            expected = f"an array of shape ({self.num_envs},) and dtype bool with at least one True"
            if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
                raise ArgumentError(f"options['reset_mask']={show(mask)} is not an array of bools. Give {expected}.")
            if mask.shape != (self.num_envs,) or not mask.any():
                fault = "names no envs" if mask.shape == (self.num_envs,) else f"is of shape {mask.shape}"
                raise ArgumentError(f"options['reset_mask']={show(mask)} {fault}. Give {expected}.")
            chosen = np.flatnonzero(mask).tolist()
            options = {key: value for key, value in options.items() if key != "reset_mask"}
            others = np.flatnonzero(~mask).tolist()
            self._calls.refuse_unknown_states(others)
            if not set(engine.in_flight).isdisjoint(others):
                raise step_in_flight()
        picked = None if seeds is None else [seeds[env_id] for env_id in chosen]
        ids = engine.env_ids if len(chosen) == self.num_envs else tuple(chosen)
        self._begun = _PendingCall("reset", self._calls.reset_async(ids, picked, options))
        self._is_awaited = True

    def reset_wait(self, timeout: float | None = None) -> tuple[State, Info]:
        """Wait for a started `reset`; return its result. For ``timeout`` and the errors raised, see `step_wait`."""
        env_ids, observations = self._finish("reset", timeout, self._calls.reset_wait)
        if len(env_ids) < self.num_envs:
            observations = self.parallel_env.engine.latest_states()
        by_env = self.parallel_env.reset_infos
        infos = gather_infos(((env_id, by_env[env_id]) for env_id in env_ids), self.num_envs)
        return _writeable(observations) if self._lends else observations, infos

    def step(self, actions: object) -> GymnasiumStep:
        """Step all envs; the autoreset mode decides when envs are reset after the end of their episodes.

        Actions are a batch like the one that ``action_space.sample()`` returns, or a sequence with one action per env.

        Returns:
            Observations, rewards ``(num_envs,)`` float64, terminations and truncations ``(num_envs,)`` bool, and infos:
            a dict of arrays with one row per env.

        Raises:
            ActionError: If the actions are invalid. No env has been stepped.
            PendingCallError: If the ``..._wait`` for an earlier ``..._async`` has not been called yet, or if a step was
                interrupted or timed out, and its result has not been received yet. No env has been stepped.
            EnvBusyError: If an env is paused (see `ParallelEnv.pause`). No env has been stepped.
            ResetNeededError: If an env's episode has ended and the mode is ``"Disabled"``, or if an env lost its
                episode because its worker died. No env has been stepped.
            WorkerTimeoutError: If the step takes longer than the ``timeout`` of the `ParallelEnv`; call `step_wait` to
                go on waiting.
            EnvContractError: If a reward is not a number.
            BaseException: Any exception raised by an env. ``error.partial`` is the return value for all other envs;
                ``error.partial.env_ids`` has the ids of those envs.
        """
        self._check_step()
        return self._calls.converted(self._gathered, self._calls.step, actions)

    def step_async(self, actions: object) -> None:
        """Start a step; `step_wait` returns the result. See `step` for the arguments and errors."""
        self._check_step()
        self._calls.converted(self._gathered, self._calls.step_async, actions)
        self._begun, self._is_awaited = _PendingCall("step", None), True

    def step_wait(self, timeout: float | None = None) -> GymnasiumStep:
        """Wait for a step that `step_async` started, or that was interrupted or timed out; return what `step` returns.

        ``timeout`` is in seconds; ``None`` means the ``timeout`` of the `ParallelEnv`.

        Raises:
            NothingInFlightError: If there is no such step.
            WorkerTimeoutError: If the step takes longer than ``timeout``; `step_wait` can be called again.
            EnvContractError, BaseException: See `step`.
        """
        if self._is_awaited:
            self._take("step", timeout)
        return self._calls.converted(self._gathered, self._calls.step_wait, timeout)

    def _gathered(self, result: StepResult) -> GymnasiumStep:
        """Convert the result of stepping all or some envs to the form that Gymnasium's vector envs return."""
        states, rewards, _, infos = result
        if self._lends:
            states = _writeable(states)
        gathered: Info = {}
        if type(infos) is GatheredInfos:
            gathered = {**infos}
        elif any(infos):
            shown: list[Info] = []
            for info in infos:
                ending: EndedEpisode | None = info.pop(EndedEpisode, None)
                if ending is None:
                    shown.append(info)
                else:  # as in Gymnasium: the info of the reset, with the info of the ended episode in ``final_info``
                    final = {} if ending.state is None else {"final_obs": ending.state}
                    shown.append({**final, "final_info": info, **ending.reset_info})
            gathered = gather_infos(enumerate(shown), len(infos))
        return states, rewards, result.terminated, result.truncated, gathered

    def _check_step(self) -> None:
        self._refuse_awaited("step")
        if self._refuses_ended and self.parallel_env.has_done() and not self.parallel_env.closed:
            ended = np.flatnonzero(self.parallel_env.done).tolist()
            raise ResetNeededError(
                f"envs {ended} have ended, and autoreset_mode is 'Disabled'. Call reset(options={{'reset_mask': "
                "terminations | truncations}) first, or choose another autoreset_mode."
            )

    # ---------------------------------------------------------------- attributes and methods

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Return an attribute of each env; if the attribute is callable, return the result of calling it.

        ``args`` and ``kwargs`` are the arguments of that call.

        Raises:
            ArgumentError: If the name is invalid, or is ``reset``, ``step`` or ``close``.
            AttributeError: If an env does not have the attribute.
            PendingCallError: If the ``..._wait`` for an earlier ``..._async`` has not been called yet.
            BaseException: Any exception raised by a method.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Start a `call`; `call_wait` returns the result. See `call` for the arguments and errors."""
        self._refuse_awaited("call")
        arguments.check_name("name", name)
        if name in ("reset", "step", "close"):
            raise ArgumentError(f"call({name!r}) would bypass this vector env. Use its own {name}().")
        call = MethodCall(name, args, kwargs, or_attribute=True)
        self._begun = _PendingCall("call", self._calls.call_async(call))
        self._is_awaited = True

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for a started `call`; return its result. For ``timeout`` and the errors raised, see `step_wait`."""
        return tuple(self._finish("call", timeout, self._calls.call_wait)[1])

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each env or, if the attribute is a method, its result. See `call` for errors."""
        return self.call(name)

    def set_attr(self, name: str, values: object) -> None:
        """Set an attribute of each env, on the outermost wrapper that has it, or else on the innermost env.

        A list or tuple must have one value per env; any other value is set on all envs.

        Raises:
            ArgumentError: If the number of values differs from the number of envs.
            PendingCallError: If the ``..._wait`` for an earlier ``..._async`` has not been called yet.
        """
        self._refuse_awaited("set_attr")
        each = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        self.parallel_env.set_env_attr(name, values=each, id=slice(None))

    def render(self) -> tuple[Any, ...]:
        """Return a tuple with the result of each env's ``render()``."""
        return self.call("render")

    @property
    @short_tracebacks
    def envs(self) -> tuple[Env, ...]:
        """The env objects; raises an `AbsentAttributeError` if the envs live in other processes."""
        return self._calls.envs("envs", "get_attr(), set_attr() or call()")

    @property  # type: ignore[misc]
    def np_random(self) -> Any:
        """Copies of the envs' random generators, as a tuple."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> Any:
        """The envs' seeds, as a tuple."""
        return self.get_attr("np_random_seed")

    # ---------------------------------------------------------------- close

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """True if this vector env or its `ParallelEnv` is closed."""
        return self.parallel_env.closed

    def close(  # type: ignore[override]
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """Close the `ParallelEnv`. A call in flight is dropped with a warning. Exceptions of envs are not raised.

        Workers have ``timeout`` seconds (by default 3) to close their envs before the workers are terminated. With
        ``terminate``, the workers are terminated at once. An invalid ``timeout`` raises an `ArgumentError`, and nothing
        is closed.
        """
        begun = self._begun if self._is_awaited and not self.closed else None
        self.parallel_env.close(0.0 if terminate else timeout)
        if begun is not None:
            name = begun.name
            warn_user(f"close() was called while {name}_async() waits for {name}_wait(): its result is lost.")

    def __del__(self) -> None:
        """Leave the `ParallelEnv` open, because other code may use it.

        In Gymnasium before 1.3, the ``__del__`` of the base class closes the vector env.
        """

    # ---------------------------------------------------------------- calls in flight

    def _refuse_awaited(self, call: str) -> None:
        if self._is_awaited and self._begun is not None and not self.closed:
            name = self._begun.name
            raise PendingCallError(f"{call}() was called while {name}_async() waits for {name}_wait().", name)

    def _take(self, name: str, timeout: object) -> _PendingCall:
        """Return the started call; ``name`` is ``"reset"``, ``"step"`` or ``"call"``.

        Once this method has returned, other calls are allowed, even if the caller's wait for the result is interrupted.

        If ``timeout`` is invalid, an error is raised, and other calls remain forbidden.
        """
        if self.closed:
            raise self.parallel_env.engine.guard.refusal(f"{name}_wait")
        if self._begun is None or self._begun.name != name:
            raise nothing_begun(name)
        arguments.check_timeout(timeout)
        self._is_awaited = False
        return self._begun

    def _finish(self, name: str, timeout: float | None, wait: Callable[..., Any]) -> tuple[Sequence[int], Any]:
        """Wait for a started call; return its env ids and result. After a timeout, this method can be called again."""
        begun = self._take(name, timeout)
        try:
            self._begun = None
            return begun.ticket.env_ids, wait(begun.ticket, timeout)  # type: ignore[union-attr]
        except BaseException as error:
            is_over = not isinstance(error, WorkerTimeoutError) and signal_behind(error) is None
            if is_over or reports_failures(error):
                raise
            self._begun = begun
            if isinstance(error, WorkerTimeoutError) and begun.ticket.pending:  # type: ignore[union-attr]
                pool = self.parallel_env.engine.pool
                limit = pool.timeout if timeout is None else timeout
                raise pool.late(error.env_ids, limit, f"{name}_wait") from None
            raise


def _observation_spaces(env: ParallelEnv, mode: ObservationMode) -> tuple[Space, Space]:
    """Return the batched and the single observation space, after checking that the envs' spaces fit them."""
    if mode == "same":
        advice = "If only their bounds differ, give observation_mode='different'."
        spaces = declared_spaces("observation_space", env, advice)
        return batch_space(spaces[0], len(spaces)), spaces[0]
    spaces = declared_spaces("observation_space", env, None)
    is_pair = isinstance(mode, tuple) and len(mode) == 2 and all(isinstance(space, gymnasium.Space) for space in mode)
    if mode != "different" and not is_pair:
        raise ArgumentError(
            f"observation_mode={mode!r} is not known; expected 'same', 'different', or a tuple of the batched and the "
            "single observation space."
        )
    single = mode[1] if isinstance(mode, tuple) else spaces[0]
    for env_id, space in enumerate(spaces):
        if not is_space_dtype_shape_equiv(space, single):
            raise InvalidEnvError(
                f"The observation_space of env {env_id} is {space}, with other shapes or dtypes than {single}. No "
                "vector env can batch them; step the ParallelEnv itself."
            )
    if not isinstance(mode, tuple):
        return batch_differing_spaces(spaces), single
    expected = batch_space(single, len(spaces))
    if not isinstance(mode[0], type(expected)) or not is_space_dtype_shape_equiv(mode[0], expected):
        raise InvalidEnvError(
            f"The batched observation space given is {mode[0]}, but observations of {len(spaces)} envs in {single} "
            f"have the shapes and dtypes of {expected}. Give a space with these."
        )
    return mode


def _writeable(states: State) -> State:
    if isinstance(states, dict):
        return {key: _writeable(part) for key, part in states.items()}
    if isinstance(states, tuple):
        return tuple(map(_writeable, states))
    if isinstance(states, np.ndarray):
        states.flags.writeable = True
    return states


def gather_infos(infos: Iterable[tuple[int, Mapping[str, object]]], num_envs: int) -> Info:
    """Return one dict of arrays for all envs, given pairs of an env id and an info. Envs may be left out.

    This function replaces `gymnasium.vector.VectorEnv._add_info`, which loses values by converting all of them to the
    type of the first one: 1.5 after 1 becomes 1. That method also raises errors for arrays of different shapes and for
    ``None`` after a number.

    Returns:
        For each key ``k``, an array with one row per env; the rows of envs without the key are zero or ``None``. The
        key ``_k`` has an array ``(num_envs,)`` bool, ``True`` for envs with the key ``k``; it replaces any value that
        envs themselves return under ``_k``. Numbers become an array ``(num_envs,)``, and arrays of one shape become an
        array ``(num_envs, *shape)``, whose dtype represents all values exactly. Dicts are gathered recursively. All
        other values, and mixtures of these kinds, become an object array ``(num_envs,)``.
    """
    columns: dict[str, dict[int, object]] = {}
    for row, info in infos:
        for key, value in info.items():
            columns.setdefault(key, {})[row] = value
    gathered = {key: _column(key, values, num_envs) for key, values in columns.items()}
    for key, values in columns.items():
        gathered[f"_{key}"] = mask = np.zeros(num_envs, dtype=bool)
        mask[list(values)] = True
    return gathered


def _column(key: object, by_row: Mapping[int, Any], num_envs: int) -> Info | Array:
    values = list(by_row.values())
    if key != "final_obs":  # values that Gymnasium never batches
        if all(isinstance(value, dict) for value in values):
            return gather_infos(by_row.items(), num_envs)
        dtype = _common_dtype(values)
        if dtype is not None:
            column: Array = np.zeros((num_envs, *np.shape(values[0])), dtype=dtype)
            column[list(by_row)] = values
            return column
    objects: Array = np.full(num_envs, None, dtype=object)
    for row, value in by_row.items():
        objects[row] = value  # one by one: numpy would split lists
    return objects


def _common_dtype(values: list[object]) -> DType | None:
    """Return a dtype that represents all values exactly; ``None`` if the values need an object array."""
    are_arrays = all(isinstance(value, np.ndarray) for value in values)
    are_numbers = all(type(value) in (int, float) or isinstance(value, np.number) for value in values)
    if not (are_arrays or are_numbers or all(type(value) is bool for value in values)):
        return None
    arrays = [np.asarray(value) for value in values]
    # A plain array would lose the mask of a masked array.
    if len({array.shape for array in arrays}) > 1 or any(isinstance(value, np.ma.MaskedArray) for value in values):
        return None
    # Unlike `exact_dtype`, do not mix bools with numbers, or dates of different units.
    kinds = {"number" if array.dtype.kind in "iufc" else array.dtype.kind for array in arrays}
    is_one_kind = len({array.dtype for array in arrays}) == 1 or kinds in ({"number"}, {"U"}, {"S"})
    return exact_dtype(arrays) if is_one_kind else None


def vector_entry_point(
    num_envs: int = 1,
    *,
    env: str | EnvSpec | Callable[..., Env],
    para_mode: ParaMode = "subproc",
    autoreset_mode: str | AutoresetMode = "NextStep",
    parallel_kwargs: dict[str, Any] | None = None,
    max_episode_steps: int | None = None,
    **make_kwargs: object,
) -> GymnasiumVectorEnv:
    """Return a vector env for `gymnasium.make_vec`.

    To use this function, register an id with this function as its vector entry point:
    ``gymnasium.register("FastPole-v0", vector_entry_point="parallelenv:vector_entry_point",
    kwargs={"env": "CartPole-v1"})``. Then call ``gymnasium.make_vec("FastPole-v0", num_envs=8)``.

    Args:
        num_envs: Number of envs.
        env: A registered id, an `EnvSpec`, or a callable that makes an env.
        para_mode: See `ParallelEnv`.
        autoreset_mode: See `ParallelEnv.to_gymnasium`.
        parallel_kwargs: Further arguments of `ParallelEnv`, by name.
        max_episode_steps: Number of steps after which an episode is truncated.
        **make_kwargs: Passed to ``gymnasium.make(env, ...)``, or to the callable.

    Raises:
        ArgumentError: If an argument has an invalid value.
        InvalidEnvError: If the id is not registered, or if ``env`` is not an id, an `EnvSpec` or a callable.
    """
    arguments.check_positive("num_envs", num_envs)
    factory = make_factories([env])[0]
    if factory.is_live:
        raise InvalidEnvError(
            f"env is {describe_value(env)}, which is itself an env, but {num_envs} must be made. Give a registered id, "
            "an EnvSpec, or a callable that makes an env."
        )
    if not isinstance(parallel_kwargs, dict | None):
        raise ArgumentError(
            f"parallel_kwargs={show(parallel_kwargs)} is not a dict. Give arguments of ParallelEnv by name."
        )
    given = parallel_kwargs or {}
    ours = [name for name in ("envs", "para_mode") if name in given]
    if ours:
        raise ArgumentError(f"parallel_kwargs contains {ours}. Give these as env= and para_mode= instead.")
    made = functools.partial(_make_env, factory.source, max_episode_steps, make_kwargs)
    pool = ParallelEnv([made] * num_envs, para_mode, **given)
    try:
        return pool.to_gymnasium(autoreset_mode)
    except BaseException:
        pool.close()
        raise


def _make_env(source: Any, max_episode_steps: int | None, make_kwargs: dict[str, object]) -> Env:
    if isinstance(source, EnvSpec):
        return gymnasium.make(source, max_episode_steps=max_episode_steps, **make_kwargs)  # type: ignore[arg-type]
    env = source(**make_kwargs)
    return env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps)
