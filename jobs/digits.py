"""scikit-learn's digits, 1,797 real images of 8 x 8 pixels that come with the package, and a small CNN."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items are (image [1, 8, 8] in 0..1, label); `split` is all, train (4 of 5 images) or test (every fifth)."""

    def __init__(self, split: str = "all") -> None:
        if split not in ("all", "train", "test"):
            raise ValueError(f"split must be all, train or test, got {split!r}")
        images, labels = load_digits(return_X_y=True)
        pick = torch.arange(len(labels))
        if split != "all":
            pick = pick[(pick % 5 == 0) == (split == "test")]
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[pick] / 16
        self.labels = torch.tensor(labels)[pick]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Net(nn.Module):
    """Two convolutions and a linear layer: images [rows, 1, 8, 8] to logits [rows, 10]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 16, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(images)
        return logits


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """1 for each row whose largest logit is its label's, else 0: [rows]."""
    return (logits.argmax(1) == labels).float()
