"""Samplers of tasks as envs: an episode is a task.

A sampler gives one task after the other, until it has no more. `TaskEnv` makes a real `gymnasium.Env` of it, so that
nothing else need know of tasks. That there are no more is an `ExhaustedError` of its ``reset``, as of any env's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import gymnasium

from parallelenv.contract.copying import deep_copy
from parallelenv.errors import EnvContractError, ExhaustedError, InvalidEnvError, ResetNeededError, UnpicklableError
from parallelenv.worker.env_adapter import split_done

_OF_SAMPLER = ("next_task", "reset", "set_seed")
_OF_TASK = ("step", "is_done", "get_observations")


class TaskStep(NamedTuple):
    """What a task's ``step`` may return; anything with these four attributes will do.

    Attributes:
        observation: What is seen after the step.
        reward: Of the step.
        done: Whether the task is over. It was cut off if ``info`` has a true ``"TimeLimit.truncated"``.
        info: What else is to be said.
    """

    observation: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class Task(Protocol):
    """One episode. Inherit from it to have `render` and `close`, or have methods of these names; any others too."""

    def step(self, action: Any) -> Any:
        """Make a step.

        Returns:
            What Gymnasium has: ``(observation, reward, terminated, truncated, info)``; something like `TaskStep`; or
            the same four as a plain tuple.
        """
        ...

    def is_done(self) -> bool:
        """Whether the task is over. If its ``step`` has not said so, it counts as cut off, as by a limit of steps."""
        ...

    def get_observations(self) -> Any:
        """Return what is seen now. It does not change the task."""
        ...

    def render(self) -> Any:
        """Return a frame; ``None`` by default."""
        return None

    def close(self) -> None:
        """Let go of what belongs to this task alone. Called before the next task is asked for, and at the end."""
        return


class TaskSampler(Protocol):
    """Gives tasks. Inherit from it for the defaults, or have the methods; any others too.

    Attributes:
        observation_space: A Gymnasium space, of all of its tasks; ``None``: not declared.
        action_space: Likewise.
        length: Number of tasks in all; ``None`` or ``math.inf``: there is no end. Nobody but users asks for it.
    """

    observation_space: Any = None  # Any: a sampler may declare them more narrowly
    action_space: Any = None
    length: Any = None

    def next_task(self, **kwargs: Any) -> Task | None:
        """Return the next task, ``None`` if there are no more. ``kwargs`` are the options of the reset."""
        ...

    def reset(self) -> None:
        """Go back to the first task. The random generator stays as it is."""
        ...

    def set_seed(self, seed: int) -> None:
        """Seed the random generator."""
        ...

    def close(self) -> None:
        """Let go of what the tasks share. Called at the end."""
        return


class TaskEnv(gymnasium.Env[Any, Any]):
    """A sampler as an env: ``reset`` begins its next task.

    Names of attributes and methods that it has not are looked up in the task and then in the sampler, when they are
    asked for by `ParallelEnv.call`, `get_env_attr` and the like.

    Args:
        sampler: A `TaskSampler`, for this env alone. Its ``render_mode`` and ``metadata``, if any, are the env's.

    Attributes:
        sampler: As given.
        task: The latest task; ``None`` before the first and when there are no more.

    Raises:
        InvalidEnvError: If it lacks a method of a `TaskSampler`.
    """

    def __init__(self, sampler: TaskSampler) -> None:
        _check(sampler, _OF_SAMPLER, "The sampler is", "TaskSampler")
        self.sampler = sampler
        self.task: Task | None = None
        self.render_mode = getattr(sampler, "render_mode", None)
        self.metadata = dict(getattr(sampler, "metadata", None) or self.metadata)
        for name in ("observation_space", "action_space"):
            if getattr(sampler, name, None) is not None:
                setattr(self, name, getattr(sampler, name))

    def attribute_owners(self) -> tuple[Any, ...]:
        """Return the objects in which names that this env does not have are looked up, in this order."""
        return self.task, self.sampler

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next task.

        Args:
            seed: Goes to ``set_seed`` of the sampler; ``None``: it goes on.
            options: Keyword arguments of its ``next_task``.

        Returns:
            What is seen first, and an empty info.

        Raises:
            ExhaustedError: If there is none.
            InvalidEnvError: If it lacks a method of a `Task`.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.sampler.set_seed(seed)
        self._leave()
        task = self.sampler.next_task(**(options or {}))
        if task is None:
            raise ExhaustedError(f"{type(self.sampler).__name__} has no further task. Call its reset() to begin again.")
        _check(task, _OF_TASK, f"next_task() of {type(self.sampler).__name__} returned", "Task")
        self.task = task
        return task.get_observations(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the task.

        Raises:
            ResetNeededError: If there is no task.
            EnvContractError: If it returns neither five or four items nor something like `TaskStep`.
        """
        if self.task is None:
            raise ResetNeededError("There is no task to step. Call reset() first.")
        state, reward, terminated, truncated, info = _five(self.task, self.task.step(action))
        if not (terminated or truncated) and self.task.is_done():
            truncated = True
        return state, reward, terminated, truncated, info

    def render(self) -> Any:
        """Return what the task's ``render()`` does; ``None`` if it has none or there is no task."""
        render = getattr(self.task, "render", None)
        return render() if callable(render) else None

    def close(self) -> None:
        """Close the task and the sampler, whatever the task's ``close`` raises."""
        try:
            self._leave()
        finally:
            _close(self.sampler)

    # ---------------------------------------------------------------- what a TaskPool asks for

    def _observe(self) -> Any:
        """Return what is seen of the task now; ``None`` if there is none."""
        return None if self.task is None else self.task.get_observations()

    def _rewind(self) -> None:
        """Leave the task, and let the sampler go back to its first one."""
        self._leave()
        self.sampler.reset()

    def _reseed(self, seed: int) -> None:
        """Seed the sampler."""
        self.sampler.set_seed(seed)

    def _leave(self) -> None:
        task, self.task = self.task, None
        _close(task)


def make_task_env(make_sampler_fn: Callable[..., Any], arguments: Mapping[str, Any]) -> TaskEnv:
    """Return an env of a new sampler. It gets copies of the arguments: it may change them, and be made again.

    Raises:
        UnpicklableError: If one cannot be copied.
    """
    try:
        copies = deep_copy(dict(arguments))
    except Exception as error:
        raise UnpicklableError(
            f"sampler_fn_args={list(arguments)} cannot be copied ({type(error).__name__}: {error}). Each sampler gets "
            "copies, to change and to be made again with. Give plain data, and let make_sampler_fn make the rest of it."
        ) from error
    return TaskEnv(make_sampler_fn(**copies))


def _check(candidate: Any, names: tuple[str, ...], what: str, kind: str) -> None:
    missing = [name for name in names if not callable(getattr(candidate, name, None))]
    if missing or isinstance(candidate, type):
        is_class = isinstance(candidate, type)
        shown = f"the class {candidate.__name__}" if is_class else type(candidate).__name__
        lacks = "is no instance" if is_class else f"lacks {_listed(missing)}"
        raise InvalidEnvError(
            f"{what} {shown}, which {lacks}. A {kind} has {_listed(names)}; see parallelenv.tasks.sampler_env.{kind}."
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name}()" for name in names)


def _five(task: Task, result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return what a task's ``step`` returned as Gymnasium has it."""
    if all(hasattr(result, name) for name in TaskStep._fields):
        terminated, truncated = split_done(result.done, result.info)
        return result.observation, result.reward, terminated, truncated, result.info or {}
    if isinstance(result, tuple) and len(result) == 5:
        return result
    if isinstance(result, tuple) and len(result) == 4:
        state, reward, done, info = result
        return state, reward, *split_done(done, info), info
    raise EnvContractError(
        f"step() of {type(task).__name__} returned a {type(result).__name__}. Return (observation, reward, terminated, "
        "truncated, info), or observation, reward, done and info, as a tuple or as parallelenv.tasks.TaskStep."
    )


def _close(owner: Any) -> None:
    close = getattr(owner, "close", None)
    if callable(close):
        close()
