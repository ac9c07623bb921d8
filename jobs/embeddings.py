"""Embeddings of the digits: what the CNN sees before its last layer, beside each image's number and label."""

from typing import Any

import torch
from torch.utils.data import Dataset

from jobs.digits import Digits, Net


class Numbered(Dataset[dict[str, Any]]):
    """The digits as dicts: image [1, 8, 8], id, label."""

    def __init__(self) -> None:
        self.digits = Digits()

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.digits[index]
        return {"image": image, "id": f"digit-{index:04}", "label": int(label)}


class Embedder(Net):
    """The CNN of jobs/digits.yaml: images [rows, 1, 8, 8] to its last inputs and its guesses."""

    def forward(self, images: torch.Tensor) -> Any:
        embedding = self.layers[:-1](images)
        return {"embedding": embedding, "guess": self.layers[-1](embedding).argmax(1)}
