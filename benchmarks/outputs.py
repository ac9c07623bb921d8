"""Large outputs: 400,000 rows of 4 kB, 1.6 GB, on two workers.

From the last step to done, against an earlier commit whose driver merged them; and the whole, call to files on disk,
against Ray Data's map_batches and write_parquet, which keeps no order.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch

from benchmarks import large, mapped
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import at_most, compared
from benchmarks.measure import alternate, seconds
from benchmarks.predict import check_outputs
from benchmarks.rows import BATCH_SIZE, Wide, Work, make_rows
from benchmarks.start import unpack
from benchmarks.table import Row, time_text

ROOT = Path(__file__).parent.parent
EARLIER = "5d1377a"  # the commit before the workers merged their outputs
ROWS, TIMES = 200_000, 2
REPEATS = 3
KEYS: dict[str, object] = {"outputs": {"file_bytes": 128 << 20}}
WHAT = "outputs: 400,000 rows of 4 kB, 2 workers, files of 128 MB"


def measure() -> Iterator[Row]:
    with scratch() as folder:
        make_rows(folder / "rows", ROWS)
        if unpack(EARLIER, folder / "earlier"):
            shutil.copy(large.__file__, folder / "earlier" / "benchmarks")
            yield _after_last_step(folder)
        yield _whole(folder)


def _after_last_step(folder: Path) -> Row:
    ours, theirs = partial(_after, ROOT, folder, KEYS), partial(_after, folder / "earlier", folder, {})
    pairs = alternate(ours, theirs, REPEATS)
    return compared(f"{WHAT}: the last step to done", pairs, time_text, f"at {EARLIER}", at_most(0.1))


def _after(code: Path, folder: Path, keys: dict[str, object]) -> float:
    """Seconds from the last step to done, in a process of its own."""
    out = Path(mkdtemp(dir=folder))
    command = [sys.executable, "-m", "benchmarks.large", str(folder / "rows"), str(TIMES), str(out), json.dumps(keys)]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    done = subprocess.run(command, cwd=code, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    check_outputs(out, TIMES * ROWS)
    shutil.rmtree(out)
    return float(json.loads(done.stdout.splitlines()[-1])["after"])


def _whole(folder: Path) -> Row:
    work = Work(str(folder / "rows"), TIMES, BATCH_SIZE, 2)
    with local_ray():
        blocks = mapped.put(folder / "rows")
        ours = partial(_written, folder, lambda out: large.predict(work.path, work.times, out, KEYS))
        theirs = partial(_written, folder, lambda out: mapped.predict(blocks, work, None, out, _wide))
        pairs = alternate(ours, theirs, REPEATS + 1)[1:]  # the first ones warm what can be warm
    return compared(f"{WHAT}: call to files on disk", pairs, time_text, "Ray Data", at_most(1.0, "ahead"))


def _wide(stamps: str | None) -> torch.nn.Module:
    return Wide()


def _written(folder: Path, predict: Callable[[Path], object]) -> float:
    out = Path(mkdtemp(dir=folder))
    taken = seconds(lambda: predict(out))
    check_outputs(out, TIMES * ROWS)
    shutil.rmtree(out)
    return taken
