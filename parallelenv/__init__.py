"""Run a list of Gymnasium environments in parallel; `para_mode` selects how.

The `ParallelEnv` of this package is neither TorchRL's process pool nor PettingZoo's multi-agent interface.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelenv.adapters.gymnasium import vector_entry_point
    from parallelenv.autotune.recommend import Recommendation, recommend
    from parallelenv.collect.collector import Collector
    from parallelenv.collect.collector_set import CollectorSet
    from parallelenv.contract.worker_info import WorkerInfo, get_worker_info
    from parallelenv.env import ParallelEnv
    from parallelenv.errors import ParallelEnvError
    from parallelenv.results import StepBatch, StepResult
    from parallelenv.rollouts.evaluation import Evaluation
    from parallelenv.rollouts.rollout import Rollout
    from parallelenv.rollouts.stream import CLOSE, RESET, TERMINATED
    from parallelenv.tasks.task_pool import TaskPool
    from parallelenv.wrappers import ParallelWrapper, StateWrapper

__version__ = "0.1.0"
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

# The modules of these names are imported on first access. A worker process needs none of the names, so it imports none
# of these modules.
_HOMES = {
    "CLOSE": "rollouts.stream",
    "RESET": "rollouts.stream",
    "TERMINATED": "rollouts.stream",
    "Collector": "collect.collector",
    "CollectorSet": "collect.collector_set",
    "Evaluation": "rollouts.evaluation",
    "ParallelEnv": "env",
    "ParallelEnvError": "errors",
    "ParallelWrapper": "wrappers",
    "Recommendation": "autotune.recommend",
    "Rollout": "rollouts.rollout",
    "StateWrapper": "wrappers",
    "StepBatch": "results",
    "StepResult": "results",
    "TaskPool": "tasks.task_pool",
    "WorkerInfo": "contract.worker_info",
    "get_worker_info": "contract.worker_info",
    "recommend": "autotune.recommend",
    "vector_entry_point": "adapters.gymnasium",
}
_SUBMODULES = ("errors", "wrappers")


def __dir__() -> list[str]:
    """Return only the names that users need, without imports and internal submodules."""
    return [*__all__, "__version__", *_SUBMODULES]


if not TYPE_CHECKING:  # a type checker would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return import_module(f"parallelenv.{name}")
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"parallelenv.{_HOMES[name]}"), name)
            return value
        from parallelenv import errors
        from parallelenv.contract import error_text, tracebacks

        try:
            hint = error_text.did_you_mean(name, __all__)
            raise errors.AbsentAttributeError(f"module 'parallelenv' has no attribute {name!r}.{hint}")
        except errors.AbsentAttributeError as error:
            tracebacks.shorten(error)
            raise  # this adds no frame
