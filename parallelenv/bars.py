"""The progress bars of tqdm."""

from __future__ import annotations

import warnings
from typing import Any


def import_tqdm() -> Any:
    """Return the class of bars that suits a notebook or a terminal.

    In a notebook without ipywidgets tqdm warns of that when it is imported, by whomever. The plain bar does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm
