"""The process of one system: imports its packages once, then measures whatever case it is asked for.

Started by `benchmarks.runner` as ``python -m benchmarks.child SYSTEM DESCRIPTOR``.
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
    """Answer questions until the runner hangs up."""
    system, pipe = BY_NAME[sys.argv[1]], Connection(int(sys.argv[2]))
    _die_with_the_runner()
    cases = {case.name: case for case in CASES}
    try:
        system.load()
    except Exception as error:  # noqa: BLE001 (likewise)
        pipe.send((None, one_line(error)))
        return
    pipe.send(("ready", None))
    with contextlib.suppress(EOFError):
        while True:
            name, seconds = pipe.recv()
            pipe.send(_measure(system, cases[name], seconds))


def _measure(system: System, case: Case, seconds: float) -> tuple[Numbers | None, str | None]:
    """Return ``(numbers, None)``, or ``(None, what failed)``."""
    disturbance = Disturbance()
    try:
        return PROBES[case.probe](system, case, seconds, disturbance) | disturbance.numbers(), None
    except Exception as error:  # noqa: BLE001 (likewise)
        return None, one_line(error)


def one_line(error: BaseException) -> str:
    """Return type and message of an error in one short line; of several errors those of the first.

    Of a message that quotes a worker's traceback, its last line.
    """
    if isinstance(error, BaseExceptionGroup):
        return f"{one_line(error.exceptions[0])} (and {len(error.exceptions) - 1} more)"
    message = str(error).strip()
    if "Traceback (most recent call last)" in message:
        message = message.splitlines()[-1]
    text = f"{type(error).__name__}: {message}"
    return " ".join(text.split())[:200]


def _die_with_the_runner() -> None:
    """Let Linux end this process with the runner, even one that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
