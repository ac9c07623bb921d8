"""How far the driver's memory grows in a run: `python -m benchmarks.memory ROWS` prints bytes."""

import sys
from pathlib import Path

import dp_ray
from benchmarks.cluster import local_ray, scratch
from benchmarks.measure import grown
from benchmarks.rows import make_rows

WARM_ROWS = 1_000


def main(rows: int) -> int:
    """The peak above what the process held when it called `run`, in bytes."""
    with scratch() as folder, local_ray():
        make_rows(folder / "warm", WARM_ROWS)
        make_rows(folder / "measured", rows)
        _run(folder / "warm", WARM_ROWS)  # what is imported and connected once is no growth
        return grown(lambda: _run(folder / "measured", rows))


def _run(rows: Path, num_rows: int) -> None:
    result = dp_ray.run(
        model="benchmarks.rows:Wide",
        dataset={"target": "benchmarks.rows:Rows", "args": {"path": str(rows)}},
        batch_size=1024,
        workers=2,
        storage=str(rows.parent),
        quiet=True,
    )
    assert result.rows == num_rows


if __name__ == "__main__":
    print(main(int(sys.argv[1])))
