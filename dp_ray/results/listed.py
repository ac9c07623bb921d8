"""The text of `dp-ray list`: a row for each folder of a storage."""

from collections.abc import Sequence

from dp_ray.results.short import aligned, measured, time_span
from dp_ray.rundir.listing import ListedRun
from dp_ray.text import printable

COLUMNS = ("name", "task", "status", "age", "steps", "seconds", "metrics", "note")
NOTE = 80


def list_text(rows: Sequence[ListedRun]) -> str:
    """The rows as a table with a heading; control characters are shown as escapes."""
    cells = [[printable(cell) for cell in _cells(row)] for row in rows]
    return aligned([COLUMNS, *cells]) if cells else "no runs"


def _cells(row: ListedRun) -> list[str]:
    metrics = ", ".join(f"{name} {value}" for name, value in measured(row.metrics).items())
    return [
        row.name,
        row.task or "-",
        row.status,
        "-" if row.age is None else time_span(row.age),
        "-" if row.steps is None else f"{row.step}/{row.steps}",
        "-" if row.seconds is None else f"{row.seconds:.1f}",
        metrics or "-",
        row.note if len(row.note) <= NOTE else f"{row.note[: NOTE - 3]}...",
    ]
