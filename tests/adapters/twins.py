"""Pairs of vector envs that get the same calls and must return the same results, bit for bit."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

from parallelenv.results import difference


class Twins:
    """An adapter, or a wrapper around it, and the same of the vector env that it replaces.

    Each method is called on both, with arguments of its own, since some wrappers write into them.
    """

    def __init__(self, ours: Any, theirs: Any) -> None:
        self.ours = ours
        self.theirs = theirs

    def __getattr__(self, name: str) -> Any:
        def both(*args: Any, **kwargs: Any) -> Any:
            given = copy.deepcopy((args, kwargs))
            ours, theirs = getattr(self.ours, name)(*args, **kwargs), getattr(self.theirs, name)(*given[0], **given[1])
            compare(comparable(ours), comparable(theirs))
            return ours

        return both

    def same(self, *names: str) -> None:
        """Fail if an attribute differs."""
        for name in names:
            compare(*map(attrgetter(name), (self.ours, self.theirs)))


def compare(ours: Any, theirs: Any) -> None:
    """Fail if two results differ."""
    assert difference(ours, theirs) is None, difference(ours, theirs)


def comparable(answer: Any) -> Any:
    """Return a result without the durations of episodes, which differ in every run, and with plain dicts."""
    if not isinstance(answer, tuple):
        return dict(answer) if isinstance(answer, dict) else answer
    infos = answer[-1] if isinstance(answer[-1], list) else [answer[-1]]
    for info in infos:
        if isinstance(info, dict):
            info.get("episode", {}).pop("t", None)
    return tuple(dict(part) if isinstance(part, dict) else part for part in answer)
