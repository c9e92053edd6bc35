"""What `Collector` and `CollectorSet` share: argument checks, `stop`, the ``with`` block and the history."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from parallelenv.collect.history import History
from parallelenv.contract.arguments import check_base_seed, check_positive, is_int
from parallelenv.contract.env_specs import bind_arguments
from parallelenv.contract.error_text import show
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.thread_guard import Guard
from parallelenv.errors import ArgumentError

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv

Info = dict[str, Any]
"""What is known of a collection beside its steps."""
COMPONENTS = ("policy", "envs", "test_envs")
ENV_MAKER = (
    "Give a function without arguments that returns a ParallelEnv, with what wrappers do put into its envs or into the "
    "policy."
)
_POLICY_MAKER = "Give a function that returns a policy; if this is the policy itself, lambda: policy."


class CollectorBase(ShortTracebacks):
    """Base of `Collector` and `CollectorSet`. For the arguments see `Collector`."""

    _unrepeatable: tuple[str, ...] = ()
    """Methods that must not be called within another call, for instance by a policy."""

    def __init__(self, num_steps: int, start_steps: int | None, seed: int | None, log_dir: object) -> None:
        check_positive("num_steps", num_steps)
        check_optional(start_steps=start_steps)
        self._num_steps, self._start_steps = num_steps, start_steps or num_steps
        self._seed = check_base_seed(seed)
        self._envs: dict[str, ParallelEnv] = {}  # to be closed by `stop`
        self._guard = Guard(type(self).__name__, "stopped", self._unrepeatable)
        self.history = History(log_dir)

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._guard.is_closed

    def plot(self, axes: Any = None) -> Any:
        """Draw returns against samples and seconds. See `History.plot`."""
        return self.history.plot(axes)

    def stop(self) -> None:
        """Close all envs and the history. Can be called more than once."""
        self._guard.is_closed = True
        for env in self._envs.values():
            env.close()
        self.history.close()

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block calls `stop`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `stop`."""
        self.stop()


def check_optional(**counts: object) -> None:
    """Check that each number is an int of at least 1, or ``None``."""
    for name, value in counts.items():
        if value is not None:
            check_positive(name, value)


def derived_seed(seed: int, *key: int) -> int:
    """Return another seed, that of a key."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])


def any_of(listen_to: object) -> Callable[[], bool]:
    """Return a function that is true once an event is set or a function returns ``True``."""
    is_list = isinstance(listen_to, Iterable) and not isinstance(listen_to, str)
    asked = [getattr(one, "is_set", one) for one in listen_to] if is_list else [None]
    if not all(map(callable, asked)):
        raise ArgumentError(
            f"listen_to={show(listen_to)} must be a list. Give a list of events, as threading.Event, or of functions "
            "without arguments."
        )
    return lambda: any(ask() for ask in asked)


def check_version(version: int | None, before: int) -> int:
    """Return the version of new weights, an int of at least 0; ``None`` means the next one."""
    if version is None:
        return before + 1
    if not is_int(version) or version < 0:
        raise ArgumentError(f"version={show(version)} must be an int of 0 or more, or None for the next one.")
    return int(version)


def check_component(component: str) -> None:
    """Check the name of a component."""
    if component not in COMPONENTS:
        raise ArgumentError(f"component={show(component)} is not known; expected one of {COMPONENTS}.")


def check_maker(name: str, make: object) -> None:
    """Check that a function can be called: one that makes a policy gets those of rank, world_size and seed it has."""
    is_policy = name == "make_policy"
    way_out = _POLICY_MAKER if is_policy else ENV_MAKER
    if not callable(make):
        raise ArgumentError(f"{name}={show(make)} cannot be called. {way_out}")
    try:
        parameters = inspect.signature(bind_arguments(make, 0, 1, 0) if is_policy else make).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    is_open = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = ", ".join(one.name for one in parameters if one.default is one.empty and one.kind not in is_open)
    if needed:
        given = ", but is given no more than rank, world_size and seed" if is_policy else ""
        raise ArgumentError(f"{name}={show(make)} needs {needed}{given}. {way_out}")
