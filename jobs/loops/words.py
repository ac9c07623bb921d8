"""A language model of words: an LSTM reads the help texts of Python, and keeps its state from step to step."""

import re
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

import dp_ray

COLUMNS = 20  # texts that are read side by side: the rows of a batch
TEXT = " ".join(topics[name] for name in sorted(topics))  # of the Python documentation, under Python's licence
WORDS = re.findall(r"\w+|[^\w\s]", TEXT)
KNOWN = {word: number for number, (word, _) in enumerate(Counter(WORDS).most_common(2000), 1)}  # 0 is any other word


class Pieces(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The text in COLUMNS columns, of which a batch has a piece each: `length` words, and the word after each."""

    def __init__(self, split: str = "train", length: int = 35, pieces: int = 100) -> None:
        numbers = torch.tensor([KNOWN.get(word, 0) for word in WORDS])
        size = len(numbers) // 10
        own = numbers[:-size] if split == "train" else numbers[-size:]
        self.columns = own[: len(own) // COLUMNS * COLUMNS].view(COLUMNS, -1)
        self.length = length
        self.pieces = min(pieces, (self.columns.shape[1] - 1) // length)

    def __len__(self) -> int:
        return self.pieces * COLUMNS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece, column = divmod(index, COLUMNS)
        words = self.columns[column, piece * self.length : (piece + 1) * self.length + 1]
        return words[:-1], words[1:]


class Reader(nn.Module):
    """Words [rows, length] to logits of the words after them, [rows, words, length]."""

    def __init__(self, width: int = 64, depth: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.size = depth, width
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(len(KNOWN) + 1, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, len(KNOWN) + 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.read(words)[0]

    def read(self, words: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Go on from a state, two tensors [rows, depth, width]; return the logits, and the state at the end."""
        before = None if state is None else tuple(part.transpose(0, 1).contiguous() for part in state)
        seen, after = self.lstm(self.drop(self.embedding(words)), before)
        return self.head(self.drop(seen)).transpose(1, 2), [part.transpose(0, 1) for part in after]


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The loss of each word; an evaluation takes its mean."""
    return cross_entropy(logits, following, reduction="none")


def train(run: dp_ray.Loop) -> None:
    """Read on where the last step ended; lower the rate after an epoch whose evaluation is no better."""
    model = run.model
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    update = run.optimizer(optimizer)
    plateau = run.state("plateau", ReduceLROnPlateau(optimizer, factor=0.25, patience=0))

    def begun() -> list[torch.Tensor]:
        return [torch.zeros(COLUMNS, *model.size, device=run.device) for _ in range(2)]

    kept = run.state("kept", {"state": begun()})  # a run that goes on has it as it was

    def loss(batch: Any) -> dict[str, Any]:
        words, following, before = batch
        logits, state = model.read(words, before)
        return {"loss": loss_of(logits, following), "outputs": {"state": state}}

    for step in run.steps():
        if step.epoch > plateau.last_epoch:
            plateau.step(run.evaluated["eval_loss_of_words"])
            kept["state"] = begun()
        words, following = step.gather(lambda batch: batch)  # of all rows, as the state is
        step.backward(loss, model, batch=(words, following, kept["state"]), keep=kept)
        update.step(clip=0.25)
