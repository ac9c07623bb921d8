"""torchvision's RetinaNet, tiny and untrained, on drawn images of rectangles. It needs the package `torchvision`.

A batch is a list of images of several sizes and a list of dicts of boxes, as torchvision's detectors take them. The
list stands in a tuple of its own: the items of a list would be arguments of the model, one for each image.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

Item = tuple[torch.Tensor, dict[str, torch.Tensor]]
Batch = tuple[tuple[list[torch.Tensor]], list[dict[str, torch.Tensor]]]
COLOURS = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.9, 0.1]])  # of label 1 and of label 2
IOU = 0.5  # a box that overlaps a true one by this share is that one


class Rectangles(Dataset[Item]):
    """Items are (image [3, height, width], {boxes: [n, 4], labels: [n]}) of n rectangles, 0 to 3, red or green.

    Boxes are left, top, right, bottom. Images are 48 to 64 pixels high and wide. `first` is the first image's number.
    """

    def __init__(self, images: int = 64, first: int = 0) -> None:
        self.images = images
        self.first = first

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> Item:
        generator = torch.Generator().manual_seed(self.first + index)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        height, width = draw(48, 64), draw(48, 64)
        image = 0.1 * torch.rand(3, height, width, generator=generator)
        boxes, labels = torch.empty(0, 4), torch.empty(0, dtype=torch.int64)
        for _ in range(draw(0, 3)):
            left, top, size, label = draw(0, width - 25), draw(0, height - 25), draw(12, 24), draw(1, 2)
            image[:, top : top + size, left : left + size] = COLOURS[label - 1, :, None, None]
            boxes = torch.cat([boxes, torch.tensor([[left, top, left + size, top + size]], dtype=torch.float32)])
            labels = torch.cat([labels, torch.tensor([label])])
        return image, {"boxes": boxes, "labels": labels}


def collate(items: list[Item]) -> Batch:
    """Return a list of images and a list of targets: what differs in size is not stacked."""
    return ([image for image, _ in items],), [target for _, target in items]


def detector(width: int = 16) -> nn.Module:
    """A RetinaNet on three convolutions, without weights to download."""
    from torchvision.models.detection import RetinaNet  # an extra
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(width, 4 * width, 3, 2, 1), nn.ReLU(),
    )  # fmt: skip
    backbone.out_channels = 4 * width  # type: ignore[assignment]  # RetinaNet asks for it
    anchors = AnchorGenerator(((12, 16, 24),), ((1.0,),))
    model: nn.Module = RetinaNet(
        backbone, num_classes=3, min_size=64, max_size=64, anchor_generator=anchors, detections_per_img=8
    )
    return model


def step(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """A step: a training gets the losses of the model, means over the images; an evaluation gets the boxes."""
    (images,), targets = batch
    if not model.training:
        return {"outputs": model(images), "target": targets}
    losses = model(images, targets)
    return {"loss": (sum(losses.values()) * len(images), len(images))}


class AveragePrecision:
    """The average precision of each label's boxes, and the mean of both: what COCO calls AP50, over all recalls.

    Boxes of all images are ordered by score. One is right if it overlaps a true box that no better one has taken.
    """

    def __init__(self, labels: int = 2) -> None:
        self.labels = labels
        self.reset()

    def reset(self) -> None:
        """Forget all images."""
        self.found: list[tuple[int, float, bool]] = []  # label, score, is right
        self.true = [0] * (self.labels + 1)

    def update(self, outputs: list[dict[str, torch.Tensor]], targets: list[dict[str, torch.Tensor]]) -> None:
        """Take in some images."""
        for output, target in zip(outputs, targets, strict=True):
            taken = torch.zeros(len(target["labels"]), dtype=torch.bool)
            for label in target["labels"].tolist():
                self.true[label] += 1
            for at in output["scores"].argsort(descending=True, stable=True).tolist():
                label, overlaps = int(output["labels"][at]), _overlaps(output["boxes"][at], target["boxes"]).cpu()
                overlaps[taken | (target["labels"].cpu() != label)] = 0
                is_right = bool((overlaps >= IOU).any())
                if is_right:
                    taken[overlaps.argmax()] = True
                self.found.append((label, float(output["scores"][at]), is_right))

    def merge_state(self, other: "AveragePrecision") -> None:
        """Take in the images of another shard."""
        self.found += other.found
        self.true = [one + more for one, more in zip(self.true, other.true, strict=True)]

    def compute(self) -> dict[str, float]:
        """Return the average precision of each label, and their mean."""
        by_label = {str(label): self._of(label) for label in range(1, self.labels + 1)}
        return {**by_label, "mean": sum(by_label.values()) / self.labels}

    def _of(self, label: int) -> float:
        right = [is_right for _, _, is_right in sorted((one for one in self.found if one[0] == label), key=_by_score)]
        total, hits = 0.0, 0
        for place, is_right in enumerate(right, 1):
            hits += is_right
            total += is_right * hits / place
        return total / max(1, self.true[label])


def _by_score(one: tuple[int, float, bool]) -> float:
    return -one[1]


def _overlaps(box: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the intersection of a box [4] with each of some boxes [n, 4], as a share of their union: [n]."""
    low, high = torch.maximum(box[:2], others[:, :2]), torch.minimum(box[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(1)
    areas = (others[:, 2:] - others[:, :2]).prod(1) + (box[2:] - box[:2]).prod()
    return common / (areas - common)
