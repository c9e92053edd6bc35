"""Deep copies that share nothing with the original and keep internal references."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from parallelenv.contract.copying import deep_copy


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_deep_copy_shares_no_objects_and_keeps_references(kind: Any) -> None:
    array = np.zeros(2)
    parts = [array, [array], array, {"x": 1}]
    copied = deep_copy(dict(enumerate(parts)) if kind is dict else kind(parts))
    assert type(copied) is kind
    assert copied[0] is copied[1][0] is copied[2] is not array
    assert copied[3] is not parts[3]
    pair = deep_copy({"a": array, "b": array})  # arrays alone have code of their own
    assert pair["a"] is pair["b"] is not array


def test_deep_copy_copies_everything_that_can_be_pickled() -> None:
    assert deep_copy({"module": sys}) == {"module": sys}
    with pytest.raises(TypeError):
        deep_copy(sys.stdout)
