"""The collectors of a set: who is at what, what each was told, and who is new because one has died."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.collect.packing import Parcel
from parallelenv.collect.seat import Order
from parallelenv.collect.unsent import UNKNOWN, Unsent
from parallelenv.contract.broadcast import Broadcast
from parallelenv.contract.failures import raise_failures
from parallelenv.engine.recovery import Budget
from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvInterruptedError, WorkerTimeoutError

Received = list[tuple[int, Parcel]]


class Crew:
    """Collectors, each an env of a `ParallelEnv`. One that is busy is not written to.

    Args:
        env: The collectors.
        unsent: What they have made and not sent.
        max_restarts: So often a collector is replaced within ten minutes.
        seed: Of the set; those of collectors in the place of dead ones follow from it.

    Attributes:
        env: The collectors.
        sizes: Number of envs of each.
        num_replaced: How often one was replaced.
    """

    def __init__(self, env: ParallelEnv, unsent: Unsent, max_restarts: int, seed: int | None) -> None:
        self.env = env
        self._unsent = unsent
        env.reset()
        self.sizes: list[int] = env.get_env_attr("num_envs")
        self._lost, self._is_exact = 0, True
        self.num_replaced = 0
        self._seed = seed
        self._budget = Budget(max_restarts)
        self._orders: dict[int, Order] = {}
        self._idle: dict[int, None] = dict.fromkeys(range(len(env)))  # a dict for its order: who rests longest
        self._news: dict[str, Broadcast] = {}  # what all are to know, by subject
        self._known: list[dict[str, Broadcast]] = [{} for _ in self.sizes]
        self._received: Received = []
        self._new: set[int] = set()  # in the place of others, and not begun

    @property
    def idle(self) -> list[int]:
        """Collectors with nothing to do, and whose parcels were received, who has had it longest first."""
        unseen = {rank for rank, _ in self._received}
        return [rank for rank in self._idle if rank not in unseen]

    @property
    def busy(self) -> list[int]:
        """Collectors at work, or whose parcel was not received."""
        return [*self._orders, *(rank for rank, _ in self._received)]

    @property
    def is_busy(self) -> bool:
        """Whether there is anything to receive, or to wait for."""
        return bool(self._orders or self._received)

    # ---------------------------------------------------------------- what they are told

    def announce(self, subject: str, broadcast: Broadcast, outdates: Sequence[str] = ()) -> None:
        """Tell all collectors something: those that are busy before their next order, those that come later at first.

        Args:
            subject: What it is about; later news of the same subject are instead of earlier ones.
            broadcast: The call.
            outdates: What the subjects of news begin with that are not true any more.

        Raises:
            KeyboardInterrupt: Whether it was announced all the same is told by `is_known`: some may have heard it, and
                nobody can tell who. Who has not does so before the next order.
            WorkerTimeoutError: If one takes too long to hear it; likewise.
            BaseException: What the first collector raised that did. What was true before is then true again.
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
        """Whether something was announced, to whom also."""
        return any(one is broadcast for one in self._news.values())

    def _catch_up(self, ranks: Sequence[int]) -> None:
        """Tell collectors what they do not know."""
        while dead := self._dead(ranks):
            self._replace(dead[0])
        self._begin_new()
        for subject, broadcast in list(self._news.items()):
            behind = [rank for rank in ranks if self._known[rank].get(subject) is not broadcast]
            if behind:
                self._tell(subject, broadcast, behind)

    def _tell(self, subject: str, broadcast: Broadcast, ranks: Sequence[int]) -> None:
        pool, late = self.env.engine.pool, None
        request = pool.post("tell", ranks, None, broadcast)
        try:
            pool.wait(request, self.env.engine.stepper.timeout)
        except WorkerTimeoutError as error:
            late = _late(error)
        for rank in ranks:
            if rank not in request.failures:  # who is late knows it before what it is told next
                self._known[rank][subject] = broadcast
        lost = {rank for rank, failure in request.failures.items() if failure.is_of_worker}
        refused = [failure for rank, failure in sorted(request.failures.items()) if rank not in lost]
        if refused:
            self._news.pop(subject)  # else nobody could ever go on
        raise_failures(refused[:1], None)  # all were told the same: mostly they say the same
        if late is not None:
            raise late
        if lost:
            self._catch_up(ranks)

    # ---------------------------------------------------------------- what they do

    def order(self, orders: Mapping[int, Order]) -> None:
        """Let idle collectors work, all at once: the workers of a node begin and answer together."""
        ranks = list(orders)
        self._catch_up(ranks)
        self.env.send(list(orders.values()), ranks)
        self._orders.update(orders)
        for rank in ranks:
            self._idle.pop(rank, None)

    def receive(self) -> Received:
        """Wait until a collector has sent something, and return all that has come, in that order.

        Where one has died, nothing may have.

        Raises:
            BaseException: What a collector raised. What others have sent is here, and comes the next time.
        """
        while self._orders and (not self._received or self.env.engine.stepper.has_landed):
            if not self._receive_one():
                break
        received, self._received = self._received, []
        return received

    def _receive_one(self) -> bool:
        """Wait for what comes next; return whether it is a parcel."""
        try:
            batch = self.env.recv(1, 1, align="batch")
        except BaseException as error:
            failed = sorted(set(self._orders).difference(self.env.engine.stepper.under_way))
            # Not told by the type of the error: what a collector raises may be that an env of its own has died.
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
        parcel: Parcel = batch[0][0]
        self.sizes[rank] = parcel.num_envs
        self._received += [(rank, one) for one in (*parcel.before, parcel)]
        return True

    def _has_broken_off(self, error: BaseException, ranks: Sequence[int]) -> bool:
        """Let collectors that have failed go on; return whether it was only an interrupt, of which the user knows."""
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
        """Return what a method of idle collectors returns, in that order. Who dies at it is replaced and asked anew.

        Args:
            method: Its name.
            orders: Keyword arguments, by collector.

        Raises:
            BaseException: What a collector raised, or that one has died too often.
        """
        answers: dict[int, Any] = {}
        while left := [rank for rank in orders if rank not in answers]:
            self._catch_up(left)
            try:
                request = self.env.engine.pool.try_asking("call", left, [orders[rank] for rank in left], method)
            except WorkerTimeoutError as error:
                raise _late(error) from None
            answers.update(request.values)
            failed = [failure for _, failure in sorted(request.failures.items()) if not failure.is_of_worker]
            raise_failures(failed, None)
        return [answers[rank] for rank in orders]

    # ---------------------------------------------------------------- who is new

    def _dead(self, ranks: Sequence[int]) -> list[int]:
        return list(self.env.engine.pool.obituaries(ranks))

    def _replace(self, rank: int) -> None:
        """Put others in the place of a collector that has died, and of those that died with it.

        Raises:
            WorkerDiedError: If that has happened too often.
        """
        denied, delay = self._budget.spend([rank])
        self._count_loss([rank])
        if denied:
            raise _given_up(self.env.engine.pool.obituaries([rank])[rank].exception, rank)
        time.sleep(delay)
        self._new.update(self._dead(range(len(self.sizes))))  # an interrupt may come before `restart` has said who
        replaced = self.env.restart([rank])
        self._new.update(replaced)
        self._count_loss(replaced)
        self._begin_new()

    def _begin_new(self) -> None:
        """Let those begin that came in the place of others: they know nothing yet."""
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
        """Return what an info says of lost samples, of those since this was last asked."""
        loss = {"lost_exactly": self._is_exact, "lost_samples": self._lost}
        self._lost, self._is_exact = 0, True
        return loss

    def _next_seed(self, rank: int) -> int | None:
        if self._seed is None:
            return None
        key = (rank, self.num_replaced + 1)
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])


def _late(error: WorkerTimeoutError) -> WorkerTimeoutError:
    """Return what to raise if collectors do not answer in time: of envs there is other advice."""
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
