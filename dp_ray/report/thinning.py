"""Thins out long series for drawing: each bucket keeps its least and its largest value, so no extreme is hidden."""

from dataclasses import dataclass
from typing import Any

import numpy as np

BUCKETS = 1500
WHOLE = 20_000  # points of a series that the page holds as it is, for zooming in
LISTED = 100  # stretches of values that are not finite

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Thinned:
    """Points of a series: `x`, `y` are of the series itself.

    `mean_x`, `mean_y` are the means of the buckets, and `count` is the number of points in each; they are empty if no
    point was left out. `odd` holds the first and last `x` of each stretch of values that are not finite.
    """

    x: Array
    y: Array
    mean_x: Array
    mean_y: Array
    count: int
    odd: list[tuple[int, int]]
    num_odd: int


def thinned(x: Array, y: Array, buckets: int = BUCKETS, whole: int = WHOLE) -> Thinned:
    """Keep all of at most `whole` points.

    Of more, keep at most `2 * buckets + 2`: the ends, and the extremes of each bucket of consecutive points.
    """
    is_finite = np.isfinite(y)
    odd = x[~is_finite]
    x, y = x[is_finite], y[is_finite]
    none = np.empty(0)
    if len(y) <= max(whole, 2 * buckets):
        return Thinned(x, y, none, none, 1, _stretches(odd), len(odd))
    width = -(-len(y) // buckets)
    starts = np.arange(0, len(y), width)
    counts = np.diff(np.append(starts, len(y)))
    kept = _extremes(y, starts, width)
    mean_x, mean_y = (np.add.reduceat(one.astype(float), starts) / counts for one in (x, y))
    return Thinned(x[kept], y[kept], mean_x, mean_y, width, _stretches(odd), len(odd))


def _extremes(y: Array, starts: Array, width: int) -> Array:
    """The places of the first and last value, and of each bucket's least and largest, in order."""
    grid = np.pad(y, (0, len(starts) * width - len(y)), mode="edge").reshape(len(starts), width)
    places = [starts + grid.argmin(1), starts + grid.argmax(1), [0, len(y) - 1]]
    return np.unique(np.minimum(np.concatenate(places), len(y) - 1))


def _stretches(x: Array) -> list[tuple[int, int]]:
    """The first and last of consecutive whole numbers; after LISTED stretches, the last one holds the rest."""
    if not len(x):
        return []
    cuts = np.flatnonzero(np.diff(x) > 1) + 1
    return [(int(one[0]), int(one[-1])) for one in np.split(x, cuts[: LISTED - 1])]
