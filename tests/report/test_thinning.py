"""Thinning out a series: no extreme is hidden, and every point that is drawn is one of the series."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.report.charts import Array, thinned

NUMBERS = st.floats(-1e6, 1e6)


def series(values: list[float]) -> tuple[Array, Array]:
    return np.arange(len(values)) * 3, np.array(values, float)


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(1, 20))
def test_each_bucket_keeps_its_extremes(values: list[float], buckets: int) -> None:
    x, y = series(values)
    kept = thinned(x, y, buckets, whole=0)
    points = dict(zip(x.tolist(), y.tolist(), strict=True))
    assert all(points[at] == value for at, value in zip(kept.x.tolist(), kept.y.tolist(), strict=True))
    assert list(kept.x) == sorted(set(kept.x.tolist()))
    assert {0, 3 * (len(values) - 1)} <= set(kept.x.tolist())
    for first in range(0, len(values), kept.count):
        bucket = values[first : first + kept.count]
        drawn = [points[at] for at in kept.x.tolist() if 3 * first <= at < 3 * (first + kept.count)]
        assert min(drawn) == min(bucket) and max(drawn) == max(bucket)


@given(st.lists(NUMBERS, min_size=1, max_size=300), st.integers(1, 20))
def test_a_thinned_series_has_few_points_and_its_buckets_means(values: list[float], buckets: int) -> None:
    kept = thinned(*series(values), buckets, whole=0)
    assert len(kept.x) <= max(2 * buckets + 2, 2 * buckets)
    if kept.count > 1:
        means = [np.mean(values[first : first + kept.count]) for first in range(0, len(values), kept.count)]
        assert np.allclose(kept.mean_y, means, atol=1e-6)
    else:
        assert kept.y.tolist() == values


def test_what_is_not_finite_is_told_apart() -> None:
    y = np.array([1.0, np.nan, np.inf, 2.0, -np.inf, 3.0])
    kept = thinned(np.arange(6), y)
    assert kept.y.tolist() == [1, 2, 3] and kept.x.tolist() == [0, 3, 5]
    assert kept.odd == [(1, 2), (4, 4)] and kept.num_odd == 3


def test_a_series_of_nothing() -> None:
    assert not len(thinned(np.arange(0), np.empty(0)).x)
    kept = thinned(np.arange(4), np.full(4, np.nan))
    assert not len(kept.x) and kept.odd == [(0, 3)]


def test_up_to_twenty_thousand_points_all_are_kept() -> None:
    x, y = np.arange(20_001), np.random.default_rng(0).normal(size=20_001)
    whole, more = thinned(x[1:], y[1:]), thinned(x, y)
    assert (whole.count, whole.y.tolist()) == (1, y[1:].tolist())
    assert more.count == 14 and len(more.x) < 3100
