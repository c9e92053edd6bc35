"""What a collector and a set of collectors have in common: what both promise, and checks of arguments."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from parallelenv.collect.history import History
from parallelenv.contract.arguments import check_base_seed, check_name, check_positive, is_int
from parallelenv.contract.env_specs import bind_arguments
from parallelenv.contract.error_text import show
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.thread_guard import Guard, single_threaded
from parallelenv.errors import ArgumentError

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv
    from parallelenv.rollouts.rollout import Rollout

Info = dict[str, Any]
"""What is known of a collection beside its steps."""
Policy = Callable[..., Any]
"""See `ParallelEnv.rollout`."""
_COMPONENTS = ("policy", "envs", "test_envs")
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
        self.version = 0
        self._envs: dict[str, ParallelEnv] = {}  # to be closed by `stop`
        self._guard = Guard(type(self).__name__, "stopped", self._unrepeatable)
        self.history = History(log_dir)

    @single_threaded
    def collect(
        self, num_steps: int | None = None, listen_to: Iterable[object] = (), *, progress: bool = True
    ) -> tuple[Rollout, Info]:
        """Step the envs with the policy, and return the steps. Episodes continue from one collection to the next.

        A set runs all collectors; collections in flight, for instance after Ctrl-C or an abandoned `stream`, are
        included.

        Args:
            num_steps: Steps of each env; ``None`` means the constructor's ``num_steps``, at first ``start_steps``.
            listen_to: Events (objects with ``is_set()``) and functions without arguments. As soon as one is set or
                returns ``True``, the collection stops at its next step and returns the steps so far. A set checks them
                about every 0.05 s.
            progress: Whether to show a progress bar, in a terminal or a notebook, after the first second.

        Returns:
            ``data``, a `Rollout`, and ``info``, a dict of

            * ``episode_returns`` and ``episode_lengths``, ``(num_ended,)``, of the episodes that ended, including their
              steps in earlier collections, in the order of ``data.ended_states``;
            * ``num_steps`` of each env, and ``num_samples`` of all envs together;
            * ``seconds`` that the collection took;
            * ``version`` of the policy.

            Of a set, ``data`` has all envs, those of the first collector, then those of the second ... Steps that a
            collector lacks are not ``valid``. Where a collector was replaced, its open episodes are truncated and
            counted so far. If envs were replaced in between, the steps of the former ones come first, in a collection
            of their own. ``num_steps`` and ``version`` (the oldest) are ``(num_workers,)``, one per collector, and
            there are

            * ``staleness``, ``(num_workers,)``: how many versions a policy is behind the latest, or ahead if negative;
            * ``lost_samples``: upper bound of the samples that collectors had made and not sent when they died: all
              that was requested from them, about 0.5 s of work each, or in `stream` a whole collection;
            * with ``compress_data``: ``num_bytes`` and ``num_bytes_sent``.

        Raises:
            ArgumentError: If an argument has an invalid value, or the collections of a set cannot be joined because
                they differ, in nesting for example. They stay available to `stream`.
            ClosedError: After `stop`.
            UsageError: If another thread is in a call.
            WorkerDiedError: If a collector of a set has died too often.
            WorkerTimeoutError: If a collector of a set took too long. It is not replaced: the next collection waits for
                it again; if it hangs, `stop` ends it.
            BaseException: What an env or the policy raised, as in `ParallelEnv.rollout`. In a `Collector`,
                ``error.partial`` is the `Rollout` so far, and the next collection begins new episodes; in a set the
                steps made until then are in the next collection.
        """
        asked: list[Any] = [None]
        if isinstance(listen_to, Iterable) and not isinstance(listen_to, str):
            asked = [getattr(one, "is_set", one) for one in listen_to]
        if not all(map(callable, asked)):
            raise ArgumentError(
                f"listen_to={show(listen_to)} must be a list. Give a list of events, as threading.Event, or of "
                "functions without arguments."
            )
        check_optional(num_steps=num_steps)
        return self._collect(num_steps, (lambda: any(ask() for ask in asked)) if asked else None, progress)

    @abc.abstractmethod
    def _collect(
        self, num_steps: int | None, is_over: Callable[[], bool] | None, progress: bool
    ) -> tuple[Rollout, Info]:
        """Do what `collect` promises, with checked arguments."""

    # ---------------------------------------------------------------- weights and components

    @single_threaded
    def set_weights(self, weights: object, version: int | None = None) -> None:
        """Set the policy's weights through its ``set_weights(weights)`` or torch's ``load_state_dict``.

        A `Collector` passes them on uncopied. A set pickles them once and sends each collector a copy, to busy ones
        before their next collection. With Ray, collectors elsewhere fetch them from the object store, one per node.

        Args:
            weights: Passed to the policy.
            version: Their version in infos, an int of at least 0; ``None`` means the current version plus one.

        Raises:
            ArgumentError: If the policy has no such method, or ``version`` is invalid.
            UnpicklableError: If a set cannot pickle them; nothing was set.
            KeyboardInterrupt, WorkerTimeoutError: On Ctrl-C, or if a policy of a set takes too long to load them. They
                are set all the same: collectors that do not have them yet take them before their next collection.
            ClosedError: After `stop`.
        """
        if version is not None and (not is_int(version) or version < 0):
            raise ArgumentError(f"version={show(version)} must be an int of 0 or more, or None for the next one.")
        self._apply("set_weights", weights, self.version + 1 if version is None else int(version))

    @single_threaded
    def update_policy(self, name: str, value: object) -> None:
        """Set an existing attribute of the policy to a copy of ``value``; ``"a.b"`` sets ``b`` of its object ``a``.

        In a set, all policies; those of busy collectors when they are done.

        Raises:
            ArgumentError: If ``name`` is invalid.
            AbsentAttributeError: If the policy does not have the attribute.
            ClosedError: After `stop`.
        """
        check_name("name", name)
        self._apply("update_policy", name, value)

    @single_threaded
    def replace(self, component: str, make: Callable[..., object]) -> None:
        """Replace the policy or envs; in a set those of all collectors, of busy ones when they are done.

        Replaced envs are closed. The number of envs may change.

        Args:
            component: ``"policy"``, whose weights are then those it was made with; ``"envs"``, which begin new episodes
                with the collector's seed; or ``"test_envs"``.
            make: Returns the new component, as ``make_policy``, ``make_envs`` or ``make_test_envs`` do.

        Raises:
            ArgumentError: If the component is unknown, or ``make`` returns the wrong thing. Nothing was replaced.
            ClosedError: After `stop`.
        """
        if component not in _COMPONENTS:
            raise ArgumentError(f"component={show(component)} is not known; expected one of {_COMPONENTS}.")
        self._apply("replace", component, make)

    @abc.abstractmethod
    def _apply(self, method: str, *arguments: object) -> None:
        """Do what one of these methods promises, with checked arguments."""

    # ---------------------------------------------------------------- other

    @property
    def closed(self) -> bool:
        """Whether `stop` was called."""
        return self._guard.is_closed

    def plot(self, axes: object = None) -> Any:
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
