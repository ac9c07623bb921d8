"""dp_ray on several GPUs beside DDP under torchrun: `python -m benchmarks.many WORKERS [eager] [compiled] [cpu]`.

Both train the same network in bf16 on global batches of the same rows, eager and compiled, one after the other. Each
of the two can be run alone, in less than ten minutes. A side's figure is by the median of its steps' times: on GPUs
those of the computing stream of rank 0. The first collective's seconds, which NCCL needs to connect, are told too.
With `cpu` it runs small, on gloo, to see that it works.
"""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import nets
from benchmarks.compare import compared
from benchmarks.gpu import LARGE, NO_SLOWER, SMALL, Case, autocast, plain_model
from benchmarks.table import HEADER, line, rate_text
from dp_ray.storage import Storage
from dp_ray.telemetry.times import STEP_PARTS, read_step_times

HOW = ("eager", "compiled")
STEPS, WARM = 120, 40
REPEATS = 3


def case_of(workers: int, on_cpu: bool) -> Case:
    """A ResNet's training; each worker has the rows of a single GPU's."""
    sizes = SMALL if on_cpu else LARGE
    rows = sizes.image_rows * workers
    return Case("ResNet-50", "train", "resnet", sizes.resnet, "Images", sizes.images, rows, "bf16", sizes)


def plain(workers: int, on_cpu: bool, compiles: bool) -> None:
    """One process of torchrun: the loop that torch's documentation shows. Rank 0 prints what it found, as JSON."""
    device = torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl")
    began = time.perf_counter()
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)
    first = time.perf_counter() - began
    case = case_of(workers, on_cpu)
    model: Any = DistributedDataParallel(plain_model(case, device))
    model = torch.compile(model) if compiles else model
    dataset: Any = nets.Images(case.rows * STEPS, **case.data_args)
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, case.rows // workers, sampler=sampler, num_workers=case.sizes.processes, pin_memory=not on_cpu
    )
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-4), torch.nn.CrossEntropyLoss()
    ends = []
    for batch in loader:
        inputs, targets = (leaf.to(device, non_blocking=True) for leaf in batch)
        optimizer.zero_grad()
        with autocast(case, device):
            total = loss(model(inputs), targets)
        total.backward()
        optimizer.step()
        ends.append(mark(device))
    synchronize(device)
    if dist.get_rank() == 0:
        seconds = [between(*two) for two in pairwise(ends)]
        print(json.dumps({"first": first, "rate": case.rows / median(seconds[WARM:])}))
    dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> Any:
    """Now: on a GPU an event of its stream, for a host that runs ahead would tell its own time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(one: Any, other: Any) -> float:
    """The seconds between two marks, which the device has passed."""
    return float(other - one) if isinstance(one, float) else float(one.elapsed_time(other)) / 1e3


def under_torchrun(workers: int, on_cpu: bool, compiles: bool) -> dict[str, float]:
    """What `plain` finds in as many processes."""
    given = ["plain", str(workers), "cpu" if on_cpu else "cuda", "compiled" if compiles else "eager"]
    command = [
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
        "-m",
        "benchmarks.many",
        *given,
    ]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def by_dp_ray(workers: int, on_cpu: bool, compiles: bool) -> float:
    """The rows a second of `dp-ray run`, by the times of rank 0's steps after the warm ones."""
    case = case_of(workers, on_cpu)
    job = {
        "task": "train",
        "model": {"target": "benchmarks.nets:resnet", "args": case.model_args},
        "dataset": {"target": "benchmarks.nets:Images", "args": {**case.data_args, "length": case.rows * STEPS}},
        "batch_size": case.rows,
        "shuffle": True,
        "workers": workers,
        "precision": "bf16",
        "compile": compiles,
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1e-4}},
        "loader": {"processes": case.sizes.processes},
        "checkpoint": {"every_seconds": None, "every_steps": STEPS},
    }
    with TemporaryDirectory() as folder:
        file = Path(folder, "job.yaml")
        file.write_text(json.dumps(job))
        line = ["dp_ray", "run", str(file), f"--storage={folder}", "--name=run", "--quiet"]
        subprocess.run([sys.executable, "-m", *line], check=True)
        times = read_step_times(Storage(str(Path(folder, "run")))).to_pylist()
    # A row's parts are its whole step; no worker ends it long before the others.
    seconds = [sum(row[part] for part in STEP_PARTS) for row in times if row["rank"] == 0]
    return float(case.rows / median(seconds[WARM + 1 :]))


def main(names: list[str]) -> None:
    if names[:1] == ["plain"]:
        return plain(int(names[1]), names[2] == "cpu", names[3] == "compiled")
    workers, on_cpu = int(names[0]), "cpu" in names
    if not on_cpu and torch.cuda.device_count() < workers:
        sys.exit(f"there are {torch.cuda.device_count()} GPUs here; `python -m benchmarks.many 2 cpu` tries it out")
    print("", f"| {' | '.join(HEADER)} |", f"| {' | '.join(['---'] * len(HEADER))} |", sep="\n", flush=True)
    firsts = []
    for how in [name for name in HOW if name in names] or HOW:
        compiles, pairs = how == "compiled", []
        for _ in range(REPEATS):
            ours, theirs = by_dp_ray(workers, on_cpu, compiles), under_torchrun(workers, on_cpu, compiles)
            pairs.append((ours, theirs["rate"]))
            firsts.append(theirs["first"])
        what = f"train: a ResNet-50, bf16, {workers} workers, {how}, rows a second"
        print(line(compared(what, pairs, rate_text, "DDP under torchrun", NO_SLOWER)), flush=True)
    print(f"the first collective: {median(firsts):.2f} s by the median of {len(firsts)} groups")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
