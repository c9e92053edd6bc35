"""Collectors: they run a policy together with its envs, and return whole collections to the caller."""

from parallelenv.collect.collector import Collector
from parallelenv.collect.collector_set import CollectorSet
from parallelenv.collect.history import History, Record

__all__ = ["Collector", "CollectorSet", "History", "Record"]
