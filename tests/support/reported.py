"""Run directories as a run leaves them, written by hand, for the tests of its page."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import TimedSteps
from dp_ray.results.result import Result
from dp_ray.rundir.history import METRICS
from dp_ray.storage import Storage
from dp_ray.tables import write_table
from dp_ray.telemetry.times import step_time_parts, times_table

EVIL = "<img src=x onerror=window.evil=1><script>window.evil=1</script>{{7*7}}$$x$$"


def job_values(**keys: Any) -> dict[str, Any]:
    """The described job of a training whose code does not exist."""
    targets = {name: {"target": f"nowhere.at_all:{name}", "args": {}} for name in ("model", "dataset")}
    given = {"task": "train", "batch_size": 4, "loss": "torch.nn:MSELoss", "optimizer": "torch.optim:SGD", **targets}
    return {**Job.make(given, "reported").describe(), **keys}


def write_run(run: Storage, steps: int, **result: Any) -> None:
    """`run.json` and `result.json` of a training with this many steps."""
    run.create()
    said = {"token": "1", "fingerprint": "2", "rows": {"dataset": 4 * steps}, "job": job_values(name="reported")}
    run.write_text("run.json", json.dumps(said))
    values = {"task": "train", "status": "done", "rows": 4 * steps, "steps": steps, "total_steps": steps, **result}
    Result(run_dir=str(run), name="reported", **values).save(run)


def history(steps: int, **columns: Any) -> pa.Table:
    """The history of a training in two epochs; `columns` replace its own, or are further ones."""
    step = np.arange(steps)
    drawn = np.random.default_rng(0)
    told = {"step": step, "epoch": step * 2 // steps, "loss": np.exp(-step / steps) + drawn.normal(0, 0.05, steps)}
    told |= {
        "learning_rate": np.full(steps, 0.1),
        "gradient_norm": drawn.gamma(2, 1, steps),
        "rows": np.full(steps, 4),
    }
    told |= {"rows_per_second": np.full(steps, 100.0), "data_wait_seconds": np.full(steps, 0.004)}
    return pa.table({**told, **columns})


def write_history(run: Storage, table: pa.Table) -> None:
    """`metrics.parquet`."""
    write_table(run, METRICS, table)


def write_times(run: Storage, steps: int, workers: int, node: str = "10.0.0.7") -> None:
    """Times of steps in which each part of worker r takes r + 1 milliseconds, and the exchange 5."""
    parts = step_time_parts(run)
    for rank in range(workers):
        seconds = np.full((steps, 10), (rank + 1) / 1000, np.float32)
        seconds[:, 4] = 0.005
        timed = TimedSteps(np.arange(steps), np.full(steps, rank, np.int32), seconds)
        parts.add(times_table(0, World(rank=rank, node=node), timed))
    parts.write()


def column(run: Storage, name: str) -> Any:
    """A column of `metrics.parquet`, read by pyarrow alone."""
    with run.open(METRICS) as stream:
        return pq.read_table(stream).column(name).to_numpy()
