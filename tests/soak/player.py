"""Executes turns on a pool in any state, follows the advice of its errors, and records every result."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from modes import THREADS

from parallelenv import ParallelEnv
from parallelenv.errors import NothingInFlightError, WorkerDiedError, WorkerTimeoutError

from .adversary import Turn
from .caller import Caller, kill, meanwhile, node_of
from .envs import EXIT, GO, TROUBLES, WAIT
from .ledger import Ledger, ViolationError, blames, demand, named


@dataclass
class Player:
    env: ParallelEnv
    ledger: Ledger
    caller: Caller
    timeout: float
    tokens: Iterator[int]
    note: Callable[[str], None]

    def play(self, turn: Turn) -> None:
        """Follow the advice of earlier errors, then execute the turn."""
        self._repair(turn)
        rank = turn.dice.sample(range(len(self.env)), len(self.env))
        hit = self.caller.strike if turn.hit == "call" else partial(self._kill, turn.hit, rank)
        if turn.hit and turn.delay is None:
            hit()
        with meanwhile(turn.delay, hit):
            getattr(self, f"_play_{turn.call}")(turn, rank)

    def _kill(self, target: str, rank: list[int]) -> None:
        pids = [pid for env_id in rank if (pid := self.ledger.accounts[env_id].pid) not in (0, os.getpid())]
        pids = list(dict.fromkeys(pids)) if target == "all" else pids[:1]
        if target == "node":
            pids = [node_of(pid) for pid in pids]
        self.ledger.tally["kills"] += kill(pids)
        self.note(f"  killed {pids}")

    def _repair(self, turn: Turn) -> None:
        """Occasionally follow the advice of errors: restart, wait, reset."""
        ledger, mood = self.ledger, turn.dice.random()
        late = ledger.where(lambda account: account.is_late)
        if late and mood < 0.3 and ledger.in_flight:
            self._receive(len(ledger.in_flight), None, 0.8 * self.timeout)
        elif late and mood < 0.9:
            self._restart(late)
        dead = ledger.where(lambda account: account.is_dead)
        if dead and mood < 0.7:
            self._restart(dead)
        fresh = ledger.where(lambda account: account.needs_reset and not account.is_dead and not account.is_late)
        over = ledger.where(lambda account: account.is_over and not account.flight and not account.is_dead)
        if (fresh and mood < 0.8) or (over and mood < 0.5):
            self._reset(sorted({*fresh, *over}), turn.number if mood < 0.25 else None, None)

    def _play_step(self, turn: Turn, rank: list[int]) -> None:
        if env_ids := self._able(turn, rank):
            call = partial(self.env.step, self._depart(turn, env_ids), env_ids)
            settled = self._settle(call, env_ids)
            demand(settled in (None, sorted(env_ids)), f"step of {sorted(env_ids)} answered for", settled)

    def _play_send(self, turn: Turn, rank: list[int]) -> None:
        if env_ids := self._able(turn, rank):
            self._settle(partial(self.env.send, self._depart(turn, env_ids), env_ids), env_ids)

    def _play_receive(self, turn: Turn, rank: list[int]) -> None:
        if turn.disturbance or not self.ledger.in_flight:
            self._play_send(turn, rank)
        if self.ledger.in_flight:
            lowest = turn.dice.choice((1, turn.dice.randint(1, len(self.env))))
            self._receive(lowest, turn.dice.choice((None, lowest, lowest + 3)), turn.timeout)

    def _play_reset(self, turn: Turn, rank: list[int]) -> None:
        self._reset(rank[: turn.dice.randint(1, 8)], None, {"until": time.time() + turn.seconds, "fails": turn.fails})

    def _play_restart(self, turn: Turn, rank: list[int]) -> None:
        self._restart(rank[: turn.dice.randint(1, 3)])

    def _play_echo(self, turn: Turn, rank: list[int]) -> None:
        env_ids = rank[: turn.dice.randint(1, 8)]
        data = [{"value": float(next(self.tokens)), "until": 0.0} for _ in env_ids]
        data[0]["until"] = time.time() + turn.seconds
        answers, error = self._attempt(partial(self.env.customized_method, "echo", data, env_ids))
        if error is None:
            wanted = [(env_id, one["value"]) for env_id, one in zip(env_ids, data, strict=True)]
            demand(answers == wanted, f"echoes {wanted} were expected:", answers)
        elif not isinstance(error, KeyboardInterrupt):
            if not all(isinstance(part, WorkerDiedError | WorkerTimeoutError) for part, _ in blames(error)):
                raise error
            self.ledger.bury(error)

    def _able(self, turn: Turn, rank: list[int]) -> list[int]:
        """Return envs to step: all that are able, or some."""
        able = [env_id for env_id in rank if self.ledger.accounts[env_id].can_step]
        return able[: turn.dice.choice((None, None, 1, turn.dice.randint(1, len(rank))))]

    def _depart(self, turn: Turn, env_ids: list[int]) -> Any:
        """Record that envs are stepped; return their actions. The first ones do the turn's deeds if they may."""
        actions = []
        for place, env_id in enumerate(env_ids):
            deed, seconds = turn.deeds[place] if place < len(turn.deeds) else (GO, 0.0)
            account = self.ledger.accounts[env_id]
            hangs = deed == WAIT and seconds > self.timeout
            # The caller's own thread cannot be ended or abandoned.
            if account.pid == os.getpid() and (deed == EXIT or (hangs and self.env.para_mode != THREADS)):
                deed = GO
            self.ledger.tally.update(kills=deed == EXIT, exceptions=deed in TROUBLES, hangs=hangs)
            actions.append((float(next(self.tokens)), float(deed), seconds))
        self.ledger.depart(env_ids, actions)
        return np.array(actions)

    def _attempt(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Make a call; return its result or its error, which is noted."""
        result, error = self.caller.attempt(call)
        if error is not None:
            self.note(f"  {describe(error)}")
        return result, error

    def _receive(self, lowest: int, highest: int | None, timeout: float | None) -> None:
        """Receive results, and check that their number is within the bounds."""
        in_flight = self.ledger.in_flight
        settled = self._settle(partial(self.env.recv, lowest, highest, timeout), ())
        if settled is not None:
            demand(set(settled) <= set(in_flight), f"recv() gave {settled}, but owed {in_flight}")
            demand(len(settled) >= min(lowest, len(in_flight)), f"recv({lowest}) gave only", settled)
            demand(highest is None or len(settled) <= highest, f"recv(max_envs={highest}) gave", settled)

    def _settle(self, call: Callable[[], Any], asked: Sequence[int]) -> list[int] | None:
        """Make a call about steps, of which it asks for some, and record its results.

        Returns:
            The envs whose steps ended; ``None`` if later calls must find out.
        """
        result, error = self._attempt(call)
        if isinstance(error, KeyboardInterrupt):
            self._after_interrupt(asked)
        elif error is not None:
            return self._after_error(error, asked)
        elif result is not None:
            return sorted(self.ledger.deliver(result))
        return None

    def _after_error(self, error: BaseException, asked: Sequence[int]) -> list[int] | None:
        if hasattr(error, "partial"):
            return sorted([*self.ledger.deliver(error.partial), *self.ledger.lose(error)])
        if isinstance(error, WorkerTimeoutError):  # the steps continue
            strangers = set(error.env_ids) - set(self.ledger.in_flight)
            demand(not strangers, f"envs {sorted(strangers)} are reported as late, but have nothing in flight:", error)
        elif isinstance(error, WorkerDiedError) and asked:  # nothing was sent
            for env_id in asked:
                self.ledger.accounts[env_id].flight = None
        else:
            raise ViolationError(f"an unexpected error: {describe(error)}") from error
        self.ledger.bury(error)
        return None

    def _after_interrupt(self, asked: Sequence[int]) -> None:
        """Receive all steps in flight. Only those that the interrupted call has asked for may be missing."""
        for account in self.ledger.accounts:  # the pool may have started episodes of envs that failed
            account.is_blurred |= self.ledger.is_tough and account.flight is not None
        while in_flight := self.ledger.in_flight:
            result, error = self._attempt(partial(self.env.recv, len(in_flight), None, 1.0))
            if error is None:
                self.ledger.deliver(result)
            elif isinstance(error, NothingInFlightError):
                break
            elif isinstance(error, WorkerTimeoutError) and not hasattr(error, "partial"):
                self.ledger.bury(error)
                self._restart(list(error.env_ids))
            else:
                self._after_error(error, ())
        if missing := self.ledger.in_flight:
            demand(set(missing) <= set(asked), f"of {asked} a step was interrupted, lost are those of", missing)
            self.note(f"  never begun, or lost: {missing}")
            self.ledger.drop(range(len(self.env)))  # the end of one env may have ended all
            for account in self.ledger.accounts:
                account.is_blurred = True

    def _reset(self, env_ids: list[int], seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset envs; the options are for the first."""
        each = [options, *[None] * (len(env_ids) - 1)]
        states, error = self._attempt(partial(self.env.reset, env_ids, seed=seed, options=each))
        if isinstance(error, KeyboardInterrupt):  # whether steps were dropped is not known
            self._restart(env_ids)
            return
        failed: set[int] = set()
        if error is not None:
            demand(bool(named(error)), "an unexpected error:", describe(error))
            self.ledger.bury(error)
            if isinstance(error, WorkerDiedError) and not hasattr(error, "partial"):  # nothing was sent
                return
            states = getattr(error, "partial", None)
            failed = set(env_ids if states is None else named(error))
        self.ledger.drop(env_ids)
        for env_id in failed:
            self.ledger.accounts[env_id].is_blurred = True
        good = [env_id for env_id in env_ids if env_id not in failed]
        seeds = [None if seed is None else seed + env_id for env_id in good]
        self.ledger.begin(good, () if states is None else states, self.env.reset_infos, seeds)

    def _restart(self, env_ids: list[int]) -> None:
        rebuilt, error = self._attempt(partial(self.env.restart, env_ids))
        if isinstance(error, KeyboardInterrupt):  # which envs were rebuilt is unknown
            self._restart(list(range(len(self.env))))
            return
        if error is None:
            demand(set(env_ids) <= set(rebuilt), f"restart({env_ids}) rebuilt only", rebuilt)
        else:
            rebuilt = getattr(error, "partial", ())
            self.ledger.drop(named(error))
            self.ledger.bury(error)
        self.ledger.rebuild(rebuilt)

    def close(self) -> None:
        """Close the pool, twice, for it may be interrupted."""
        self.caller.make(self.env.close)
        self.env.close()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__} of envs {sorted(named(error))}: {str(error)[:150]!r}"
