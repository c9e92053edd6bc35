"""Run a list of Gymnasium environments in parallel; one word chooses how.

This `ParallelEnv` is neither TorchRL's process pool nor PettingZoo's multi-agent interface.
"""

from typing import TYPE_CHECKING, NoReturn

from parallelenv.adapters.entry_point import vector_entry_point
from parallelenv.choice import Recommendation, recommend
from parallelenv.collect import Collector, CollectorSet
from parallelenv.env import ParallelEnv
from parallelenv.errors import AbsentAttributeError, ParallelEnvError
from parallelenv.evaluation import Evaluation
from parallelenv.results import StepBatch, StepResult
from parallelenv.task_pool import TaskPool
from parallelenv.texts import did_you_mean
from parallelenv.tracebacks import short_tracebacks
from parallelenv.trajectory import Rollout
from parallelenv.turns import CLOSE, RESET, TERMINATED
from parallelenv.whereabouts import WorkerInfo, get_worker_info
from parallelenv.wrappers import ParallelWrapper, StateWrapper

__all__ = [
    "CLOSE",
    "RESET",
    "TERMINATED",
    "Collector",
    "CollectorSet",
    "Evaluation",
    "ParallelEnv",
    "ParallelEnvError",
    "ParallelWrapper",
    "Recommendation",
    "Rollout",
    "StateWrapper",
    "StepBatch",
    "StepResult",
    "TaskPool",
    "WorkerInfo",
    "get_worker_info",
    "recommend",
    "vector_entry_point",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Offer what users need: the submodules hold much that they do not."""
    return [*__all__, "__version__", "errors", "wrappers"]


if not TYPE_CHECKING:  # to a type checker any name would be there

    @short_tracebacks
    def __getattr__(name: str) -> NoReturn:
        raise AbsentAttributeError(f"module 'parallelenv' has no attribute {name!r}.{did_you_mean(name, __all__)}")
