"""Run a list of Gymnasium environments in parallel; one word chooses how.

This `ParallelEnv` is neither TorchRL's process pool nor PettingZoo's multi-agent interface.
"""

from parallelenv.adapters.entry_point import vector_entry_point
from parallelenv.choice import Recommendation, recommend
from parallelenv.env import ParallelEnv
from parallelenv.errors import ParallelEnvError
from parallelenv.results import StepBatch, StepResult
from parallelenv.task_pool import TaskPool
from parallelenv.trajectory import Rollout
from parallelenv.wrappers import ParallelWrapper, StateWrapper

__all__ = [
    "ParallelEnv",
    "ParallelEnvError",
    "ParallelWrapper",
    "Recommendation",
    "Rollout",
    "StateWrapper",
    "StepBatch",
    "StepResult",
    "TaskPool",
    "recommend",
    "vector_entry_point",
]
__version__ = "0.1.0"
