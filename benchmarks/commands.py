"""Whole commands, from the shell's call to its end, with no Ray up.

Predict 200,000 rows on two workers, against `accelerate launch` and against a script with Ray Data; and `verify` on
four numbers of workers, against four runs. A list of many runs, against an import of torch.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.cluster import scratch
from benchmarks.compare import Goal, at_most, compared
from benchmarks.predict import ROWS, check_outputs
from benchmarks.rows import make_rows
from benchmarks.table import Row, time_text

ROOT = Path(__file__).parent.parent
REPEATS = 3
COUNTS = (1, 2, 3, 8)
LISTED = 1_000
WITHIN = Goal("at most 2.0 s", 2.0, is_least=False, absolute=True)
DP_RAY = (sys.executable, "-m", "dp_ray")
PREDICT = (*DP_RAY, "run", "benchmarks/predict.yaml", "--quiet")
# Without --multi_gpu, accelerate launches one process on a machine without GPUs.
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2")
PLAIN = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "benchmarks/accelerated.py")
VERIFY = ("jobs/tutorial.yaml", "--quiet")
FASTER = at_most(1.0, "ahead")
Side = Callable[[Path, Path], tuple[str, ...]]  # the command, of the file of rows and the folder for the outputs


def measure() -> Iterator[Row]:
    with scratch() as folder:
        make_rows(folder / "rows", ROWS)
        rounds = [{name: _predict(side, folder) for name, side in SIDES.items()} for _ in range(REPEATS + 1)]
    what = f"commands: predict {ROWS:,} rows, 2 workers, the whole command"
    for name in ("accelerate launch", "Ray Data"):
        # In the first round, files are read into memory.
        pairs = [(seconds["dp_ray"], seconds[name]) for seconds in rounds[1:]]
        yield compared(what, pairs, time_text, name, FASTER)
    what = f"commands: dp-ray verify on {', '.join(map(str, COUNTS))} workers"
    yield compared(what, [_verify_and_runs() for _ in range(REPEATS)], time_text, "four runs", at_most(0.4))
    what = f"commands: dp-ray list of {LISTED:,} runs"
    yield compared(what, list(_lists_and_imports()), time_text, "python -c 'import torch'", WITHIN)


def _lists_and_imports() -> Iterator[tuple[float, float]]:
    """Seconds of a list of many finished runs, and of an import of torch, which it does without."""
    with scratch() as folder:
        run = ("run", "jobs/tutorial.yaml", "--quiet", "--workers=0", f"--storage={folder}")
        _run((*DP_RAY, *run, "--name=run-0"))
        shutil.rmtree(folder / "run-0" / "tensorboard", ignore_errors=True)
        for number in range(1, LISTED):
            shutil.copytree(folder / "run-0", folder / f"run-{number}", copy_function=os.link)
        for _ in range(2 * REPEATS):
            yield _run((*DP_RAY, "list", str(folder))), _run((sys.executable, "-c", "import torch"))


def _ours(rows: Path, out: Path) -> tuple[str, ...]:
    return (*PREDICT, f"--set=dataset.args.path={rows}", f"--storage={out}")


def _accelerates(rows: Path, out: Path) -> tuple[str, ...]:
    return (*LAUNCH, *PLAIN, str(rows), str(out))


def _ray_datas(rows: Path, out: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "benchmarks.mapped", str(rows), str(out))


SIDES: dict[str, Side] = {"dp_ray": _ours, "accelerate launch": _accelerates, "Ray Data": _ray_datas}


def _predict(side: Side, folder: Path) -> float:
    out = Path(mkdtemp(dir=folder))
    taken = _run(side(folder / "rows", out))
    check_outputs(out, ROWS)
    shutil.rmtree(out)
    return taken


def _verify_and_runs() -> tuple[float, float]:
    """Seconds of one `verify`, and of a run on each number of workers."""
    with scratch() as folder:
        verify = (*DP_RAY, "verify", *VERIFY, f"--workers={','.join(map(str, COUNTS))}", f"--storage={folder}")
        ours = _run(verify)
        run = (*DP_RAY, "run", *VERIFY, f"--storage={folder}")
        return ours, sum(_run((*run, f"--workers={count}", f"--name=on-{count}")) for count in COUNTS)


def _run(command: tuple[str, ...]) -> float:
    """Wall time of a command in the checkout; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    taken = time.perf_counter() - started
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
    return taken
