"""Policies beside the envs: what they collect comes to the caller in large pieces."""

from parallelenv.collect.collector import Collector
from parallelenv.collect.collector_set import CollectorSet
from parallelenv.collect.history import History, Record

__all__ = ["Collector", "CollectorSet", "History", "Record"]
