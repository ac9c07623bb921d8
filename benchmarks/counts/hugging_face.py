"""Hugging Face's Trainer, as its pages have it: arguments, `compute_loss_func`, `compute_metrics`, `predict`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.counts.programs import Program, Results, f1
from benchmarks.counts.side import NO_WAY, Told, run_all

STARTS_WITH = "torchrun"
DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer"
TOLD = {
    "dropout": Told("not said", "each process draws its own random numbers", DOCS),
    "BatchNorm": Told("by design", "the model is DDP's; SyncBatchNorm is for GPUs", DOCS),
    "uneven": Told("rows twice", "`even_batches` duplicates samples from the start of the dataset", DOCS),
    "contrastive": Told("not said", "the loss sees the rows of its process", DOCS),
    "augmentation": Told("rounding", "with `dispatch_batches`: one process reads", DOCS),
    "optimizers": Told(NO_WAY, "`optimizers` is one, and its schedule", DOCS),
    "killed": Told("", "torchrun starts all again, from the newest checkpoint that you ask for", DOCS),
}


class Items(Dataset[dict[str, Tensor]]):
    """Rows as the Trainer wants them: dicts."""

    def __init__(self, rows: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs, target = self.rows[index]
        return {"inputs": inputs, "labels": target}


class Outputs(nn.Module):
    """A model that gives a dict, as the Trainer wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.model(inputs)}


class StopsAfter(TrainerCallback):
    """Leaves the training after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step == self.step


def main(folder: Path, count: int, of: str) -> None:
    """Be one of the processes that torchrun has started."""
    keeps = TrainingArguments(output_dir=str(folder), use_cpu=True).process_index == 0
    run_all(run, folder, count, of, keeps, TOLD)


def run(program: Program, kept: Path, leaves: bool) -> Results | None:
    """What the program ends with, on this process of several."""
    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    arguments = TrainingArguments(
        output_dir=str(kept),
        use_cpu=True,
        per_device_train_batch_size=program.batch_size // count,
        per_device_eval_batch_size=program.batch_size // count,
        num_train_epochs=program.epochs,
        accelerator_config={"dispatch_batches": program.draws == "in the dataset" or None},
        average_tokens_across_devices=program.over == "labels",
        full_determinism=True,
        train_sampling_strategy="sequential",
        max_grad_norm=program.clip or 0.0,
        save_strategy="epoch" if program.keeps_epochs else "no",
        label_names=["labels"],
        report_to=[],
        disable_tqdm=True,
    )
    model, rows = Outputs(program.model()), Items(program.rows())
    (optimizer,) = program.optimizers(model)

    def loss(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        found = program.loss(outputs["logits"], labels)
        if num_items_in_batch is None or program.over != "labels":
            return found
        return found * (labels != -100).sum() / num_items_in_batch

    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        compute_loss_func=loss,
        callbacks=[StopsAfter(program.left_after)] if leaves and program.left_after else [],
        compute_metrics=measured,
    )
    if program.does != "train":
        found: Any = trainer.predict(rows)
        outputs = torch.from_numpy(found.predictions)
        return (
            {"outputs": outputs} if program.does == "predict" else {"metric": torch.tensor(found.metrics["test_f1"])}
        )
    trainer.train(resume_from_checkpoint=kept.is_dir() and get_last_checkpoint(str(kept)))  # type: ignore[no-untyped-call]
    return {"weights": program.ends_with(model.model)}


def measured(of: EvalPrediction) -> dict[str, float]:
    """The metric, of all rows."""
    return {"f1": float(f1()(torch.from_numpy(of.predictions), torch.from_numpy(of.label_ids)))}
