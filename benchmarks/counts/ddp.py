"""Plain DDP, as torch's tutorials write it: `DistributedSampler`, `DistributedDataParallel`, and rank 0 keeps."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.counts.programs import BATCH_SIZE, EPOCHS, Program, Results, f1, flat
from benchmarks.counts.side import NO_WAY, Told, run_all

STARTS_WITH = "torchrun"
TUTORIAL = "https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html"
NOTES = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
SAMPLER = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler"
CLASS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
TOLD = {
    "dropout": Told("by design", "each process draws its own random numbers", NOTES),
    "BatchNorm": Told("by design", "each process normalises its own rows; SyncBatchNorm is for GPUs", CLASS),
    "uneven": Told("rows twice", "rows are added until all processes have as many; or dropped", SAMPLER),
    "tokens": Told("by design", "the gradient is the mean of the processes' means, whatever each has", CLASS),
    "contrastive": Told("by design", "the loss sees the rows of its process", CLASS),
    "resume": Told(NO_WAY, "checkpoints are shown between epochs", TUTORIAL),
    "augmentation": Told("by design", "each process draws its own random numbers", NOTES),
    "metric": Told("rows twice", "torchmetrics gathers the rows that the sampler added", SAMPLER),
    "predictions": Told(NO_WAY, "nothing gathers outputs", CLASS),
}


def main(folder: Path, count: int) -> None:
    """Be one of the processes that torchrun has started."""
    dist.init_process_group("gloo")
    run_all(run, folder, count, dist.get_rank() == 0, TOLD)
    dist.destroy_process_group()


def run(program: Program, kept: Path, leaves: bool) -> Results | None:
    """What the program ends with, on this process of several."""
    return run_prepared(program, kept, leaves, DistributedDataParallel, distributed)


def distributed(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader of this process's part."""
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, shuffle=False)
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


def run_prepared(
    program: Program,
    kept: Path,
    leaves: bool,
    prepared: Callable[[nn.Module], nn.Module],
    part: Callable[[DataLoader[Any]], Iterable[Any]],
) -> Results | None:
    """The loop, with a library's own way to prepare a model and a loader."""
    model = prepared(program.model())
    loader = part(DataLoader(program.rows(), BATCH_SIZE // dist.get_world_size()))
    if program.does == "metric":
        return measured(model, loader)
    bare = getattr(model, "module", model)
    optimizers = program.optimizers(model)
    begin = 0
    if program.left_after is not None and not leaves:
        state = torch.load(kept)
        bare.load_state_dict(state["model"])
        for optimizer, of in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(of)
        begin = state["epoch"]
    for epoch in range(begin, EPOCHS):
        for inputs, target in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            program.loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
            if program.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), program.clip)
            for optimizer in optimizers:
                optimizer.step()
        if leaves:
            if dist.get_rank() == 0:
                states = [optimizer.state_dict() for optimizer in optimizers]
                torch.save({"model": bare.state_dict(), "optimizers": states, "epoch": epoch + 1}, kept)
            dist.barrier()
            return None
    return {"weights": flat(bare)}


def measured(model: nn.Module, loader: Iterable[Any]) -> Results:
    """The metric of torchmetrics, which asks the other processes by itself."""
    metric = f1()
    model.eval()
    with torch.no_grad():
        for inputs, target in loader:
            metric.update(model(inputs), target)
    return {"metric": metric.compute()}
