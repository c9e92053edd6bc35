"""Every exception that this package raises on purpose.

Each derives from `ParallelEnvError` and from the builtin (or Gymnasium) exception that it means, so that existing
``except`` clauses keep working. Exceptions of envs are not defined here: they reach the user with their own type.
"""

from __future__ import annotations

import multiprocessing

import gymnasium.error


class ParallelEnvError(Exception):
    """Base of all errors of this package."""


class ArgumentError(ParallelEnvError, ValueError, TypeError):
    """An argument has an invalid value or type, or is not an option of the chosen backend."""


class IdRangeError(ArgumentError, IndexError):
    """The ``id`` argument names an env that does not exist."""


class ActionError(ArgumentError):
    """The actions have the wrong number, shape or dtype."""


class InvalidEnvError(ArgumentError, RuntimeError):
    """An item of ``envs`` is not an environment, cannot be used as one here, occurs twice, or lacks needed spaces."""


class MissingDependencyError(ParallelEnvError, ImportError):
    """A mode needs a package that is not installed."""


class UsageError(ParallelEnvError, RuntimeError):
    """A call is not possible here: in this thread or process, outside a notebook, on a wrapper, or at this time."""


class ClosedError(ParallelEnvError, gymnasium.error.ClosedEnvironmentError, RuntimeError):
    """A call came after ``close()``."""


class ResetNeededError(ParallelEnvError, gymnasium.error.ResetNeeded):
    """An env was stepped before its first reset, or after its step was lost."""


class EnvBusyError(ParallelEnvError, RuntimeError):
    """An env cannot be stepped now: it has a step whose result was not received, or it is paused."""


class NothingInFlightError(ParallelEnvError, gymnasium.error.NoAsyncCallError, RuntimeError):
    """``recv()`` or a ``..._wait()`` was called while nothing is in flight that it waits for.

    Attributes:
        name: The call that is not in flight: ``"step"``, ``"reset"`` or ``"call"``.
    """

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class PendingCallError(gymnasium.error.AlreadyPendingCallError, EnvBusyError):
    """An adapter was called while another call waits for its ``..._wait()``.

    Attributes:
        name: The pending call: ``"step"``, ``"reset"`` or ``"call"``.
    """


class EnvContractError(ParallelEnvError, TypeError, ValueError):
    """An env returned something that contradicts its spaces or the Gymnasium interface, or a number that is not finite.

    Attributes:
        env_ids: Ids of the envs at fault, if known.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids


class AbsentAttributeError(ParallelEnvError, AttributeError):
    """An env, or a `ParallelEnv` itself, has no such attribute or method."""


class AbsentAttributeWarning(UserWarning):
    """None of the envs has an attribute of this name, but one has a similar name."""


class OldApiWarning(UserWarning):
    """A `gymnasium.Env` follows the API of the old gym, and is used through it. The message gives the consequences."""


class ExhaustedError(ParallelEnvError, RuntimeError):
    """An env has no further episode: its ``reset`` raises this, and the env counts as exhausted.

    Users see it where envs cannot be idle: in a plain Gymnasium loop, and in adapters.
    """


class EnvInterruptedError(ParallelEnvError, RuntimeError):
    """An env was interrupted during a step, in the caller's own process."""


class EnvError(ParallelEnvError, RuntimeError):
    """Replaces an env's exception that cannot be pickled."""


class UnpicklableError(ParallelEnvError, TypeError):
    """Something cannot be copied to or from the process where the env lives."""


class WorkerStartError(ParallelEnvError, OSError):
    """There are not enough processes, memory or resources for a worker or its arrays."""


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
        """Return this error with a message about a call that needed these envs."""
        return WorkerDiedError(str(self), env_ids, self.pid, self.exitcode)


class WorkerTimeoutError(ParallelEnvError, TimeoutError, multiprocessing.TimeoutError):
    """Envs did not finish in time.

    Attributes:
        env_ids: The envs that are still running.
    """

    def __init__(self, message: str, env_ids: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.env_ids = env_ids

    def about(self, env_ids: tuple[int, ...]) -> WorkerTimeoutError:
        """Return the same error, for some of its envs."""
        return WorkerTimeoutError(str(self), env_ids)
