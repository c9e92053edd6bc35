"""The base of all wrappers: it has every attribute and method of `ParallelEnv`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from parallelenv.contract import arguments, migration_hints
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.error_text import show
from parallelenv.contract.tracebacks import ShortTracebacks
from parallelenv.engine.checkpoint import WrappedState
from parallelenv.errors import ArgumentError, UsageError
from parallelenv.notebook.repr import mime_bundle
from parallelenv.wrappers.answer_rows import Space

if TYPE_CHECKING:
    from parallelenv.engine.assemble import Align
    from parallelenv.env import ParallelEnv

_BYPASSING = {
    *("rollout", "send_reset", "arecv", "stream", "run_episodes", "play", "record", "get_state", "send_action"),
    *("to_gymnasium", "to_sb3", "to_tianshou"),
}
"""Methods that step inside of wrappers, or whose results are received later than wrappers can process them."""


def space_of(env: Any) -> Space:
    """Return the observation space shared by all envs, ``None`` if they share none.

    Raises:
        ArgumentError: If ``env`` is not a `ParallelEnv` or a wrapper of one.
    """
    if isinstance(env, type) or not hasattr(env, "customized_method"):
        raise ArgumentError(
            f"env={show(env)} is not a ParallelEnv or a wrapper of one. Wrap single envs where you make them."
        )
    return env.single_observation_space  # type: ignore[no-any-return]


class ParallelWrapper(ShortTracebacks):
    """Forwards everything to the `ParallelEnv` in it. Subclasses override what they change.

    Methods that would bypass wrappers raise `UsageError`: `rollout`, `stream`, `run_episodes`, `play`, `record`,
    `send_reset`, `arecv`, `get_state`, `send_action`, `to_gymnasium`, `to_sb3`, `to_tianshou`. Call those of
    `unwrapped`, or wrap the single envs.

    Args:
        env: A `ParallelEnv`, or another wrapper.

    Attributes:
        env: The wrapped `ParallelEnv` or wrapper.
    """

    is_frozen: bool | None = None
    """Whether this wrapper's own statistics are frozen; ``None`` if it has none."""

    def __init__(self, env: ParallelEnv | ParallelWrapper) -> None:
        space_of(env)  # refuses anything else
        self.env = env

    @property
    def frozen(self) -> bool:
        """Whether the statistics of all `NormalizeStates` and `NormalizeRewards`, from here inwards, are frozen.

        Setting it, at any time, sets it for all of them.

        Raises:
            ArgumentError: If it is set to anything but a bool.
            AbsentAttributeError: If there is no such wrapper.
        """
        return all(layer.is_frozen for layer in self._with_statistics())

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        arguments.check_flags(frozen=frozen)
        for layer in self._with_statistics():
            layer.is_frozen = bool(frozen)

    def _with_statistics(self) -> list[ParallelWrapper]:
        """Return the wrappers with statistics, from this one inwards; raise if there is none."""
        layers: list[Any] = [self]
        while isinstance(layers[-1].env, ParallelWrapper):
            layers.append(layers[-1].env)
        found = [layer for layer in layers if layer.is_frozen is not None]
        if not found:
            raise migration_hints.absent(self, "frozen")
        return found

    @property
    def unwrapped(self) -> ParallelEnv:
        """The `ParallelEnv` without any wrapper."""
        return self.env.unwrapped

    def reset(self, id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        """Begin new episodes. See `ParallelEnv.reset`."""
        return self.env.reset(id, seed=seed, options=options)

    def step(self, action: Any, id: Any = None, align: Align = "item") -> Any:
        """Step envs. See `ParallelEnv.step`."""
        return self.env.step(action, id, align)

    def send(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.send`."""
        self.env.send(action, id)

    def recv(
        self, min_envs: int = 1, max_envs: int | None = None, timeout: float | None = None, align: Align = "item"
    ) -> Any:
        """Return results of steps in flight. See `ParallelEnv.recv`."""
        return self.env.recv(min_envs, max_envs, timeout, align)

    def step_async(self, action: Any, id: Any = None) -> None:
        """Begin a step. See `ParallelEnv.step_async`."""
        self.env.step_async(action, id)

    def step_wait(self, timeout: float | None = None, align: Align = "item") -> Any:
        """Return the results of the step in flight. See `ParallelEnv.step_wait`."""
        return self.env.step_wait(timeout, align)

    def next_task(self, id: Any = None, **kwargs: Any) -> Any:
        """Begin the next tasks by calling `reset`. See `TaskPool.next_task`.

        Raises:
            AttributeError: If the wrapped object is not a `TaskPool`.
        """
        if not hasattr(self.unwrapped, "next_task"):
            raise AttributeError(f"{self!r} has no next_task(): that of ParallelEnv.from_samplers() has.")
        return self.reset(id, options=kwargs or None)

    def save_state(self) -> Any:
        """Return the state of the envs, see `ParallelEnv.save_state`, and of the wrappers."""
        state, memory = self.env.save_state(), self.remembered()
        return WrappedState(type(self).__qualname__, deep_copy(memory), state) if memory else state

    def load_state(self, state: Any) -> tuple[int, ...]:
        """Restore a state. See `ParallelEnv.load_state`.

        If an env fails, the wrappers keep what they remember, so reset all envs.

        Raises:
            ArgumentError: Also if it was saved through different wrappers; nothing was changed.
        """
        expected = _forms(self.remembered())
        if not expected:
            return self.env.load_state(state)
        name = type(self).__qualname__
        found = state.wrapper if isinstance(state, WrappedState) else f"no wrapper, but a {type(state).__name__}"
        if found != name:
            raise ArgumentError(
                f"The state is of {found}, and {name} remembers something of its own. Load it through the same "
                "wrappers, in the same order, through which it was saved."
            )
        forms = _forms(state.memory)
        if forms != expected:
            raise ArgumentError(
                f"What {name} remembers is of the form {forms}, but here it is {expected}. Make it with the same "
                "arguments, around as many envs."
            )
        lost: tuple[int, ...] = self.env.load_state(state.state)
        self.remember(deep_copy(state.memory))
        return lost

    def remembered(self) -> dict[str, Any]:
        """Return what this wrapper keeps between calls, for `save_state`; empty if nothing."""
        return {}

    def remember(self, memory: dict[str, Any]) -> None:
        """Restore what `remembered` returned."""
        vars(self).update(memory)

    def close(self) -> None:
        """Close the `ParallelEnv`."""
        self.env.close()

    def _refuse(self, call: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            f"{call}() would go past {type(self).__name__}. Wrap the single envs instead, or what the other library "
            f"gives; env.unwrapped.{call}() does without this wrapper."
        )

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped object; of a method that would bypass this wrapper, one that raises."""
        if name in _BYPASSING:
            return partial(self._refuse, name)
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        return getattr(self.env, name)

    if not TYPE_CHECKING:  # a type checker would let any name be set

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of this wrapper; unlike reading, this does not forward.

            Raises:
                AbsentAttributeError: If it is a setting of another library, which would have no effect here.
            """
            if name in migration_hints.SETTINGS and not hasattr(type(self), name):
                raise migration_hints.not_to_set(self, name, is_argument=False)
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of envs."""
        return len(self.env)

    def __enter__(self) -> Self:
        """Return itself; the end of the ``with`` block calls `close`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `close`."""
        self.close()

    def __repr__(self) -> str:
        """Return one line."""
        return f"<{type(self).__name__} around {self.env!r}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the notebook display of this wrapper and the wrapped object."""
        return mime_bundle(self)


def _forms(memory: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in two memories of a wrapper: shapes, and the arguments under ``"settings"``."""
    return {name: value if name == "settings" else _form(value) for name, value in memory.items()}


def _form(value: Any) -> Any:
    if isinstance(value, list):
        return [_form(part) for part in value]
    return getattr(value, "shapes", getattr(value, "shape", None))
