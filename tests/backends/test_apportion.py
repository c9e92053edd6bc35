"""Distribution of workers over the nodes of a cluster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallelenv.backends._ray_cluster import apportion

WEIGHTS = st.lists(st.integers(1, 128), min_size=1, max_size=12)


@given(WEIGHTS, st.integers(0, 500))
def test_every_share_is_at_least_one_and_loads_are_balanced(weights: list[int], more: int) -> None:
    total = len(weights) + more
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    loads = [share / weight for share, weight in zip(shares, weights, strict=True) if share > 1]
    assert all((share + 1) / weight >= max(loads, default=0) for share, weight in zip(shares, weights, strict=True))
