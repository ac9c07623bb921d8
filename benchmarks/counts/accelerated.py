"""accelerate, as its guides write it: `prepare`, `accelerator.backward`, `gather_for_metrics`, `save_state`."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.counts.programs import BATCH_SIZE, EPOCHS, Program, Results, f1, flat, mean
from benchmarks.counts.side import Told, run_all

STARTS_WITH = "torchrun"
GUIDES = "https://huggingface.co/docs/accelerate"
TOLD = {
    "dropout": Told("by design", "each process draws its own random numbers", f"{GUIDES}/concept_guides/performance"),
    "BatchNorm": Told(
        "by design",
        "the model is DDP's: each process normalises its own rows",
        f"{GUIDES}/package_reference/accelerator",
    ),
    "uneven": Told(
        "rows twice", "`even_batches` begins again with the first rows", f"{GUIDES}/package_reference/accelerator"
    ),
    "contrastive": Told(
        "by design", "the loss sees the rows of its process", f"{GUIDES}/usage_guides/gradient_accumulation"
    ),
    "augmentation": Told(
        "by design", "each process draws its own random numbers", f"{GUIDES}/concept_guides/performance"
    ),
}


def main(folder: Path, count: int) -> None:
    """Be one of the processes that torchrun has started."""
    accelerator = Accelerator(cpu=True)

    def run(program: Program, kept: Path, leaves: bool) -> Results | None:
        accelerator.free_memory()  # of the program before
        loader = DataLoader(program.rows(), BATCH_SIZE // accelerator.num_processes)
        if program.does != "train":
            model, loader = accelerator.prepare(program.model().eval(), loader)
            with torch.inference_mode():
                found = [accelerator.gather_for_metrics((model(inputs), target)) for inputs, target in loader]
            outputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
            return {"outputs": outputs} if program.does == "predict" else {"metric": f1()(outputs, targets)}
        model = program.model()
        made = program.optimizers(model)
        model, loader, *optimizers = accelerator.prepare(model, loader, *made)
        begin, read = 0, 0
        if program.left_after is not None and not leaves:
            accelerator.load_state(str(kept))
            begin, read = divmod(program.left_after, len(loader))
        for epoch in range(begin, EPOCHS):
            batches = accelerator.skip_first_batches(loader, read) if epoch == begin and read else loader
            for number, (inputs, target) in enumerate(batches, 1):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = program.loss(model(inputs), target)
                if program.loss is mean:  # by what counts in the whole batch, as the guide shows for tokens
                    count = (target != -100).sum()
                    whole = accelerator.gather(count).sum()
                    loss = loss * count * accelerator.num_processes / whole
                accelerator.backward(loss)
                if program.clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), program.clip)
                for optimizer in optimizers:
                    optimizer.step()
                if leaves and epoch * len(loader) + number == program.left_after:
                    accelerator.save_state(str(kept))
                    return None
        return {"weights": flat(accelerator.unwrap_model(model))}

    run_all(run, folder, count, accelerator.is_main_process, TOLD)
    accelerator.end_training()
