"""What all sides of `images` read, and dp_ray's dataset and labels, as a user writes them.

`python -m benchmarks.peers.photos FOLDER NUMBER` makes it: JPEGs, lists of them in Parquet, and weights of a
ResNet-18 where torch looks for what it has loaded before.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import transforms
from torchvision.models import ResNet18_Weights, resnet18

WEIGHTS = ResNet18_Weights.DEFAULT
LISTED = 100  # images in each file of the list
SIDES = (256, 400)  # of an image, in pixels
DETAIL = 32  # pixels of random numbers on a side, which the image's pixels lie between


class Photos(Dataset[dict[str, Any]]):
    """The images of the lists in a folder, as the model wants them."""

    def __init__(self, lists: str) -> None:
        self.paths = pads.dataset(lists).to_table()["image_url"].to_pylist()
        self.transform = transforms.Compose([transforms.ToTensor(), WEIGHTS.transforms()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        return {"image": self.transform(Image.open(path).convert("RGB")), "image_url": path}


def labels(logits: torch.Tensor) -> dict[str, list[str]]:
    return {"label": [WEIGHTS.meta["categories"][at] for at in logits.argmax(1)]}


def make(folder: Path, number: int) -> None:
    """Write the images, of smooth random colours, the lists, and the weights."""
    numbers = np.random.default_rng(0)
    for name in ("images", "lists", "hub/checkpoints"):
        (folder / name).mkdir(parents=True)
    paths = [str(folder / "images" / f"{at:05}.jpg") for at in range(number)]
    for path in paths:
        size = tuple(numbers.integers(*SIDES, 2))
        colours = Image.fromarray(numbers.integers(0, 256, (DETAIL, DETAIL, 3), np.uint8))
        colours.resize(size, Image.Resampling.BICUBIC).save(path, quality=90)
    for first in range(0, number, LISTED):
        table = pa.table({"image_url": paths[first : first + LISTED]})
        pq.write_table(table, folder / "lists" / f"{first:05}.parquet")
    torch.manual_seed(0)
    model = resnet18(norm_layer=partial(nn.BatchNorm2d, momentum=None)).train()
    photos = Photos(str(folder / "lists"))
    seen = torch.stack([photos[at]["image"] for at in range(min(50, number))])
    with torch.no_grad():
        model(seen)  # for the statistics of BatchNorm
        model.fc.bias -= model.eval()(seen).mean(0)  # else all images are of one class
    torch.save(model.state_dict(), folder / "hub/checkpoints" / Path(WEIGHTS.url).name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
