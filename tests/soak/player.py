"""Executes turns on a pool in any state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from modes import THREADS

from parallelenv import ParallelEnv
from parallelenv.errors import EnvBusyError, ResetNeededError, WorkerDiedError

from .adversary import Turn
from .caller import Caller, kill, meanwhile, node_of
from .client import Client
from .envs import EXIT, GO, TROUBLES, WAIT, Action
from .ledger import Account, Ledger, ViolationError, demand


class Player(Client):
    """Executes turns."""

    def __init__(self, env: ParallelEnv, ledger: Ledger, caller: Caller, timeout: float, tokens: Iterator[int]) -> None:
        super().__init__(env, ledger, caller)
        self.timeout = timeout
        self.tokens = tokens

    def play(self, turn: Turn) -> None:
        """Follow the advice of earlier errors, then execute the turn."""
        self._repair(turn)
        what = f"{turn.call} ({turn.disturbance})" if turn.disturbance else turn.call
        self.caller.note(f"turn {turn.number}: {what}, {len(self.ledger.in_flight)} under way")
        if turn.kill and turn.kill_after is None:
            self._kill(turn)
        self.caller.interrupt_after = turn.interrupt_after
        with meanwhile(turn.kill_after, partial(self._kill, turn)):
            getattr(self, f"_{turn.call}")(turn)
        self.caller.interrupt_after = None

    def _kill(self, turn: Turn) -> None:
        accounts = [self.ledger.accounts[env_id] for env_id in turn.rank]
        pids = [account.pid for account in accounts if account.pid not in (0, os.getpid())]
        pids = list(dict.fromkeys(pids)) if turn.kill == "all" else pids[:1]
        if turn.kill == "node":
            pids = [node_of(pid) for pid in pids]
        self.ledger.tally["kills"] += kill(pids)
        self.caller.note(f"  killed {pids}")

    def _repair(self, turn: Turn) -> None:
        """Occasionally follow the advice of errors: restart, wait, reset."""
        ledger = self.ledger
        late = ledger.where(lambda account: account.is_late)
        if late and turn.mood < 0.3 and ledger.in_flight:
            self.receive(len(ledger.in_flight), None, 0.8 * self.timeout, turn.align)
            late = []
        if late and turn.mood < 0.9:
            self.restart(late)
        dead = ledger.where(lambda account: account.is_dead)
        if dead and turn.mood < 0.7:
            self.restart(dead)
        fresh = ledger.where(lambda account: account.needs_reset and not account.is_dead and not account.is_late)
        over = ledger.where(lambda account: account.is_over and not account.flight and not account.is_dead)
        if (fresh and turn.mood < 0.8) or (over and turn.mood < 0.5):
            self.reset(sorted({*fresh, *over}), turn.number if turn.mood < 0.25 else None, None)

    # ---------------------------------------------------------------- turns, by name

    def _step(self, turn: Turn) -> None:
        env_ids, named_ids = self._choose(turn)
        if env_ids:
            self.step(self._actions(turn, env_ids), env_ids, named_ids, turn.align)

    def _send(self, turn: Turn) -> None:
        env_ids, named_ids = self._choose(turn)
        if env_ids:
            self.send(self._actions(turn, env_ids), env_ids, named_ids)

    def _receive(self, turn: Turn) -> None:
        if turn.disturbance or not self.ledger.in_flight:
            interrupt_after, self.caller.interrupt_after = self.caller.interrupt_after, None
            self._send(turn)
            self.caller.interrupt_after = interrupt_after
        if self.ledger.in_flight:
            self.receive(*turn.window, turn.timeout, turn.align)

    def _reset(self, turn: Turn) -> None:
        options = {"until": time.time() + turn.seconds, "fails": turn.fails}
        self.reset(turn.rank[: turn.count or 4], None, options)

    def _restart(self, turn: Turn) -> None:
        self.restart(turn.rank[: min(3, turn.count or 1)])

    def _echo(self, turn: Turn) -> None:
        """Call methods whose return values are known."""
        env_ids = turn.rank[: turn.count or 6]
        token = next(self.tokens)
        data = [{"value": token + env_id / 1024} for env_id in env_ids]
        data[0]["until"] = time.time() + turn.seconds
        answers = self.ask(partial(self.env.customized_method, "echo", data, env_ids))
        wanted = [(env_id, one["value"]) for env_id, one in zip(env_ids, data, strict=True)]
        demand(not answers or answers == wanted, f"echoes {wanted} were expected:", answers)
        settled = [env_id for env_id in env_ids if not self.ledger.accounts[env_id].flight]
        places = self.ask(partial(self.env.customized_method, "where", None, settled)) if settled else []
        for env_id, place in zip(settled, places, strict=bool(places)):
            self.ledger.recognise(env_id, place)

    def _attribute(self, turn: Turn) -> None:
        """Set attributes and read them again."""
        env_ids = turn.rank[: turn.count or 6]
        token = next(self.tokens)
        marks = [token + env_id / 1024 for env_id in env_ids]
        answers = self.ask(lambda: [self.env.set_env_attr("mark", values=marks, id=env_ids)])
        found = self.ask(partial(self.env.get_env_attr, "mark", env_ids)) if answers else []
        is_same = found == marks or (self.ledger.is_tough and len(found) == len(marks))
        demand(not found or is_same, f"marks {marks} were expected:", found)

    def _pause(self, turn: Turn) -> None:
        self.env.pause(turn.rank[:3])
        for env_id in turn.rank[:3]:
            self.ledger.accounts[env_id].is_paused = True

    def _resume(self, turn: Turn) -> None:
        self.env.resume()
        for account in self.ledger.accounts:
            account.is_paused = False

    def _refused(self, turn: Turn) -> None:
        """Make calls that must be refused; later turns show whether an env was stepped."""
        env_ids = self.ledger.where(_must_be_refused)
        if not env_ids:
            return
        try:
            self.env.step(np.zeros((len(env_ids), 3)), env_ids)
        except (EnvBusyError, ResetNeededError, WorkerDiedError):
            return
        raise ViolationError(f"a step of envs {env_ids} was not refused")

    # ---------------------------------------------------------------- actions

    def _choose(self, turn: Turn) -> tuple[list[int], Any]:
        """Return the envs to step, and the form of ``id``."""
        accounts = self.ledger.accounts
        everyone = [account.env_id for account in accounts if not account.is_paused]
        able = [env_id for env_id in turn.rank if accounts[env_id].can_step]
        if turn.count is None and sorted(able) == everyone:
            return everyone, None
        chosen = able[: turn.count]
        if turn.form == "mask":
            mask = [env_id in chosen for env_id in range(len(accounts))]
            return sorted(chosen), mask
        forms: dict[str, Callable[[list[int]], Any]] = {"list": list, "tuple": tuple, "array": np.array}
        return chosen, forms[turn.form](chosen)

    def _actions(self, turn: Turn, env_ids: list[int]) -> list[Action]:
        """Return an action per env; the first in rank do the turn's deeds."""
        first = sorted(env_ids, key=turn.rank.index)
        deeds = dict(zip(first, turn.deeds, strict=False))
        actions = []
        for env_id in env_ids:
            deed, seconds = self._allowed(env_id, *deeds.get(env_id, (GO, 0.0)))
            actions.append((float(next(self.tokens)), float(deed), seconds))
        return actions

    def _allowed(self, env_id: int, deed: int, seconds: float) -> tuple[int, float]:
        """Return a deed that an env may do in its mode: the caller's own thread cannot be ended or abandoned."""
        account = self.ledger.accounts[env_id]
        if account.is_over:
            return deed, seconds
        shares_process = account.pid == os.getpid()
        if deed == EXIT and shares_process:
            return GO, 0.0
        if deed == WAIT and seconds > self.timeout and shares_process and self.env.para_mode != THREADS:
            return GO, 0.0
        self.ledger.tally["kills"] += deed == EXIT
        self.ledger.tally["exceptions"] += deed in TROUBLES
        self.ledger.tally["hangs"] += deed == WAIT and seconds > self.timeout
        return deed, seconds


def _must_be_refused(account: Account) -> bool:
    """Return whether a step is certainly refused: after an abandoned reset there may be an episode."""
    return bool(account.flight or account.is_paused or (account.needs_reset and not account.is_blurred))
