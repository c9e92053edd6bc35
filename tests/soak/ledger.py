"""The accounts of all envs: the next transition expected of each. Every result and error is checked against them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parallelenv import StepBatch, StepResult
from parallelenv.errors import EnvInterruptedError, WorkerDiedError, WorkerTimeoutError

from .envs import CUT, END, ENDINGS, ENV_ID, NO_TOKEN, PID, STUMBLE, TOKEN, TROUBLES, Action, reward_of, speaks

_NOTE = re.compile(r"Raised by env \d+(?: and \d+ others?)? in (.*), process \d+\.")


@dataclass(frozen=True, slots=True)
class Blame:
    """One error, without the group that may contain it."""

    error: BaseException
    env_ids: tuple[int, ...]
    operation: str  # empty if it is not about an operation of an env

    @property
    def is_of_death(self) -> bool:
        """Whether it reports a dead worker."""
        return isinstance(self.error, WorkerDiedError)

    @property
    def is_of_time(self) -> bool:
        """Whether it reports a timeout."""
        return isinstance(self.error, WorkerTimeoutError)

    @property
    def is_of_step(self) -> bool:
        """Whether an env raised in a step."""
        return self.operation == "step"

    @property
    def ends_episode(self) -> bool:
        """Whether the envs need a reset: one failed in the reset within a step, or was interrupted."""
        return self.operation not in ("", "step")


def blames(error: BaseException) -> Iterator[Blame]:
    """Split an error into its parts."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    failures: dict[int, BaseException] = getattr(error, "failures", {})
    for part in parts:
        env_ids = tuple(env_id for env_id, other in failures.items() if _is_like(other, part))
        if isinstance(part, WorkerDiedError | WorkerTimeoutError):
            yield Blame(part, part.env_ids, "")
        else:
            operations = _NOTE.findall(" ".join(getattr(part, "__notes__", [])))
            yield Blame(part, env_ids, operations[-1] if operations else "")


def _is_like(error: BaseException, other: BaseException) -> bool:
    return (type(error), str(error)) == (type(other), str(other))


def named(error: BaseException) -> list[int]:
    """Return all envs that an error names."""
    return [env_id for blame in blames(error) for env_id in blame.env_ids]


class ViolationError(Exception):
    """The library violated a promise."""


@dataclass(slots=True)
class Flight:
    """A step that was sent and not received."""

    token: float
    deed: float
    is_absent: bool  # left out, because the env is done


@dataclass(slots=True)
class Account:
    """The caller's knowledge about one env."""

    env_id: int
    birth: float | None = None
    episode: int = 0
    step: int = 0  # the latest delivered
    pid: int = 0  # of the process that gave the latest result
    flight: Flight | None = None
    is_new: bool = True  # rebuilt since its latest result
    is_blurred: bool = False  # unreported episodes may have started, because the call was given up
    needs_reset: bool = True
    is_over: bool = False  # its episode ended, and it is left out of steps
    is_dead: bool = False
    is_late: bool = False  # known to take longer than the timeout
    is_paused: bool = False

    @property
    def can_step(self) -> bool:
        """Whether a step would be accepted."""
        return not (self.flight or self.needs_reset or self.is_dead or self.is_late or self.is_paused)


@dataclass(slots=True)
class Row:
    """One env's part of a result."""

    env_id: int
    state: Any
    reward: Any
    done: Any
    info: dict[str, Any]
    terminated: Any
    truncated: Any


def rows_of(result: StepResult | StepBatch) -> Iterator[Row]:
    """Split a result of either alignment into rows."""
    items = result if isinstance(result, StepBatch) else zip(*result, strict=True)
    flags = zip(result.terminated.tolist(), result.truncated.tolist(), strict=True)
    for env_id, item, (terminated, truncated) in zip(result.env_ids.tolist(), items, flags, strict=True):
        state, reward, done, info = item
        yield Row(env_id, state, reward, done, info, terminated, truncated)


def demand(holds: bool, text: str, *details: Any) -> None:
    """Raise `ViolationError` unless something holds."""
    if not holds:
        raise ViolationError(" ".join([text, *map(str, details)]))


class Ledger:
    """All accounts of one pool."""

    def __init__(self, num_envs: int, done_policy: str | None, is_tough: bool, tally: Counter[str]) -> None:
        self.accounts = [Account(env_id) for env_id in range(num_envs)]
        self._done_policy = done_policy
        self._skips_done = done_policy in (None, "idle")
        self.is_tough = is_tough
        self.tally = tally

    def where(self, holds: Callable[[Account], Any]) -> list[int]:
        """Return the envs whose accounts fulfil a condition."""
        return [account.env_id for account in self.accounts if holds(account)]

    @property
    def in_flight(self) -> list[int]:
        """Envs with a step in flight."""
        return self.where(lambda account: account.flight)

    # ---------------------------------------------------------------- steps

    def depart(self, env_ids: Sequence[int], actions: Sequence[Action]) -> None:
        """Record that steps were requested."""
        for env_id, (token, deed, _) in zip(env_ids, actions, strict=True):
            account = self.accounts[env_id]
            account.flight = Flight(token, deed, account.is_over)

    def withdraw(self, env_ids: Iterable[int]) -> None:
        """Note that steps were refused before anything was sent."""
        for env_id in env_ids:
            self.accounts[env_id].flight = None

    def deliver(self, result: StepResult | StepBatch) -> list[int]:
        """Check a result and return its env ids."""
        env_ids: list[int] = result.env_ids.tolist()
        demand(len(set(env_ids)) == len(env_ids), "an env was delivered twice in one answer:", env_ids)
        for row in rows_of(result):
            self._settle(row)
        return env_ids

    def _settle(self, row: Row) -> None:
        account = self.accounts[row.env_id]
        flight, account.flight, account.is_late = account.flight, None, False
        if flight is None:
            raise ViolationError(f"env {row.env_id} was delivered, but owed nothing: {row}")
        demand(row.done == (row.terminated or row.truncated), "done contradicts its parts:", row)
        if flight.is_absent:
            is_blank = row.state is None and row.reward is None and row.done and row.info == {}
            demand(is_blank, "an env whose episode is over was to answer (None, None, True, {}):", row)
        elif "failure" in row.info:
            self._cut_off(account, flight, row)
        else:
            self._advance(account, flight, row)

    def _advance(self, account: Account, flight: Flight, row: Row) -> None:
        ends = flight.deed in ENDINGS
        restarts = ends and self._done_policy == "restart"
        state = row.info.get("ended_state") if restarts else row.state
        step = account.step + 1
        self._check_state(account, state, (account.birth, account.episode, step, flight.token), row)
        demand(row.reward == reward_of(row.env_id, step), f"the reward of step {step} was expected:", row)
        flags = (flight.deed in (END, STUMBLE), flight.deed == CUT)
        demand((row.terminated, row.truncated) == flags, f"flags {flags} were expected:", row)
        demand(row.info.get("token") == (flight.token if speaks(step) else None), "another step's info:", row)
        demand(row.info.get("reset") == (restarts if self._done_policy == "restart" else None), "info['reset']:", row)
        account.step = step
        self.tally["transitions"] += 1
        if restarts:
            account.episode, account.step = account.episode + 1, 0
            self._check_state(account, row.state, (account.birth, account.episode, 0, NO_TOKEN), row)
        elif ends:
            self._end(account)

    def _check_state(self, account: Account, state: Any, expected: tuple[Any, ...], row: Row) -> None:
        wanted = [account.env_id, *expected]
        demand(state is not None, f"a state {wanted} was expected:", row)
        found = state.tolist()
        demand(found[:PID] == wanted, f"state {wanted} was expected, {found[:PID]} came:", row)
        account.pid = int(found[PID])

    def _end(self, account: Account) -> None:
        """Note the end of an episode, according to the done policy."""
        ended = self.accounts if self._done_policy is None else [account]
        for other in ended:
            other.is_over = self._skips_done

    def follow(self, done: Any) -> None:
        """Take over the pool's `done` after a result was lost to an interrupt."""
        for account in self.accounts:
            account.is_over = self._skips_done and bool(done[account.env_id])

    def _cut_off(self, account: Account, flight: Flight, row: Row) -> None:
        """Note that the pool has restarted an env by itself."""
        demand(self.is_tough, "no restart was asked for:", row)
        failure = row.info["failure"]
        is_own = f"token {flight.token:.0f}" in str(failure) or f"env {row.env_id} " in str(failure)
        others = WorkerDiedError | WorkerTimeoutError | EnvInterruptedError
        demand(is_own or isinstance(failure, others), f"env {row.env_id} is blamed for another's failure:", row)
        demand((row.reward, row.terminated, row.truncated) == (0, False, True), "no episode that was cut off:", row)
        demand(row.info.get("ended_state") is None, "the last state cannot be known:", row)
        episode = row.state[2] if account.is_blurred else 1
        self._check_state(account, row.state, (row.state[1], episode, 0, NO_TOKEN), row)
        self._check_birth(account, row.state[1])
        account.birth, account.episode, account.step, account.is_new = row.state[1], int(episode), 0, False
        account.is_dead = account.is_blurred = False
        self.tally["lost"] += 1
        self.tally["mended"] += 1
        self._end(account)

    def _check_birth(self, account: Account, birth: float) -> None:
        demand(birth != account.birth, f"env {account.env_id} was to be rebuilt, but lives on")

    def lose(self, blame: Blame) -> list[int]:
        """Record an error about steps without a result; return their env ids."""
        for env_id in blame.env_ids:
            account = self.accounts[env_id]
            flight, account.flight = account.flight, None
            if flight is None:
                raise ViolationError(f"env {env_id} failed, but owed nothing: {blame.error!r}")
            is_own = flight.deed in TROUBLES and f"token {flight.token:.0f}" in str(blame.error)
            demand(is_own or not blame.is_of_step, f"this is not of the step of env {env_id}:", repr(blame.error))
            account.needs_reset |= blame.ends_episode
            account.is_blurred |= blame.ends_episode
            self.tally["lost"] += 1
        self.bury(blame)
        return list(blame.env_ids)

    def bury(self, blame: Blame) -> None:
        """Record which envs an error reports as dead or late."""
        for env_id in blame.env_ids:
            self.accounts[env_id].is_dead |= blame.is_of_death
            self.accounts[env_id].is_late |= blame.is_of_time

    # ---------------------------------------------------------------- episodes and rebuilds

    def drop(self, env_ids: Iterable[int]) -> None:
        """Record that a reset of envs has started: their steps are dropped, and they need a reset until it is done."""
        for env_id in env_ids:
            account = self.accounts[env_id]
            if account.flight:
                self.tally["lost"] += not account.flight.is_absent
                account.flight, account.is_blurred = None, True
            account.needs_reset = True

    def remember(self, env_ids: Iterable[int]) -> list[Account]:
        """Return copies of accounts, for `restore`."""
        return [replace(self.accounts[env_id]) for env_id in env_ids]

    def restore(self, accounts: Iterable[Account]) -> None:
        """Restore the accounts of envs."""
        for account in accounts:
            self.accounts[account.env_id] = account

    def blur(self) -> None:
        """Note that a call was interrupted in which the pool may have started episodes of envs that failed."""
        for account in self.accounts:
            account.is_blurred |= self.is_tough and account.flight is not None

    def begin(self, env_ids: Sequence[int], states: Any, infos: Sequence[dict[str, Any]], seeds: Sequence[Any]) -> None:
        """Check the results of a reset."""
        demand(len(states) == len(env_ids), f"{len(states)} states came of a reset of {len(env_ids)} envs")
        for env_id, state, seed in zip(env_ids, states, seeds, strict=True):
            account, birth, episode = self.accounts[env_id], state[1], int(state[2])
            found = state.tolist()
            wanted = [env_id, birth, episode, 0, NO_TOKEN]
            demand(found[: TOKEN + 1] == wanted, f"a first state of env {env_id} was expected:", found)
            if account.is_new:
                self._check_birth(account, birth)
            elif not self.is_tough:
                demand(birth == account.birth, f"env {env_id} was not to be rebuilt:", found, account)
            is_reborn = birth != account.birth
            lowest = 1 if is_reborn else account.episode + 1
            is_next = episode >= lowest if account.is_blurred or self.is_tough else episode == lowest
            demand(is_next, f"episode {lowest} of env {env_id} was expected:", found)
            info = infos[env_id]
            expected = {"birth": birth, "episode": episode, "seed": seed}
            demand(info == expected, f"the reset info {expected} was expected:", info)
            account.birth, account.episode, account.step, account.pid = birth, episode, 0, int(found[PID])
            account.is_new = account.is_blurred = account.needs_reset = account.is_over = account.is_dead = False

    def rebuild(self, env_ids: Iterable[int]) -> None:
        """Note that envs were rebuilt."""
        self.drop(env_ids)
        for env_id in env_ids:
            account = self.accounts[env_id]
            account.is_new, account.is_blurred, account.is_dead, account.is_late = True, False, False, False
            self.tally["restarts"] += 1

    # ---------------------------------------------------------------- other calls

    def recognise(self, env_id: int, whereabouts: tuple[int, float, int, int]) -> None:
        """Check the self-report of an env without a step in flight."""
        account = self.accounts[env_id]
        demand(whereabouts[ENV_ID] == env_id, f"env {env_id} was asked, another answered:", whereabouts)
        if account.needs_reset or account.is_new or self.is_tough:  # it may have been reset unnoticed
            return
        known = (env_id, account.birth, account.episode, account.step)
        demand(tuple(whereabouts) == known, f"env {env_id} is not where it was left, at {known}:", whereabouts)

    def find(self, env_id: int, whereabouts: tuple[int, float, int, int], *, may_be_unbegun: bool) -> None:
        """Record whether a step was made whose result was lost to an interrupt."""
        account = self.accounts[env_id]
        flight, account.flight = account.flight, None
        _, birth, episode, step = whereabouts
        if (birth, episode, step) == (account.birth, account.episode, account.step):
            is_still = may_be_unbegun or (flight and (flight.is_absent or flight.deed in TROUBLES))
            demand(bool(is_still), f"the step of env {env_id} was forgotten, and never made: {flight}")
            return
        is_next = (birth, episode, step) in (
            (account.birth, account.episode, account.step + 1),
            (account.birth, account.episode + 1, 0),
        )
        demand(is_next or self.is_tough, f"env {env_id} went astray, from {account}:", whereabouts)
        account.birth, account.episode, account.step = birth, episode, step
        self.tally["torn"] += 1
