"""The modes and their backend classes, which are imported only when used.

Third-party packages add modes with entry points in the group ``parallelenv.backends``. The name of an entry point is
the name of the mode, and its value is ``module:Class``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from parallelenv.contract.error_text import did_you_mean, hint_at, show
from parallelenv.contract.protocol import Backend
from parallelenv.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from parallelenv.autotune.recommend import Recommendation
    from parallelenv.contract.env_specs import EnvFactory
    from parallelenv.contract.spaces import Spaces

ENTRY_POINT_GROUP = "parallelenv.backends"
AUTO = "auto"
"""The value of ``para_mode`` with which `choose` selects the mode."""
AUTO_OPTION = "caller_busy"
"""The only option of ``"auto"``; `recommend` has an argument of this name with the same meaning."""

# word -> (module:Class, package that the mode needs beyond our own dependencies)
_MODES: dict[str, tuple[str, str | None]] = {
    "dummy": ("parallelenv.backends.dummy:DummyBackend", None),
    "thread": ("parallelenv.backends.thread:ThreadBackend", None),
    "subproc": ("parallelenv.backends.subproc:SubprocBackend", None),
    "ray": ("parallelenv.backends.ray:RayBackend", "ray"),
    "ray-subproc": ("parallelenv.backends.ray_subproc:RaySubprocBackend", "ray"),
}

# Type checkers accept any string, because other packages may add modes. Editors suggest the built-in modes.
ParaMode = Literal["dummy", "thread", "subproc", "ray", "ray-subproc", "auto"] | str | type[Backend]


def known_modes() -> tuple[str, ...]:
    """Return the names of all modes, built-in modes first, including modes whose required packages are missing."""
    return (*_MODES, *sorted(_foreign()))


def known_words() -> tuple[str, ...]:
    """Return every string that ``para_mode`` accepts: the names of the modes, and ``"auto"``."""
    return (*known_modes(), AUTO)


def resolve_backend(
    para_mode: Any,
    options: dict[str, Any],
    env_factories: Sequence[EnvFactory],
    num_cpus: int | None,
    num_gpus: float,
    spaces: Spaces | None,
    for_envs: dict[str, Any],
    own_arguments: Sequence[str],
) -> tuple[Backend, int | None, Recommendation | None]:
    """Return a new backend, the number of cores that it may use, and a recommendation if the mode is ``"auto"``.

    ``own_arguments`` are the names of the arguments that `ParallelEnv` has in every mode; the error for a misspelt
    option may suggest one of these names. ``for_envs`` holds the arguments ``seed``, ``shared`` and ``seed_globals``,
    which also apply while ``"auto"`` tries the modes. See `load_backend` for the other errors raised.

    Raises:
        ArgumentError: If the mode does not accept one of the options, or GPUs are requested with ``"auto"``.
    """
    chosen: Recommendation | None = None
    if _is_auto(para_mode):
        # Otherwise, it would depend on the result of the trial whether an option is an error.
        for name, value in options.items():
            if name != AUTO_OPTION:
                raise ArgumentError(
                    f"{name}={show(value)} is not an option of para_mode={AUTO!r}, which only accepts {AUTO_OPTION}, "
                    "because other options depend on the mode that it chooses. Give that mode, which recommend(envs) "
                    f"returns.{_instead(name, own_arguments)}"
                )
        if num_gpus:
            raise ArgumentError(
                f"num_gpus={show(num_gpus)} is not possible with para_mode={AUTO!r}: only Ray's workers can have GPUs, "
                "and 'auto' never chooses Ray. Give para_mode='ray', or leave num_gpus at 0."
            )
        from parallelenv.autotune.recommend import choose  # imported late: that module imports this one

        chosen = choose(env_factories, num_cpus, spaces, **for_envs, **options)
        para_mode, num_cpus, options = chosen.mode, chosen.num_cpus, chosen.options
    kind = load_backend(para_mode)
    accepted = _accepted(kind)
    for name, value in options.items():
        if name not in accepted:
            raise ArgumentError(
                f"{name}={show(value)} is not an option of para_mode={word_of(para_mode)!r}; it accepts "
                f"{', '.join(accepted) if accepted else 'no further options'}."
                f"{_instead(name, [*own_arguments, *accepted])}"
            )
    return kind(**options), num_cpus, chosen


def option_names(para_mode: Any) -> list[str]:
    """Return the names of the options that a mode accepts. See `load_backend` for the argument and the errors."""
    return [AUTO_OPTION] if _is_auto(para_mode) else _accepted(load_backend(para_mode))


def may_live_here(para_mode: Any) -> bool:
    """Return True if a mode keeps its envs in this process, or may choose to, as ``"auto"`` does.

    See `load_backend` for the argument and the errors.
    """
    return _is_auto(para_mode) or bool(load_backend(para_mode).uses_live_envs)


def _is_auto(para_mode: Any) -> bool:
    return isinstance(para_mode, str) and para_mode == AUTO  # an array would be compared item by item


def _accepted(kind: type[Any]) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]


def load_backend(para_mode: Any) -> type[Any]:
    """Import and return the backend class of a mode. If ``para_mode`` is a class, return that class.

    Raises:
        ArgumentError: If the mode is unknown, or its class does not derive from `protocol.Backend`.
        MissingDependencyError: If a package that the mode needs is not installed.
    """
    kind: Any = para_mode
    if isinstance(para_mode, str) and para_mode in _MODES:
        target, needs = _MODES[para_mode]
        # The package is not imported here, because importing Ray changes environment variables.
        if needs is not None and find_spec(needs) is None:
            raise MissingDependencyError(
                f"para_mode={para_mode!r} needs the package {needs!r}, which is not installed. Install it with: pip "
                f"install {needs}"
            )
        module, _, name = target.partition(":")
        kind = getattr(import_module(module), name)
    elif not isinstance(para_mode, type):
        foreign = _foreign()
        if not isinstance(para_mode, str) or para_mode not in foreign:
            known = known_words()
            raise ArgumentError(
                f"para_mode={para_mode!r} is not known; expected one of {known}.{_instead(para_mode, known)}"
            )
        kind = foreign[para_mode].load()
    if not isinstance(kind, type) or not issubclass(kind, Backend):
        raise ArgumentError(
            f"para_mode={word_of(para_mode)!r} is {show(kind)}, which does not derive from "
            f"parallelenv.contract.protocol.Backend; expected a class that does, or one of {known_words()}."
            f"{hint_at(word_of(para_mode))}"
        )
    return kind


def _foreign() -> dict[str, Any]:
    """Return the entry points of other packages by name. Finding them takes milliseconds."""
    found = entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: point for point in found if point.name not in (*_MODES, AUTO)}


def word_of(para_mode: Any) -> str:
    """Return the name of a mode, which may be given as a backend class."""
    return str(getattr(para_mode, "__name__", para_mode))


def _instead(name: object, known: Sequence[str]) -> str:
    return hint_at(name) or did_you_mean(str(name), known)
