"""What went wrong in one env, on its way from the host to the user.

An exception keeps its type, its attributes and a traceback that shows the user's own source
line, whichever process it was raised in.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType, FunctionType, TracebackType
from typing import Any, NoReturn

import cloudpickle
import gymnasium.error
from tblib import Traceback as PortableTraceback

from parallelenv.errors import EnvError, ParallelEnvError, WorkerDiedError, WorkerTimeoutError
from parallelenv.texts import count, list_ids
from parallelenv.unpickling import loads

_SHOWN_FRAMES = 50
"""So many of the outermost and of the innermost frames of a traceback travel."""


class Failure:
    """An exception raised for one env.

    Args:
        exception: What was raised.
        env_id: The env that it concerns.
        operation: What the env was doing: ``"step"``, ``"reset"``, a method's name ... Empty if it is nothing that
            the env did: its worker died, or did not answer in time.
    """

    def __init__(self, exception: BaseException, env_id: int, operation: str) -> None:
        self.exception = exception
        self.env_id = env_id
        self.operation = operation
        self.pid = os.getpid()

    @property
    def is_of_worker(self) -> bool:
        """Whether it is a `WorkerDiedError` or `WorkerTimeoutError` of the env's own worker."""
        return not self.operation

    def __reduce__(self) -> tuple[Any, ...]:
        packed = _pack(self.exception)
        return _rebuild, (packed, self.env_id, self.operation, self.pid)


class RemoteTraceback(Exception):  # noqa: N818 (shown as the cause of an error, never raised)
    """The text of a traceback in a worker; the cause of errors whose own chain stayed there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raise_failures(failures: Sequence[Failure], partial: Any) -> None:
    """Raise what the failures stand for, if there are any.

    Args:
        failures: In env id order.
        partial: Result of the envs that did not fail; kept as ``error.partial``.

    Raises:
        BaseException: The only failure, or an exception group of several.
    """
    if not failures:
        return
    # One dead worker, one misspelt name or one reset that is missing fails several envs with the same error: it is
    # shown once.
    alike: dict[Any, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(_identity(failure), []).append(failure)
    errors = [noted(*group) for group in alike.values()]
    error = errors[0] if len(errors) == 1 else _grouped(failures, errors)
    put(error, "partial", partial)
    raise error


def agreed(error: BaseException) -> BaseException:
    """Return the first exception of a group if all in it say the same, and any other error as it is."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    first, *others = error.exceptions
    if any((type(other), _safe_str(other)) != (type(first), _safe_str(first)) for other in others):
        return error
    put(first, "__notes__", [*getattr(first, "__notes__", []), f"So did {count(len(others), 'more env')}."])
    put(first, "partial", getattr(error, "partial", None))
    return first


def raise_of_policy(failure: Failure, env_ids: Sequence[int], partial: Any) -> NoReturn:
    """Raise what the policy of a rollout raised beside these envs, with ``error.partial`` and a note."""
    notes = getattr(failure.exception, "__notes__", [])
    note = f"Raised by {failure.operation} beside envs {list_ids(env_ids)[1:-1]}, process {failure.pid}."
    put(failure.exception, "__notes__", [*notes, note])
    put(failure.exception, "partial", partial)
    raise failure.exception


def noted(*failures: Failure) -> BaseException:
    """Return the exception of failures that are alike, with a note that says where it came from."""
    first = failures[0]
    ids = tuple(failure.env_id for failure in failures)
    if first.is_of_worker and isinstance(first.exception, WorkerDiedError | WorkerTimeoutError):
        return first.exception.about(ids)
    who = f"env {ids[0]}" if len(ids) == 1 else f"envs {list_ids(ids)[1:-1]}"
    note = f"Raised by {who} in {first.operation}, process {first.pid}."
    notes = getattr(first.exception, "__notes__", [])
    if note not in notes:
        put(first.exception, "__notes__", [*notes, note])
    return first.exception


def put(exception: BaseException, name: str, value: Any) -> None:
    """Set an attribute, also of an exception whose class refuses, as a frozen dataclass does."""
    object.__setattr__(exception, name, value)


def _grouped(failures: Sequence[Failure], errors: Sequence[BaseException]) -> BaseException:
    ids = tuple(failure.env_id for failure in failures)
    sample = f"{type(errors[0]).__name__}: {_safe_str(errors[0])}"
    return BaseExceptionGroup(f"{len(ids)} envs failed: ({list_ids(ids)[1:-1]}); the first with {sample}", errors)


def _identity(failure: Failure) -> Any:
    """What tells two failures apart: errors of our own, or of a missing reset, are the same if they say the same."""
    exception = failure.exception
    kinds = ParallelEnvError, gymnasium.error.ResetNeeded
    is_known = isinstance(exception, kinds) and not isinstance(exception, EnvError)
    return (type(exception), _safe_str(exception)) if is_known else id(failure)


def _pack(exception: BaseException) -> dict[str, Any]:
    text = "".join(traceback.format_exception(exception)).rstrip()
    has_context = exception.__context__ is not None and not exception.__suppress_context__
    return {
        "pickled": _portable_pickle(exception),
        "name": f"{type(exception).__module__}.{type(exception).__qualname__}",
        "message": _safe_str(exception),
        "text": text,
        "frames": _pack_traceback(exception.__traceback__),
        "chained": exception.__cause__ is not None or has_context,
    }


def _portable_pickle(exception: BaseException) -> bytes | None:
    """Pickle an exception so that it surely unpickles; ``None`` if there is no way."""
    for form in (exception, _Parts(exception)):
        try:
            pickled: bytes = cloudpickle.dumps(form)
            loads(pickled)
        except Exception:  # noqa: BLE001 (whatever user code raises here, try the next form)
            continue
        return pickled
    return None


class _Parts:
    """An exception whose constructor does not take its ``args`` back, in parts."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def __reduce__(self) -> tuple[Any, ...]:
        exception = self.exception
        return _assemble, (type(exception), exception.args, exception.__dict__)


def _assemble(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    exception = kind.__new__(kind, *args)
    put(exception, "args", args)
    exception.__dict__.update(attributes)
    return exception


def _safe_str(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:  # noqa: BLE001 (a broken __str__ must not hide the failure)
        return f"<its str() raised {type(error).__name__}>"


def _pack_traceback(frames: TracebackType | None) -> dict[str, Any] | None:
    if frames is None:
        return None
    _cut_middle(frames)
    packed: dict[str, Any] = PortableTraceback(frames).to_dict()
    return packed


def _cut_middle(frames: TracebackType) -> None:
    """Leave out the middle of a very long traceback: packing is recursive, and nobody reads it."""
    chain = [frames]
    while chain[-1].tb_next is not None:
        chain.append(chain[-1].tb_next)
    if len(chain) > 2 * _SHOWN_FRAMES:
        chain[_SHOWN_FRAMES - 1].tb_next = chain[-_SHOWN_FRAMES]


def _rebuild(packed: dict[str, Any], env_id: int, operation: str, pid: int) -> Failure:
    exception = _unpack(packed)
    failure = Failure(exception, env_id, operation)
    failure.pid = pid
    return failure


def _unpack(packed: dict[str, Any]) -> BaseException:
    exception = _load(packed)
    cause = RemoteTraceback(packed["text"])
    if packed["chained"] or isinstance(exception, EnvError):
        put(exception, "__cause__", cause)
    frames = _unpack_traceback(packed["frames"])
    if frames is None:
        put(exception, "__cause__", cause)
    return exception.with_traceback(frames)


def _load(packed: dict[str, Any]) -> BaseException:
    if packed["pickled"] is not None:
        try:
            exception = loads(packed["pickled"])
        except Exception:  # noqa: BLE001 (a class that imports only there: the text below stands for it)
            exception = None
        if isinstance(exception, BaseException):
            return exception
    return EnvError(f"{packed['name']}: {packed['message']} (this exception cannot travel between processes)")


def _unpack_traceback(frames: dict[str, Any] | None) -> TracebackType | None:
    """Rebuild a traceback; ``None`` where tblib cannot, as with another version of it.

    tblib's own `as_traceback` is not used: its frames lead to whoever calls it, here on to the user's function.
    An exception in an info would then keep all variables of that function alive for ever, the `ParallelEnv` too:
    numpy's arrays of objects are a hole in Python's garbage collection.
    """
    if frames is None:
        return None
    try:
        portable = PortableTraceback.from_dict(frames)
        chain = [portable]
        while chain[-1].tb_next is not None:
            chain.append(chain[-1].tb_next)
        rebuilt: TracebackType | None = None
        for one in reversed(chain):
            rebuilt = TracebackType(rebuilt, _lone_frame(one.tb_frame), -1, one.tb_lineno)
    except Exception:  # noqa: BLE001 (the text is the fallback, and it is always there)
        return None
    return rebuilt


def _lone_frame(like: Any) -> FrameType:
    """Return a frame that shows the place of another one, and that nobody has called."""
    code = like.f_code
    shown = _never_run.__code__.replace(co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_name)
    return FunctionType(shown, dict(like.f_globals))().gi_frame  # type: ignore[no-any-return]


def _never_run() -> Iterator[None]:
    yield
