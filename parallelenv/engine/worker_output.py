"""Shows the output of envs in workers, in the caller's terminal or below the notebook cell that is running."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from parallelenv.contract.protocol import NoEffect, Printed, Remark
from parallelenv.contract.tracebacks import warn_user
from parallelenv.errors import ArgumentError, OldApiWarning


def show_printed(printed: Sequence[Printed]) -> None:
    """Write lines to the caller's standard output; each begins with the name of its env: ``[env 3] hello``."""
    lines = []
    for env_ids, pieces in groupby(printed, attrgetter("env_ids")):
        name = f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {env_ids[0]}-{env_ids[-1]}"
        for line in "".join(piece.text for piece in pieces).split("\n"):
            shown = line.rstrip("\r").rpartition("\r")[2]  # as on a terminal, where a progress bar overwrites itself
            lines += [f"[{name}] {shown}\n"] if shown else []
    if lines:
        say("".join(lines))


def say(text: str) -> None:
    """Write a text to the caller's standard output, and flush it."""
    if sys.stdout is None:  # Windows programs without a console
        return
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def make_listener(word: str) -> Callable[[Sequence[Printed]], None]:
    """Return the listener for ``output=word``. The listener issues the first `Remark` of each kind as a warning."""
    if word not in ("show", "quiet"):
        raise ArgumentError(
            f"output={word!r} is not known; expected 'show' (output of envs in workers appears here) or 'quiet'."
        )
    issued: set[type[Printed]] = set()

    def listen(printed: Sequence[Printed]) -> None:
        if word == "show":
            show_printed([one for one in printed if not isinstance(one, Remark)])
        for one in printed:
            if isinstance(one, Remark) and type(one) not in issued:
                issued.add(type(one))
                kind = UserWarning if isinstance(one, NoEffect) else OldApiWarning
                warn_user(f"{one.text} Other envs that do the same are not reported.", kind)

    return listen
