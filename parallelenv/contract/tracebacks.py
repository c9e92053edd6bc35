"""Tracebacks: which frames a user sees, and how a traceback is sent between processes."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import gymnasium.error

from parallelenv.errors import ParallelEnvError

_Target = TypeVar("_Target", bound=Callable[..., Any])

_PLUMBING = "cloudpickle concurrent contextlib functools multiprocessing pickle queue selectors threading"
"""Packages whose frames are hidden if this package called them, but shown if an env or policy did."""

_ON_PURPOSE = ParallelEnvError, gymnasium.error.Error, BaseExceptionGroup, OSError, KeyboardInterrupt
_MOST_FRAMES = 50
"""A long traceback keeps this many of its outermost frames, and as many of its innermost."""


# ---------------------------------------------------------------- what a user sees


def short_tracebacks(target: _Target, translate: Callable[[BaseException], BaseException] | None = None) -> _Target:
    """Leave this package's frames out of the tracebacks of a function, or of all public methods of a class.

    The user then sees the line of the call, the frames of the env or policy that raised the error, and the message.
    ``translate`` takes an error and returns the exception to raise instead.
    """
    if not isinstance(target, type):
        return cast("_Target", _shortening(target, translate))
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in ("__init__", "__getattr__", "__setattr__"):
            continue
        if isinstance(member, classmethod | staticmethod):
            setattr(target, name, type(member)(_shortening(member.__func__, translate)))
        elif inspect.isfunction(member) and not hasattr(member, "has_short_traceback"):
            setattr(target, name, _shortening(member, translate))
    return target


def shortens_tracebacks(function: _Target) -> _Target:
    """Mark a method that shortens its tracebacks itself, so that `short_tracebacks` does not wrap it."""
    vars(function)["has_short_traceback"] = True
    return function


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line, however many frames of this package are in between."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("parallelenv."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class ShortTracebacks:
    """Base class that gives short tracebacks to the public methods of its subclasses in this package.

    Subclasses written by users inherit the wrapped methods; methods that they define themselves are not wrapped.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Wrap the methods only if the subclass is in this package: frames of users' subclasses must stay visible."""
        super().__init_subclass__(**kwargs)
        if _is_ours(cls.__module__):
            short_tracebacks(cls)


def _shortening(
    function: Callable[..., Any], translate: Callable[[BaseException], BaseException] | None
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def awaited(*args: object, **kwargs: object) -> object:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    @functools.wraps(function)
    def yielding(*args: object, **kwargs: object) -> Iterator[object]:
        try:
            yield from function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True  # for IPython and pytest, when one error is raised instead of another
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            instead = error if translate is None else translate(error)
            if instead is error:
                raise  # adds no frame of its own
        try:
            raise instead  # outside the except block; inside, the caught error would be shown as well
        finally:
            del instead  # breaks a reference cycle

    if inspect.iscoroutinefunction(function):
        return awaited
    return yielding if inspect.isgeneratorfunction(function) else called


def shorten(error: BaseException, *, is_of_env: bool = False) -> None:
    """Remove frames that are neither the user's nor the env's from the tracebacks of an error and its causes.

    An unexpected error raised by this package itself keeps its traceback: it is a defect and should be reported in
    full.
    """
    if os.environ.get("PARALLELENV_FULL_TRACEBACK", "0") not in ("", "0"):
        return
    entries = _entries(error)
    is_of_env = is_of_env or reports_failures(error)
    if not (is_of_env or isinstance(error, _ON_PURPOSE) or len(entries) < 2 or not _is_ours(_module(entries[-1]))):
        return
    chain, emptied = {id(error): error}, set()
    waiting = [error]
    for one in waiting:  # grows in the loop
        entries = _entries(one)
        kept = _kept(entries, is_of_env)
        BaseException.with_traceback(one, _linked(kept))
        if entries and not kept:
            emptied.add(id(one))
        members = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        others = {id(other): other for other in (*causes(one).values(), *members)}
        waiting += [other for key, other in others.items() if key not in chain]
        chain |= others
    for one in waiting:
        shown = causes(one)
        if "__cause__" not in shown and id(shown.get("__context__")) in emptied:
            # The context was handled within this package and is of no interest to the user. The exception's class
            # may forbid plain assignment.
            vars(BaseException)["__suppress_context__"].__set__(one, True)


def reports_failures(error: BaseException) -> bool:
    """Return whether `raise_failures` raised an error; if not, the error is about the call itself, and no env failed.

    An env that has a `ParallelEnv` of its own may raise any error of this package.
    """
    return "failures" in object.__getattribute__(error, "__dict__")


def causes(error: BaseException) -> dict[str, BaseException]:
    """Return the cause and the context of an error, by attribute name, if Python would show them."""
    names = ("__cause__",) if _get(error, "__suppress_context__") else ("__cause__", "__context__")
    return {name: one for name in names if (one := _get(error, name)) is not None}


def _get(error: BaseException, name: str) -> Any:
    """Return an attribute that `BaseException` defines, even if the class of ``error`` breaks attribute look-up."""
    return vars(BaseException)[name].__get__(error)


def _entries(error: BaseException) -> list[TracebackType]:
    """Return the entries of an error's traceback; if there are many, those in the middle are left out.

    The traceback of an error grows each time the error is raised again.
    """
    entries = []
    entry: TracebackType | None = _get(error, "__traceback__")
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    if len(entries) > 2 * _MOST_FRAMES:
        entries[_MOST_FRAMES:-_MOST_FRAMES] = []
    return entries


def _kept(entries: Sequence[TracebackType], is_of_env: bool) -> list[TracebackType]:
    kept = []
    was_left_out = not is_of_env
    for position, entry in enumerate(entries):
        module = _module(entry)
        # A `step` of a Gymnasium wrapper or checker only calls the env's `step` if a `step` follows further down.
        called = entry.tb_frame.f_code.co_name.removeprefix("env_").removesuffix("_passive_checker")
        was_left_out = (
            _is_ours(module)
            or (not is_of_env and was_left_out and module.partition(".")[0] in _PLUMBING.split())
            or (
                module.startswith("gymnasium.")
                and any(deeper.tb_frame.f_code.co_name == called for deeper in entries[position + 1 :])
            )
        )
        if not was_left_out:
            kept.append(entry)
    return kept


def _is_ours(module: str) -> bool:
    return f"{module}.".startswith("parallelenv.") and not module.startswith("parallelenv.testing.")


def _module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))


def _linked(entries: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback made of copies of the entries.

    Copies are faster, because setting `tb_next` of an existing entry walks over all entries that follow it.
    """
    following: TracebackType | None = None
    for entry in reversed(entries):
        line = entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno  # no `tb_lineno` if Ctrl-C came between lines
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, line)
    return following


# ---------------------------------------------------------------- sending tracebacks between processes


class FrameLine(NamedTuple):
    """One entry of a traceback, as plain data.

    ``first_line`` is the first line of the function. The other lines and columns are those of the failed expression.
    """

    filename: str
    module: str
    function: str
    first_line: int
    line: int
    end_line: int
    column: int
    end_column: int
    source: str


def pack(error: BaseException) -> list[FrameLine]:
    """Return the entries of an error's traceback as plain data."""
    places = []
    for entry in _entries(error):
        code = entry.tb_frame.f_code
        index, unknown = max(entry.tb_lasti, 0) // 2, (None, None, None, None)
        line, end_line, column, end_column = next(itertools.islice(code.co_positions(), index, None), unknown)
        if line is None or end_line is None or column is None or end_column is None:
            line = end_line = entry.tb_lineno or code.co_firstlineno
            column = end_column = -1  # unknown even to the compiler
        source = linecache.getline(code.co_filename, line, entry.tb_frame.f_globals)
        start = code.co_filename, _module(entry), code.co_name, code.co_firstlineno
        places.append(FrameLine(*start, line, end_line, column, end_column, source))
    return places


def rebuild(places: Sequence[FrameLine]) -> TracebackType | None:
    """Return a traceback with these entries. Each shows its line of source, even if its file cannot be read here."""
    # This runs in a generator, because a generator's frame has no caller after a yield. Otherwise the traceback's
    # frames would refer to the user's function and keep its variables, such as a `ParallelEnv`, alive as long as an
    # info contains the exception: Python's garbage collection does not see into object arrays.
    return next(_linked([_raised_at(place) for place in places]) for _ in range(1))


def _raised_at(place: FrameLine) -> TracebackType:
    """Raise an exception in code that is compiled for this place, and return the resulting traceback entry.

    Debuggers, IPython and pytest inspect frames and their code, so the entry needs a real frame with real code. The
    code has the line and columns of the expression that failed, so that tracebacks mark the expression as they would in
    the process where it failed. (tblib, for example, does not keep the columns.)
    """
    if place.source and not linecache.getline(place.filename, place.line):  # unreadable in this process
        lines = linecache.getlines(place.filename)
        lines = [*lines, *[""] * (place.line - len(lines))]
        lines[place.line - 1] = place.source
        linecache.cache[place.filename] = sum(map(len, lines)), None, lines, place.filename
    tree = ast.parse("raise Exception")
    raising: Any = tree.body[0]
    first = min(place.first_line, place.line)  # set last, because lines are stored relative to it
    for node in (raising, raising.exc):
        node.lineno, node.end_lineno = place.line - first + 1, place.end_line - first + 1
        node.col_offset, node.end_col_offset = place.column, place.end_column
    code = compile(tree, place.filename, "exec")
    code = code.replace(co_name=place.function, co_qualname=place.function, co_firstlineno=first)
    try:
        exec(code, {"__name__": place.module, "__file__": place.filename}, {})
    except Exception as error:  # noqa: BLE001 (the exception that is raised on purpose)
        return error.__traceback__.tb_next  # type: ignore[union-attr,return-value]
    raise AssertionError  # not reached
