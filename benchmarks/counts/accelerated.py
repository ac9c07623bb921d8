"""accelerate, as its guides write it: `prepare`, `accelerator.backward`, `gather_for_metrics`, `save_state`."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from benchmarks.counts.programs import Program, Results, f1
from benchmarks.counts.side import Told, run_all

STARTS_WITH = "torchrun"
DOCS = "https://huggingface.co/docs/accelerate"
TOLD = {
    "dropout": Told("by design", "a seed is that of one process", f"{DOCS}/package_reference/utilities"),
    "BatchNorm": Told(
        "by design", "the model is DDP's; SyncBatchNorm is for GPUs", f"{DOCS}/package_reference/kwargs"
    ),
    "uneven": Told(
        "rows twice",
        "`even_batches` begins again with the first rows; `join_uneven_inputs` is for GPUs",
        f"{DOCS}/package_reference/torch_wrappers",
    ),
    "contrastive": Told(
        "by design",
        "the gradient is the mean of the processes' ones; `gather` is for evaluation",
        f"{DOCS}/usage_guides/gradient_accumulation",
    ),
    "augmentation": Told(
        "rounding", "with `dispatch_batches`: one process reads", f"{DOCS}/package_reference/utilities"
    ),
    "killed": Told("", "torchrun starts all again, from the state that you load", f"{DOCS}/package_reference/cli"),
}


def main(folder: Path, count: int, of: str) -> None:
    """Be one of the processes that torchrun has started."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    run_all(run, folder, count, of, accelerator.is_main_process, TOLD)
    accelerator.end_training()


def run(program: Program, kept: Path, leaves: bool) -> Results | None:
    """What the program ends with, on this process of several."""
    configured = DataLoaderConfiguration(dispatch_batches=program.draws == "in the dataset" or None)
    accelerator = Accelerator(cpu=True, dataloader_config=configured)
    loader = DataLoader(program.rows(), program.batch_size // accelerator.num_processes)
    if program.does != "train":
        model, loader = accelerator.prepare(program.model().eval(), loader)
        with torch.inference_mode():
            found = [accelerator.gather_for_metrics((model(inputs), target)) for inputs, target in loader]
        outputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
        return {"outputs": outputs} if program.does == "predict" else {"metric": f1()(outputs, targets)}
    model = program.model()
    model, loader, *optimizers = accelerator.prepare(model, loader, *program.optimizers(model))
    begin, read = 0, 0
    if program.left_after is not None and not leaves:
        accelerator.load_state(str(kept))
        begin, read = divmod(program.left_after, len(loader))
    elif epochs := sorted(kept.glob("epoch_*")):
        accelerator.load_state(str(epochs[-1]))
        begin = len(epochs)
    for epoch in range(begin, program.epochs):
        batches = accelerator.skip_first_batches(loader, read) if epoch == begin and read else loader
        for number, (inputs, target) in enumerate(batches, 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = program.loss(model(inputs), target)
            if program.over == "labels":  # of the whole batch, as the guide shows
                count = (target != -100).sum()
                loss = loss * count * accelerator.num_processes / accelerator.gather(count).sum()
            accelerator.backward(loss)
            if program.clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), program.clip)
            for optimizer in optimizers:
                optimizer.step()
            if leaves and epoch * len(loader) + number == program.left_after:
                accelerator.save_state(str(kept))
                return None
        if program.keeps_epochs:
            accelerator.save_state(str(kept / f"epoch_{epoch}"))
    return {"weights": program.ends_with(accelerator.unwrap_model(model))}
