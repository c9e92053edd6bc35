"""The counts of the soak test of one mode, and its line in the final table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallelenv.contract.error_text import format_table


@dataclass
class Tally:
    """Counts of one mode."""

    mode: str
    turns: int = 0
    transitions: int = 0
    kills: int = 0
    hangs: int = 0
    exceptions: int = 0
    interrupts: int = 0
    rebuilds: int = 0
    restarts: int = 0
    mended: int = 0  # envs restarted by the pool itself
    lost: int = 0  # steps without a result, each of which the library announced
    torn: int = 0  # results lost to an interrupt between the library and its caller
    wrong: int = 0
    leaks: int = 0
    memory: tuple[float, float] = (0.0, 0.0)  # MB in the second quarter of the time, and at the end

    def line(self) -> str:
        """Return the counts so far, for a line of progress."""
        names = ("transitions", "kills", "hangs", "exceptions", "interrupts", "rebuilds", "lost", "wrong")
        return ", ".join(f"{getattr(self, name):,} {name}" for name in names)


_COLUMNS = [name for name in Tally.__dataclass_fields__ if name != "memory"]


def format_tallies(tallies: Iterable[Tally]) -> str:
    """Return the table of all modes."""
    rows = [
        [*(_shown(getattr(tally, name)) for name in _COLUMNS), *(f"{megabytes:.1f}" for megabytes in tally.memory)]
        for tally in tallies
    ]
    return format_table([*_COLUMNS, "MB before", "MB after"], rows, left=("mode",))


def _shown(value: str | int) -> str:
    return value if isinstance(value, str) else f"{value:,}"
