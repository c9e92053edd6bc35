"""Where a process runs and how much memory it uses, read from the system without asking the process."""

from __future__ import annotations

import functools
import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


class ProcessInfo(NamedTuple):
    """The process in which an env runs.

    Attributes:
        pid: Process id; 0 if unknown.
        machine: Name of the machine.
    """

    pid: int = 0
    machine: str = ""

    @property
    def is_near(self) -> bool:
        """Whether it is a process of this machine."""
        return self.pid > 0 and self.machine == platform.node()

    def memory(self) -> int | None:
        """Return the memory that the process uses, in bytes; shared pages count in proportion.

        ``None`` if unknown: the process has ended, runs on another machine, or the system does not provide it.
        """
        if not self.is_near:
            return None
        try:
            found = _PSS.search(Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError):  # ended, another user's, or not Linux
            found = None
        return int(found[1]) * 1024 if found else None


UNKNOWN_PROCESS = ProcessInfo()


def this_process() -> ProcessInfo:
    """Return the info of this process."""
    return ProcessInfo(os.getpid(), platform.node())


@functools.cache
def clock_id() -> str:
    """Return an id that processes share if and only if they share one `time.perf_counter`."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return platform.node()
