"""dp_ray's side of `glue`, as a user writes it: the sentences, the model, its step and a metric."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """The rows of a CSV with the columns sentence and label, each as the tokens of one length and their label."""

    def __init__(self, file: str, model: str, length: int) -> None:
        from transformers import AutoTokenizer  # of the environment of this row

        with Path(file).open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        auto: Any = AutoTokenizer
        texts = [row["sentence"] for row in rows]
        padded = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
        labels = torch.tensor([int(row["label"]) for row in rows])
        self.columns = {**auto.from_pretrained(model)(texts, **padded), "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


def classifier(model: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    built: nn.Module = auto.from_pretrained(model)
    return built


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    outputs, count = model(**batch), len(batch["labels"])
    return {"loss": (outputs.loss * count, count), "outputs": outputs.logits, "target": batch["labels"]}


def accuracy(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == target).float()
