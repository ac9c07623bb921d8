"""What a benchmark found: one row, and the rows as a markdown table."""

import os
import platform
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from importlib.metadata import version

HEADER = ("what", "dp_ray", "against", "ratio", "to reach", "reached")


@dataclass(frozen=True)
class Row:
    """One comparison; `ratio` is dp_ray's figure over the other's, its median and quartiles."""

    what: str
    dp_ray: str
    against: str
    ratio: str
    to_reach: str
    reached: bool


def line(row: Row) -> str:
    """The row as a line of the table."""
    *texts, reached = astuple(row)
    return _cells([*texts, "yes" if reached else "NO"])


def heading() -> Iterator[str]:
    """The machine, for no figure means anything without it, and the table's head."""
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "accelerate", "pyarrow"))
    yield f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, {names}"
    yield ""
    yield _cells(HEADER)
    yield _cells(["---"] * len(HEADER))


def ratio_text(ratio: float) -> str:
    """A ratio of three digits, as a fraction where it is small."""
    return f"{ratio:.3g}" if ratio > 0.01 else f"1/{1 / ratio:,.0f}"


def time_text(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.1f} µs"


def rate_text(rows_per_second: float) -> str:
    return f"{rows_per_second:,.0f} rows/s"


def bytes_text(size: float) -> str:
    return f"{size / 2**20:,.1f} MB" if size >= 1e5 else f"{size / 2**10:,.0f} kB"


def _cells(texts: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(texts)} |"
