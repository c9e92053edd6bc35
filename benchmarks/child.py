"""The process of one system. It imports the system's packages once, then measures the cases that it receives.

`benchmarks.runner` starts the process as ``python -m benchmarks.child SYSTEM DESCRIPTOR``.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from multiprocessing.connection import Connection

from benchmarks.cases import CASES, Case
from benchmarks.disturbance import Disturbance, Numbers
from benchmarks.probes import PROBES
from benchmarks.systems import BY_NAME, System

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Measure the requested cases until the runner closes the pipe."""
    system, pipe = BY_NAME[sys.argv[1]], Connection(int(sys.argv[2]))
    _die_with_the_runner()
    cases = {case.name: case for case in CASES}
    try:
        system.load()
    except Exception as error:  # noqa: BLE001 (any package may raise anything)
        pipe.send((None, one_line(error)))
        return
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError):
        while True:
            name, seconds = pipe.recv()
            pipe.send(_measure(system, cases[name], seconds))


def _measure(system: System, case: Case, seconds: float) -> tuple[Numbers | None, str | None]:
    """Measure a case. Return ``(numbers, None)`` or, if the system raised an exception, ``(None, failure)``."""
    disturbance = Disturbance()
    try:
        return PROBES[case.probe](system, case, seconds, disturbance) | disturbance.numbers(), None
    except Exception as error:  # noqa: BLE001 (any package may raise anything)
        return None, one_line(error)


def one_line(error: BaseException) -> str:
    """Return the type and message of an error in one short line; for a group, those of its first error.

    If the message contains a worker's traceback, only the last line of the message is used.
    """
    if isinstance(error, BaseExceptionGroup):
        return f"{one_line(error.exceptions[0])} (and {len(error.exceptions) - 1} more)"
    message = str(error).strip()
    if "Traceback (most recent call last)" in message:
        message = message.splitlines()[-1]
    text = f"{type(error).__name__}: {message}"
    return " ".join(text.split())[:200]


def _die_with_the_runner() -> None:
    """Let Linux kill this process when the runner ends, even if the runner was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
