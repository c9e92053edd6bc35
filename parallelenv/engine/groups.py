"""The vector envs of a pool: which env ids belong to each of them, and which operations each does not support.

The sub-envs of a vector env form a *group*. They have consecutive env ids and live in the same worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from parallelenv.contract.error_text import list_ids
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import GroupFacts
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.errors import ArgumentError, InvalidEnvError

_FOR_ALL = {
    "reset": "which can only be reset as a whole",
    "step": "which can only step as a whole",
    "set": "whose attributes can only be set for all of its envs",
    "call": "whose methods can only be called for all of its envs",
    "load": "which can only be loaded as a whole",
}
"""Operations that many vector envs support only for all of their sub-envs at once, with a clause for error messages."""


class Groups:
    """The groups of a pool.

    Args:
        facts: For each item in the user's list, the facts about it if it is a vector env, or ``None`` if it is a single
            env. Empty if no item is a vector env.
    """

    def __init__(self, facts: Iterable[GroupFacts | None]) -> None:
        self._groups: dict[range, GroupFacts] = {}
        self._group_of: dict[int, range] = {}
        self._items: list[int] = []  # index in the user's list, by env id
        for item, one in enumerate(facts):
            first = len(self._items)
            env_ids = range(first, first + (1 if one is None else one.num_envs))
            if one is not None:
                self._groups[env_ids] = one
                self._group_of.update(dict.fromkeys(env_ids, env_ids))
            self._items += [item] * len(env_ids)

    def item(self, env_id: int) -> int:
        """Return the index of this env's item in the user's list."""
        return self._items[env_id] if self._items else env_id

    def facts(self, env_ids: Iterable[int]) -> list[GroupFacts | None] | None:
        """Return the facts about each env's group (``None`` for a single env), or ``None`` if there are no groups."""
        if not self._groups:
            return None
        return [self._groups.get(self._group_of.get(env_id, range(0))) for env_id in env_ids]

    def complete(self, env_ids: Iterable[int]) -> list[int]:
        """Return the ids of these envs and of all other envs of their groups, in ascending order."""
        chosen = set(env_ids)
        return sorted(chosen.union(*(self._group_of.get(env_id, ()) for env_id in chosen)))

    def spread(self, failures: dict[int, Failure], env_ids: Iterable[int]) -> None:
        """Add to ``failures`` each env in ``env_ids`` whose group contains an env that failed."""
        if not self._groups:
            return
        of_group = {self._group_of[env_id]: one for env_id, one in failures.items() if env_id in self._group_of}
        for env_id in env_ids if of_group else ():
            one = of_group.get(self._group_of.get(env_id, range(0)))
            if one is not None and env_id not in failures:
                failures[env_id] = Failure(one.exception, env_id, one.operation)

    def fitting_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> list[int | None]:
        """Return ``seeds``, but replace seeds that the envs cannot use.

        If a group accepts only one seed for all its envs, the first env's seed is kept, and the seeds of the others are
        derived from it.
        """
        first = dict(zip(env_ids, seeds, strict=True))
        fitting = list(seeds)
        for place, env_id in enumerate(env_ids):
            whole = self._group_of.get(env_id, range(0))
            if whole and not self._groups[whole].seeds_each:
                seed = first.get(whole.start)
                fitting[place] = None if seed is None else seed + env_id - whole.start
        return fitting

    def refuse_seeds(self, env_ids: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Raise an `ArgumentError` if envs get separate seeds but their vector env accepts only one seed for all."""
        given = {env_id: seed for env_id, seed in zip(env_ids, seeds, strict=True) if seed is not None}
        for whole in self._groups if given else ():
            own = [given.get(env_id) for env_id in whole]
            if any(seed is not None for seed in own) and own != self.fitting_seeds(whole, own):
                raise ArgumentError(
                    f"envs {list_ids(whole)} are one vector env, {self._groups[whole].name}, which takes one seed for "
                    "all of its envs. Reset all of them, with an int as seed."
                )

    def refuse_cut(
        self, operation: str, env_ids: Sequence[int], each: Sequence[Any] | None = None, common: Any = None
    ) -> None:
        """Raise an `ArgumentError` if some envs of a group are left out of an operation that needs the whole group."""
        if not self._groups:
            return
        what = str(common) if operation == "manage" else operation
        if what not in _FOR_ALL or (what == "call" and {call.name for call in each or (common,)} == {"render"}):
            return
        for whole, part in self._cut(env_ids).items():
            if not self._groups[whole].does_for_some(what):
                raise self._error_of_cut(whole, part, _FOR_ALL[what])

    def refuse_running(self, env_ids: Iterable[int], is_running: Callable[[int], bool]) -> None:
        """Raise an `ArgumentError` if a step leaves out running envs of a group that can only step them all together.

        ``is_running`` tells whether an env is in an episode.
        """
        if not self._groups:
            return
        for whole, part in self._cut(env_ids).items():
            if not self._groups[whole].steps_some and any(map(is_running, set(whole).difference(part))):
                raise self._error_of_cut(whole, part, "which steps all that have an episode")

    def _cut(self, env_ids: Iterable[int]) -> dict[range, list[int]]:
        """Return the envs in ``env_ids`` that belong to a group, by group.

        Groups whose envs are all in ``env_ids`` are left out.
        """
        chosen: dict[range, list[int]] = {}
        for env_id in env_ids:
            if env_id in self._group_of:
                chosen.setdefault(self._group_of[env_id], []).append(env_id)
        return {whole: part for whole, part in chosen.items() if len(part) < len(whole)}

    def _error_of_cut(self, whole: range, part: Sequence[int], why: str) -> ArgumentError:
        return ArgumentError(
            f"envs {list_ids(part)} are a part of one vector env, {self._groups[whole].name}, of envs "
            f"{list_ids(whole)}, {why}. Give id=range({whole.start}, {whole.stop}), and pause none of them."
        )

    def refuse_resting(self, call: str, env_ids: Iterable[int], *, autoreset: bool = False) -> None:
        """Raise an `ArgumentError` if one of the envs belongs to a vector env that cannot step without that env.

        ``call`` is the name of the user's call, for the message. During this call, an env that has played its episodes
        rests: it is not stepped any more. ``autoreset`` tells whether such an env has already started another episode.
        """
        if not self._groups:
            return
        for env_id in env_ids:
            whole = self._group_of.get(env_id, range(0))
            facts = self._groups.get(whole)
            if facts is not None and len(whole) > 1 and not (facts.steps_some or (facts.steps_ended and not autoreset)):
                raise ArgumentError(
                    f"envs {list_ids(whole)} are one vector env, {facts.name}, which steps only as a "
                    f"whole, but in {call} each env rests when it has played its episodes. Use rollout(policy, "
                    "num_steps), or give the envs one by one."
                )

    def refuse_policy(self, policy: DonePolicy, env_ids: Sequence[int] | None = None) -> None:
        """Raise an `InvalidEnvError` if a vector env does not fit a done policy."""
        chosen = None if env_ids is None else set(env_ids)
        for whole, facts in self._groups.items():
            lack = _lack(facts, policy)
            if lack and (chosen is None or not chosen.isdisjoint(whole)):
                mode = f"{facts.autoreset}{' (assumed: its metadata has none)' if facts.is_assumed else ''}"
                raise InvalidEnvError(
                    f"envs {list_ids(whole)} are one vector env, {facts.name}, whose autoreset mode is {mode}: "
                    f"{lack}. So it does not fit {policy.name} ({policy.after_end}). Choose another autoreset_mode or "
                    "another done policy: the page on vector envs lists what fits."
                )


def _lack(facts: GroupFacts, policy: DonePolicy) -> str:
    """Return a clause that tells why a vector env does not fit a done policy, or an empty string if it fits."""
    if policy.autoreset:
        if facts.autoreset == "SameStep" or facts.resets_some:
            return ""
        return (
            "it cannot start an episode of only some of its envs, because it lacks options['reset_mask'] (make_vec() "
            "makes one that has it with vectorization_mode='sync')"
        )
    if facts.autoreset == "SameStep":
        return "it starts the next episode within the step that ends one"
    if policy.resets_next:
        return "" if facts.autoreset == "NextStep" else "it does not start the next episode by itself"
    if policy.skips_done and not policy.is_shared:
        can = facts.steps_some or facts.steps_ended
        return "" if can else "it cannot step without those of its envs that ended"
    return ""
