"""From the word a user writes to the class behind it, imported only when asked for.

Packages of third parties add words with an entry point of the group ``parallelenv.backends``
whose value is ``module:Class``.
"""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from parallelenv.errors import MissingDependencyError, UnknownModeError, UnknownOptionError
from parallelenv.protocol import Backend

ENTRY_POINT_GROUP = "parallelenv.backends"

# word -> (module:Class, package that it needs beyond our own dependencies)
_MODES: dict[str, tuple[str, str | None]] = {
    "dummy": ("parallelenv.backends.dummy:DummyBackend", None),
    "thread": ("parallelenv.backends.thread:ThreadBackend", None),
    "subproc": ("parallelenv.backends.subproc:SubprocBackend", None),
    "ray": ("parallelenv.backends.ray_actor:RayBackend", "ray"),
    "ray-subproc": ("parallelenv.backends.ray_subproc:RaySubprocBackend", "ray"),
}


def known_modes() -> tuple[str, ...]:
    """Return every word that ``para_mode`` accepts, installed or not; ours first."""
    return (*_MODES, *sorted(set(_foreign()) - set(_MODES)))


def make_backend(para_mode: Any, options: dict[str, Any]) -> Backend:
    """Return a new backend.

    Args:
        para_mode: A known word, or a class that fulfils `protocol.Backend`.
        options: Keyword arguments of its constructor.

    Raises:
        UnknownModeError: If the word is not known.
        MissingDependencyError: If a package that the mode needs is not installed.
        UnknownOptionError: If the backend does not know one of the options.
    """
    kind = para_mode if isinstance(para_mode, type) else load_backend(para_mode)
    accepted = [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]
    for name, value in options.items():
        if name not in accepted:
            raise UnknownOptionError(
                f"{name}={value!r} is no option of para_mode={_word(para_mode)!r}; it accepts "
                f"{', '.join(accepted) if accepted else 'no further options'}.{_nearest(name, accepted)}"
            )
    backend: Backend = kind(**options)
    return backend


def load_backend(word: Any) -> type[Any]:
    """Import and return the backend class behind a word.

    Raises:
        UnknownModeError: If the word is not known.
        MissingDependencyError: If a package that the mode needs is not installed.
    """
    known = known_modes()
    if not isinstance(word, str) or word not in known:
        raise UnknownModeError(f"para_mode={word!r} is not known; expected one of {known}.{_nearest(word, known)}")
    if word not in _MODES:
        foreign: type[Any] = _foreign()[word].load()
        return foreign
    target, needs = _MODES[word]
    if needs is not None:
        _require(word, needs)
    module, _, name = target.partition(":")
    backend: type[Any] = getattr(import_module(module), name)
    return backend


def _require(word: str, package: str) -> None:
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # the package is there but broken: say so plainly
        raise MissingDependencyError(
            f"para_mode={word!r} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install {package}"
        ) from error


def _foreign() -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _word(para_mode: Any) -> str:
    return para_mode.__name__ if isinstance(para_mode, type) else str(para_mode)


def _nearest(word: Any, known: Any) -> str:
    near = get_close_matches(str(word), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
