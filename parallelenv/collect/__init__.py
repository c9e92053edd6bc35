"""Collectors: they run a policy beside its envs and send the caller whole collections."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallelenv.collect.collector import Collector
    from parallelenv.collect.collector_set import CollectorSet
    from parallelenv.collect.history import History, Record

__all__ = ["Collector", "CollectorSet", "History", "Record"]

# Imported on first access: a worker that holds a collector does not import the set.
_HOMES = {"Collector": "collector", "CollectorSet": "collector_set", "History": "history", "Record": "history"}

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return value
