"""The digits, augmented: each image is moved and gets noise, drawn anew in each epoch."""

import torch
from torch.nn import functional as F

from jobs.digits import Digits


class Moved(Digits):
    """A training's digits, each by up to a pixel in any direction, with noise: items are (image [1, 8, 8], label).

    It draws by torch's global generator, which dp_ray seeds for each sample and epoch.
    """

    def __init__(self, noise: float = 0.05) -> None:
        super().__init__("train")
        self.noise = noise

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        down, right = torch.randint(3, (2,)).tolist()
        moved = F.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return moved + self.noise * torch.randn_like(moved), label
