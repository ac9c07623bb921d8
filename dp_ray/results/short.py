"""Paths, metrics, tables and times as short text; it imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dp_ray.rundir.history_file import is_inner


def relative(path: str) -> str:
    """A path below the working directory, relative to it; any other path or URL unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if "://" not in path and Path(path).is_relative_to(here) else path


def measured(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics in six digits, without those that `verify` adds."""
    return {name: f"{value:.6g}" for name, value in metrics.items() if not is_inner(name)}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows with the same number of cells, as text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def time_span(seconds: float) -> str:
    """Seconds in their largest unit: `12 s`, `5 min`, `3 h`, `20 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
