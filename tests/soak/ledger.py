"""The accounts of all envs: the next transition expected of each. Every result and error is checked against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from parallelenv import StepResult
from parallelenv.errors import EnvInterruptedError, WorkerDiedError, WorkerTimeoutError

from .envs import CUT, END, NO_TOKEN, PID, TROUBLES, info_of, reward_of

_OF_OTHERS = (WorkerDiedError, WorkerTimeoutError, EnvInterruptedError)
"""Errors of a step that its own action did not ask for."""


class ViolationError(Exception): ...


def demand(holds: bool, text: str, *details: Any) -> None:
    if not holds:
        raise ViolationError(" ".join([text, *map(str, details)]))


def blames(error: BaseException) -> list[tuple[BaseException, tuple[int, ...]]]:
    """Return the parts of an error, each with the envs that it names."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    failures: dict[int, BaseException] = getattr(error, "failures", {})
    found = []
    for part in parts:
        like = tuple(i for i, one in failures.items() if (type(one), str(one)) == (type(part), str(part)))
        found.append((part, part.env_ids if isinstance(part, WorkerDiedError | WorkerTimeoutError) else like))
    return found


def named(error: BaseException) -> list[int]:
    return [env_id for _, env_ids in blames(error) for env_id in env_ids]


@dataclass(slots=True)
class Account:
    """The caller's knowledge about one env."""

    env_id: int
    birth: float | None = None
    episode: int = 0
    step: int = 0  # the latest delivered
    pid: int = 0  # of the process that gave the latest result
    flight: tuple[float, float] | None = None  # token and deed of a step that was sent and not received
    is_new: bool = True  # rebuilt since its latest result
    is_blurred: bool = False  # unreported episodes may have started, because the call was given up
    needs_reset: bool = True
    is_over: bool = False  # its episode ended, and it would be left out of steps
    is_dead: bool = False
    is_late: bool = False  # known to take longer than the timeout

    @property
    def can_step(self) -> bool:
        return not (self.flight or self.needs_reset or self.is_over or self.is_dead or self.is_late)


class Ledger:
    def __init__(self, num_envs: int, done_policy: str | None, is_tough: bool, tally: Counter[str]) -> None:
        self.accounts = [Account(env_id) for env_id in range(num_envs)]
        self._done_policy = done_policy
        self.is_tough = is_tough  # the pool restarts envs by itself
        self.tally = tally

    def where(self, holds: Callable[[Account], Any]) -> list[int]:
        return [account.env_id for account in self.accounts if holds(account)]

    @property
    def in_flight(self) -> list[int]:
        return self.where(lambda account: account.flight)

    def depart(self, env_ids: Sequence[int], actions: Sequence[tuple[float, float, float]]) -> None:
        """Record that steps were requested."""
        for env_id, (token, deed, _) in zip(env_ids, actions, strict=True):
            self.accounts[env_id].flight = token, deed

    def deliver(self, result: StepResult) -> list[int]:
        env_ids: list[int] = result.env_ids.tolist()
        demand(len(set(env_ids)) == len(env_ids), "an env was delivered twice in one answer:", env_ids)
        for env_id, *row in zip(env_ids, *result, result.terminated, result.truncated, strict=True):
            account = self.accounts[env_id]
            flight, account.flight, account.is_late = account.flight, None, False
            _, _, done, info, terminated, truncated = row
            if flight is None:
                raise ViolationError(f"env {env_id} was delivered, but owed nothing: {row}")
            demand(done == (terminated or truncated), "done contradicts its parts:", row)
            if "failure" in info:
                self._cut_off(account, flight, row)
            else:
                self._advance(account, flight, row)
        return env_ids

    def _advance(self, account: Account, flight: tuple[float, float], row: list[Any]) -> None:
        state, reward, _, info, terminated, truncated = row
        token, deed = flight
        ends = deed in (END, CUT)
        restarts = ends and self._done_policy == "restart"
        account.step += 1
        self._check_state(account, info.get("ended_state") if restarts else state, token)
        expected = (reward_of(account.env_id, account.step), deed == END, deed == CUT)
        demand((reward, terminated, truncated) == expected, f"{expected} were expected:", row)
        demand(info.get("token") == info_of(account.step, token).get("token"), "another step's info:", row)
        demand(info.get("reset") == (restarts if self._done_policy == "restart" else None), "info['reset']:", row)
        self.tally["transitions"] += 1
        if restarts:
            account.episode, account.step = account.episode + 1, 0
            self._check_state(account, state, NO_TOKEN)
        elif ends:
            self._end(account)

    def _check_state(self, account: Account, state: Any, token: float) -> None:
        wanted = [account.env_id, account.birth, account.episode, account.step, token]
        found = None if state is None else state.tolist()
        demand(found is not None and found[:PID] == wanted, f"state {wanted} was expected, {found} came")
        account.pid = int(state[PID])

    def _end(self, account: Account) -> None:
        for other in self.accounts if self._done_policy is None else [account]:
            other.is_over = self._done_policy in (None, "idle")

    def _cut_off(self, account: Account, flight: tuple[float, float], row: list[Any]) -> None:
        """Note that the pool has restarted an env by itself."""
        state, reward, _, info, *flags = row
        demand(self.is_tough, "no restart was asked for:", row)
        text = str(info["failure"])
        is_own = f"token {flight[0]:.0f}" in text or f"env {account.env_id} " in text
        demand(is_own or isinstance(info["failure"], _OF_OTHERS), f"env {account.env_id} has another's failure:", row)
        demand((reward, *flags, info.get("ended_state")) == (0, False, True, None), "no episode that was cut off:", row)
        demand(state[1] != account.birth, f"env {account.env_id} was to be rebuilt, but lives on:", row)
        account.birth, account.step = float(state[1]), 0
        account.episode = int(state[2]) if account.is_blurred else 1
        self._check_state(account, state, NO_TOKEN)
        account.is_new = account.is_dead = account.is_blurred = False
        self.tally.update(lost=1, mended=1)
        self._end(account)

    def lose(self, error: BaseException) -> list[int]:
        """Record an error about steps without a result; return their env ids."""
        for part, env_ids in blames(error):
            for env_id in env_ids:
                account = self.accounts[env_id]
                flight, account.flight = account.flight, None
                if flight is None:
                    raise ViolationError(f"env {env_id} failed, but owed nothing: {part!r}")
                is_own = flight[1] in TROUBLES and f"token {flight[0]:.0f}" in str(part)
                demand(is_own or isinstance(part, _OF_OTHERS), f"this is not of the step of env {env_id}:", repr(part))
                if isinstance(part, EnvInterruptedError):
                    account.needs_reset = account.is_blurred = True
                self.tally["lost"] += 1
        self.bury(error)
        return named(error)

    def bury(self, error: BaseException) -> None:
        """Record which envs an error reports as dead or late."""
        for part, env_ids in blames(error):
            for env_id in env_ids:
                self.accounts[env_id].is_dead |= isinstance(part, WorkerDiedError)
                self.accounts[env_id].is_late |= isinstance(part, WorkerTimeoutError)

    def drop(self, env_ids: Iterable[int]) -> None:
        """Record that a call has dropped the steps of envs, which need a reset now."""
        for env_id in env_ids:
            account = self.accounts[env_id]
            if account.flight:
                self.tally["lost"] += 1
                account.flight, account.is_blurred = None, True
            account.needs_reset = True

    def begin(self, env_ids: Sequence[int], states: Any, infos: Sequence[dict[str, Any]], seeds: Sequence[Any]) -> None:
        demand(len(states) == len(env_ids), f"{len(states)} states came of a reset of {len(env_ids)} envs")
        for env_id, state, seed in zip(env_ids, states, seeds, strict=True):
            account, birth, episode = self.accounts[env_id], float(state[1]), int(state[2])
            is_reborn = birth != account.birth
            demand(is_reborn or not account.is_new, f"env {env_id} was to be rebuilt, but lives on")
            demand(not is_reborn or account.is_new or self.is_tough, f"env {env_id} was not to be rebuilt:", account)
            lowest = 1 if is_reborn else account.episode + 1
            is_next = episode >= lowest if account.is_blurred or self.is_tough else episode == lowest
            demand(is_next, f"episode {lowest} of env {env_id} was expected:", state)
            account.birth, account.episode, account.step = birth, episode, 0
            self._check_state(account, state, NO_TOKEN)
            expected = {"birth": birth, "episode": episode, "seed": seed}
            demand(infos[env_id] == expected, f"the reset info {expected} was expected:", infos[env_id])
            account.is_new = account.is_blurred = account.needs_reset = account.is_over = account.is_dead = False

    def rebuild(self, env_ids: Sequence[int]) -> None:
        self.drop(env_ids)
        for env_id in env_ids:
            account = self.accounts[env_id]
            account.is_new, account.is_blurred, account.is_dead, account.is_late = True, False, False, False
        self.tally["restarts"] += len(env_ids)
