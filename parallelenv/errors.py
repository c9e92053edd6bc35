"""Every exception that this package raises on purpose.

Each derives from `ParallelEnvError` and from the builtin (or Gymnasium) exception that it means, so that existing
``except`` clauses keep working. Exceptions of envs are not defined here: they reach the user with their own type.
"""

from __future__ import annotations

import multiprocessing

import gymnasium.error


class ParallelEnvError(Exception):
    """Base of all errors of this package."""


class ArgumentError(ParallelEnvError, ValueError):
    """An argument has an invalid value."""


class UnknownModeError(ArgumentError):
    """``para_mode`` is not a known word."""


class UnknownPolicyError(ArgumentError):
    """``asynchronous`` is not a known word."""


class UnknownOptionError(ParallelEnvError, TypeError):
    """A keyword argument is not an option of the chosen backend."""


class MissingDependencyError(ParallelEnvError, ImportError):
    """A mode needs a package that is not installed."""


class NotebookNeededError(ParallelEnvError, RuntimeError):
    """A call that displays something was made outside of a notebook."""


class NotRecordedError(ParallelEnvError, RuntimeError):
    """A profile was asked for results that are not recorded yet."""


class InvalidEnvError(ParallelEnvError, TypeError):
    """An item of ``envs`` is not an environment, or cannot be used as one here."""


class DuplicateEnvError(InvalidEnvError, ValueError):
    """Two items of ``envs`` are the same instance, or two env fns returned the same one."""


class InvalidIdError(ArgumentError):
    """The ``id`` argument names an env twice, or is a mask of the wrong length."""


class IdRangeError(InvalidIdError, IndexError):
    """The ``id`` argument names an env that does not exist."""


class IdTypeError(InvalidIdError, TypeError):
    """The ``id`` argument is not made of integers, a slice or a mask."""


class ActionError(ArgumentError):
    """The actions have the wrong number, shape or dtype."""


class ActionTypeError(ActionError, TypeError):
    """A single action was given instead of a batch."""


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
    """An adapter was called while another call waits for its ``..._wait()``.

    Attributes:
        name: The pending call: ``"step"``, ``"reset"`` or ``"call"``.
    """


class NoPendingCallError(gymnasium.error.NoAsyncCallError, NothingInFlightError):
    """A ``..._wait()`` of an adapter was called without its ``..._async()``.

    Attributes:
        name: The call that is missing.
    """


class HandedOverError(ParallelEnvError, RuntimeError):
    """A second adapter was made for one `ParallelEnv`; each would need its own rules."""


class MissingMethodError(ParallelEnvError, NotImplementedError):
    """A subclass lacks a method that it must define."""


class WrappedError(ParallelEnvError, RuntimeError):
    """A call would silently bypass a wrapper."""


class NotFiniteError(ParallelEnvError, ValueError):
    """A number is nan or infinite.

    Attributes:
        env_ids: Ids of the envs it came from.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class UnpackingError(ParallelEnvError, ValueError):
    """A result is unpacked into the wrong number of items."""


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
    """None of the envs has an attribute of this name, but one has a similar name."""


class OldApiWarning(UserWarning):
    """A `gymnasium.Env` follows the API of the old gym. It is used that way; the message gives the consequences."""


class AbsentMethodError(ParallelEnvError, AttributeError):
    """An env has no such method, or an attribute of that name is not callable."""


class ExhaustedError(ParallelEnvError, RuntimeError):
    """An env has no further episode: its ``reset`` raises this, and the env counts as exhausted.

    Users see it where envs cannot rest: in a plain Gymnasium loop, and in adapters.
    """


class EnvInterruptedError(ParallelEnvError, RuntimeError):
    """An env was interrupted during a step, in the caller's own process."""


class EnvError(ParallelEnvError, RuntimeError):
    """Replaces an env's exception that cannot be pickled."""


class UnpicklableError(ParallelEnvError, TypeError):
    """Something cannot be copied to or from the process where the env lives."""


class SchedulingError(ParallelEnvError, RuntimeError):
    """The Ray cluster does not have the requested resources."""


class WorkerDiedError(ParallelEnvError, RuntimeError):
    """The worker of an env is dead.

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
    """There is not enough memory for the arrays of all envs."""


class WorkerStartError(ParallelEnvError, OSError):
    """Another worker could not be started."""


class InvalidStateError(ParallelEnvError, ValueError):
    """A saved state does not fit the env that should load it."""


class WorkerTimeoutError(ParallelEnvError, TimeoutError, multiprocessing.TimeoutError):
    """Envs did not finish in time.

    Attributes:
        env_ids: The envs that are still running.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids

    def about(self, env_ids: tuple[int, ...]) -> WorkerTimeoutError:
        """Return the same error for some of its envs."""
        return WorkerTimeoutError(str(self), env_ids)
