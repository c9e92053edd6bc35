"""Collectors, which run a policy in envs and return collections of steps to the caller."""

from parallelenv.collect.collector import Collector, History, Record
from parallelenv.collect.collector_set import CollectorSet

__all__ = ["Collector", "CollectorSet", "History", "Record"]
