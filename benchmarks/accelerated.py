"""accelerate's side of `predict`: two gloo processes, their outputs gathered on rank 0, which writes them.

`accelerate launch ... benchmarks/accelerated.py ROWS OUT`, the whole command, is that of `commands`.
"""

import os
import socket
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from benchmarks.rows import BATCH_SIZE, CLASSES, Mlp, Rows, Work


def predict(work: Work, stamps: Path, out: Path) -> None:
    """Start the processes, as `accelerate launch` would, but without a launcher's own start."""
    args = (_free_port(), work, str(stamps), out)
    spawn(_worker, args, nprocs=work.workers)  # type: ignore[no-untyped-call]


def _worker(rank: int, port: int, work: Work, stamps: str, out: Path) -> None:
    world_size = work.workers
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    predict_here(work, stamps, out)
    dist.destroy_process_group()


def predict_here(work: Work, stamps: str | None, out: Path) -> None:
    """Predict in this process, one of those that the environment names."""
    # One thread each, as Ray gives a worker of one CPU, and torchrun any worker; more only get in each other's way.
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rows = Rows(work.path, work.times)
    loader = DataLoader(rows, batch_size=work.batch_size // work.workers)
    model, loader = accelerator.prepare(Mlp(stamps).eval(), loader)
    gathered = []
    with torch.inference_mode():
        for batch in loader:
            gathered.append(accelerator.gather_for_metrics(model(batch)))
    if accelerator.is_main_process:
        _write(torch.cat(gathered), out)
    accelerator.wait_for_everyone()


def _write(outputs: torch.Tensor, out: Path) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(outputs.reshape(-1).numpy()), CLASSES)
    pq.write_table(pa.table({"output": column}), out / "outputs.parquet")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def main(rows: str, out: str) -> None:
    predict_here(Work(rows, 1, BATCH_SIZE, int(os.environ["WORLD_SIZE"])), None, Path(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
