"""Schedules a set of collectors: sends them requests and settings, receives their steps, and replaces dead ones.

A `CollectorEnv` presents a collector as an env, so that a `ParallelEnv` can run and restart collectors as it does envs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from parallelenv.collect.collector import Collector, derived_seed, import_package
from parallelenv.contract.copying import Broadcast, loads
from parallelenv.contract.failures import Failure, add_note, put, raise_failures, with_note
from parallelenv.contract.interrupts import DeferSignals, signal_behind
from parallelenv.contract.protocol import MethodCall
from parallelenv.contract.rollout_data import map_leaves
from parallelenv.contract.tracebacks import reports_failures
from parallelenv.engine.engine import HEARTBEAT
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.engine.recovery import Budget
from parallelenv.errors import ArgumentError, EnvInterruptedError, WorkerTimeoutError
from parallelenv.rollouts.rollout import Rollout, can_follow, count_episodes, join_rollouts, refuse_different

if TYPE_CHECKING:
    from parallelenv.contract.batch import Array
    from parallelenv.contract.spaces import Info
    from parallelenv.env import ParallelEnv
    from parallelenv.rollouts.evaluation import Evaluation

# ---------------------------------------------------------------- in a worker: a collector as an env

_LEVEL = 1
"""Compression level of zstd.

For steps of 16 CartPoles, zstd has a compression ratio of 0.47, compresses 0.8 GB/s and decompresses 1.3 GB/s; LZ4 has
0.51, 1.9 GB/s and 1.0 GB/s. For rendered frames of 84x84x4, zstd has 0.01, 1.8 GB/s and 3.3 GB/s, and LZ4 has 0.02, 3.5
GB/s and 0.5 GB/s. The speed of decompression matters most, because the caller decompresses the data of all collectors.
Higher levels of zstd take longer and improve the ratio by only 0.01.
"""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """The action of a `CollectorEnv`: the maximum number of steps to collect, and a time limit in seconds.

    With 0 steps, it returns an empty rollout, which has the form of the data and the current states.
    """

    num_steps: int
    seconds: float = math.inf


@dataclass(slots=True)
class Part:
    """The steps that a collector made for one request. A `CollectorEnv` returns a `Part` as its state."""

    num_envs: int
    version: int  # of the policy
    seconds: float = 0.0  # seconds that the steps took
    failure: Failure | None = None  # the exception that stopped the collector before its request was done
    data: Rollout | None = None
    packed: bytes = b""  # the data, pickled and compressed; `data` is then not set
    num_bytes: tuple[int, int] | None = None  # number of bytes before and after compression

    def pack(self) -> None:
        """Compress the steps."""
        if self.data is not None:
            plain = cloudpickle.dumps(self.data)
            self.packed, self.data = zstandard().compress(plain, _LEVEL), None
            self.num_bytes = len(plain), len(self.packed)

    def unpack(self) -> Rollout | None:
        """Return the steps, decompressed if necessary."""
        if self.packed:
            self.data, self.packed = loads(zstandard().decompress(self.packed)), b""
        return self.data

    def __deepcopy__(self, memo: object) -> Part:
        """Return the object itself. The sender never changes it, so it need not be copied within one process."""
        return self


class CollectorEnv(Collector):
    """A collector as an env: each step carries out one `CollectRequest`, and episodes never end."""

    def __init__(self, arguments: dict[str, Any], compresses: bool) -> None:
        super().__init__(**arguments)
        self._compresses = compresses

    def reset(self, seed: int | None = None) -> None:
        """Set the seed if one is given, which happens only if this collector replaces a dead one."""
        if seed is not None:
            self._seed = seed
            self._begin()

    def step(self, request: CollectRequest) -> tuple[Part, float, bool, dict[str, Any]]:
        """Collect steps. An exception that an env or the policy raises is returned with the steps made before it."""
        end = time.perf_counter() + request.seconds
        part = Part(self.num_envs, self.version)
        try:
            part.data, part.seconds = self._gather(
                max(1, request.num_steps),
                lambda num_made: not request.num_steps or (num_made > 0 and time.perf_counter() >= end),
                progress=False,
            )
        except Exception as error:  # user code runs; the error is sent
            if signal_behind(error) is not None:
                raise
            made = getattr(error, "partial", None)
            if isinstance(made, Rollout):
                num_steps = int(np.flatnonzero((made.valid | made.dones).any(axis=1)).max(initial=-1)) + 1
                names = ("states", "actions", "rewards", "terminated", "truncated", "valid", "extras")
                kept = {name: map_leaves(getattr(made, name), lambda leaf: leaf[:num_steps]) for name in names}
                part.data = replace(made, **kept)  # drops the trailing steps that no env made
                put(error, "partial", None)  # otherwise the steps would be sent twice
            part.failure = Failure(error, self._rank, "collect")
        else:
            self._needs_reset = False
        if self._compresses:
            part.pack()
        return part, 0.0, False, {}

    def evaluate(self, *arguments: Any, **named: Any) -> Any:
        """Return the evaluation, and the number of test envs."""
        return super().evaluate(*arguments, **named), len(self._envs["test_envs"])

    def replace(self, component: str, make: Callable[..., object], version: int | None = None) -> Any:
        """Replace a component, and return the number of envs.

        ``version`` is given with a new policy: this collector may not have loaded the weights of that version, which
        were for the former policy.
        """
        super().replace(component, make)
        self.version = self.version if version is None else version
        return self.num_envs

    close = Collector.stop


def zstandard() -> Any:
    """Return the module ``zstandard``; raise `MissingDependencyError` if it is not installed."""
    return import_package("zstandard", "compress_data=True")


# ---------------------------------------------------------------- in the caller

_SLICE = 0.5
"""Seconds after which a collector sends its steps and continues. A collector that dies loses about 0.5 s of work."""
_QUICK_SLICE = 0.05
"""Seconds after which a collector sends its steps if `Scheduler.work` may have to stop it before its goal."""
Subject = tuple[str, str]
"""Identifies a setting: a method, and its first argument (an attribute or component), or ``""`` for weights."""


@dataclass(slots=True)
class Member:
    """The caller's record of a collector."""

    num_envs: int  # the latest known number
    rows: Array  # rows of its envs in `Scheduler._running`
    pace: float = 16 / _SLICE  # latest steps per second; while unknown, a slice has 16 steps
    request: CollectRequest | None = None  # in progress
    parts: list[Part] = field(default_factory=list)  # received but not yet taken; an empty one is the only one
    settings: dict[Subject, Broadcast] = field(default_factory=dict)  # the settings that it has applied, by subject
    is_new: bool = False  # True for a replacement that has not been reset yet
    rested: float = 0.0  # time at which its latest request was done

    def history(self) -> list[Rollout]:
        """Return the rollouts not taken yet. Stop before the first one that cannot be joined with those before it."""
        steps = [part.data for part in self.parts if part.data is not None]
        return list(itertools.takewhile(lambda data: can_follow(steps[0], data), steps))


class Scheduler:
    """Runs collectors, each of which is an env of a `ParallelEnv`. Nothing is sent to a busy collector.

    A collector that dies is replaced, at most ``max_restarts`` times within ten minutes. Replacements get seeds derived
    from ``seed``.
    """

    def __init__(self, env: ParallelEnv, max_restarts: int, seed: int | None) -> None:
        env.reset()
        sizes: list[int] = env.get_env_attr("num_envs")
        self.env, self._pool = env, env.engine.pool
        self._running = OpenEpisodes(0)
        self.members = [Member(size, self._new_rows(size)) for size in sizes]
        self.version = self.num_replaced = 0
        self._seed, self._budget = seed, Budget(max_restarts)
        self._settings: dict[Subject, Broadcast] = {}  # the current settings of all collectors, by subject
        self._lost_samples = 0

    def _new_rows(self, num_envs: int) -> Array:
        first = len(self._running.returns)
        for name in ("returns", "lengths", "are_whole"):
            known: Array = getattr(self._running, name)
            setattr(self._running, name, np.append(known, np.zeros(num_envs, known.dtype)))
        return np.arange(first, first + num_envs)

    @property
    def busy(self) -> list[int]:
        """Ranks of the collectors with a request in progress."""
        return [rank for rank, member in enumerate(self.members) if member.request is not None]

    @property
    def idle(self) -> list[int]:
        """Ranks of the collectors without a request in progress; the one that has been idle longest comes first."""
        ranks = set(range(len(self.members))).difference(self.busy)
        return sorted(ranks, key=lambda rank: (self.members[rank].rested, rank))

    # ---------------------------------------------------------------- settings

    def announce(self, method: str, *arguments: Any) -> None:
        """Apply a setting by calling a method of all collectors.

        Busy collectors run the method before their next request, and replacements before their first one. If a
        collector has not yet run an earlier call that changes the same setting (see `Subject`), it runs only the new
        one. After Ctrl-C or `WorkerTimeoutError`, the new call still takes effect. After any other error, the former
        settings and policy version are valid again: collectors that have run the new call run the former one before
        their next request. If there is no former call, they keep the new setting.
        """
        before = self._settings, self.version
        subject = method, "" if method == "set_weights" else arguments[0]
        kept = {key: one for key, one in self._settings.items() if key != subject}
        if subject == ("replace", "policy"):  # weights and attributes for the former policy are outdated
            kept = {key: one for key, one in kept.items() if key[0] == "replace"}
            arguments = *arguments, self.version
        self._settings = {**kept, subject: Broadcast(method, *arguments)}
        if method == "set_weights":
            self.version = arguments[1]
        try:
            self._catch_up(self.idle)
        except Exception as error:
            is_temporary = isinstance(error, WorkerTimeoutError) or signal_behind(error) is not None
            if reports_failures(error) or not is_temporary:
                self._settings, self.version = before
            raise

    def _catch_up(self, ranks: Collection[int]) -> None:
        """Replace dead collectors; then send the collectors ``ranks`` the settings that they have not applied yet."""
        self._replace_dead()
        for subject, broadcast in list(self._settings.items()):
            behind = [rank for rank in ranks if self.members[rank].settings.get(subject) is not broadcast]
            if not behind:
                continue
            ticket = late = None
            try:
                ticket = self._pool.submit("call", behind, None, broadcast)
                self._pool.wait(ticket, self._pool.timeout)
            except WorkerTimeoutError as error:
                late = _late(error)
                if ticket is None:  # workers are still busy with an earlier call, so nothing was sent
                    raise late from None
            for rank in behind:
                member = self.members[rank]
                if rank not in ticket.failures:  # a late collector applies the setting before anything sent later
                    member.settings[subject] = broadcast
                member.num_envs = ticket.values.get(rank, member.num_envs)  # `replace` returns it
            refused = [failure for _, failure in sorted(ticket.failures.items()) if not failure.is_of_worker]
            if refused:
                self._settings.pop(subject)  # otherwise this setting would make every later request fail
            _raise_for_collectors(refused[:1])  # all collectors got the same call, so one error is enough
            if late is not None:
                raise late
            if ticket.failures:  # of collectors that died
                self._catch_up(ranks)

    # ---------------------------------------------------------------- requests

    def work(
        self, goals: Sequence[int], enough: int, is_over: Callable[[], bool] | None, advance: Callable[[int], object]
    ) -> None:
        """Run collectors until enough of them have reached their goals, or ``is_over`` returns ``True``.

        In the first case, each collector makes at least one step. In the second, no further step is requested.
        """
        seconds = _SLICE if is_over is None and enough == len(goals) else _QUICK_SLICE
        while True:
            made = [sum(len(part.data or ()) for part in member.parts) for member in self.members]
            left = [goal - num_steps for goal, num_steps in zip(goals, made, strict=True)]
            is_enough = sum(one <= 0 for one in left) >= enough
            chosen = [rank for rank in self.idle if left[rank] > 0 and not (is_enough and made[rank])]
            if is_over is not None and is_over():
                if without := [rank for rank in self.idle if not self.members[rank].parts]:
                    self.request(dict.fromkeys(without, CollectRequest(0)))
            elif chosen:  # each gets as many steps as it can make in about `seconds`, so that little is lost if it dies
                most = {rank: 1 if is_enough else max(1, int(self.members[rank].pace * seconds)) for rank in chosen}
                self.request({rank: CollectRequest(min(left[rank], most[rank]), seconds) for rank in chosen})
            if not self.busy:
                return
            advance(self.receive())

    def request(self, requests: Mapping[int, CollectRequest]) -> None:
        """Send requests to idle collectors, all at once so that the workers of a node start and reply together."""
        ranks = list(requests)
        self._catch_up(ranks)
        with DeferSignals():  # otherwise an interrupt after `send` leaves a collector in flight that counts as idle
            self.env.send(list(requests.values()), ranks)
            for rank, request in requests.items():
                self.members[rank].request = request

    def receive(self) -> int:
        """Wait until a collector has sent steps or failed, store all that has arrived, and return the number of steps.

        If an env or a policy has raised an exception, this method stores the steps that the collector made before the
        exception, and then raises it.
        """
        num_steps, engine = 0, self.env.engine
        while self.busy:
            start = time.monotonic()
            try:
                while not engine.poll(1, None, start):
                    self._pool.pump(time.monotonic() + HEARTBEAT)
                with DeferSignals():  # otherwise an interrupt after `recv` loses the steps
                    batch = self.env.recv(1, 1, align="batch")  # does not wait
                    rank, part = int(batch.env_ids[0]), batch[0][0]
                    member, data = self.members[rank], part.unpack()
                    is_empty = member.request == CollectRequest(0) and data is not None
                    self._rest([rank])
                    member.num_envs = part.num_envs
                    if data:
                        member.parts = [*(one for one in member.parts if one.data), part]
                        member.pace = len(data) / part.seconds if part.seconds else member.pace
                    elif is_empty and not member.parts:
                        member.parts = [part]
            except BaseException as error:  # noqa: BLE001 (raised again, unless handled)
                self._handle(error)
                return num_steps
            num_steps += len(data or ())
            if part.failure is not None:
                raised = with_note(part.failure)
                add_note(raised, f"It was raised in collector {rank}, which is an env of its set.")
                raise raised
            if not engine.table.arrived(1):
                break
        return num_steps

    def _handle(self, error: BaseException) -> None:
        """Make collectors that died or were interrupted usable again; raise ``error`` if it has another cause."""
        failed = sorted(set(self.busy).difference(self.env.engine.in_flight))
        if self._pool.death_failures(failed):
            self._replace_dead()
            if signal_behind(error) is None:
                return
            raise error
        if failed:
            self._rest(failed, are_lost=True)
            self.env.reset(failed)
        if isinstance(error, WorkerTimeoutError) and not failed:
            raise _late(error) from None
        if not isinstance(error, EnvInterruptedError):
            raise error

    def _rest(self, ranks: Sequence[int], *, are_lost: bool = False) -> None:
        for rank in ranks:
            member = self.members[rank]
            request, member.request, member.rested = member.request, None, time.monotonic()
            if request is not None and are_lost:
                self._lost_samples += request.num_steps * member.num_envs

    def evaluate(self, shares: Mapping[int, int], seed: int | None) -> list[tuple[Evaluation, int]]:
        """Wait until all requests are done, then run each collector's share of episodes, given by rank.

        If a collector dies, its replacement is called with the same arguments. The result has the value of
        `CollectorEnv.evaluate` for each collector.
        """
        while self.busy:
            self.receive()
        answers: dict[int, tuple[Evaluation, int]] = {}
        while left := [rank for rank in shares if rank not in answers]:
            self._catch_up(left)
            calls = [MethodCall("evaluate", (shares[rank],), {"seed": seed, "progress": False}) for rank in left]
            try:
                ticket = self._pool.ask("call", left, calls, raises=False)
            except WorkerTimeoutError as error:
                raise _late(error) from None
            answers.update(ticket.values)
            failed = [failure for _, failure in sorted(ticket.failures.items()) if not failure.is_of_worker]
            _raise_for_collectors(failed)
        return [answers[rank] for rank in shares]

    # ---------------------------------------------------------------- replacements

    def _replace_dead(self) -> None:
        while dead := self._pool.death_failures(range(len(self.members))):
            ranks = list(dead)
            denied, delay = self._budget.spend(ranks)
            self._rest(ranks, are_lost=True)
            if denied:
                error = dead[denied[0]].exception
                error.add_note(
                    f"It was collector {denied[0]} of a set, which died more often within ten minutes than "
                    "max_restarts allows. Find the cause, and make a new set."
                )
                raise error
            time.sleep(delay)
            for rank in ranks:
                self.members[rank].is_new = True  # an interrupt may come before `restart` returns
            self.env.restart(ranks)
        new = [rank for rank, member in enumerate(self.members) if member.is_new]
        if new:
            seeds = None
            if self._seed is not None:
                seeds = [derived_seed(self._seed, rank, self.num_replaced + 1) for rank in new]
            self.env.reset(new, seed=seeds)
            for rank in new:
                self.members[rank].settings, self.members[rank].is_new = {}, False
            self.num_replaced += len(new)

    # ---------------------------------------------------------------- results

    @property
    def in_flight(self) -> set[int]:
        """Ranks of the collectors with a request in progress, or with steps that `take` has not returned yet."""
        return {rank for rank, member in enumerate(self.members) if member.request is not None or member.parts}

    def take(self, ranks: Sequence[int]) -> tuple[Rollout, Info]:
        """Remove the steps received from the collectors ``ranks``; return them, joined into one rollout, and an info.

        If `Collector.replace` changed a collector's number of envs or the form of its data, the steps made after the
        change remain for the next call. If the steps of different collectors cannot be joined, raise an `ArgumentError`
        and remove nothing.
        """
        histories = {rank: self.members[rank].history() for rank in ranks}
        found = {rank: history for rank, history in histories.items() if history}
        first, *others = found
        for rank in others:
            try:
                refuse_different(found[first][0], found[rank][0], f"The collections of collectors {first} and {rank}")
            except ArgumentError as error:
                raise ArgumentError(f"{error} Nothing is lost: stream() returns them one by one.") from None
        data = join_rollouts(list(found.values()))
        taken: list[list[Part]] = []
        for rank, history in histories.items():
            member, num_envs = self.members[rank], len(history[0].env_ids) if history else 0
            if history and len(member.rows) != num_envs:  # the number of envs has changed
                member.rows = self._new_rows(num_envs)
            taken.append(member.parts[: len(history)])
            del member.parts[: len(history)]
        rows = np.concatenate([self.members[rank].rows for rank in found])
        ended = count_episodes(data, self._running, rows)
        versions = np.array([min((part.version for part in parts), default=self.version) for parts in taken], np.int64)
        info: Info = {
            "episode_returns": ended.returns,
            "episode_lengths": ended.lengths,
            "num_steps": np.array([sum(map(len, history)) for history in histories.values()], np.int64),
            "num_samples": int(data.valid.sum()),
            "version": versions,
            "staleness": self.version - versions,
            "lost_samples": self._lost_samples,
        }
        self._lost_samples = 0
        if sizes := [part.num_bytes for parts in taken for part in parts if part.num_bytes is not None]:
            info["num_bytes"], info["num_bytes_sent"] = map(sum, zip(*sizes, strict=True))
        return data, info


def _raise_for_collectors(failures: Sequence[Failure]) -> None:
    try:
        raise_failures(failures, None)
    except BaseException as error:
        add_note(error, "The envs of a CollectorSet are its collectors.")
        raise


def _late(error: WorkerTimeoutError) -> WorkerTimeoutError:
    """Return an error to raise instead of ``error``, with advice for collectors instead of advice for envs."""
    fact = str(error).partition(". ")[0].replace("env", "collector", 1)
    return WorkerTimeoutError(
        f"{fact}. The next call of the set continues the wait. Give a longer timeout if it is only slow; stop() "
        "terminates collectors that hang.",
        error.env_ids,
    )
