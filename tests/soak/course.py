"""The soak test of one mode: turn by turn, with a new pool occasionally."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import psutil
from holdings import Holdings, survivors
from modes import PROCESSES, RAY, RAY_POOLS

from parallelenv import ParallelEnv
from parallelenv.contract.error_text import format_table
from parallelenv.engine import recovery

from .adversary import Adversary
from .caller import Caller, StuckError
from .envs import Numbered
from .ledger import Ledger, ViolationError, demand
from .player import Player

_TIMEOUT = 1.0
_TIMEOUTS = {RAY: 2.0, RAY_POOLS: 2.0}
_PATIENCE = 10.0
"""Seconds for the end of processes: a Ray actor takes long."""
_MOST_REPORTS = 5
_GROWTH = 1.3, 30.0
"""The allowed growth of memory between the second quarter and the last: a factor, and MB."""
_PROGRESS = ("transitions", "kills", "hangs", "exceptions", "interrupts", "rebuilds", "lost", "wrong")
_COLUMNS = (
    *("turns", "transitions", "kills", "hangs", "exceptions", "interrupts", "rebuilds", "restarts"),
    "mended",  # envs restarted by the pool itself
    "lost",  # steps without a result, each of which the library announced
    "torn",  # results lost to an interrupt between the library and its caller
    *("wrong", "leaks", "MB before", "MB after"),
)
_SAMPLES_EVERY = 0.5
_LINES_EVERY = 5.0


class Course:
    """Runs the soak test of one mode."""

    def __init__(self, mode: str, seed: int, num_envs: int, say: Callable[[str], None] = print) -> None:
        self.tally: Counter[str] = Counter()
        self._mode = mode
        self._seed = seed
        self._num_envs = num_envs
        self._say = say
        self._timeout = _TIMEOUTS.get(mode, _TIMEOUT)
        self._adversary = Adversary(seed, mode, num_envs, self._timeout)
        self._events: deque[str] = deque(maxlen=30)
        self._tokens = itertools.count(1)
        self._options = ""
        self._is_lost = False  # after a violation, which the ledger cannot account for
        self._begin = time.monotonic()
        self._samples: list[tuple[float, float]] = []
        self._caller = Caller(self.tally, self._note)
        self._player: Player

    def run(self, seconds: float) -> Counter[str]:
        """Run for some seconds and return the counts."""
        self._make_pool()
        self._player.env.close()  # resources that Python and Ray keep exist now
        before = Holdings()
        # The pauses before restarts, which grow up to 5 s, would take up all the time.
        unhurried = mock.patch.multiple(recovery, _FIRST_DELAY=0.01, _LONGEST_DELAY=0.05)
        with self._caller, unhurried:
            self._make_pool()
            self._begin = time.monotonic()
            try:
                self._take_turns(seconds)
            finally:
                self._release(is_abandoned=False)
        leaks = before.leaks(_PATIENCE)
        self.tally["leaks"] += len(leaks)
        if leaks:
            self._report(ViolationError(f"left behind: {'; '.join(leaks)}"))
        self._look_at_memory(seconds)
        return self.tally

    # ---------------------------------------------------------------- turns

    def _take_turns(self, seconds: float) -> None:
        sampled = shown = 0.0
        while (elapsed := time.monotonic() - self._begin) < seconds and self.tally["wrong"] < _MOST_REPORTS:
            if elapsed > sampled:
                sampled = elapsed + _SAMPLES_EVERY
                self._samples.append((elapsed, megabytes()))
            if elapsed > shown:
                shown = elapsed + _LINES_EVERY
                line = ", ".join(f"{self.tally[name]:,} {name}" for name in _PROGRESS)
                where = f"[{self._mode} {elapsed:.0f}/{seconds:.0f} s] turn {self.tally['turns']}"
                self._say(f"{where}: {line}, {self._samples[-1][1]:.0f} MB")
            try:
                self._take_turn()
            except (Exception, StuckError) as error:  # noqa: BLE001 (anything caught here is not an acceptable result for a user)
                self._report(error)
                self._is_lost = True
            self.tally["turns"] += 1

    def _take_turn(self) -> None:
        turn = self._adversary.plan(self.tally["turns"])
        if self._is_lost:
            self._release(is_abandoned=False)
            self._make_pool()
            self._is_lost = False
        self._caller.interrupt_after = None
        if turn.call not in ("rebuild", "abandon", "make"):
            self._player.play(turn)
            return
        self._note(f"turn {turn.number}: {turn.disturbance}")
        self._caller.interrupt_after = turn.interrupt_after
        if turn.call == "make":
            self._make_in_vain()
        else:
            self._renew(is_abandoned=turn.call == "abandon")

    # ---------------------------------------------------------------- pools

    def _make_pool(self) -> None:
        dice = self._adversary.dice("pool", self.tally["turns"])
        options: dict[str, Any] = {
            "asynchronous": dice.choice((None, "idle", "restart", "continue")),
            "on_failure": dice.choice(("raise", "restart")),
            "max_restarts": dice.choice((2, 10, 1000)),
            "copy": dice.choice((True, True, False)),
            "num_cpus": dice.randint(2, 4),
        }
        if self._mode == PROCESSES:
            options["caller_steps"] = dice.random() < 0.25
        if self._mode == RAY_POOLS:
            options["hosts_per_node"] = dice.choice((1, 2))
        self._options = str(options)
        self._note(f"a pool with {options}")
        env = self._caller.make(partial(self._make_env, options))
        ledger = Ledger(self._num_envs, options["asynchronous"], options["on_failure"] == "restart", self.tally)
        self._player = Player(env, ledger, self._caller, self._timeout, self._tokens)

    def _make_env(self, options: dict[str, Any]) -> ParallelEnv:
        env_fns = [partial(Numbered, env_id) for env_id in range(self._num_envs)]
        return ParallelEnv(env_fns, self._mode, timeout=self._timeout, **options)

    def _make_in_vain(self) -> None:
        """Make a second pool, which is interrupted; leaks are found at the end."""
        with contextlib.suppress(KeyboardInterrupt):
            self._caller.make(partial(self._make_env, {"num_cpus": 1})).close()

    def _renew(self, *, is_abandoned: bool) -> None:
        """Release the pool, check that it and its workers end, and make another."""
        pids = {account.pid for account in self._player.ledger.accounts}
        remains = self._release(is_abandoned=is_abandoned)
        gc.collect()
        kept = remains() if remains else None
        if kept is not None:
            kept.close()
        left = survivors(pids - {0, os.getpid()}, _PATIENCE)
        self.tally["leaks"] += len(left)
        self.tally["rebuilds"] += 1
        self._make_pool()
        demand(kept is None, "an unused pool was kept")
        demand(not left, "these processes outlived their pool:", left)

    def _release(self, *, is_abandoned: bool) -> weakref.ref[ParallelEnv] | None:
        """Close the pool unless it is abandoned, and drop the reference; return a weak reference."""
        if not hasattr(self, "_player"):  # making it failed
            return None
        remains = weakref.ref(self._player.env)
        if not is_abandoned:
            self._player.close()
        del self._player
        return remains

    # ---------------------------------------------------------------- accounts

    def _note(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._begin:8.3f} s  {text}")

    def _report(self, error: BaseException) -> None:
        self.tally["wrong"] += 1
        again = f"python -m tests.soak --modes {self._mode} --seed {self._seed} --num-envs {self._num_envs}"
        frames = "" if type(error) is ViolationError else "".join(traceback.format_exception(error))
        events = "\n".join(self._events)
        what = f"WRONG in turn {self.tally['turns']}: {error}\n{frames}in a pool with {self._options}\nseen by: {again}"
        self._say(f"{what}\nthe last events:\n{events}")

    def _look_at_memory(self, seconds: float) -> None:
        def typical(begin: float, end: float) -> float:
            sizes = [size for elapsed, size in self._samples if begin * seconds <= elapsed < end * seconds]
            return median(sizes or [self._samples[-1][1]])

        before, after = typical(0.25, 0.5), typical(0.75, 1.0)
        self.tally.update({"MB before": round(before), "MB after": round(after)})
        factor, room = _GROWTH
        if after > before * factor + room:
            self._report(ViolationError(f"memory grew from {before:.0f} to {after:.0f} MB"))


def format_tallies(tallies: dict[str, Counter[str]]) -> str:
    """Return the table of all modes."""
    rows = [[mode, *(f"{tally[name]:,}" for name in _COLUMNS)] for mode, tally in tallies.items()]
    return format_table(["mode", *_COLUMNS], rows, left=("mode",))


def megabytes() -> float:
    """Return the memory of this process: its proportional share if the system reports it, else the resident size."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return float(psutil.Process().memory_info().rss) / 1e6
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3
