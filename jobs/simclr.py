"""SimCLR on scikit-learn's digits: embeddings are learned without labels, by a loss that sees the whole batch.

`python -m jobs.simclr` trains jobs/simclr.yaml, and the same by plain torch in one process. It prints a loss of both,
and how many views of test images find the other view of their image, before and after.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dp_ray
from jobs.digits import Digits

JOB = "jobs/simclr.yaml"
BATCH, STEPS = 96, 60  # as in the job


class Views(Dataset[tuple[torch.Tensor, int]]):
    """Items are (two views of an image [2, 1, 8, 8], number of the image).

    The views are drawn once, so that plain torch trains on the same. To draw them anew in each epoch, draw them in
    `__getitem__`, by torch's global generator: dp_ray seeds it for each sample.
    """

    def __init__(self, split: str = "train", noise: float = 0.05) -> None:
        images, generator = Digits(split).images, torch.Generator().manual_seed(0)
        self.views = torch.stack([self._drawn(images, noise, generator) for _ in range(2)], 1)

    def _drawn(self, images: torch.Tensor, noise: float, generator: torch.Generator) -> torch.Tensor:
        """Return each image moved by a pixel in some direction, with noise."""
        places = torch.randint(3, (2, len(images)), generator=generator)
        padded = F.pad(images[:, 0], (1, 1, 1, 1)).unfold(1, 8, 1).unfold(2, 8, 1)
        moved = padded[torch.arange(len(images)), places[0], places[1]]
        return moved[:, None] + noise * torch.randn(images.shape, generator=generator)

    def __len__(self) -> int:
        return len(self.views)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.views[index], index


class Encoder(nn.Module):
    """Views [rows, 2, 1, 8, 8] to embeddings [rows, 2, size] of length 1; images [rows, 1, 8, 8] to [rows, size]."""

    def __init__(self, width: int = 16, size: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 16, size)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embedded = F.normalize(self.layers(images.flatten(0, -4)), dim=1)
        return embedded.view(*images.shape[:-3], -1)


def nt_xent(embedded: torch.Tensor, numbers: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """The loss of a batch: of all other views, each is to be nearest to the other one of its image."""
    views = embedded.transpose(0, 1).flatten(0, 1)  # all first views, then all second ones
    likeness = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    others = torch.arange(len(views), device=views.device).roll(len(views) // 2)
    return F.cross_entropy(likeness, others)


def by_plain_torch(model: nn.Module, steps: int = STEPS) -> list[float]:
    """The losses of the same training by plain torch, whose loss sees the batch because there is one process."""
    data = Views()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    full, losses = len(data) // BATCH, []
    for step in range(steps):
        rows = torch.arange(BATCH) + step % full * BATCH
        loss = nt_xent(model(data.views[rows]), rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def found(model: nn.Module) -> float:
    """The share of test images whose second view is the nearest one to their first among the second views of all."""
    with torch.no_grad():
        first, second = model(Views("test").views).unbind(1)
    return float(((first @ second.T).argmax(1) == torch.arange(len(first))).float().mean())


if __name__ == "__main__":
    result = dp_ray.run(JOB)
    torch.manual_seed(0)
    fresh, trained = Encoder(), Encoder()
    trained.load_state_dict(result.weights)
    before = found(fresh)
    losses = by_plain_torch(fresh)
    print(f"loss of step 2: {result.history[2]['loss']:.6f}, by plain torch {losses[2]:.6f}")
    print(f"{before:.0%} of the views found before, {found(trained):.0%} after")
