"""Plain DDP, as torch's tutorials write it: `DistributedSampler`, `DistributedDataParallel`, and rank 0 keeps."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.counts.programs import Program, Results, f1
from benchmarks.counts.side import NO_WAY, Told, run_all

STARTS_WITH = "torchrun"
DOCS = "https://docs.pytorch.org/docs/stable"
CLASS = f"{DOCS}/generated/torch.nn.parallel.DistributedDataParallel.html"
JOIN = "https://docs.pytorch.org/tutorials/advanced/generic_join.html"
FAULTS = "https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html"
TOLD = {
    "dropout": Told("not said", "each process draws its own random numbers", f"{DOCS}/notes/randomness.html"),
    "BatchNorm": Told(
        "by design",
        "each process normalises its own rows, and rank 0's statistics are kept; SyncBatchNorm is for GPUs",
        f"{DOCS}/generated/torch.nn.SyncBatchNorm.html",
    ),
    "uneven": Told("not said", "in `Join` a process whose rows have ended takes no step of the optimizer", JOIN),
    "tokens": Told("by design", "the gradient is the mean of the processes' means, whatever each has", CLASS),
    "contrastive": Told("rounding", "by a deprecated `all_gather`", f"{DOCS}/distributed.html"),
    "resume": Told(NO_WAY, "checkpoints are shown between epochs", FAULTS),
    "augmentation": Told("not said", "each process draws its own random numbers", f"{DOCS}/notes/randomness.html"),
    "predictions": Told(NO_WAY, "nothing puts the outputs into the rows' order", f"{DOCS}/distributed.html"),
    "killed": Told("", "torchrun starts all again, from the last checkpoint", FAULTS),
}


def main(folder: Path, count: int, of: str) -> None:
    """Be one of the processes that torchrun has started."""
    dist.init_process_group("gloo")
    ways = Ways(DistributedDataParallel, distributed, joined, whole, load, save)
    run_all(partial(run, ways), folder, count, of, dist.get_rank() == 0, TOLD)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Ways:
    """A library's own ways to do what the loop needs."""

    model: Callable[[nn.Module], nn.Module]
    part: Callable[[DataLoader[Any]], Iterable[Any]]  # of the loader, for this process
    joined: Callable[[nn.Module, int], AbstractContextManager[object]]  # round a loop over so many rows
    whole: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of a batch's outputs and targets
    load: Callable[[Path], dict[str, Any] | None]
    save: Callable[[dict[str, Any], Path, bool], None]  # and whether another training is to go on from there


def distributed(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader of this process's part: by the sampler where it divides the rows, else as long as there are rows."""
    rows, rank, count = loader.dataset, dist.get_rank(), dist.get_world_size()
    if len(rows) % count:  # type: ignore[arg-type]
        return DataLoader(Subset(rows, range(rank, len(rows), count)), loader.batch_size)  # type: ignore[arg-type]
    sampler: DistributedSampler[Any] = DistributedSampler(rows, shuffle=False)
    return DataLoader(rows, loader.batch_size, sampler=sampler)


def joined(model: nn.Module, rows: int) -> AbstractContextManager[object]:
    """Processes whose rows have ended go along, and do not count."""
    return Join([model], enable=rows % dist.get_world_size() > 0, divide_by_initial_world_size=False)  # type: ignore[list-item]


def whole(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Those of all processes, with gradients."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return torch.cat(all_gather(outputs)), torch.cat(all_gather(target))  # type: ignore[no-untyped-call]


def load(kept: Path) -> dict[str, Any] | None:
    """The snapshot, if there is one."""
    return torch.load(kept) if kept.exists() else None


def save(state: dict[str, Any], kept: Path, _: bool) -> None:
    """Let rank 0 keep a snapshot."""
    if dist.get_rank() == 0:
        torch.save(state, kept)
    dist.barrier()


def run(ways: Ways, program: Program, kept: Path, leaves: bool) -> Results | None:
    """What the program ends with, on this process of several."""
    model = ways.model(program.model())
    rows = program.rows()
    loader = ways.part(DataLoader(rows, program.batch_size // dist.get_world_size()))
    if program.does == "metric":
        return measured(model, loader)
    bare = getattr(model, "module", model)
    optimizers = program.optimizers(model)
    begin = 0
    goes_on = program.keeps_epochs or (program.left_after is not None and not leaves)
    if goes_on and (state := ways.load(kept)):
        bare.load_state_dict(state["model"])
        for optimizer, of in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of)
        begin = state["epoch"]
    for epoch in range(begin, program.epochs):
        with ways.joined(model, len(rows)):  # type: ignore[arg-type]
            for inputs, target in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                outputs = model(inputs)
                if program.over == "batch":
                    outputs, target = ways.whole(outputs, target)
                program.loss(outputs, target).backward()  # type: ignore[no-untyped-call]
                if program.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), program.clip)
                for optimizer in optimizers:
                    optimizer.step()
        if leaves or program.keeps_epochs:
            states = [optimizer.state_dict() for optimizer in optimizers]
            ways.save({"model": bare.state_dict(), "optimizers": states, "epoch": epoch + 1}, kept, leaves)
        if leaves:
            return None
    return {"weights": program.ends_with(bare)}


def measured(model: nn.Module, loader: Iterable[Any]) -> Results:
    """The metric of torchmetrics, which asks the other processes by itself."""
    metric = f1()
    model.eval()
    with torch.no_grad():
        for inputs, target in loader:
            metric.update(model(inputs), target)
    return {"metric": metric.compute()}
