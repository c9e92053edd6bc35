"""Deep copies that share nothing with the original and keep internal references."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from parallelenv.contract.copying import deep_copy


@pytest.mark.parametrize("value", [{"a": np.zeros(2)}, {"a": [np.zeros(2)]}, [{"a": 1}], (np.zeros(2),)])
def test_deep_copy_shares_no_objects(value: Any) -> None:
    copied = deep_copy(value)
    assert type(copied) is type(value)
    part, copied_part = (next(iter(each.values() if isinstance(each, dict) else each)) for each in (value, copied))
    assert part is not copied_part


def test_deep_copy_preserves_shared_references() -> None:
    array = np.zeros(2)
    copied = deep_copy({"a": array, "b": array})
    assert copied["a"] is copied["b"] is not array
    copied = deep_copy({"a": [array], "b": array})
    assert copied["a"][0] is copied["b"] is not array


def test_deep_copy_copies_everything_that_can_be_pickled() -> None:
    assert deep_copy({"module": sys}) == {"module": sys}
    with pytest.raises(TypeError):
        deep_copy(sys.stdout)
