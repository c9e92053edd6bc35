"""Code that adapters share: engine calls, and the forms of indices, spaces and errors that other libraries use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.arguments import Ids, Options, Seeds, parse_ids
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import GIVE_SPACES, name_envs
from parallelenv.contract.failures import add_note, one_line, put
from parallelenv.contract.interrupts import DeferSignals
from parallelenv.contract.protocol import Lookup, MethodCall
from parallelenv.contract.spaces import Action, Info, Space, State
from parallelenv.contract.tracebacks import reports_failures, short_tracebacks
from parallelenv.engine.assemble import Form
from parallelenv.engine.done_policies import DonePolicy, Restart
from parallelenv.engine.thread_guard import single_threaded, single_threaded_in
from parallelenv.engine.tickets import Ticket
from parallelenv.errors import (
    AbsentAttributeError,
    EnvBusyError,
    InvalidEnvError,
    NothingInFlightError,
    PendingCallError,
    UsageError,
)
from parallelenv.results import StepBatch, StepResult

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

_Class = TypeVar("_Class", bound=type)
_Step = TypeVar("_Step")


def positions(argument: Any, num_envs: int, name: str) -> list[int]:
    """Convert positions in the list of all envs to env ids, in the same order; ``None`` means all envs.

    ``argument`` may have any form that `parse_ids` accepts, or be a set. Positions may be negative (counted from the
    end) and may occur more than once. ``name`` is the name of the argument, for messages.
    """
    if argument is None:
        return list(range(num_envs))
    given = argument.tolist() if isinstance(argument, np.ndarray | np.generic) else argument
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        given = list(given)
    listed = given if isinstance(given, list) else [given]
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in listed):
        return list(parse_ids(given, num_envs, name))
    found = [int(one) + num_envs if -num_envs <= one < 0 else int(one) for one in listed]
    parse_ids(list(dict.fromkeys(found)), num_envs, name)
    return found


def declared_spaces(name: str, env: ParallelEnv, if_different: str | None = "Make them equal.") -> list[Space]:
    """Return the space of each env. ``name`` is ``"observation_space"`` or ``"action_space"``.

    Raises an `InvalidEnvError` if an env declares no space, or if the spaces differ; ``if_different`` is the end of the
    message about different spaces. If ``if_different`` is ``None``, the spaces may differ.
    """
    spaces: list[Space] = [getattr(facts, name) for facts in env.engine.pool.facts]
    for env_id, space in enumerate(spaces):
        if space is None:
            raise InvalidEnvError(
                f"env {env_id} declares no {name}, which a vector env needs. Set it on the env, or {GIVE_SPACES}."
            )
        if if_different is not None and space != spaces[0]:
            raise InvalidEnvError(
                f"The {name} of env {env_id} is {space}, but that of env 0 is {spaces[0]}. {if_different}"
            )
    return spaces


class EndedEpisode(NamedTuple):
    """The end of an episode, which a reset within the same step would otherwise hide."""

    state: State  #: Last state of the episode that ended; ``None`` if unknown, because the env was restarted.
    reset_info: Info  #: The info of the reset that followed.


class SameStep(Restart):
    """The done policy ``"restart"`` for adapters.

    The info of a step that ends an episode contains an `EndedEpisode`; its key is the class itself.
    """

    name = "this adapter"
    lets_rest = False
    plain_info: ClassVar[Info] = {}

    def describe_end(  # noqa: D102 (see DonePolicy)
        self, info: dict[Any, Any], ended_state: State, reset_info: Info, is_exhausted: bool
    ) -> None:
        info[EndedEpisode] = EndedEpisode(ended_state, reset_info)
        if is_exhausted:
            info.update(reset_info)


class NextStep(DonePolicy):
    """A done policy for adapters: an env whose episode has ended starts its next episode in the next step."""

    name = "this adapter"
    after_end = "an ended env starts its next episode in the next step"
    resets_next = True
    lets_rest = False


class ByHand(DonePolicy):
    """The done policy ``"continue"`` for adapters whose users reset the envs themselves."""

    name = "this adapter"
    lets_rest = False


class AdapterCalls:
    """The calls that an adapter makes on the engine of a `ParallelEnv`.

    Once this object has been made, the engine follows the adapter's rules. An adapter keeps no episode state itself, so
    attributes, rendering, `ParallelEnv.restart` and `ParallelEnv.save_state` still work on the `ParallelEnv`. Closing
    either the adapter or the `ParallelEnv` closes both. Paused envs are resumed. Until its first reset, each env is
    treated as if an episode were in progress, so it may be stepped.

    Args:
        env: The `ParallelEnv`.
        adapter: The call that made the adapter, such as ``"to_sb3()"``.
        policy: The done policy of the adapter.
        observation_space: Space according to which states are batched; ``None`` keeps the current space.
        reward_dtype: A numeric dtype that all rewards must fit; ``None``: rewards may be of any type.
        always_copies: Whether states are copied even if the `ParallelEnv` was made with ``copy=False``.
        broadcasts: See `Layout`.
        waits_by: Name of the call that gets the result of an interrupted or late step, for messages.
        align: Form of the results of `step`. See `Form`.

    Raises:
        UsageError: If another adapter already uses the `ParallelEnv`.
        EnvBusyError: If a step is in flight.
        WorkerTimeoutError: If an env is still in a call that timed out.
    """

    def __init__(
        self,
        env: ParallelEnv,
        adapter: str,
        policy: DonePolicy,
        observation_space: Space | None = None,
        *,
        reward_dtype: np.dtype[Any] | None = None,
        always_copies: bool = False,
        broadcasts: bool = False,
        waits_by: str = "step_wait()",
        align: Form = "item",
    ) -> None:
        self._align = align
        self._engine, self._guard = env.engine, env.engine.guard
        rules = {"reward_dtype": reward_dtype, "copies": env.engine.copies or always_copies}
        layout: dict[str, Any] = {
            "keeps_ended": policy.autoreset,
            "keeps_types": policy.autoreset,
            "broadcasts": broadcasts,
        }
        if observation_space is not None:
            layout["observation_space"] = observation_space
        self._apply(adapter, policy, waits_by, rules, layout)

    @single_threaded_in("to_gymnasium(), to_sb3() or to_tianshou")
    def _apply(
        self, adapter: str, policy: DonePolicy, waits_by: str, rules: dict[str, Any], layout: dict[str, Any]
    ) -> None:
        engine = self._engine
        if engine.adapter == adapter:
            return
        if engine.adapter is not None:
            raise UsageError(
                f"{adapter} was called, but this ParallelEnv was handed over by {engine.adapter} and follows its "
                "rules. Make another ParallelEnv from the same list of env fns."
            )
        engine.refuse_busy(engine.env_ids)
        engine.pool.groups.refuse_policy(policy)
        old, stats = engine.pool.layout, engine.table.stats
        needs_batch = any(getattr(old, name) is not value for name, value in layout.items())
        if needs_batch:
            engine.pool.await_idle()
        with DeferSignals():  # all of this or nothing: the batch, the table and the done policy belong together
            if needs_batch:
                engine.pool.attach(replace(old, **layout))
            if engine.recovery is not None:
                engine.recovery.forget(engine.env_ids)
            engine.use_done_policy(policy, as_given=True, **rules)
            engine.table.share_stats(stats)
            engine.table.record_unknown_states()
            engine.pool.waits_by = waits_by
            engine.adapter = adapter

    # ---------------------------------------------------------------- steps and resets

    def step(self, action: Action) -> StepResult:
        """Step all envs; raise `EnvBusyError` if an env is paused (see `ParallelEnv.pause`)."""
        return self._engine.step(action, self._engine.env_ids, self._align)  # type: ignore[return-value]

    @single_threaded_in("step_async")
    def step_async(self, action: Action) -> None:
        """Start a step of all envs."""
        self._engine.submit_step(action, self._engine.env_ids)

    @single_threaded
    def step_wait(self, timeout: float | None) -> StepResult:
        """Wait for the step that `step_async` started, or that an interrupt left in flight, and return its result."""
        limit = arguments.check_timeout(timeout)
        return self._engine.step_wait(self._engine.env_ids, limit, "item")  # type: ignore[return-value]

    def converted(
        self, convert: Callable[[StepResult], _Step], call: Callable[[Any], StepResult | None], argument: object
    ) -> _Step:
        """Make a call of this class; return its converted result, or ``None`` if the call only starts a step.

        Raises:
            PendingCallError, NothingInFlightError: If ``..._async()`` and ``..._wait()`` are called in the wrong order.
            BaseException: Any other error of the call, with its ``partial`` converted.
        """
        try:
            result = call(argument)
        except BaseException as error:
            if isinstance(error, NothingInFlightError) and not reports_failures(error):
                raise nothing_begun("step") from None
            if isinstance(error, EnvBusyError) and self._engine.in_flight:  # otherwise, an env is paused
                raise step_in_flight() from None
            convert_partial(error, convert)
            raise
        return None if result is None else convert(result)  # type: ignore[return-value]

    @single_threaded
    def reset_async(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> Ticket:
        """Start resets and return the ticket for `reset_wait`. See `ParallelEnv.reset` for the arguments."""
        return self._engine.submit_reset(env_ids, self._engine.reset_arguments(env_ids, seed, options))

    @single_threaded
    def reset_wait(self, ticket: Ticket, timeout: float | None) -> State:
        """Wait for the resets that `reset_async` started and return the batched first states."""
        return self._engine.collect_reset(ticket, arguments.check_timeout(timeout))

    @single_threaded_in("reset")
    def reset_each(self, env_ids: Sequence[int], seed: Seeds, options: Options) -> list[State]:
        """Start new episodes and return a list with the first state of each env, in the order of ``env_ids``."""
        ticket = self._engine.submit_reset(env_ids, self._engine.reset_arguments(env_ids, seed, options))
        return self._engine.collect_reset(ticket, None, "batch")  # type: ignore[no-any-return]

    @single_threaded_in("reset")
    def refuse_unknown_states(self, env_ids: Sequence[int]) -> None:
        """Raise `ResetNeededError` if an env has no episode in progress, or if its latest state is not known."""
        self._engine.table.refuse_without_episode(env_ids)
        self._engine.table.refuse_unknown_states(env_ids)

    # ---------------------------------------------------------------- methods and attributes

    @single_threaded_in("call")
    def call_async(self, call: MethodCall, id: Ids = None) -> Ticket:
        """Send a method call to each env of ``id`` (by default, to all envs) and return the ticket for `call_wait`."""
        env_ids = self._engine.ids(id, with_paused=True)
        return self._engine.pool.submit("call", env_ids, [call] * len(env_ids))

    @single_threaded
    def call_wait(self, ticket: Ticket, timeout: float | None) -> list[Any]:
        """Wait for the calls started by `call_async`; return their results in the order of the ids given there."""
        limit = arguments.check_timeout(timeout)
        self._engine.pool.wait(ticket, self._engine.pool.timeout if limit is None else limit)
        return ticket.listed()

    @single_threaded_in("call")
    def look_up(self, lookup: Lookup, argument: Any, id: Ids = None) -> list[Any]:
        """Return the result of a look-up in each env of ``id`` (by default, in all envs). See `Lookup`."""
        env_ids = self._engine.ids(id, with_paused=True)
        return self._engine.pool.ask("get", env_ids, [argument] * len(env_ids), lookup).listed()

    @single_threaded_in("get_attr")
    def existing_attr(self, key: str, id: Ids) -> list[Any]:
        """Return the attribute ``key`` of each env of ``id``; raise `AbsentAttributeError` if an env lacks it."""
        env_ids = parse_ids(id, self._engine.num_envs)
        arguments.check_name("key", key)
        values = self._engine.attributes(key, env_ids)
        without = [env_id for env_id in env_ids if env_id not in values]
        if without:
            have = "has" if len(without) == 1 else "have"
            hint = self._engine.attribute_hint(key, without[0])
            raise AbsentAttributeError(
                f"{name_envs(without)} {have} no attribute {key!r}, nor has a wrapper around it.{hint}"
            )
        return [values[env_id] for env_id in env_ids]

    def envs(self, name: str, way: str) -> tuple[Any, ...]:
        """Return the env objects, in env id order.

        ``name``, the attribute that the user tried to read, and ``way``, the call to use instead, are for messages.

        Raises:
            AbsentAttributeError: If the envs do not live in this process, or have been closed.
        """
        if self._guard.is_closed:
            raise AbsentAttributeError(f"{name} is absent: the ParallelEnv was closed, and its envs with it.")
        envs = self._engine.pool.envs_here()
        if envs is None:
            raise AbsentAttributeError(f"{name} is absent: these envs live in other processes. Use {way}.")
        return envs


class PartialStep(tuple):  # type: ignore[type-arg]
    """The return value of an adapter's step, limited to the rows of the envs that did not fail.

    Attributes:
        env_ids: ``(k,)`` int64, the env of each row.
    """

    env_ids: Array


def step_in_flight() -> PendingCallError:
    """Return the error for a call that must wait for the result of a step."""
    return PendingCallError(
        "A step is in flight whose result was not received (started, interrupted, or late). Get it with step_wait(), "
        "or drop it with reset() of all envs.",
        "step",
    )


def nothing_begun(name: str) -> NothingInFlightError:
    """Return the error for a call of ``..._wait()`` without an earlier call of ``..._async()``."""
    return NothingInFlightError(f"{name}_wait() was called, but {name}_async() was not.", name)


def convert_partial(error: BaseException, convert: Callable[[Any], Any]) -> None:
    """If ``error.partial`` is the result of a step, convert it to the adapter's form with ``convert``."""
    partial = getattr(error, "partial", None)
    if isinstance(partial, StepResult | StepBatch):
        converted = PartialStep(convert(partial))
        converted.env_ids = partial.env_ids
        put(error, "partial", converted)


def raises_first(adapter: _Class) -> _Class:
    """Make an adapter class raise only the exception of the first env that failed, as the adapter's library does.

    The other envs that failed are listed in notes added to the exception.
    """

    def first_of(error: BaseException) -> BaseException:
        if not isinstance(error, BaseExceptionGroup) or not reports_failures(error):
            return error
        if error in vars(error)["failures"].values():  # an env itself raised the group
            return error
        first, *others = error.exceptions
        for other in others:
            add_note(first, f"Also: {one_line(other)} {' '.join(getattr(other, '__notes__', ()))}")
        for name in ("env_ids", "failures", "partial"):
            put(first, name, getattr(error, name))
        return first

    return short_tracebacks(adapter, first_of)
