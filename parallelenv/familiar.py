"""Names that other libraries use for what a `ParallelEnv` does, each in a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from parallelenv.contract import arguments, migration_hints
from parallelenv.engine.assemble import Align
from parallelenv.engine.guard import exclusive
from parallelenv.errors import NothingInFlightError
from parallelenv.handover import Adaptable
from parallelenv.results import StepBatch, StepResult

if TYPE_CHECKING:
    from parallelenv.env import ParallelEnv


class Familiar(Adaptable):
    """A `ParallelEnv` with the names that users of other libraries know."""

    def __init__(self) -> None:
        super().__init__()
        self._awaited: Sequence[int] = ()

    @property
    def unwrapped(self) -> ParallelEnv:
        """Itself; of a wrapper around it, the `ParallelEnv`."""
        return cast("ParallelEnv", self)

    @exclusive
    def step_async(self, action: Any, id: Any = None) -> None:
        """Start a step of envs and return without waiting, as `ParallelEnv.send`; `step_wait` gives the results.

        Raises:
            As `ParallelEnv.step`, before anything was sent.
        """
        env_ids = self._ids(id)
        self._stepper.send(action, env_ids)
        self._awaited = env_ids

    @overload
    def step_wait(self, timeout: float | None = None, align: Literal["item"] = "item") -> StepResult: ...
    @overload
    def step_wait(self, timeout: float | None, align: Literal["batch"]) -> StepBatch: ...
    @overload
    def step_wait(self, timeout: float | None = None, *, align: Literal["batch"]) -> StepBatch: ...
    @exclusive
    def step_wait(self, timeout: float | None = None, align: Align = "item") -> StepResult | StepBatch:
        """Wait for all envs of the latest `step_async` and return their results, in the order asked.

        Args:
            timeout: Seconds to wait; ``None`` means the pool's own timeout.
            align: As in `ParallelEnv.step`.

        Returns:
            As `ParallelEnv.step`.

        Raises:
            NothingInFlightError: If there was none, or a `recv` or `reset` since has taken its results.
            WorkerTimeoutError: If they do not come in time. This can be called again.
            BaseException: What an env raised; ``error.partial`` is the others' result.
        """
        arguments.check_align(align)
        limit = arguments.check_timeout(timeout)
        if not self._awaited:
            raise NothingInFlightError("step_wait() was called, but no step is in flight. Call step_async() first.")
        result = self._stepper.finish(self._awaited, limit, align)
        self._awaited = ()
        return result

    if not TYPE_CHECKING:  # to a type checker any name would be there

        def __getattr__(self, name: str) -> Any:
            """Refuse a name that is not there, and say what does the same. No worker is asked.

            Raises:
                AttributeError: Always; an `AbsentAttributeError` if it is no private name.
            """
            if name.startswith("_"):  # probed for by copy, pickle and notebooks
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            if hasattr(type(self), name):  # a property that has raised an AttributeError: that is the one to see
                return object.__getattribute__(self, name)
            raise migration_hints.absent(self, name)

    def get_images(self, id: Any = None) -> list[Any]:
        """Return the frame of each env, as ``render(id)``; ``render(tile=True)`` makes one picture of them."""
        return self.render(id)  # type: ignore[no-any-return]
