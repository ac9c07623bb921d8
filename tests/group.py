"""A job's workers as real processes in a gloo group, without Ray."""

import multiprocessing
import traceback
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dp_ray.job import Job
from dp_ray.replica.world import World
from dp_ray.results.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.task import Measured, run_task
from tests.conftest import free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.group", "tests.models", "tests.training"])


class Ended(Exception):
    """A worker ended otherwise than well; holds what it raised."""


def run_group(job: Job, folder: Path | str) -> list[Any]:
    """Run the job on its workers, to its end or until they die; what rank 0 told. Ended holds what one raised."""
    run = Storage(str(folder))
    run.child(PARTS).create()
    world_size = job.max_workers
    told: Any = _context.SimpleQueue()
    port = free_port()
    processes = [
        _context.Process(target=_worker, args=(rank, world_size, job, str(folder), port, told))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    messages, errors, open_ends = [], [], world_size
    while open_ends:
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


def _worker(rank: int, world_size: int, job: Job, folder: str, port: int, told: Any) -> None:
    torch.set_num_threads(1)

    def send(what: Any) -> None:
        if rank == 0 and "Report" not in type(what).__name__:
            told.put(("told", what))

    try:
        if world_size > 1:
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        devices = tuple(torch.device(name) for name in job.devices or ["cpu"])
        run_task(job, World(rank, world_size, all_devices=devices), Storage(folder), send)
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
        told.put(("done", None))
    except BaseException:
        told.put(("raised", traceback.format_exc()))
