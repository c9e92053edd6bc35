"""Deep copies that share nothing with the original and keep internal references."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from parallelenv.contract.copying import deep_copy, deep_copy_but_graph


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


def test_deep_copy_shares_no_records_and_no_keys() -> None:
    table = np.rec.array([(1, 2.0)], dtype=[("n", int), ("x", float)])
    plain = np.zeros(1, [("n", int)])
    copied = deep_copy({"record": table[0], "void": plain[0]})
    table.n, plain["n"] = 5, 5
    assert (type(copied["record"]), copied["record"].tolist(), copied["void"].tolist()) == (np.record, (1, 2.0), (0,))
    key = type("Agent", (), {})()
    (copied_key,) = deep_copy({key: 1.0})
    assert type(copied_key) is type(key)
    assert copied_key is not key


def test_object_arrays_of_any_shape_are_searched_for_gradients() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    for shape in ((), (1,), (1, 1)):
        array = np.full(shape, None)
        array.fill(tensor)
        assert deep_copy_but_graph([array])[0].item() is tensor


def test_deep_copy_copies_everything_that_can_be_pickled() -> None:
    assert deep_copy({"module": sys}) == {"module": sys}
    with pytest.raises(TypeError):
        deep_copy(sys.stdout)
