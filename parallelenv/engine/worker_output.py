"""Output of envs in worker processes, shown to the user in the notebook cell of the current call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

from parallelenv.contract.protocol import Printed, Remark
from parallelenv.contract.tracebacks import warn_user
from parallelenv.errors import ArgumentError, OldApiWarning


def show_printed(printed: Sequence[Printed]) -> None:
    """Write to the caller's standard output, each line with the env that printed it: ``[env 3] hello``."""
    lines = []
    for env_ids, pieces in groupby(printed, attrgetter("env_ids")):
        text = "".join(piece.text for piece in pieces)
        lines += [f"[{_name(env_ids)}] {line}\n" for line in map(_visible, text.split("\n")) if line]
    if lines:
        say("".join(lines))


def say(text: str) -> None:
    """Write to the caller's standard output and flush; Windows programs without a console have none."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


class Listener:
    """Shows the output of hosts, and warns of the first remark.

    Args:
        show: Called with what envs have printed.
    """

    def __init__(self, show: Callable[[Sequence[Printed]], None]) -> None:
        self._show = show
        self._has_warned = False

    def __call__(self, printed: Sequence[Printed]) -> None:
        """Show output."""
        remarks = [one for one in printed if isinstance(one, Remark)]
        self._show([one for one in printed if not isinstance(one, Remark)] if remarks else printed)
        if remarks and not self._has_warned:
            self._has_warned = True
            warn_user(f"{remarks[0].text} Others that do the same are not named.", OldApiWarning)


def make_listener(word: str) -> Callable[[Sequence[Printed]], None]:
    """Return the listener for an ``output`` argument.

    Raises:
        ArgumentError: If the word is not known.
    """
    listeners = {"show": show_printed, "quiet": _ignore}
    if not isinstance(word, str) or word not in listeners:
        raise ArgumentError(
            f"output={word!r} is not known; expected 'show' (what envs print in workers appears here) or 'quiet'."
        )
    return Listener(listeners[word])


def _ignore(printed: Sequence[Printed]) -> None:
    pass


def _visible(line: str) -> str:
    """Return what a terminal shows of a line that overwrites itself, like a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]


def _name(env_ids: tuple[int, ...]) -> str:
    return f"env {env_ids[0]}" if len(env_ids) == 1 else f"envs {env_ids[0]}-{env_ids[-1]}"
