"""Distribution of workers over the nodes of a cluster."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallelenv.backends._ray_cluster import apportion

WEIGHTS = st.lists(st.integers(1, 128), min_size=1, max_size=12)


def test_equal_weights_get_equal_shares_and_the_first_the_remainder() -> None:
    assert apportion(7, [1, 1, 1]) == [3, 2, 2]
    assert apportion(3, [5, 5, 5]) == [1, 1, 1]


def test_shares_are_proportional_to_weights() -> None:
    assert apportion(10, [6, 2, 2]) == [6, 2, 2]
    assert apportion(8, [12, 4]) == [6, 2]
    assert apportion(2, [100, 1]) == [1, 1]


@given(WEIGHTS)
def test_shares_equal_weights_if_the_total_is_their_sum(weights: list[int]) -> None:
    assert apportion(sum(weights), weights) == weights


@given(WEIGHTS, st.integers(0, 500))
def test_every_share_is_at_least_one_and_loads_are_balanced(weights: list[int], more: int) -> None:
    total = len(weights) + more
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    loads = [share / weight for share, weight in zip(shares, weights, strict=True) if share > 1]
    assert all((share + 1) / weight >= max(loads, default=0) for share, weight in zip(shares, weights, strict=True))
