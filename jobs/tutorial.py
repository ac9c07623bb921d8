"""The model and the dataset of PyTorch's DataParallel tutorial: 100 random rows of 5 numbers."""

import torch
from torch import nn
from torch.utils.data import Dataset


class RandomDataset(Dataset[torch.Tensor]):
    """`length` rows of `size` normal numbers, the same for everybody who asks with the same seed."""

    def __init__(self, size: int, length: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.data = torch.randn(length, size, generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Model(nn.Module):
    """One linear layer."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.fc(inputs)
        return outputs
