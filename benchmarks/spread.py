"""The median and the quartiles of a ratio that was measured several times."""

from dataclasses import dataclass
from statistics import quantiles

from benchmarks.table import share


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs, each pair measured one after the other: the median, and the quartiles around it."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{share(self.median, 1)} ({share(self.lower, 1)} to {share(self.upper, 1)})"


def ratio_of(pairs: list[tuple[float, float]]) -> Ratio:
    """The ratio of the pairs; a row that is to be at most so much has reached it only if the upper quartile has."""
    return Ratio(*quantiles((ours / theirs for ours, theirs in pairs), n=4, method="inclusive"))
