"""Every exception that this package raises on purpose.

Each derives from `ParallelEnvError` and from the builtin (or Gymnasium) exception it means,
so that existing ``except`` clauses keep working. An environment's own exceptions are not
here: they reach the user with their own type.
"""

from __future__ import annotations

import multiprocessing

import gymnasium.error


class ParallelEnvError(Exception):
    """Base of all errors of this package."""


class ArgumentError(ParallelEnvError, ValueError):
    """An argument has a value that cannot be used."""


class UnknownModeError(ArgumentError):
    """``para_mode`` is no known word."""


class UnknownPolicyError(ArgumentError):
    """``asynchronous`` is no known word."""


class UnknownOptionError(ParallelEnvError, TypeError):
    """A keyword argument is not an option of the chosen backend."""


class MissingDependencyError(ParallelEnvError, ImportError):
    """A mode needs a package that is not installed."""


class NotebookNeededError(ParallelEnvError, RuntimeError):
    """Something is to be shown where there is no notebook to show it in."""


class NotRecordedError(ParallelEnvError, RuntimeError):
    """A profile is asked for what it has not recorded yet."""


class InvalidEnvError(ParallelEnvError, TypeError):
    """Something in ``envs`` is no environment, or cannot be used as one here."""


class DuplicateEnvError(InvalidEnvError, ValueError):
    """Two items of ``envs``, or two env fns, are or have made one and the same instance."""


class InvalidIdError(ArgumentError):
    """The ``id`` argument names an env twice, or is a mask of the wrong length."""


class IdRangeError(InvalidIdError, IndexError):
    """The ``id`` argument names an env that does not exist."""


class IdTypeError(InvalidIdError, TypeError):
    """The ``id`` argument is not made of integers, a slice or a mask."""


class ActionError(ArgumentError):
    """The actions have the wrong number, shape or dtype."""


class ActionTypeError(ActionError, TypeError):
    """A single action was given where a batch of them is expected."""


class ClosedError(ParallelEnvError, gymnasium.error.ClosedEnvironmentError, RuntimeError):
    """A call came after ``close()``."""


class ResetNeededError(ParallelEnvError, gymnasium.error.ResetNeeded):
    """An env was stepped before its first reset, or after its step was lost."""


class EnvBusyError(ParallelEnvError, RuntimeError):
    """An env has a step in flight, or one whose result was not received."""


class EnvPausedError(ParallelEnvError, RuntimeError):
    """A paused env was asked to step."""


class NothingInFlightError(ParallelEnvError, RuntimeError):
    """``recv()`` was called while no step is in flight."""


class PendingCallError(gymnasium.error.AlreadyPendingCallError, EnvBusyError):
    """A call of an adapter came while another one waits for its ``..._wait()``.

    Attributes:
        name: What is waited for: ``"step"``, ``"reset"`` or ``"call"``.
    """


class NoPendingCallError(gymnasium.error.NoAsyncCallError, NothingInFlightError):
    """A ``..._wait()`` of an adapter came without its ``..._async()``.

    Attributes:
        name: What would be waited for.
    """


class HandedOverError(ParallelEnvError, RuntimeError):
    """Two adapters want one `ParallelEnv`, and each its own rules."""


class MissingMethodError(ParallelEnvError, NotImplementedError):
    """A subclass lacks the method that it is there for."""


class WrappedError(ParallelEnvError, RuntimeError):
    """A call would silently go past a wrapper."""


class NotFiniteError(ParallelEnvError, ValueError):
    """A number is nan or infinite.

    Attributes:
        env_ids: Whose it is.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class UnpackingError(ParallelEnvError, ValueError):
    """A result is unpacked into another number of items than it has."""


class SpacesError(ArgumentError, RuntimeError):
    """The envs declare no spaces, or not those that an adapter needs."""


class ConcurrentUseError(ParallelEnvError, RuntimeError):
    """Two threads used one `ParallelEnv` at the same time."""


class ForkedError(ParallelEnvError, RuntimeError):
    """A `ParallelEnv` was used in a process forked from the one that made it."""


class EnvContractError(ParallelEnvError, TypeError):
    """An env returned something that contradicts its spaces or the Gymnasium interface."""


class AbsentAttributeError(ParallelEnvError, AttributeError):
    """An env, or a `ParallelEnv` itself, has no such attribute."""


class AbsentAttributeWarning(UserWarning):
    """No env that was asked has an attribute of this name, but one of a similar name."""


class OldApiWarning(UserWarning):
    """A `gymnasium.Env` does as envs of the old gym did. It is used so, and this says what that means."""


class AbsentMethodError(ParallelEnvError, AttributeError):
    """An env has no such method, or what has that name cannot be called."""


class ExhaustedError(ParallelEnvError, RuntimeError):
    """An env has no further episode: its ``reset`` raises this, and the env counts as exhausted.

    Users meet it where nobody may rest: in a plain Gymnasium loop, and in adapters.
    """


class EnvInterruptedError(ParallelEnvError, RuntimeError):
    """An env was interrupted in the middle of a step, in the caller's own process."""


class EnvError(ParallelEnvError, RuntimeError):
    """Stands for an env's exception that cannot travel between processes."""


class UnpicklableError(ParallelEnvError, TypeError):
    """Something cannot be copied to or from the process where the env lives."""


class SchedulingError(ParallelEnvError, RuntimeError):
    """The Ray cluster cannot give what was asked for."""


class WorkerDiedError(ParallelEnvError, RuntimeError):
    """The worker that owns an env is dead.

    Attributes:
        env_ids: The envs that it owned and that the call needed.
        pid: Process id of the worker, if known.
        exitcode: Its exit code, negative for a signal, if known.
    """

    def __init__(
        self, message: str, env_ids: tuple[int, ...] = (), pid: int | None = None, exitcode: int | None = None
    ) -> None:
        super().__init__(message)
        self.env_ids = env_ids
        self.pid = pid
        self.exitcode = exitcode

    def about(self, env_ids: tuple[int, ...]) -> WorkerDiedError:
        """Return the same error for a call that needed these envs."""
        return WorkerDiedError(str(self), env_ids, self.pid, self.exitcode)


class BatchMemoryError(ParallelEnvError, MemoryError):
    """There is no room for the arrays of all envs."""


class WorkerStartError(ParallelEnvError, OSError):
    """The system does not let another worker start."""


class InvalidStateError(ParallelEnvError, ValueError):
    """A saved state does not fit the env that is to take it."""


class WorkerTimeoutError(ParallelEnvError, TimeoutError, multiprocessing.TimeoutError):
    """Envs did not answer in time.

    Attributes:
        env_ids: The envs that are still running.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids

    def about(self, env_ids: tuple[int, ...]) -> WorkerTimeoutError:
        """Return the same error for some of its envs."""
        return WorkerTimeoutError(str(self), env_ids)
