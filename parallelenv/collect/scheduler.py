"""The scheduler of a set of collectors: their requests, their settings and their results."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.collect.collector import Info
from parallelenv.collect.collector_env import CollectRequest, PackedCollection
from parallelenv.collect.concat import are_of_one_kind, join_in_time
from parallelenv.collect.unsent_samples import UNKNOWN, UnsentSamples
from parallelenv.contract.batch import Array
from parallelenv.contract.broadcast import Broadcast
from parallelenv.contract.failures import raise_failures
from parallelenv.contract.protocol import MethodCall
from parallelenv.engine.recovery import Budget
from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvInterruptedError, WorkerTimeoutError
from parallelenv.rollouts.trajectory import Rollout

Received = list[tuple[int, PackedCollection]]


class CollectorHandles:
    """Collectors, each an env of a `ParallelEnv`. Nothing is sent to a busy one.

    Args:
        env: The collectors.
        unsent: Their counts of samples made and not sent.
        max_restarts: How often one collector is replaced within ten minutes.
        seed: Seed of the set; replacements get seeds derived from it.

    Attributes:
        env: The collectors.
        sizes: Number of envs of each.
        num_replaced: How often a collector was replaced.
    """

    def __init__(self, env: ParallelEnv, unsent: UnsentSamples, max_restarts: int, seed: int | None) -> None:
        self.env = env
        self._unsent = unsent
        env.reset()
        self.sizes: list[int] = env.get_env_attr("num_envs")
        self._lost, self._is_exact = 0, True
        self.num_replaced = 0
        self._seed = seed
        self._budget = Budget(max_restarts)
        self._orders: dict[int, CollectRequest] = {}
        self._idle: dict[int, None] = dict.fromkeys(range(len(env)))  # a dict for its order: idle longest first
        self._news: dict[str, Broadcast] = {}  # current settings of all collectors, by subject
        self._known: list[dict[str, Broadcast]] = [{} for _ in self.sizes]
        self._received: Received = []
        self._new: set[int] = set()  # replacements that have not begun

    @property
    def idle(self) -> list[int]:
        """Idle collectors whose collections were all received, idle longest first."""
        unseen = {rank for rank, _ in self._received}
        return [rank for rank in self._idle if rank not in unseen]

    @property
    def busy(self) -> list[int]:
        """Collectors with a request in flight, or with a collection not yet received."""
        return [*self._orders, *(rank for rank, _ in self._received)]

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to receive or to wait for."""
        return bool(self._orders or self._received)

    # ---------------------------------------------------------------- settings

    def announce(self, subject: str, broadcast: Broadcast, outdates: Sequence[str] = ()) -> None:
        """Send a setting to all collectors: busy ones get it before their next ticket, replacements when they begin.

        Args:
            subject: Subject of the setting. It replaces an earlier one of the same subject.
            broadcast: The call that applies it.
            outdates: Prefixes of subjects whose settings are no longer valid.

        Raises:
            KeyboardInterrupt: `is_known` tells whether it was announced all the same. Some collectors may have it
                already; the others get it before their next ticket.
            WorkerTimeoutError: If a collector takes too long to apply it. As after Ctrl-C.
            BaseException: What the first failing collector raised. The former settings are valid again.
        """
        kept = {name: news for name, news in self._news.items() if not name.startswith(tuple(outdates))}
        kept.pop(subject, None)
        before, self._news = self._news, {**kept, subject: broadcast}
        try:
            self._catch_up(self.idle)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt | WorkerTimeoutError) or not self.is_known(broadcast):
                self._news = before
            raise

    def is_known(self, broadcast: Broadcast) -> bool:
        """Return whether a setting was announced, even if not to all."""
        return any(one is broadcast for one in self._news.values())

    def _catch_up(self, ranks: Sequence[int]) -> None:
        """Send collectors the settings that they do not have yet."""
        while dead := self._dead(ranks):
            self._replace(dead[0])
        self._begin_new()
        for subject, broadcast in list(self._news.items()):
            behind = [rank for rank in ranks if self._known[rank].get(subject) is not broadcast]
            if behind:
                self._tell(subject, broadcast, behind)

    def _tell(self, subject: str, broadcast: Broadcast, ranks: Sequence[int]) -> None:
        pool, late = self.env.engine.pool, None
        ticket = pool.submit("call", ranks, None, broadcast)
        try:
            pool.wait(ticket, self.env.engine.timeout)
        except WorkerTimeoutError as error:
            late = _late(error)
        for rank in ranks:
            if rank not in ticket.failures:  # a late one applies it before anything sent later
                self._known[rank][subject] = broadcast
        lost = {rank for rank, failure in ticket.failures.items() if failure.is_of_worker}
        refused = [failure for rank, failure in sorted(ticket.failures.items()) if rank not in lost]
        if refused:
            self._news.pop(subject)  # otherwise every later request would fail on it
        raise_failures(refused[:1], None)  # all got the same call, so the errors are mostly the same
        if late is not None:
            raise late
        if lost:
            self._catch_up(ranks)

    # ---------------------------------------------------------------- requests

    def order(self, orders: Mapping[int, CollectRequest]) -> None:
        """Send requests to idle collectors, all at once, so that the workers of a node begin and answer together."""
        ranks = list(orders)
        self._catch_up(ranks)
        self.env.send(list(orders.values()), ranks)
        self._orders.update(orders)
        for rank in ranks:
            self._idle.pop(rank, None)

    def receive(self) -> Received:
        """Wait until a collector has sent something, and return all collections received, in order.

        If a collector has died, the list may be empty.

        Raises:
            BaseException: What a collector raised. Collections of others are kept for the next call.
        """
        while self._orders and (not self._received or self.env.engine.table.arrived):
            if not self._receive_one():
                break
        received, self._received = self._received, []
        return received

    def _receive_one(self) -> bool:
        """Wait for the next answer; return whether it is a collection."""
        try:
            batch = self.env.recv(1, 1, align="batch")
        except BaseException as error:
            failed = sorted(set(self._orders).difference(self.env.engine.under_way))
            # The error's type does not tell: a collector may raise because an env of its own has died.
            if dead := self._dead(failed):
                self._replace(dead[0])
                return False
            if failed and self._has_broken_off(error, failed):
                return False
            if isinstance(error, WorkerTimeoutError) and not failed:
                raise _late(error) from None
            raise
        rank = int(batch.env_ids[0])
        self._rest([rank])
        self._unsent.take(rank)
        collection: PackedCollection = batch[0][0]
        self.sizes[rank] = collection.num_envs
        self._received += [(rank, one) for one in (*collection.before, collection)]
        return True

    def _has_broken_off(self, error: BaseException, ranks: Sequence[int]) -> bool:
        """Make failed collectors usable again; return whether it was only an interrupt, which the user knows of."""
        is_known = isinstance(error, EnvInterruptedError)
        if is_known:
            self._count_loss(ranks)
        else:
            self._rest(ranks)
            error.add_note(f"It was raised in collector {', '.join(map(str, ranks))}, which is an env of its set.")
        self.env.reset(ranks)
        return is_known

    def _rest(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._orders.pop(rank, None)
            self._idle[rank] = None

    def ask(self, method: str, orders: Mapping[int, Mapping[str, Any]]) -> list[Any]:
        """Return the results of a method of idle collectors, in order. One that dies is replaced and asked again.

        Args:
            method: Name of the method.
            orders: Keyword arguments, by collector.

        Raises:
            BaseException: What a collector raised, or the error of one that died too often.
        """
        answers: dict[int, Any] = {}
        while left := [rank for rank in orders if rank not in answers]:
            self._catch_up(left)
            try:
                ticket = self.env.engine.pool.try_asking(
                    "call", left, [MethodCall(method, (), orders[rank]) for rank in left]
                )
            except WorkerTimeoutError as error:
                raise _late(error) from None
            answers.update(ticket.values)
            failed = [failure for _, failure in sorted(ticket.failures.items()) if not failure.is_of_worker]
            raise_failures(failed, None)
        return [answers[rank] for rank in orders]

    # ---------------------------------------------------------------- replacements

    def _dead(self, ranks: Sequence[int]) -> list[int]:
        return list(self.env.engine.pool.death_errors(ranks))

    def _replace(self, rank: int) -> None:
        """Replace a dead collector, and those that died with it.

        Raises:
            WorkerDiedError: If that has happened too often.
        """
        denied, delay = self._budget.spend([rank])
        self._count_loss([rank])
        if denied:
            raise _given_up(self.env.engine.pool.death_errors([rank])[rank].exception, rank)
        time.sleep(delay)
        self._new.update(self._dead(range(len(self.sizes))))  # an interrupt may come before `restart` returns
        replaced = self.env.restart([rank])
        self._new.update(replaced)
        self._count_loss(replaced)
        self._begin_new()

    def _begin_new(self) -> None:
        """Reset replacements, which have no settings yet."""
        new = sorted(self._new.difference(self._dead(range(len(self.sizes)))))
        if not new:
            return
        for rank in new:
            self._known[rank] = {}
            self._unsent.samples[rank] = UNKNOWN
        seeds = [self._next_seed(rank) for rank in new]
        self.env.reset(new, seed=seeds)
        self._new.difference_update(new)
        self.num_replaced += len(new)

    def _count_loss(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            number = self._unsent.take(rank)
            if number is None and rank in self._orders:
                number, self._is_exact = self._orders[rank].num_steps * self.sizes[rank], False
            self._lost += number or 0
        self._rest(ranks)

    def take_loss(self) -> dict[str, Any]:
        """Return the info entries on samples lost since the last call."""
        loss = {"lost_exactly": self._is_exact, "lost_samples": self._lost}
        self._lost, self._is_exact = 0, True
        return loss

    def _next_seed(self, rank: int) -> int | None:
        if self._seed is None:
            return None
        key = (rank, self.num_replaced + 1)
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])


def _late(error: WorkerTimeoutError) -> WorkerTimeoutError:
    """Return the error to raise if collectors do not answer in time, with advice for collectors instead of envs."""
    fact = str(error).partition(". ")[0].replace("env", "collector", 1)
    return WorkerTimeoutError(
        f"{fact}. The next call of the set waits on. Give a longer timeout if it is only slow; stop() ends what hangs.",
        error.env_ids,
    )


def _given_up(error: BaseException, rank: int) -> BaseException:
    error.add_note(
        f"It was collector {rank} of a set, which has died more often within ten minutes than max_restarts allows. "
        "Look into why, and make a new set."
    )
    return error


_SLICE = 0.5
"""Seconds after which a collector sends its steps and continues. A dead one loses about as much."""
_QUICK_SLICE = 0.05
"""The same if others may have to wait for it to stop."""
_FIRST = 16
"""Steps of a collector's first slice, when its speed is not known yet."""


class Scheduler:
    """Makes the collectors of a set work in slices.

    Args:
        handles: The collectors.
        collections: Store of received collections.
        fraction: Once this fraction of the collectors has finished, the others stop.

    Attributes:
        fraction: The same.
        enough: That fraction as a number of collectors.
    """

    def __init__(self, handles: CollectorHandles, collections: ReceivedCollections, fraction: float) -> None:
        self.fraction = fraction
        self._handles, self._collections = handles, collections
        # Rounded, as 0.07 * 100 is 7.000000000000001 and would need one collector more.
        self.enough = math.ceil(round(fraction * len(handles.sizes), 9))
        self._paces = [0.0] * len(handles.sizes)  # latest steps per second of each

    def work(
        self, goals: Sequence[int], is_quick: bool, is_over: Callable[[], bool], advance: Callable[[int], object]
    ) -> None:
        """Run collectors until all, or enough of them, have reached their goals.

        Args:
            goals: Steps of each, including those already received.
            is_quick: Whether they must be able to stop soon.
            is_over: Called between slices; true stops the work. Collectors without any step then make one.
            advance: Called with the number of steps received.
        """
        handles = self._handles
        seconds = _QUICK_SLICE if is_quick else _SLICE
        while True:
            left = [goal - self._collections.count(rank) for rank, goal in enumerate(goals)]
            is_enough = sum(one <= 0 for one in left) >= self.enough or is_over()
            waiting = self._collections.waiting  # a collector without steps makes at least one: no env may be missing
            chosen = [rank for rank in handles.idle if left[rank] > 0 and not (is_enough and rank in waiting)]
            if chosen:
                handles.order({rank: self._slice(rank, 1 if is_enough else left[rank], seconds) for rank in chosen})
            if not handles.is_busy:
                return
            for rank, collection in handles.receive():
                self._collections.add(rank, collection)
                advance(collection.info["num_steps"])
                self._paces[rank] = collection.info["num_steps"] / max(collection.info["seconds"], 1e-6)

    def _slice(self, rank: int, left: int, seconds: float) -> CollectRequest:
        """Return a collector's next request: about the steps that fit in the time, so that little can be lost."""
        pace = self._paces[rank]
        return CollectRequest(max(1, min(left, int(pace * seconds) if pace else _FIRST)), seconds)


RolloutJoin = Callable[[Sequence[Rollout]], Rollout]


class ReceivedCollections:
    """Collections by collector, oldest first.

    Args:
        num_workers: Number of collectors.
    """

    def __init__(self, num_workers: int) -> None:
        self._parts: list[list[PackedCollection]] = [[] for _ in range(num_workers)]

    def add(self, rank: int, collection: PackedCollection) -> None:
        """Add a collection."""
        self._parts[rank].append(collection)

    @property
    def waiting(self) -> list[int]:
        """Collectors with collections."""
        return [rank for rank, parts in enumerate(self._parts) if parts]

    def count(self, rank: int) -> int:
        """Return the number of steps stored of a collector."""
        return sum(map(_num_steps, self._parts[rank]))

    def take(self, ranks: Sequence[int], version: int, join: RolloutJoin) -> tuple[Rollout, Info]:
        """Remove and return the steps of collectors, up to the point where a collector's envs or policy were replaced.

        Args:
            ranks: The collectors.
            version: Version of the weights that were set last.
            join: Makes one rollout of one per collector. If it raises, nothing is removed.

        Returns:
            The rollout, and its info.
        """
        chosen = {rank: _of_one_kind(self._parts[rank]) for rank in ranks if self._parts[rank]}
        rollouts = [join_in_time([collection.open() for collection in collections]) for collections in chosen.values()]
        data = join(rollouts)
        for rank, collections in chosen.items():
            del self._parts[rank][: len(collections)]
        infos = [collection.info for collections in chosen.values() for collection in collections]
        parts = [chosen.get(rank, []) for rank in ranks]
        versions = np.array([min((one.info["version"] for one in part), default=version) for part in parts], np.int64)
        info: Info = {
            **_episodes(rollouts, list(chosen.values())),
            "num_steps": np.array([sum(map(_num_steps, part)) for part in parts], dtype=np.int64),
            "num_samples": sum(one["num_samples"] for one in infos),
            "version": versions,
            "staleness": version - versions,
        }
        for name in ("num_bytes", "num_bytes_sent"):
            if any(name in one for one in infos):
                info[name] = sum(one[name] for one in infos)
        return data, info


def _num_steps(collection: PackedCollection) -> int:
    return int(collection.info["num_steps"])


def _of_one_kind(collections: Sequence[PackedCollection]) -> list[PackedCollection]:
    """Return the longest run of collections from the first on that can be joined in time."""
    first = collections[0].open()
    return list(itertools.takewhile(lambda collection: are_of_one_kind(first, collection.open()), collections))


def _episodes(rollouts: Sequence[Rollout], collections: Sequence[Sequence[PackedCollection]]) -> Info:
    """Return returns and lengths in the order in which episodes end in rollouts side by side."""
    columns = np.cumsum([0, *(len(rollout.env_ids) for rollout in rollouts)]).tolist()
    places = [np.add(np.argwhere(one.dones), (0, first)) for one, first in zip(rollouts, columns, strict=False)]
    steps, columns = np.concatenate(places).T
    order = np.lexsort((columns, steps))
    counted = [_counted(*one) for one in zip(rollouts, collections, strict=True)]
    names = "episode_returns", "episode_lengths"
    return {name: np.concatenate(part)[order] for name, part in zip(names, zip(*counted, strict=True), strict=True)}


def _counted(rollout: Rollout, collections: Sequence[PackedCollection]) -> tuple[Array, Array]:
    """Return returns and lengths of episodes that end in a rollout, including those cut off between its parts."""
    first, counted = 0, []
    for collection in collections:
        part = collection.open()
        ends = np.argwhere(rollout.dones[first : first + len(part)])
        is_cut = ~part.dones[tuple(ends.T)]
        for name, index in (("episode_returns", 0), ("episode_lengths", 1)):
            values_sent = collection.info[name]
            values = np.empty(len(ends), values_sent.dtype)
            values[~is_cut] = values_sent
            for place in np.flatnonzero(is_cut).tolist():
                values[place] = collection.under_way[int(ends[place, 1])][index]
            counted.append(values)
        first += len(part)
    return np.concatenate(counted[::2]), np.concatenate(counted[1::2])
