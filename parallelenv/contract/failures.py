"""Failures of envs, which are sent from the host to the caller and raised there.

In every mode, an exception keeps its type, its attributes and a traceback that shows the user's own source line. An
exception that is not an `Exception`, such as the `SystemExit` of ``sys.exit()``, becomes the cause of an `EnvError`:
an env that ends its own program must not end the caller's.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from parallelenv.contract import tracebacks
from parallelenv.contract.copying import dumps, loads
from parallelenv.contract.error_text import count, list_ids
from parallelenv.contract.interrupts import Ignore
from parallelenv.contract.tracebacks import shorten
from parallelenv.errors import EnvError, ParallelEnvError, WorkerDiedError, WorkerTimeoutError

_Packed: TypeAlias = dict[str, Any]
_MOST_LINKS = 10
"""Maximum length of the chain of causes and contexts that is sent with an exception."""


class Failure:
    """An exception raised for one env.

    An exception that is not an `Exception` is replaced by an `EnvError`, see the module.

    ``operation`` says what failed, such as ``"step"``, ``"reset"`` or ``"the policy"``. It is empty if the env's worker
    died or did not reply in time.
    """

    def __init__(self, exception: BaseException, env_id: int, operation: str) -> None:
        self._exception: Exception | None = exception if isinstance(exception, Exception) else _as_error(exception)
        self._packed: _Packed = {}  # the exception as plain data
        self.env_id = env_id
        self.operation = operation
        self.pid = os.getpid()

    @property
    def exception(self) -> Exception:
        """The exception.

        It is unpacked on first access, because a process that only forwards it may lack the module that defines it.
        """
        if self._exception is None:
            exception = _unpack(self._packed)
            self._exception = exception if isinstance(exception, Exception) else _as_error(exception)
        return self._exception

    @property
    def is_of_worker(self) -> bool:
        """True if the exception is a `WorkerDiedError` or `WorkerTimeoutError` of the env's own worker."""
        return not self.operation

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_exception": None, "_packed": self._packed or _pack(self.exception)}


NO_FAILURES: Mapping[int, Failure] = MappingProxyType({})


def raise_failures(failures: Sequence[Failure], partial: object) -> None:
    """Raise the error for these failures, which are ordered by env id; if there are none, do nothing.

    If all failures have the same type and text, the exception of the first env is raised, with a note that says how
    many other envs failed. If they differ, an exception group is raised, in which equal failures appear only once. The
    error gets the attributes ``env_ids`` (a tuple of the envs that failed), ``failures`` (their exceptions, by env id)
    and ``partial`` (the result of the envs that did not fail).
    """
    if not failures:
        return
    alike: dict[tuple[type, str], list[Failure]] = {}
    for failure in failures:
        text = _safe_str(failure.exception)
        if isinstance(failure.exception, ParallelEnvError) and not isinstance(failure.exception, EnvError):
            text = re.sub(r"\benv \d+", "env", text)  # messages that differ only in env ids count as equal
        alike.setdefault((type(failure.exception), text), []).append(failure)
    errors = [with_note(*group) for group in alike.values()]
    env_ids = tuple(failure.env_id for failure in failures)
    error = errors[0]
    if len(errors) > 1:
        sample = f"{type(error).__name__}: {_safe_str(error)}"
        text = f"{len(env_ids)} envs failed: ({list_ids(env_ids)[1:-1]}); the first with {sample}"
        error = ExceptionGroup(text, errors)
    by_env = {failure.env_id: failure.exception for failure in failures}
    by_env.update((group[0].env_id, one) for group, one in zip(alike.values(), errors, strict=True))
    for name, value in (("env_ids", env_ids), ("failures", by_env), ("partial", partial)):
        put(error, name, value)
    raise error


def with_note(*failures: Failure) -> Exception:
    """Return one exception that stands for these equal failures."""
    first = failures[0]
    if first.is_of_worker and isinstance(first.exception, WorkerDiedError | WorkerTimeoutError):
        return with_env_ids(first.exception, tuple(failure.env_id for failure in failures))
    others = "" if len(failures) == 1 else f" and {count(len(failures) - 1, 'other env')}"
    where = f"process {first.pid}" if len({failure.pid for failure in failures}) == 1 else "several processes"
    what = "its constructor" if first.operation == "build" else first.operation
    add_note(first.exception, f"Raised by env {first.env_id}{others} in {what}, {where}.")
    for failure in failures:
        shorten(failure.exception, is_of_env=True)
    return first.exception


def with_env_ids(error: WorkerDiedError | WorkerTimeoutError, env_ids: tuple[int, ...]) -> Exception:
    """Return a copy of an error of a worker, with the given ``env_ids``."""
    other = copy.copy(error)
    other.env_ids = env_ids
    return other


def put(exception: BaseException, name: str, value: object) -> None:
    """Set an attribute, even if the exception's class forbids this (as a frozen dataclass does)."""
    with Ignore(Exception):  # the user's class has a property with this name
        object.__setattr__(exception, name, value)


def add_note(exception: BaseException, note: str) -> None:
    """Add a note to an exception, unless the exception already has this note.

    This works even if the exception's class forbids attributes or uses ``__notes__`` for something else.
    """
    found = object.__getattribute__(exception, "__dict__").get("__notes__")
    notes = list(found) if isinstance(found, list | tuple) else []
    if note not in notes:
        put(exception, "__notes__", [*notes, note])


def one_line(error: BaseException) -> str:
    """Return an error's message as one line, preceded by the error's type unless this package defines that type."""
    if isinstance(error, BaseExceptionGroup):  # several envs failed, usually in the same way
        return f"{one_line(error.exceptions[0])} (and {len(error.exceptions) - 1} more)"
    text = " ".join(str(error).split())
    return text if isinstance(error, ParallelEnvError) else f"{type(error).__name__}: {text}"


def _as_error(exception: BaseException) -> EnvError:
    error = EnvError(f"{_described(exception)} (raised as an EnvError, so that it does not end the caller's program)")
    error.__cause__ = exception
    return error


def _described(exception: BaseException) -> str:
    name = f"{type(exception).__module__}.{type(exception).__qualname__}".removeprefix("builtins.")
    return ": ".join(filter(None, (name, _safe_str(exception))))


def _pack(exception: BaseException, seen: tuple[int, ...] = ()) -> _Packed:
    """Return an exception and its causes as plain data.

    ``seen`` contains the `id` of each exception on the path from the first exception to this one; these are not packed
    again, because causes may form a cycle.
    """
    seen = (*seen, id(exception))
    causes = tracebacks.causes(exception) if len(seen) <= _MOST_LINKS else {}
    members = exception.exceptions if isinstance(exception, BaseExceptionGroup) else ()
    pickled = None
    for in_parts in (False, True):  # in parts, if the constructor does not accept ``args``
        with Ignore(Exception, SystemExit):  # pickling runs user code
            attempt = dumps((type(exception), exception.args, exception.__dict__) if in_parts else exception)
            _load(attempt)
            pickled = attempt
            break
    return {
        "pickled": pickled,
        "name": f"{type(exception).__module__}.{type(exception).__qualname__}",
        "message": _safe_str(exception),
        "places": tracebacks.pack(exception),
        "causes": {name: _pack(other, seen) for name, other in causes.items() if id(other) not in seen},
        "members": [_pack(member, seen) for member in members],
    }


def _load(pickled: bytes) -> Any:
    loaded = loads(pickled)
    if not isinstance(loaded, tuple):
        return loaded
    kind, args, attributes = loaded
    exception = kind.__new__(kind, *args)
    put(exception, "args", args)
    exception.__dict__.update(attributes)
    return exception


def _safe_str(exception: BaseException) -> str:
    try:
        return str(exception)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a broken __str__ must not hide the failure)
        return f"<its str() raised {type(error).__name__}>"


def _unpack(packed: _Packed, exception: BaseException | None = None) -> BaseException:
    """Return the exception with its traceback and causes; if it cannot be loaded in this process, return an `EnvError`.

    The members of an exception group are loaded with the group; only their tracebacks and causes are added here.
    """
    if exception is None:
        with Ignore(Exception):
            exception = _load(packed["pickled"])
    if not isinstance(exception, BaseException):
        text = f"{packed['name']}: {packed['message']} (this exception cannot travel between processes)"
        exception = EnvError(text)
    for name, other in packed["causes"].items():
        put(exception, name, _unpack(other))
    if isinstance(exception, BaseExceptionGroup):
        for member, one in zip(exception.exceptions, packed["members"], strict=False):
            _unpack(one, member)
    return BaseException.with_traceback(exception, tracebacks.rebuild(packed["places"]))
