"""The output of a worker process, including that of C code and child processes.

The worker's standard output and error go to an unnamed file that the caller can read, so even the last output of a
killed worker is available. Text that Python prints is marked with the id of the env that was running.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from parallelenv.contract.interrupts import DeferSigint
from parallelenv.contract.protocol import Printed

_MARK = re.compile(b"\x1e([0-9]{0,9})\x1f")
"""Matches the marks of `EnvStream`. More digits are not a mark, but binary output of an env."""
_WORN = 1 << 20
"""Size in bytes. A longer file is truncated once the caller has read it and the worker is idle.

Otherwise, text that the worker appends between the two could be lost. The file of a worker that is never idle grows.
"""
_IOLBF = 1
"""The value of this macro in C libraries for Linux."""
_OWN_FRAMES = re.compile(
    rf'(most recent call first\):\n.*?)\n  File "{re.escape(str(Path(__file__).parent))}.*', re.DOTALL
)
"""Matches frames of this package and of a forking caller, which follow the env's frames in `faulthandler` output."""


class WorkerLog:
    """A handle to an unnamed file that a worker process appends to and the caller reads.

    Each of the two processes has its own `WorkerLog`, which owns a descriptor for the file.
    """

    def __init__(self, fileno: int) -> None:
        self.fileno = fileno
        self._position = 0  # read position on the caller's side; last known length on the worker's
        self._last = b""  # the last bytes that were read

    @classmethod
    def create(cls) -> WorkerLog | None:
        """Return a new log; ``None`` on systems where descriptors cannot be sent to other processes."""
        if os.name != "posix":
            return None
        import fcntl

        with DeferSigint():
            if hasattr(os, "memfd_create"):
                fileno = os.memfd_create("parallelenv-log", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    fileno = os.dup(file.fileno())
            fcntl.fcntl(fileno, fcntl.F_SETFL, os.O_APPEND)
            return cls(fileno)

    def __reduce__(self) -> Any:
        return _receive, (reduction.DupFd(self.fileno),)

    def close(self) -> None:
        """Close the descriptor."""
        with DeferSigint():
            fileno, self.fileno = self.fileno, -1  # set first, because two threads may call this
            if fileno >= 0:
                os.close(fileno)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # at exit this module's globals may be gone, and the system closes the descriptor
            self.close()  # an interrupt may have left the log without an owner that closes it

    def has_grown(self) -> bool:
        """Return whether anything has been printed since the last call. The check takes 0.2 us."""
        size = os.lseek(self.fileno, 0, os.SEEK_END)
        changed, self._position = size != self._position, size
        return changed and size > 0

    def take_output(self, env_ids: tuple[int, ...], *, is_idle: bool) -> list[Printed]:
        """Return the text that a worker with these envs has printed since the last call.

        ``is_idle`` says whether the worker is waiting for a command. If it is, the last line counts as complete;
        otherwise, an incomplete last line is left for the next call.
        """
        text = self._read()
        if not is_idle:
            text, newline, rest = text.rpartition(b"\n")
            text += newline
            self._position -= len(rest)
        self._last = (self._last + text)[-4096:]
        if is_idle and self._position > _WORN:
            os.ftruncate(self.fileno, 0)
            self._position = 0
        pieces = _MARK.split(text)  # text, env id, text, env id ...
        return [
            Printed((int(env_id),) if env_id else env_ids, piece.decode("utf-8", "replace"))
            for env_id, piece in zip([b"", *pieces[1::2]], pieces[::2], strict=True)
            if piece
        ]

    def last_lines(self) -> str:
        """Return the last lines that the worker printed, indented."""
        text = _MARK.sub(b"", self._last + self._read()).decode("utf-8", "replace")
        lines = [line for line in _OWN_FRAMES.sub(r"\1", text).splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in lines[-20:])

    def _read(self) -> bytes:
        parts = []
        while part := os.pread(self.fileno, _WORN, self._position):
            parts.append(part)
            self._position += len(part)
        return b"".join(parts)


class EnvStream(io.TextIOWrapper):
    """A replacement for standard output or error, which marks text with the id of the env that prints the text.

    C code writes to the same descriptor, but without marks. ``env_of`` returns the id of the env that is running, or
    ``None`` if no env is running.
    """

    def __init__(self, fileno: int, env_of: Callable[[], int | None]) -> None:
        raw: Any = io.FileIO(fileno, "w", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self.env_of = env_of

    def write(self, text: str) -> int:
        """Write the text together with its marks, in a single write."""
        env_id = self.env_of()
        super().write(text if env_id is None else f"\x1e{env_id}\x1f{text}\x1e\x1f")
        return len(text)


def open_standard_descriptors(opened: list[int]) -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, as in some daemons, and add them to ``opened``.

    Otherwise a pipe would get such a number, and `redirect_descriptors` would replace the pipe by the log.
    """
    while (fileno := os.open(os.devnull, os.O_RDWR)) <= 2:  # the system gives the lowest free number
        opened.append(fileno)
    os.close(fileno)


def redirect_descriptors(log: WorkerLog) -> None:
    """Redirect all output of this process and its children to a log."""
    for fileno in (1, 2):
        os.dup2(log.fileno, fileno)
    # The C library holds back what `printf` writes to a file; a buffer of one line makes it behave as on a terminal.
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a C library that has other names
        library = ctypes.CDLL(None)
        library.setvbuf(ctypes.c_void_p.in_dll(library, "stdout"), None, _IOLBF, 0)
    faulthandler.enable(2, all_threads=False)  # reports the Python line if C code crashes


def redirect_streams(env_of: Callable[[], int | None], filenos: tuple[int, int]) -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` with `EnvStream` objects that write to the descriptors ``filenos``."""
    for name, fileno in zip(("stdout", "stderr"), filenos, strict=True):
        stream = getattr(sys, name)
        if isinstance(stream, EnvStream) and stream.fileno() == fileno:  # it may be in use, for example by a logger
            stream.env_of = env_of
        else:
            setattr(sys, name, EnvStream(fileno, env_of))


def _receive(duplicate: Any) -> WorkerLog:
    return WorkerLog(duplicate.detach())
