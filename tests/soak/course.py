"""The soak test of one mode: turn by turn, with a new pool occasionally."""

from __future__ import annotations

import gc
import itertools
import random
import time
import traceback
from collections import Counter, deque
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import psutil
from holdings import Holdings
from modes import ON_RAY, PROCESSES, RAY_POOLS

from parallelenv import ParallelEnv
from parallelenv.contract.error_text import format_table
from parallelenv.engine import recovery

from .adversary import Turn, turns
from .caller import Caller, StuckError, meanwhile
from .envs import Numbered
from .ledger import Ledger, ViolationError
from .player import Player

_NUM_ENVS = 32
_PATIENCE = 10.0
"""Seconds for the end of processes: a Ray actor takes long."""
_MOST_REPORTS = 5
_GROWTH = 1.3, 30.0
"""The allowed growth of memory between the second quarter and the last: a factor, and MB."""
_COLUMNS = (
    *("turns", "transitions", "kills", "hangs", "exceptions", "interrupts", "rebuilds", "restarts"),
    "mended",  # envs restarted by the pool itself
    "lost",  # steps without a result: the library announced it, or the call that asked for them was interrupted
    *("wrong", "leaks", "MB before", "MB after"),
)
_LINES_EVERY = 5.0


class Course:
    def __init__(self, mode: str, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self._mode = mode
        self._seed = seed
        self._timeout = 2.0 if mode in ON_RAY else 1.0
        self._events: deque[str] = deque(maxlen=30)
        self._tokens = itertools.count(1)
        self._begin = time.monotonic()
        self._sizes: list[float] = []
        self._caller = Caller()
        self._player: Player | None = None

    def run(self, seconds: float) -> Counter[str]:
        self._make_player().close()  # resources that Python and Ray keep exist now
        before = Holdings()
        # The pauses before restarts, which grow up to 5 s, would take up all the time.
        unhurried = mock.patch.multiple(recovery, _FIRST_DELAY=0.01, _LONGEST_DELAY=0.05)
        with self._caller, unhurried:
            self._begin = time.monotonic()
            try:
                self._take_turns(seconds)
            finally:
                self._release()
        leaks = before.leaks(_PATIENCE)
        self.tally.update(leaks=len(leaks), interrupts=self._caller.num_interrupted)
        if leaks:
            self._report(ViolationError(f"left behind: {'; '.join(leaks)}"))
        self._look_at_memory()
        return self.tally

    def _take_turns(self, seconds: float) -> None:
        shown = 0.0
        for turn in turns(self._seed, self._mode, self._timeout):
            elapsed = time.monotonic() - self._begin
            if elapsed > seconds or self.tally["wrong"] >= _MOST_REPORTS:
                return
            self._sizes.append(psutil.Process().memory_full_info().uss / 1e6)
            if elapsed > shown:
                shown = elapsed + _LINES_EVERY
                line = ", ".join(f"{self.tally[name]:,} {name}" for name in _COLUMNS if self.tally[name])
                print(f"[{self._mode} {elapsed:.0f}/{seconds:.0f} s] {line}", flush=True)
            try:
                self._take_turn(turn)
            except (Exception, StuckError) as error:  # noqa: BLE001 (anything caught here is not an acceptable result for a user)
                self._report(error)
                self._release()  # the ledger cannot account for what follows
            self.tally["turns"] += 1

    def _take_turn(self, turn: Turn) -> None:
        self._player = player = self._player or self._make_player()
        self._note(f"turn {turn.number}: {turn.call} ({turn.disturbance}), {len(player.ledger.in_flight)} under way")
        if turn.call == "renew":
            with meanwhile(turn.delay, self._caller.strike):
                self._release()
        elif turn.call == "abandon":  # without `close`
            self._player = None
            del player
            gc.collect()
        elif turn.call == "make":  # a second pool, which is interrupted; leaks are found at the end
            with meanwhile(turn.delay, self._caller.strike):
                env = self._caller.make(partial(self._make_env, {"num_cpus": 1}))
            if env is not None:
                env.close()
        else:
            player.play(turn)

    def _make_player(self) -> Player:
        dice = random.Random(f"{self._seed} {self._mode} pool {self.tally['turns']}")
        options: dict[str, Any] = {
            "asynchronous": dice.choice((None, "idle", "restart", "continue")),
            "on_failure": dice.choice(("raise", "restart")),
            "max_restarts": dice.choice((2, 10, 1000)),
            "copy": dice.choice((True, True, False)),
            "num_cpus": dice.randint(2, 3),  # the second pool needs one of the four cores of the tests' Ray cluster
        }
        if self._mode == PROCESSES:
            options["caller_steps"] = dice.random() < 0.25
        if self._mode == RAY_POOLS:
            options["hosts_per_node"] = dice.choice((1, 2))
        self._note(f"a pool with {options}")
        ledger = Ledger(_NUM_ENVS, options["asynchronous"], options["on_failure"] == "restart", self.tally)
        return Player(self._make_env(options), ledger, self._caller, self._timeout, self._tokens, self._note)

    def _make_env(self, options: dict[str, Any]) -> ParallelEnv:
        env_fns = [partial(Numbered, env_id) for env_id in range(_NUM_ENVS)]
        return ParallelEnv(env_fns, self._mode, timeout=self._timeout, **options)

    def _release(self) -> None:
        if self._player is not None:
            player, self._player = self._player, None
            player.close()
            self.tally["rebuilds"] += 1

    def _note(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._begin:8.3f} s  {text}")

    def _report(self, error: BaseException) -> None:
        self.tally["wrong"] += 1
        again = f"python -m tests.soak --modes {self._mode} --seed {self._seed}"
        frames = "" if type(error) is ViolationError else "".join(traceback.format_exception(error))
        events = "\n".join(self._events)
        what = f"WRONG in turn {self.tally['turns']}: {error}\n{frames}seen by: {again}"
        print(f"{what}\nthe last events:\n{events}", flush=True)

    def _look_at_memory(self) -> None:
        quarter = len(self._sizes) // 4
        before, after = median(self._sizes[quarter : 2 * quarter + 1]), median(self._sizes[-quarter - 1 :])
        self.tally.update({"MB before": round(before), "MB after": round(after)})
        factor, room = _GROWTH
        if after > before * factor + room:
            self._report(ViolationError(f"memory grew from {before:.0f} to {after:.0f} MB"))


def format_tallies(tallies: dict[str, Counter[str]]) -> str:
    rows = [[mode, *(f"{tally[name]:,}" for name in _COLUMNS)] for mode, tally in tallies.items()]
    return format_table(["mode", *_COLUMNS], rows, left=("mode",))
