"""The digits as images in tar shards, as WebDataset has them: `00012.png` beside `00012.cls`.

`python -m jobs.webdataset` writes them: `data/digits-train-0.tar` to `-3.tar`, and `data/digits-test-0.tar`.
"""

import io
import tarfile
from pathlib import Path

import torch

from jobs.digits import Digits, Net

SHARDS = {"train": 4, "test": 1}


class OfPixels(Net):
    """Images as they are decoded, uint8 [rows, 3, 8, 8], to logits [rows, 10]."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.float().mean(1, keepdim=True) / 255)


def write(folder: Path) -> None:
    """Write the digits into shards, as PNG files and their labels."""
    from PIL import Image  # an extra

    folder.mkdir(exist_ok=True)
    for split, shards in SHARDS.items():
        digits = Digits(split)
        for shard, numbers in enumerate(torch.arange(len(digits)).chunk(shards)):
            with tarfile.open(folder / f"digits-{split}-{shard}.tar", "w") as tar:
                for number in numbers.tolist():
                    image, label = digits[number]
                    png = io.BytesIO()
                    Image.fromarray((image[0] * 255).byte().numpy()).save(png, "png")
                    _add(tar, f"{number:05}.png", png.getvalue())
                    _add(tar, f"{number:05}.cls", str(int(label)).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    write(Path("data"))
