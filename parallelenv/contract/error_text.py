"""Parts of messages, and plain text tables."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice

from parallelenv.errors import ParallelEnvError

_MOST_IDS = 16
"""Number of ids that a message lists one by one."""
_LONGEST = 80
"""Number of characters of a value that a message shows."""


class _Repr(reprlib.Repr):
    """Reads only as much of a value as a message can show, so a million items take no longer than 20."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 16
        self.maxstring = self.maxlong = self.maxother = 2 * _LONGEST

    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Keep the order, unlike `reprlib`."""
        if level <= 0 or not x:
            return "{...}" if x else "{}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict)]
        return f"{{{', '.join(items)}{', ...' if len(x) > self.maxdict else ''}}}"

    def repr_instance(self, x: object, level: int) -> str:
        """Describe large arrays and tensors by shape and dtype."""
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not hasattr(type(x), "__array__") or shape is None or dtype is None:  # a space has both, too
            return super().repr_instance(x, level)
        text = " ".join(repr(x).split()) if math.prod(shape) <= self.maxlist else ""
        return text if 0 < len(text) <= _LONGEST else f"<{type(x).__name__} of shape {tuple(shape)} and dtype {dtype}>"


_REPR = _Repr()


def show(value: object) -> str:
    """Return a value as a user would write it; if that is long, it is cut, or the type and length. Never raises."""
    try:
        text = _REPR.repr(value)
        if len(text) > _LONGEST and isinstance(value, (list, tuple, set, frozenset, dict)):
            return f"<{type(value).__name__} of {count(len(value), 'item')}>"
    except Exception:  # noqa: BLE001 (a broken __repr__, or an int of thousands of digits, must not hide the message)
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a hint at the known word nearest to a misspelt one: a sentence after a space, or an empty string."""
    near = get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def near_attribute(name: str, *owners: object) -> str:
    """Return a hint at the public attribute nearest to a misspelt name, as `did_you_mean` does."""
    names = {other for owner in owners for other in dir(owner) if not other.startswith("_") and other != name}
    # Objects have many names: with the usual 0.6 `render` would match `render_mode`.
    return did_you_mean(name, names, cutoff=0.75)


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, with its type unless it is an error of this package."""
    if isinstance(error, BaseExceptionGroup):  # several envs failed, usually in the same way
        return f"{one_line(error.exceptions[0])} (and {len(error.exceptions) - 1} more)"
    text = " ".join(str(error).split())
    return text if isinstance(error, ParallelEnvError) else f"{type(error).__name__}: {text}"


def count(number: int, thing: str) -> str:
    """Return a number of things as text: ``1 env``, ``2 envs``, ``1,024 envs``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def name_range(env_ids: Sequence[int]) -> str:
    """Return consecutive ids as text: ``3``, ``0-7``."""
    return str(env_ids[0]) if len(env_ids) == 1 else f"{env_ids[0]}-{env_ids[-1]}"


def list_ids(env_ids: Sequence[int]) -> str:
    """Return ids as a list, shortened if it is long: ``[0, 1]``, ``[0, 1, 2, ..., 2999]``."""
    if len(env_ids) <= _MOST_IDS:
        return str(list(env_ids))
    return f"[{env_ids[0]}, {env_ids[1]}, {env_ids[2]}, ..., {env_ids[-1]}]"


def name_envs(env_ids: Sequence[int]) -> str:
    """Return ``"env 3"`` or ``"envs 3, 4"``."""
    return f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {list_ids(env_ids)[1:-1]}"


def were(number: int, thing: str) -> str:
    """Return a number of things and the matching verb: ``1 env was``, ``2 envs were``."""
    return f"{count(number, thing)} {'was' if number == 1 else 'were'}"


def number(value: float) -> str:
    """Return a number with three digits, or all before the point, and separators: ``0.0123``, ``21.5``, ``12,346``."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time with three digits and a suitable unit."""
    unit, size = ("s", 1.0) if seconds >= 0.9995 else ("ms", 1e-3) if seconds >= 0.9995e-3 else ("µs", 1e-6)
    return f"{number(seconds / size)} {unit}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Return rows under a header, in columns; columns that are empty in every row are left out.

    Columns with a title in ``left`` are left-aligned, the others right-aligned, as suits numbers.
    """
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    padded = []
    for title, *cells in columns:
        width = max(map(len, (title, *cells)))
        padded.append([cell.ljust(width) if title in left else cell.rjust(width) for cell in (title, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))
