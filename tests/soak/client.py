"""Calls to a `ParallelEnv` that follow the advice of its errors and record every result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from parallelenv import ParallelEnv
from parallelenv.errors import NothingInFlightError, WorkerDiedError, WorkerTimeoutError

from .caller import Caller, StopError, StuckError
from .envs import Action
from .ledger import Ledger, ViolationError, blames, demand, named

_MISSING: Any = object()
_OURS = (ViolationError, StuckError, StopError)


class Client:
    """Uses one pool until it is closed."""

    def __init__(self, env: ParallelEnv, ledger: Ledger, caller: Caller) -> None:
        self.env = env
        self.ledger = ledger
        self.caller = caller

    def _attempt(self, call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Make a call; return its result or its error, which is noted unless it is an interrupt."""
        try:
            return self.caller.make(call), None
        except _OURS:
            raise
        except BaseException as error:  # noqa: BLE001 (the callers decide which are expected)
            if not isinstance(error, KeyboardInterrupt):
                self.caller.note(f"  {describe(error)}")
            return None, error

    # ---------------------------------------------------------------- steps

    def step(self, actions: Sequence[Action], env_ids: list[int], named_ids: Any, align: Any) -> None:
        """Step envs."""
        self.ledger.depart(env_ids, actions)
        settled = self._settle(partial(self.env.step, np.array(actions), named_ids, align), env_ids)
        demand(settled in (None, sorted(env_ids)), f"step of {sorted(env_ids)} answered for", settled)

    def send(self, actions: Sequence[Action], env_ids: list[int], named_ids: Any) -> None:
        """Send a step of envs. Arguments as in `step`."""
        self.ledger.depart(env_ids, actions)
        self._settle(partial(self.env.send, np.array(actions), named_ids), env_ids)

    def receive(self, lowest: int, highest: int | None, timeout: float | None, align: Any) -> None:
        """Receive results, and check that their number is within the bounds."""
        in_flight = self.ledger.in_flight
        call = partial(self.env.recv, lowest, highest, timeout, align)
        settled = self._settle(call, (), is_glance=timeout is not None)
        if settled is None:
            return
        demand(set(settled) <= set(in_flight), f"recv() gave {settled}, but owed {in_flight}")
        demand(len(settled) >= min(lowest, len(in_flight)), f"recv({lowest}) gave only", settled)
        demand(highest is None or len(settled) <= highest, f"recv(max_envs={highest}) gave", settled)

    def _settle(self, call: Callable[[], Any], asked: Sequence[int], *, is_glance: bool = False) -> list[int] | None:
        """Make a call about steps, and record its results.

        Args:
            call: The call.
            asked: Envs that it asks to step.
            is_glance: Whether it waits less than the pool's timeout, so that no env is late for it.

        Returns:
            The envs whose steps ended; ``None`` if later calls must find out.
        """
        result, error = self._attempt(call)
        if error is None:
            return None if result is None else sorted(self.ledger.deliver(result))
        if isinstance(error, KeyboardInterrupt):
            self._after_interrupt(asked)
        elif isinstance(error, WorkerTimeoutError) and not hasattr(error, "partial"):
            self._after_timeout(error, is_glance)
        else:
            return self._after_error(error, asked)
        return None

    def _after_error(self, error: BaseException, asked: Sequence[int]) -> list[int] | None:
        """Record an error, and the results of the other envs."""
        result = getattr(error, "partial", _MISSING)
        if result is _MISSING:  # nothing was sent
            if not isinstance(error, WorkerDiedError) or not asked:
                raise ViolationError(f"an unexpected error: {describe(error)}") from error
            self.ledger.withdraw(asked)
            self._bury(error)
            return None
        delivered = self.ledger.deliver(result)
        lost = [env_id for blame in blames(error) for env_id in self.ledger.lose(blame)]
        return sorted([*delivered, *lost])

    def _bury(self, error: BaseException) -> None:
        for blame in blames(error):
            self.ledger.bury(blame)

    def _after_timeout(self, error: WorkerTimeoutError, is_glance: bool) -> None:
        """Record which envs are late. Their steps continue."""
        strangers = set(error.env_ids) - set(self.ledger.in_flight)
        demand(not strangers, f"envs {sorted(strangers)} are reported as late, but have nothing in flight:", error)
        if not is_glance:
            self._bury(error)

    def _after_interrupt(self, asked: Sequence[int]) -> None:
        """Receive all steps in flight, and check steps interrupted at their start or end."""
        self.ledger.blur()
        while self.ledger.in_flight:
            result, error = self._attempt(partial(self.env.recv, len(self.ledger.in_flight), None, 1.0))
            if error is None:
                self.ledger.deliver(result)
            elif isinstance(error, NothingInFlightError):
                break
            elif isinstance(error, WorkerTimeoutError):
                self._bury(error)
                self.restart(list(error.env_ids))
            else:
                self._after_error(error, ())
        self._search(asked)

    def _search(self, asked: Sequence[int]) -> None:
        """Ask envs whose step was neither received nor is in flight whether it was made."""
        missing = self.ledger.in_flight
        demand(
            not asked or set(missing) <= set(asked), f"of {asked} a step was interrupted, lost are those of", missing
        )
        for env_id in missing:
            places = self.ask(partial(self.env.customized_method, "where", id=env_id))
            if places:
                self.ledger.find(env_id, places[0], may_be_unbegun=env_id in asked)
            else:
                self.ledger.withdraw([env_id])
        self.ledger.follow(self.env.done)  # the end of one env may end all
        if missing:
            self.caller.note(f"  never begun, or torn: {missing}")

    # ---------------------------------------------------------------- episodes and rebuilds

    def reset(self, env_ids: list[int], seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset envs; the options are for the first."""
        before = self.ledger.remember(env_ids)
        self.ledger.drop(env_ids)
        each = [options, *[None] * (len(env_ids) - 1)]
        states, error = self._attempt(partial(self.env.reset, env_ids, seed=seed, options=each))
        if isinstance(error, KeyboardInterrupt):  # whether steps were dropped is not known
            self.restart(env_ids)
            return
        failed: set[int] = set()
        if error is not None:
            if isinstance(error, WorkerDiedError) and not hasattr(error, "partial"):  # refused
                self.ledger.restore(before)
            demand(bool(named(error)), "an unexpected error:", describe(error))
            self._bury(error)
            states = getattr(error, "partial", None)
            failed = set(env_ids if states is None else named(error))
        for env_id in failed:
            self.ledger.accounts[env_id].is_blurred = True
        good = [env_id for env_id in env_ids if env_id not in failed]
        seeds = [None if seed is None else seed + env_id for env_id in good]
        self.ledger.begin(good, () if states is None else states, self.env.reset_infos, seeds)

    def restart(self, env_ids: list[int]) -> None:
        """Rebuild envs."""
        begin = time.monotonic()
        rebuilt, error = self._attempt(partial(self.env.restart, env_ids))
        if isinstance(error, KeyboardInterrupt):  # which envs were rebuilt is unknown
            self.restart(list(range(len(self.env))))
            return
        if error is None:
            demand(set(env_ids) <= set(rebuilt), f"restart({env_ids}) rebuilt only", rebuilt)
        else:
            rebuilt = getattr(error, "partial", ())
            self.ledger.drop(named(error))
            self._bury(error)
        self.ledger.rebuild(rebuilt)
        self.caller.note(f"  restart({env_ids}) rebuilt {list(rebuilt)} in {time.monotonic() - begin:.2f} s")

    def close(self) -> None:
        """Close the pool, twice, for it may be interrupted."""
        with contextlib.suppress(KeyboardInterrupt):
            self.caller.make(self.env.close)
        self.env.close()

    # ---------------------------------------------------------------- other calls

    def ask(self, call: Callable[[], list[Any]]) -> list[Any]:
        """Make a call by name and return its result, nothing if there is none."""
        answer: list[Any] | None
        answer, error = self._attempt(call)
        if error is not None and not isinstance(error, KeyboardInterrupt):
            if not all(blame.is_of_death or blame.is_of_time for blame in blames(error)):
                raise error
            self._bury(error)
        return answer or []


def describe(error: BaseException) -> str:
    """Return a line on an error."""
    envs = sorted(named(error))
    parts = getattr(error, "exceptions", [error])
    kinds = ", ".join(dict.fromkeys(type(part).__name__ for part in parts))
    return f"{type(error).__name__} ({kinds}) of envs {envs}: {str(error)[:150]!r}"
