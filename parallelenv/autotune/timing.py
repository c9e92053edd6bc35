"""How fast one open `ParallelEnv` steps beside another: the measurement of `recommend` and ``parallelenv compare``.

Machines are noisy, so two are stepped in turns, in several short rounds: a slow moment then affects both. The ratio is
taken per round, then the median over the rounds.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from statistics import mean, median

from gymnasium.spaces import Space, Tuple

from parallelenv.env import ParallelEnv
from parallelenv.errors import EnvContractError

CLOSE_ENOUGH = 1.05
"""A mode is chosen over a simpler one only if it is faster by more than this factor."""
ROUNDS = 5


def is_clearly_faster(ratio: float, than: float) -> bool:
    """Whether a mode is preferred to a simpler one; both speeds are relative to the same loop."""
    return ratio > CLOSE_ENOUGH * than


class TimedEnv:
    """An open `ParallelEnv` whose steps are timed in short turns.

    Args:
        env: Must have been reset.
        actions: Repeated if need be.
        turn: Seconds of a turn, at least one step.
        busy: Seconds for which the caller computes during a step.
        scale: Factor for each time: how long a step of all envs takes if ``env`` has only some of them.
    """

    def __init__(
        self, env: ParallelEnv, actions: Sequence[object], turn: float, busy: float = 0.0, scale: float = 1.0
    ) -> None:
        self.env = env
        self.times: deque[float] = deque(maxlen=ROUNDS)
        self._actions = itertools.cycle(actions)
        self._busy = busy
        self._scale = scale
        self._count = 0
        self._step()  # may include one-time work
        # The number of steps per turn is settled here: steps may take different times, and a turn that ends with a long
        # one would count it too often. Meanwhile the system finds a core for each worker.
        end = time.perf_counter() + turn
        while not self._count or time.perf_counter() < end:
            self._step()
            self._count += 1

    @property
    def seconds(self) -> float:
        """How long a step takes: the median of the latest turns."""
        return median(self.times)

    def time(self) -> None:
        """Step for a turn, and note how long a step takes."""
        if self._count > 1:
            self._step()  # wakes workers that have slept since the last turn, which takes 60 us
        begin = time.perf_counter()
        for _ in range(self._count):
            self._step()
        self.times.append((time.perf_counter() - begin) / self._count * self._scale)

    def mean(self) -> float:
        """Return how long a step takes on average over `ROUNDS` turns, for envs whose times are of chance."""
        for _ in range(ROUNDS):
            self.time()
        return mean(self.times)

    def speedup(self, loop: TimedEnv) -> float:
        """Return how many times as fast this is as another, stepped in turns for `ROUNDS` rounds."""
        ratios: list[float] = []
        for turn in range(ROUNDS):
            for each in (self, loop) if turn % 2 else (loop, self):
                each.time()
            ratios.append(loop.times[-1] / self.times[-1])
        return median(ratios)

    def _step(self) -> None:
        if not self._busy:
            self.env.step(next(self._actions))
            return
        self.env.step_async(next(self._actions))
        end = time.thread_time() + self._busy
        while time.thread_time() < end:
            pass
        self.env.step_wait()


def random_actions(env: ParallelEnv, number: int, seed: int = 0) -> list[object]:
    """Return random actions for all envs; raise `EnvContractError` if one declares no action space."""
    space = env.action_space
    spaces = [space for space in env.action_spaces if space is not None]
    if len(spaces) < len(env):
        raise EnvContractError("it declares no action space to draw random actions from")
    whole: Space[object] = Tuple(spaces) if space is None else space
    whole.seed(seed)
    samples = [whole.sample() for _ in range(number)]
    return [list(sample) for sample in samples] if space is None else samples  # type: ignore[call-overload]
