"""The scheduler of a set of collectors: their requests, settings, replacements and steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from parallelenv.collect.collector import Info
from parallelenv.collect.collector_env import CollectRequest, Part
from parallelenv.collect.concat import can_follow, join_beside, join_in_time, refuse_different
from parallelenv.contract.copying import Broadcast
from parallelenv.contract.failures import add_note, raise_failures, with_note
from parallelenv.contract.protocol import MethodCall
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.engine.recovery import Budget
from parallelenv.env import ParallelEnv
from parallelenv.errors import ArgumentError, EnvInterruptedError, WorkerTimeoutError
from parallelenv.rollouts.evaluation import Evaluation
from parallelenv.rollouts.trajectory import Rollout, count_episodes

_SLICE = 0.5
"""Seconds after which a collector sends its steps and continues. A dead one loses about as much."""
_QUICK_SLICE = 0.05
"""The same if others may have to wait for it to stop."""
_FIRST = 16
"""Steps of a collector's first slice, when its speed is not known yet."""


class Scheduler:
    """Runs collectors, each an env of a `ParallelEnv`. Nothing is sent to a busy one.

    Args:
        env: The collectors.
        max_restarts: How often one collector is replaced within ten minutes.
        seed: Seed of the set; replacements get seeds derived from it.

    Attributes:
        version: Version of the weights that were set last.
        sizes: Number of envs of each collector.
        idle: Collectors without a request, idle longest first.
        num_replaced: How often a collector was replaced.
    """

    def __init__(self, env: ParallelEnv, max_restarts: int, seed: int | None) -> None:
        env.reset()
        self.version = 0
        self.sizes: list[int] = env.get_env_attr("num_envs")
        self.idle = list(range(len(env)))
        self.num_replaced = 0
        self._env, self._pool = env, env.engine.pool
        self._seed = seed
        self._budget = Budget(max_restarts)
        self._requests: dict[int, CollectRequest] = {}
        self._parts: list[list[Part]] = [[] for _ in self.sizes]  # received, and not returned to the user
        self._paces = [_FIRST / _SLICE for _ in self.sizes]  # latest steps per second
        self._running = [OpenEpisodes(size) for size in self.sizes]
        self._lost_samples = 0
        self._news: dict[str, Broadcast] = {}  # current settings of all collectors, by subject
        self._known: list[dict[str, Broadcast]] = [{} for _ in self.sizes]
        self._new: set[int] = set()  # replacements that have not begun

    # ---------------------------------------------------------------- settings

    def announce(
        self, subject: str, broadcast: Broadcast, outdates: tuple[str, ...] = (), version: int | None = None
    ) -> None:
        """Send a setting to all collectors: busy ones get it before their next request, replacements when they begin.

        After Ctrl-C and `WorkerTimeoutError` it is valid all the same.

        Args:
            subject: Subject of the setting. It replaces an earlier one of the same subject.
            broadcast: The call that applies it.
            outdates: Prefixes of subjects whose settings are no longer valid.
            version: New version of the weights.

        Raises:
            BaseException: What the first failing collector raised. The former settings are valid again.
        """
        before = self._news, self.version
        kept = {name: news for name, news in self._news.items() if name != subject and not name.startswith(outdates)}
        self._news = {**kept, subject: broadcast}
        self.version = self.version if version is None else version
        try:
            self._catch_up(self.idle)
        except Exception as error:
            if not isinstance(error, WorkerTimeoutError):
                self._news, self.version = before
            raise

    def _catch_up(self, ranks: Collection[int]) -> None:
        """Replace dead collectors, and send these the settings that they do not have yet."""
        self._replace_dead()
        for subject, broadcast in list(self._news.items()):
            behind = [rank for rank in ranks if self._known[rank].get(subject) is not broadcast]
            if behind:
                self._tell(subject, broadcast, behind)

    def _tell(self, subject: str, broadcast: Broadcast, ranks: Sequence[int]) -> None:
        ticket, late = self._pool.submit("call", ranks, None, broadcast), None
        try:
            self._pool.wait(ticket, self._env.engine.timeout)
        except WorkerTimeoutError as error:
            late = _late(error)
        for rank in ranks:
            if rank not in ticket.failures:  # a late one applies it before anything sent later
                self._known[rank][subject] = broadcast
        refused = [failure for _, failure in sorted(ticket.failures.items()) if not failure.is_of_worker]
        if refused:
            self._news.pop(subject)  # otherwise every later request would fail on it
        raise_failures(refused[:1], None)  # all got the same call, so the errors are mostly the same
        if late is not None:
            raise late
        if ticket.failures:  # of collectors that died
            self._catch_up(ranks)

    # ---------------------------------------------------------------- requests

    def work(
        self, goals: Sequence[int], enough: int, is_over: Callable[[], bool] | None, advance: Callable[[int], object]
    ) -> None:
        """Run collectors until enough of them have reached their goals. Each makes at least one step.

        Args:
            goals: Steps of each, including those received before.
            enough: Number of collectors that must reach theirs; then the others stop.
            is_over: Called between slices; true stops the work.
            advance: Called with the number of steps received.
        """
        seconds = _SLICE if is_over is None and enough == len(goals) else _QUICK_SLICE
        while True:
            left = [goal - sum(part.num_steps for part in self._parts[rank]) for rank, goal in enumerate(goals)]
            is_enough = sum(one <= 0 for one in left) >= enough or (is_over is not None and is_over())
            chosen = [rank for rank in self.idle if left[rank] > 0 and not (is_enough and self._parts[rank])]
            if chosen:  # each makes about the steps that fit in the time, so that little can be lost
                most = {rank: 1 if is_enough else max(1, int(self._paces[rank] * seconds)) for rank in chosen}
                self.request({rank: CollectRequest(min(left[rank], most[rank]), seconds) for rank in chosen})
            if not self._requests:
                return
            advance(self.receive())

    def request(self, requests: Mapping[int, CollectRequest]) -> None:
        """Send requests to idle collectors, all at once, so that the workers of a node begin and answer together."""
        ranks = list(requests)
        self._catch_up(ranks)
        self._env.send(list(requests.values()), ranks)
        self._requests.update(requests)
        self.idle = [rank for rank in self.idle if rank not in requests]

    def receive(self) -> int:
        """Wait until a collector has sent steps or failed, store all that has arrived, and return the number of steps.

        Raises:
            BaseException: What an env or a policy raised. All steps made until then are stored.
        """
        num_steps = 0
        while self._requests:
            try:
                batch = self._env.recv(1, 1, align="batch")
            except BaseException as error:  # noqa: BLE001 (raised again, but for what is known)
                self._handle(error)
                return num_steps
            rank, part = int(batch.env_ids[0]), batch[0][0]
            self._rest([rank])
            self.sizes[rank] = part.num_envs
            if part.num_steps:
                self._parts[rank].append(part)
                self._paces[rank] = part.num_steps / part.seconds if part.seconds else self._paces[rank]
                num_steps += part.num_steps
            if part.failure is not None:
                raised = with_note(part.failure)
                add_note(raised, f"It was raised in collector {rank}, which is an env of its set.")
                raise raised
            if not self._env.engine.table.arrived:
                break
        return num_steps

    def finish(self) -> None:
        """Wait for all requests that were sent."""
        while self._requests:
            self.receive()

    def _handle(self, error: BaseException) -> None:
        """Make collectors usable again that died or were interrupted; raise what the user does not know yet."""
        failed = sorted(set(self._requests).difference(self._env.engine.under_way))
        if self._pool.death_errors(failed):
            self._replace_dead()
            return
        if failed:
            self._lose(failed)
            self._env.reset(failed)
        if isinstance(error, WorkerTimeoutError) and not failed:
            raise _late(error) from None
        if not isinstance(error, EnvInterruptedError):
            raise error

    def _rest(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self._requests.pop(rank, None) is not None:
                self.idle.append(rank)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Count what collectors may have made and not sent."""
        for rank in ranks:
            if rank in self._requests:
                self._lost_samples += self._requests[rank].num_steps * self.sizes[rank]
        self._rest(ranks)

    def evaluate(self, shares: Mapping[int, Mapping[str, Any]]) -> list[Evaluation]:
        """Return the evaluations of idle collectors, in order. One that dies is replaced and asked again.

        Args:
            shares: Arguments of `CollectorEnv.evaluate`, by collector.
        """
        answers: dict[int, Evaluation] = {}
        while left := [rank for rank in shares if rank not in answers]:
            self._catch_up(left)
            calls = [MethodCall("evaluate", (), shares[rank]) for rank in left]
            try:
                ticket = self._pool.try_asking("call", left, calls)
            except WorkerTimeoutError as error:
                raise _late(error) from None
            answers.update(ticket.values)
            failed = [failure for _, failure in sorted(ticket.failures.items()) if not failure.is_of_worker]
            raise_failures(failed, None)
        return [answers[rank] for rank in shares]

    # ---------------------------------------------------------------- replacements

    def _replace_dead(self) -> None:
        """Replace dead collectors.

        Raises:
            WorkerDiedError: If that has happened to one too often.
        """
        while dead := self._pool.death_errors(range(len(self.sizes))):
            ranks = list(dead)
            denied, delay = self._budget.spend(ranks)
            self._lose(ranks)
            if denied:
                error = dead[denied[0]].exception
                error.add_note(
                    f"It was collector {denied[0]} of a set, which has died more often within ten minutes than "
                    "max_restarts allows. Look into why, and make a new set."
                )
                raise error
            time.sleep(delay)
            self._new.update(ranks)  # an interrupt may come before `restart` returns
            self._env.restart(ranks)
        if self._new:
            new = sorted(self._new)
            self._env.reset(new, seed=[self._next_seed(rank) for rank in new])
            for rank in new:
                self._known[rank] = {}
            self._new.clear()
            self.num_replaced += len(new)

    def _next_seed(self, rank: int) -> int | None:
        if self._seed is None:
            return None
        key = (rank, self.num_replaced + 1)
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])

    # ---------------------------------------------------------------- results

    @property
    def ready(self) -> list[int]:
        """Idle collectors with steps."""
        return [rank for rank, parts in enumerate(self._parts) if parts and rank not in self._requests]

    @property
    def in_flight(self) -> set[int]:
        """Collectors with a request, or with steps that `take` has not returned."""
        return {*self._requests, *(rank for rank, parts in enumerate(self._parts) if parts)}

    def take(self, ranks: Sequence[int]) -> tuple[Rollout, Info]:
        """Remove and return the steps of collectors, up to the point where a collector's envs or policy were replaced.

        Returns:
            The rollout, and its info with one entry per collector.

        Raises:
            ArgumentError: If the steps of different collectors cannot be joined. Nothing is removed.
        """
        chosen = {rank: _of_one_kind(self._parts[rank]) for rank in ranks if self._parts[rank]}
        rollouts = {rank: join_in_time([part.open() for part in parts]) for rank, parts in chosen.items()}
        first = next(iter(rollouts))
        for rank, rollout in rollouts.items():
            try:
                refuse_different(rollouts[first], rollout, f"The collections of collectors {first} and {rank}")
            except ArgumentError as error:
                raise ArgumentError(f"{error} Nothing is lost: stream() gives them one by one.") from None
        data = join_beside(list(rollouts.values()))
        for rank, parts in chosen.items():
            del self._parts[rank][: len(parts)]
        taken = [chosen.get(rank, []) for rank in ranks]
        every = [part for parts in taken for part in parts]
        versions = np.array([min((one.version for one in part), default=self.version) for part in taken], np.int64)
        info: Info = {
            **self._count_episodes(rollouts, data),
            "num_steps": np.array([sum(part.num_steps for part in parts) for parts in taken], dtype=np.int64),
            "num_samples": sum(part.num_samples for part in every),
            "version": versions,
            "staleness": self.version - versions,
            "lost_samples": self._lost_samples,
        }
        self._lost_samples = 0
        if sizes := [part.num_bytes for part in every if part.num_bytes is not None]:
            info["num_bytes"], info["num_bytes_sent"] = map(sum, zip(*sizes, strict=True))
        return data, info

    def _count_episodes(self, rollouts: Mapping[int, Rollout], data: Rollout) -> Info:
        """Return returns and lengths in the order in which episodes end in ``data``, the rollouts side by side."""
        ended = []
        for rank, rollout in rollouts.items():
            columns = np.arange(len(rollout.env_ids))
            if len(columns) != len(self._running[rank].returns):  # the envs were replaced
                self._running[rank] = OpenEpisodes(len(columns))
            ended.append(count_episodes(rollout, self._running[rank], columns))
        owners = np.repeat(np.arange(len(rollouts)), [len(rollout.env_ids) for rollout in rollouts.values()])
        place = np.argsort(np.argsort(owners[np.nonzero(data.dones)[1]], kind="stable"))
        return {
            "episode_returns": np.concatenate([one.returns for one in ended])[place],
            "episode_lengths": np.concatenate([one.lengths for one in ended])[place],
        }


def _of_one_kind(parts: Sequence[Part]) -> list[Part]:
    """Return the longest run of parts from the first on that can be joined in time."""
    first = parts[0].open()
    return list(itertools.takewhile(lambda part: can_follow(first, part.open()), parts))


def _late(error: WorkerTimeoutError) -> WorkerTimeoutError:
    """Return the error to raise if collectors do not answer in time, with advice for collectors instead of envs."""
    fact = str(error).partition(". ")[0].replace("env", "collector", 1)
    return WorkerTimeoutError(
        f"{fact}. The next call of the set waits on. Give a longer timeout if it is only slow; stop() ends what hangs.",
        error.env_ids,
    )
