"""Every exception that this package raises on purpose.

Each error derives from `ParallelEnvError` and from the builtin or Gymnasium exception to which it corresponds, so that
existing ``except`` clauses keep working. Exceptions raised by envs reach the user with their own type, except those
that cannot be pickled, and those that are not an `Exception`; see `EnvError`.
"""

from __future__ import annotations

import multiprocessing

import gymnasium.error


class ParallelEnvError(Exception):
    """Base class of all errors raised by this package."""


class ArgumentError(ParallelEnvError, ValueError, TypeError):
    """An argument has an invalid value or type, or is not an option of the chosen backend."""


class IdRangeError(ArgumentError, IndexError):
    """The ``id`` argument names an env that does not exist."""


class ActionError(ArgumentError):
    """The actions do not fit the envs, for example because their number, shape or dtype is wrong."""


class InvalidEnvError(ArgumentError, RuntimeError):
    """An item of ``envs`` is not an environment, cannot be used here, occurs twice, or lacks spaces that are needed."""


class MissingDependencyError(ParallelEnvError, ImportError):
    """A mode or a method needs a package that is not installed."""


class UsageError(ParallelEnvError, RuntimeError):
    """A method was called where it is not allowed, for example in the wrong thread or outside a notebook."""


class ClosedError(ParallelEnvError, gymnasium.error.ClosedEnvironmentError, RuntimeError):
    """A method was called after ``close()``."""


class ResetNeededError(ParallelEnvError, gymnasium.error.ResetNeeded):
    """An env must be reset first, for example because it has never been reset or because its episode was lost."""


class EnvBusyError(ParallelEnvError, RuntimeError):
    """An env cannot be stepped now, because the result of its last call has not been received or the env is paused."""


class NothingInFlightError(ParallelEnvError, gymnasium.error.NoAsyncCallError, RuntimeError):
    """``recv()`` or a ``..._wait()`` method was called, but no call that it could wait for is in flight.

    Attributes:
        name: The call that is not in flight: ``"step"``, ``"reset"`` or ``"call"``.
    """

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class PendingCallError(gymnasium.error.AlreadyPendingCallError, EnvBusyError):
    """An adapter was called while an earlier call was still waiting for its ``..._wait()``.

    Attributes:
        name: The pending call: ``"step"``, ``"reset"`` or ``"call"``.
    """


class EnvContractError(ParallelEnvError, TypeError, ValueError):
    """An env returned a value that contradicts its spaces or the Gymnasium interface, or a number that is not finite.

    Attributes:
        env_ids: Ids of the envs at fault, if known.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class AbsentAttributeError(ParallelEnvError, AttributeError):
    """An env or an object of this package lacks the requested attribute or method."""


class AbsentAttributeWarning(UserWarning):
    """An attribute that none of the envs had was read or set; the first env has an attribute with a similar name."""


class OldApiWarning(UserWarning):
    """A `gymnasium.Env` follows the old gym API and is used through that API. The message states the consequences."""


class ExhaustedError(ParallelEnvError, RuntimeError):
    """An env has no further episode: its ``reset`` raises this error, and the env then counts as exhausted.

    Users see this error only where an exhausted env cannot be idle while the others are stepped: in a plain Gymnasium
    loop, and in adapters.
    """


class EnvInterruptedError(ParallelEnvError, RuntimeError):
    """An env that lives in the caller's process was interrupted during a step or another call."""


class EnvError(ParallelEnvError, RuntimeError):
    """An env or a policy raised an exception in whose place this error is raised.

    The exception either cannot be pickled, or is not an `Exception` and would end the caller's program, as that of
    ``sys.exit()`` would. In the latter case, it is the cause of this error.
    """


class UnpicklableError(ParallelEnvError, TypeError):
    """An object cannot be pickled or unpickled, for example when sent to or from the process where an env lives."""


class WorkerStartError(ParallelEnvError, OSError):
    """A worker could not be started, or the arrays that it needs could not be allocated."""


class WorkerDiedError(ParallelEnvError, RuntimeError):
    """The worker of an env is dead.

    Attributes:
        env_ids: Ids of the worker's envs that the call needed.
        pid: Process id of the worker, if known.
        exitcode: Exit code of the worker, negative for a signal, if known.
    """

    def __init__(
        self, message: str, env_ids: tuple[int, ...] = (), pid: int | None = None, exitcode: int | None = None
    ) -> None:
        super().__init__(message)
        self.env_ids = env_ids
        self.pid = pid
        self.exitcode = exitcode


class WorkerTimeoutError(ParallelEnvError, TimeoutError, multiprocessing.TimeoutError):
    """Envs did not finish in time.

    Attributes:
        env_ids: Ids of the envs that are still running.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids
