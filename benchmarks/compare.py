"""Judge what two sides gave in turn: a row with the median, the quartiles, and whether the goal is reached.

A goal is reached only if the worse quartile reaches it, so that a lucky run does not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

from benchmarks.table import Row, ratio_text

Pairs = Sequence[tuple[float, float]]  # dp_ray's figure and the other side's, measured one right after the other


class Quartiles(NamedTuple):
    """A quarter of the values is at most `lower`, a quarter at least `upper`."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles, between two values in proportion; those of a single value are that value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Goal:
    """A limit of dp_ray's figure over the other side's or, if it is `absolute`, of dp_ray's figure."""

    text: str
    limit: float
    is_least: bool
    absolute: bool = False

    def is_reached(self, found: Quartiles) -> bool:
        """Whether the worse quartile is within the limit."""
        return found.lower >= self.limit if self.is_least else found.upper <= self.limit


def at_least(limit: float, text: str = "") -> Goal:
    """A ratio of at least `limit`."""
    return Goal(text or f"at least {limit:.2f}", limit, is_least=True)


def at_most(limit: float, text: str = "") -> Goal:
    """A ratio of at most `limit`."""
    return Goal(text or f"at most {limit}", limit, is_least=False)


AHEAD = at_least(1.0, "ahead")


def in_rounds(pairs: Pairs, size: int) -> Pairs:
    """Of each round of `size` pairs, an odd number, the one with the median ratio.

    A turn of a few steps varies by some 6 % with what else the machine does; the median of several varies by less, on
    both sides alike. Pairs after the last whole round are left out.
    """
    rounds = [pairs[start : start + size] for start in range(0, len(pairs) - size + 1, size)]
    return [sorted(pairs, key=lambda pair: pair[0] / pair[1])[size // 2] for pairs in rounds]


def compared(what: str, pairs: Pairs, shown: Callable[[float], str], against: str, *goals: Goal) -> Row:
    """The row of a comparison; `shown` writes a figure with its unit, and `against` names the other side.

    The ratio is that within each pair. dp_ray's figure has quartiles of its own if a goal is absolute.
    """
    ours, theirs = (list(side) for side in zip(*pairs, strict=True))
    ratios, figures = quartiles([ours / theirs for ours, theirs in pairs]), quartiles(ours)
    has_absolute = any(goal.absolute for goal in goals)
    return Row(
        what,
        _spread(figures, shown) if has_absolute else shown(figures.median),
        f"{shown(median(theirs))} {against}",
        _spread(ratios, ratio_text),
        ", and ".join(goal.text for goal in goals),
        all(goal.is_reached(figures if goal.absolute else ratios) for goal in goals),
    )


def _spread(found: Quartiles, shown: Callable[[float], str]) -> str:
    """The median and the quartiles: `0.97 (0.95 to 0.98)`."""
    return f"{shown(found.median)} ({shown(found.lower)} to {shown(found.upper)})"
