"""Wrappers around a whole `ParallelEnv`: they process the results of all envs as one batch."""

from parallelenv.engine.checkpoint import WrappedState
from parallelenv.wrappers.base import ParallelWrapper
from parallelenv.wrappers.episodes import RecordEpisodeStatistics
from parallelenv.wrappers.finite import CheckFinite
from parallelenv.wrappers.normalize import Normalizer, NormalizeRewards, NormalizeStates
from parallelenv.wrappers.seeing import AnswerWrapper
from parallelenv.wrappers.stack import StackStates
from parallelenv.wrappers.states import StateWrapper
from parallelenv.wrappers.statistics import RunningStatistics
from parallelenv.wrappers.video import RecordVideo

__all__ = [
    "AnswerWrapper",
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
