"""Where a process is, and how much memory it takes: read from the system, without asking the process."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


class ProcessInfo(NamedTuple):
    """Where an env lives.

    Attributes:
        pid: Of its process; 0 if that is not known.
        machine: Name of the machine.
    """

    pid: int = 0
    machine: str = ""

    @property
    def is_near(self) -> bool:
        """Whether it is a process of this machine."""
        return self.pid > 0 and self.machine == _machine()

    def memory(self) -> int | None:
        """Return how many bytes of memory its process takes, pages that it shares counted by their share.

        ``None`` if that is not known: the process is gone, or on another machine, or the system does not tell.
        """
        if not self.is_near:
            return None
        try:
            found = _PSS.search(Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError):  # gone, somebody else's, or no Linux
            found = None
        return int(found[1]) * 1024 if found else None


UNKNOWN_PROCESS = ProcessInfo()


def this_process() -> ProcessInfo:
    """Return where this is."""
    return ProcessInfo(os.getpid(), _machine())


@functools.cache
def clock_id() -> str:
    """Return what machines have in common whose processes have one `time.perf_counter`: it is one and the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        return _machine()


@functools.cache
def _machine() -> str:
    return platform.node()
