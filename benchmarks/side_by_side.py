"""One system in several processes at the same time, each with its share of the envs: what the cores can do together."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

EnvFns = Sequence[Callable[[], Any]]


class SideBySide:
    """Opens a system once per process, and times all of them over the same seconds.

    Args:
        opener: As in `benchmarks.systems.System`.
        env_fns: Of all envs.
        count: How many processes; fewer if there are fewer envs.
    """

    def __init__(self, opener: Callable[[EnvFns, dict[str, Any]], Any], env_fns: EnvFns, count: int) -> None:
        count = min(count, len(env_fns))
        bounds = [len(env_fns) * index // count for index in range(count + 1)]
        self._shares = [slice(*ends) for ends in pairwise(bounds)]
        self._pipes, self._processes = [], []
        for share in self._shares:
            pipe, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_run, args=(opener, env_fns[share], theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def reset(self, seed: int) -> None:
        """Reset all envs; the first one gets the seed, the others the numbers after it."""
        self._ask(seed + share.start for share in self._shares)

    def rate(self, actions: Sequence[Any], warm_up: float, seconds: float) -> float:
        """Return the env steps per second of all processes together.

        Args:
            actions: A batch of all envs per step, used in turns.
            warm_up: For how many seconds to step before.
            seconds: For how many to step.
        """
        self._ask(([row[share] for row in actions], warm_up, seconds) for share in self._shares)
        return float(sum(self._ask("begin" for _ in self._shares)))

    def _ask(self, questions: Any) -> list[Any]:
        """Ask each process something, and return all answers.

        Raises:
            RuntimeError: If a process failed.
        """
        for pipe, question in zip(self._pipes, questions, strict=True):
            with contextlib.suppress(OSError):  # its process has failed, and its answer says why
                pipe.send(question)
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers

    def close(self) -> None:
        """Close all envs, and wait for the processes to end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its process has died
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            process.join()
            process.close()


def _run(opener: Callable[[EnvFns, dict[str, Any]], Any], env_fns: EnvFns, pipe: Connection) -> None:
    """Answer what `SideBySide` asks: a seed, then any number of times actions and the word to begin."""
    try:
        running = opener(env_fns, {})
        running.reset(pipe.recv())
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            actions, warm_up, seconds = asked
            _steps_per_second(running.step, actions, warm_up)
            pipe.send(None)
            if pipe.recv() is None:  # another process failed
                break
            pipe.send(len(env_fns) * _steps_per_second(running.step, actions, seconds))
        running.close()
    except Exception as error:  # noqa: BLE001 (raised in the process that asked)
        pipe.send(f"{type(error).__name__}: {error}")


def _steps_per_second(step: Callable[[Any], Any], actions: Sequence[Any], seconds: float) -> float:
    """Return the rate of the steps that ended in time, or of the first one.

    The step that is under way at the end is not counted: other processes may be done while it goes on.
    """
    count = 0
    begin = last = now = time.perf_counter()
    while now - begin < seconds:
        step(actions[count % len(actions)])
        now = time.perf_counter()
        if now - begin < seconds or count == 0:
            count, last = count + 1, now
    return count / (last - begin)
