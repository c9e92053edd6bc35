"""Collectors, which run a policy in envs and return collections of steps to the caller."""

from parallelenv.collect.collector import Collector
from parallelenv.collect.collector_set import CollectorSet
from parallelenv.collect.history import History, Record

__all__ = ["Collector", "CollectorSet", "History", "Record"]
