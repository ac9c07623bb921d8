"""A job's workers as real processes in a gloo group, without Ray."""

import multiprocessing
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dp_ray.job import Job
from dp_ray.replica.world import World
from dp_ray.storage import Storage
from dp_ray.task import PARTS, Measured, run_task
from tests.conftest import free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.group", "tests.models", "tests.training"])


class Ended(Exception):
    """A worker ended otherwise than well; holds what it raised."""


def run_group(job: Job, folder: Path, world_size: int | None = None, kill_at: int | None = None) -> list[Any]:
    """Run the job to its end, or until every worker kills itself at a step; what rank 0 told."""
    run = Storage(str(folder))
    run.child(PARTS).create()
    world_size = job.max_workers if world_size is None else world_size
    told: Any = _context.SimpleQueue()
    port = free_port()
    processes = [
        _context.Process(target=_worker, args=(rank, world_size, job, str(folder), port, told, kill_at))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    messages, errors, open_ends = [], [], world_size
    while open_ends and not (kill_at is not None and not any(process.is_alive() for process in processes)):
        if told._reader.poll(0.05):
            kind, what = told.get()
            messages += [what] if kind == "told" else []
            errors += [what] if kind == "raised" else []
            open_ends -= kind in ("done", "raised")
            if kind == "raised":
                break
        elif not any(process.is_alive() for process in processes):
            break
    for process in processes:
        if errors:
            process.kill()
        process.join(120)
        process.close()
    told.close()
    if errors:
        raise Ended(errors[0])
    return messages


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights, read by the safetensors library."""
    return dict(load_file(folder / "weights.safetensors"))


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that the pieces of the history hold, without what the clock says; read by pyarrow alone."""
    pieces = sorted((folder / "history").iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    rows = [row for piece in pieces for row in pq.read_table(piece).to_pylist()]
    return [{name: value for name, value in row.items() if name != "rows_per_second"} for row in rows]


def measured(messages: list[Any]) -> dict[str, float]:
    """What an evaluation told."""
    (found,) = (one.metrics for one in messages if isinstance(one, Measured))
    return dict(found)


def _worker(rank: int, world_size: int, job: Job, folder: str, port: int, told: Any, kill_at: int | None) -> None:
    torch.set_num_threads(1)

    def send(what: Any) -> None:
        if rank == 0 and "Report" not in type(what).__name__:
            told.put(("told", what))
        through = getattr(what, "through", None)
        if kill_at is not None and through is not None and through >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if world_size > 1:
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        run_task(job, World(rank, world_size), Storage(folder), send)
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
        told.put(("done", None))
    except BaseException:
        told.put(("raised", traceback.format_exc()))
