"""Digits of which some cannot be read, and some are not finite: a training sets them aside, and goes on."""

import torch

from jobs.digits import Digits


class Damaged(Digits):
    """A training's digits; of every 200, one image is cut off and another is no number."""

    def __init__(self) -> None:
        super().__init__("train")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = super().__getitem__(index)
        if index % 200 == 7:
            raise OSError(f"image-{index}.png is truncated")
        if index % 200 == 99:
            image = torch.full_like(image, torch.nan)
        return image, label
