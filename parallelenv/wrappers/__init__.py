"""Wrappers around a whole `ParallelEnv`: they process the results of all envs as one batch."""

from parallelenv.engine.env_table import WrappedState
from parallelenv.wrappers.base import ParallelWrapper, StateWrapper
from parallelenv.wrappers.check_finite import CheckFinite
from parallelenv.wrappers.normalize import Normalizer, NormalizeRewards, NormalizeStates, RunningStatistics
from parallelenv.wrappers.record_episode_statistics import RecordEpisodeStatistics
from parallelenv.wrappers.record_video import RecordVideo
from parallelenv.wrappers.stack_states import StackStates

__all__ = [
    "CheckFinite",
    "NormalizeRewards",
    "NormalizeStates",
    "Normalizer",
    "ParallelWrapper",
    "RecordEpisodeStatistics",
    "RecordVideo",
    "RunningStatistics",
    "StackStates",
    "StateWrapper",
    "WrappedState",
]
