"""What adapters share: indices and spaces in the form of other libraries, and errors as these libraries raise them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from parallelenv.contract.arguments import parse_ids
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import GIVE_SPACES
from parallelenv.contract.failures import add_note, one_line, put
from parallelenv.contract.spaces import Space
from parallelenv.contract.tracebacks import short_tracebacks
from parallelenv.errors import EnvBusyError, InvalidEnvError, NoPendingCallError, NothingInFlightError, PendingCallError
from parallelenv.results import StepBatch, StepResult

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

_Class = TypeVar("_Class", bound=type)
_Step = TypeVar("_Step")


def positions(argument: Any, num_envs: int, name: str) -> list[int]:
    """Return the env ids at these positions in the list of all envs, in order; ``None``: all.

    Besides the forms of `parse_ids`, positions may be negative (from the end), duplicates, or a set.
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
    """Return each env's ``observation_space`` or ``action_space``.

    ``if_different`` ends the message of the error if they differ; ``None``: they may.
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


class PartialStep(tuple):  # type: ignore[type-arg]
    """The return value of a step, with only the rows of envs that did not fail.

    Attributes:
        env_ids: ``(k,)`` int64, the envs of the rows, in order.
    """

    env_ids: Array


def convert_step(
    convert: Callable[[StepResult], _Step], call: Callable[[Any], StepResult | None], argument: object
) -> _Step:
    """Return the result of a call of the engine in the form of the adapter, ``None`` if it only begins a step.

    Raises:
        PendingCallError, NoPendingCallError: If ``..._async()`` and ``..._wait()`` are called in the wrong order.
        BaseException: Any other error of the call, with its ``partial`` converted.
    """
    try:
        result = call(argument)
    except EnvBusyError:
        raise PendingCallError(
            "A step is under way whose result was not received (begun, interrupted, or late). Get it with step_wait(), "
            "or drop it with reset().",
            "step",
        ) from None
    except NothingInFlightError:
        raise nothing_begun("step") from None
    except BaseException as error:
        convert_partial(error, convert)
        raise
    return None if result is None else convert(result)  # type: ignore[return-value]


def nothing_begun(name: str) -> NoPendingCallError:
    """Return the error for a wait without a call."""
    return NoPendingCallError(f"{name}_wait() was called, but {name}_async() was not.", name)


def convert_partial(error: BaseException, convert: Callable[[Any], Any]) -> None:
    """Convert ``error.partial``, if it is of a step, with ``convert``, the adapter's conversion of results."""
    partial = getattr(error, "partial", None)
    if isinstance(partial, StepResult | StepBatch):
        converted = PartialStep(convert(partial))
        converted.env_ids = partial.env_ids
        put(error, "partial", converted)


def raises_first(adapter: _Class) -> _Class:
    """Make an adapter raise the first env's exception if several failed, as its library does; others are noted."""

    def first_of(error: BaseException) -> BaseException:
        if not isinstance(error, BaseExceptionGroup) or not hasattr(error, "failures"):
            return error
        first, *others = error.exceptions
        for other in others:
            add_note(first, f"Also: {one_line(other)} {' '.join(getattr(other, '__notes__', ()))}")
        for name in ("env_ids", "failures", "partial"):
            put(first, name, getattr(error, name))
        return first

    return short_tracebacks(adapter, first_of)
