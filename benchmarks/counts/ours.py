"""dp_ray, with `bitwise: true` and six shards for each batch, on a session's workers."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassF1Score

import dp_ray
from benchmarks.counts import programs, smallest
from benchmarks.counts.programs import BATCH_SIZE, CLASSES, Program, Results
from benchmarks.counts.side import Told, run_all

STARTS_WITH = "python"
F1 = {"f1": {"target": MulticlassF1Score, "args": {"num_classes": CLASSES, "average": "macro"}}}
TOLD = {
    "BatchNorm": Told(
        "",
        "each shard is normalised by itself, on any number of workers",
        "https://github.com/dp-ray/dp_ray/blob/main/docs/bits.md#batchnorm-and-other-state",
    )
}


def sum_of_squares(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of `smallest.squares`, and what it is the mean of."""
    labelled = target != -100
    return outputs[labelled].square().sum() / 2, labelled.sum()


def minus_sum(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of `smallest.minus_mean`, and what it is the mean of."""
    labelled = target != -100
    return -outputs[labelled].sum(), labelled.sum()


LOSSES: dict[Any, Any] = {
    programs.mean: torch.nn.CrossEntropyLoss,
    smallest.minus_mean: minus_sum,
    smallest.squares: sum_of_squares,
}
ADAM = {"target": torch.optim.Adam, "args": {"lr": 0.01}}
OPTIMIZERS: dict[Any, Any] = {
    programs.adam: ADAM,
    programs.sgd_and_adam: [
        {"match": "0", "target": torch.optim.SGD, "args": {"lr": 0.1, "momentum": 0.9}},
        ADAM,
    ],
    smallest.step: {"target": torch.optim.SGD, "args": {"lr": 1.0}},
    smallest.heavy_step: {"target": torch.optim.SGD, "args": {"lr": 1.0, "momentum": 0.5}},
}


def main(folder: Path, count: int, of: str) -> None:
    """Start the workers, and run all."""
    with dp_ray.session(workers=count, verbose=False) as session:

        def run(program: Program, kept: Path, leaves: bool) -> Results | None:
            if program.begun_by is not None and not leaves:  # others go on from there too
                kept = Path(shutil.copytree(kept, kept.with_name(f"{kept.name}-on-{count}")))
            keys = keys_of(program) | {"storage": str(kept.parent), "name": kept.name, "workers": count}
            if leaves:
                keys["max_steps"] = program.left_after
            found = session.run(**keys)
            if program.does == "predict":
                return {"outputs": found.outputs}
            if program.does == "metric":
                return {"metric": torch.tensor(found.metrics["f1"])}
            model = program.model()
            model.load_state_dict(found.weights)
            return {"weights": program.ends_with(model)}

        run_all(run, folder, count, of, True, TOLD)


def keys_of(program: Program) -> dict[str, Any]:
    """The job."""
    keys: dict[str, Any] = {"model": program.model, "dataset": program.rows, "batch_size": program.batch_size}
    keys["shards"] = 6 if program.batch_size == BATCH_SIZE else 2
    if program.does == "predict":
        return {"task": "predict", **keys}
    if program.does == "metric":
        return {"task": "evaluate", **keys, "loss": torch.nn.CrossEntropyLoss, "metrics": F1}
    keys["loss"] = LOSSES.get(program.loss, {"target": program.loss, "over": "batch"})
    keys |= {"optimizer": OPTIMIZERS[program.optimizers], "grad_clip": program.clip}
    return {"task": "train", **keys, "epochs": program.epochs, "shuffle": False, "bitwise": True}
