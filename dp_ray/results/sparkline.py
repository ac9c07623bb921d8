"""Curves as a line of block characters."""

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
NO_NUMBER = "!"


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """A curve in at most `width` characters, each the mean of its values; `!` is where a value is NaN or infinite.

    `low` and `high` are the ends of the scale; by default those of the curve.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    given = [value for value in values if value is not None]
    means = [_mean(piece) for piece in _pieces(given, width)]
    finite = [value for value in means if math.isfinite(value)]
    low = min(finite, default=0.0) if low is None else low
    high = max(finite, default=0.0) if high is None else high
    return "".join(_block(value, low, high) for value in means)


def _pieces(values: Sequence[float], width: int) -> list[Sequence[float]]:
    count = min(width, len(values))
    return [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return NO_NUMBER
    share = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(share * len(BLOCKS))))]
