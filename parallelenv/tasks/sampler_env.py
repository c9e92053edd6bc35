"""Task samplers as envs: one episode is one task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium

from parallelenv.contract.attributes import look_up
from parallelenv.contract.copying import deep_copy
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.spaces import Action, Info, State
from parallelenv.errors import EnvContractError, ExhaustedError, InvalidEnvError, ResetNeededError, UnpicklableError
from parallelenv.worker.env_adapter import split_done


class TaskStep(NamedTuple):
    """A possible return value of a task's ``step``.

    Any object with the attributes ``observation``, ``reward``, ``done`` and ``info`` works as well.

    Attributes:
        done: Whether the task has ended. An ended task counts as truncated if ``info["TimeLimit.truncated"]`` is true,
            and as terminated otherwise.
    """

    observation: State
    reward: Any
    done: bool
    info: Info


class Task(Protocol):
    """One episode. Subclass this class to inherit `render` and `close`, or define all methods of this class."""

    def step(self, action: Action) -> Any:
        """Step the task.

        Returns:
            The five items that the ``step`` of a Gymnasium env returns, an object like `TaskStep`, or a tuple with the
            four fields of `TaskStep`.
        """
        ...

    def is_done(self) -> bool:
        """Return whether the task has ended.

        If it has, but ``step`` did not report the end, the task counts as truncated.
        """
        ...

    def get_observations(self) -> State:
        """Return the current observation, without changing the task."""
        ...

    def render(self) -> Any:
        """Return a frame; ``None`` by default."""
        return None

    def close(self) -> None:
        """Release resources of this task only. Called before the next task starts, and when the env is closed."""
        return


class TaskSampler(Protocol):
    """Returns tasks. Subclass this class to inherit its defaults, or define all its methods.

    Attributes:
        observation_space: Space of the observations of all tasks; ``None`` if not declared.
        action_space: Space of the actions of all tasks; ``None`` if not declared.
        length: Total number of tasks; ``None`` or ``math.inf`` if unlimited. The package does not use this attribute.
    """

    observation_space: Any = None  # `Any` allows a sampler to declare a narrower type
    action_space: Any = None
    length: Any = None

    def next_task(self, **kwargs: Any) -> Task | None:
        """Return the next task, or ``None`` if there are no more tasks. ``kwargs`` are the options of the reset."""
        ...

    def reset(self) -> None:
        """Go back to the first task, without changing the random generator."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed the random generator."""
        ...

    def close(self) -> None:
        """Release resources that the tasks share. Called when the env is closed."""
        return


class TaskEnv(gymnasium.Env[State, Action]):
    """A sampler as an env: ``reset`` starts the next task.

    If `ParallelEnv.call`, `get_env_attr` or a similar method asks for an attribute that this env does not have, the
    attribute is looked up in the current task, then in the sampler.

    Args:
        sampler: A `TaskSampler` for this env only. The env adopts the sampler's ``render_mode``, ``metadata`` and
            spaces, if any.

    Attributes:
        task: The current task; ``None`` before the first task and when there are no more tasks.

    Raises:
        InvalidEnvError: If the sampler is a class, or lacks ``next_task``, ``reset`` or ``set_seed``.
    """

    def __init__(self, sampler: TaskSampler) -> None:
        _check(sampler, "The sampler is", "TaskSampler", "next_task", "reset", "set_seed")
        self.sampler = sampler
        self.task: Task | None = None
        self.render_mode = look_up(sampler, "render_mode", None)
        self.metadata = dict(look_up(sampler, "metadata", None) or self.metadata)
        for name in ("observation_space", "action_space"):
            if (space := look_up(sampler, name, None)) is not None:
                setattr(self, name, space)

    def attribute_owners(self) -> tuple[object, ...]:
        """Return the objects to search, one after the other, for an attribute that this env does not have."""
        return self.task, self.sampler

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[State, Info]:
        """Start the next task, and return its first observation and an empty info.

        Args:
            seed: Passed to the sampler's ``set_seed``. With ``None``, the sampler is not seeded.
            options: Keyword arguments of the sampler's ``next_task``.

        Raises:
            ExhaustedError: If there are no more tasks.
            InvalidEnvError: If the task is a class, or lacks ``step``, ``is_done`` or ``get_observations``.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.sampler.set_seed(seed)
        self._leave()
        task, name = self.sampler.next_task(**(options or {})), type(self.sampler).__name__
        if task is None:
            raise ExhaustedError(f"{name} has no further task. Call its reset() to start again.")
        _check(task, f"next_task() of {name} returned", "Task", "step", "is_done", "get_observations")
        self.task = task
        return task.get_observations(), {}

    def step(self, action: Action) -> tuple[State, Any, bool, bool, Info]:
        """Step the task.

        Raises:
            ResetNeededError: If there is no task.
            EnvContractError: If the task's ``step`` returns neither a tuple of four or five items nor an object like
                `TaskStep`.
        """
        if self.task is None:
            raise ResetNeededError("There is no task to step. Call reset() first.")
        result = self.task.step(action)
        is_short = isinstance(result, tuple) and len(result) == 4
        if is_short or all(hasattr(result, name) for name in TaskStep._fields):
            state, reward, done, info = result if is_short else (getattr(result, name) for name in TaskStep._fields)
            terminated, truncated = split_done(done, info)
            info = info or {}
        elif isinstance(result, tuple) and len(result) == 5:
            state, reward, terminated, truncated, info = result
        else:
            raise EnvContractError(
                f"step() of {type(self.task).__name__} returned a {type(result).__name__}. Return (observation, "
                "reward, terminated, truncated, info), or observation, reward, done and info, as a tuple or as "
                "parallelenv.tasks.TaskStep."
            )
        if not (terminated or truncated) and self.task.is_done():
            truncated = True
        return state, reward, terminated, truncated, info

    def render(self) -> Any:
        """Return the result of the task's ``render()``; ``None`` if there is no task or the task has no ``render``."""
        render = look_up(self.task, "render")
        return render() if callable(render) else None

    def close(self) -> None:
        """Close the task, then the sampler. The sampler is closed even if the task's ``close`` raises."""
        try:
            self._leave()
        finally:
            _close(self.sampler)

    # ---------------------------------------------------------------- called by TaskPool

    def _observe(self) -> State:
        return None if self.task is None else self.task.get_observations()

    def _rewind(self) -> None:
        self._leave()
        self.sampler.reset()

    def _leave(self) -> None:
        task, self.task = self.task, None
        _close(task)


def make_task_env(make_sampler_fn: Callable[..., TaskSampler], arguments: Mapping[str, object]) -> TaskEnv:
    """Return an env with a new sampler.

    The sampler gets copies of the arguments. It may change the copies; the originals are needed to rebuild the sampler.
    """
    try:
        copies = deep_copy(dict(arguments))
    except Exception as error:
        if signal_behind(error) is not None:
            raise
        raise UnpicklableError(
            f"sampler_fn_args={list(arguments)} cannot be copied ({type(error).__name__}: {error}). Each sampler gets "
            "its own copies. Give plain data, and let make_sampler_fn build other objects from it."
        ) from error
    return TaskEnv(make_sampler_fn(**copies))


def _check(candidate: object, what: str, kind: str, *names: str) -> None:
    missing = [f"{name}()" for name in names if not callable(look_up(candidate, name))]
    shown, lacks = type(candidate).__name__, f"lacks {', '.join(missing)}"
    if isinstance(candidate, type):
        shown, lacks = f"the class {candidate.__name__}", "is not an instance"
    elif not missing:
        return
    raise InvalidEnvError(
        f"{what} {shown}, which {lacks}. A {kind} has {', '.join(f'{name}()' for name in names)}; see "
        f"parallelenv.tasks.sampler_env.{kind}."
    )


def _close(owner: object) -> None:
    close = look_up(owner, "close")
    if callable(close):
        close()
