"""All rows of the fault table, in its order."""

from __future__ import annotations

# Each module enters its functions into the table when it is imported.
from faults import died, ended, raised, surrounded
from faults.context import FAULTS

__all__ = ["FAULTS", "died", "ended", "raised", "surrounded"]
