"""dp_ray, with `bitwise: true` and six shards for each batch, on a session's workers."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torchmetrics.classification import MulticlassF1Score

import dp_ray
from benchmarks.counts import programs
from benchmarks.counts.programs import BATCH_SIZE, CLASSES, EPOCHS, Program, Results, mean
from benchmarks.counts.side import Told, run_all

STARTS_WITH = "python"
PAGE = "https://github.com/dp-ray/dp_ray/blob/main/docs/bits.md"
F1 = {"f1": {"target": MulticlassF1Score, "args": {"num_classes": CLASSES, "average": "macro"}}}
TOLD: dict[str, Told] = {}


def main(folder: Path, count: int) -> None:
    """Start the workers, and run all."""
    with dp_ray.session(workers=count, verbose=False) as session:

        def run(program: Program, kept: Path, leaves: bool) -> Results | None:
            if program.begun_by is not None and not leaves:  # others go on from there too
                kept = Path(shutil.copytree(kept, kept.with_name(f"{kept.name}-on-{count}")))
            keys: dict[str, Any] = {"storage": str(kept.parent), "name": kept.name, "workers": count}
            keys |= {"model": program.model, "dataset": program.rows, "batch_size": BATCH_SIZE, "shards": 6}
            if program.does == "predict":
                return {"outputs": session.run(task="predict", **keys).outputs}
            if program.does == "metric":
                found = session.run(task="evaluate", loss=torch.nn.CrossEntropyLoss, metrics=F1, **keys)
                return {"metric": torch.tensor(found.metrics["f1"])}
            keys |= {"epochs": EPOCHS, "shuffle": False, "bitwise": True, "grad_clip": program.clip}
            keys["loss"] = (
                torch.nn.CrossEntropyLoss if program.loss is mean else {"target": program.loss, "over": "batch"}
            )
            keys["optimizer"] = {"target": torch.optim.Adam, "args": {"lr": 0.01}}
            if program.optimizers is programs.sgd_and_adam:
                first = {"match": "0", "target": torch.optim.SGD, "args": {"lr": 0.1, "momentum": 0.9}}
                keys["optimizer"] = [first, keys["optimizer"]]
            if leaves:
                keys["max_steps"] = program.left_after
            trained = session.run(task="train", **keys)
            return {"weights": weights_of(trained)}

        run_all(run, folder, count, True, TOLD)


def weights_of(trained: dp_ray.Result) -> torch.Tensor:
    """The weights, as `flat` gives those of a model."""
    state = trained.weights
    return torch.cat([value.double().flatten() for _, value in sorted(state.items())])
