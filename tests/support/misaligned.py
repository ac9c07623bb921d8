"""Models, and a dataset, whose gradients, inputs and buffers begin at any multiple of 4 bytes."""

from typing import Any

import torch
from torch import nn

BYTES = 16  # CUDA's reductions add what begins at a multiple of that in one order, anything else in another one
CLASSES = 10


class Odd(torch.utils.data.Dataset[Any]):
    """Samples of 7 numbers and a class of 10: the rows of a batch begin anywhere."""

    def __init__(self, length: int = 80) -> None:
        draws = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, 7, generator=draws)
        self.targets = torch.randint(CLASSES, (length,), generator=draws)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class OnDevice:
    """A collate that puts a batch on a device, as a view of a longer one."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, samples: list[Any]) -> Any:
        return [column.to(self._device)[1:] for column in torch.utils.data.default_collate([samples[0], *samples])]


class Net(nn.Module):
    """Layers of odd sizes, whose gradients DDP has at odd places of a bucket.

    It reduces its inputs. On a GPU what it is given, and its outputs' gradients, must begin at multiples of 16 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, 9), nn.Linear(9, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        check(inputs)
        outputs: torch.Tensor = self.head(torch.tanh(self.body(inputs - inputs.mean(1, keepdim=True))))
        if outputs.requires_grad:
            outputs.register_hook(check)  # type: ignore[no-untyped-call]
        return outputs


def check(tensor: torch.Tensor) -> None:
    assert not tensor.is_cuda or tensor.data_ptr() % BYTES == 0, "misaligned"


class Joined(Net):
    """A weight is a piece of a longer vector: its gradient is a view of that one's, on one worker too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7 * CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        joined = torch.cat([inputs.new_ones(3), self.weight])[3:]
        return super().forward(inputs) + inputs @ joined.view(7, CLASSES)


class Queue(Net):
    """It keeps the means of its last batches in a buffer, which becomes a view of a longer tensor."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(22)[1:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        check(self.kept)
        outputs = super().forward(inputs) * (1 + self.kept.mean())
        self.kept = torch.cat([self.kept, inputs.mean().reshape(1)])[1:]
        return outputs
