"""A ResNet and a GPT of torch.nn alone, and random data of their sizes: what a GPU is measured and tested with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut: ResNet-50's block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(inputs) + self.shortcut(inputs), inplace=True)


def resnet(width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """A ResNet of bottlenecks, by default ResNet-50 with its 25.6 M parameters: images [rows, 3, h, w] to logits."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate(blocks):
        for place in range(count):
            stride = 2 if stage and not place else 1
            layers.append(Bottleneck(before, width << stage, stride))
            before = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


@dataclass(frozen=True)
class GptConfig:
    """The sizes of a GPT, and what it gives; by default those of GPT-2 small, with its 124 M parameters."""

    vocabulary: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    dropout: float = 0.0
    last_only: bool = False


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and around a shortcut."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(config.dropout)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, length, width = inputs.shape
        split = self.qkv(self.norm1(inputs)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        inputs = inputs + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        outputs: torch.Tensor = inputs + self.mlp(self.norm2(inputs))
        return outputs


class Gpt(nn.Module):
    """A GPT with tied embeddings: tokens [rows, length] to logits [rows, vocabulary, length].

    With `last_only` the logits are those of the last place, [rows, vocabulary].
    """

    def __init__(self, **config: Any) -> None:
        super().__init__()
        sizes = GptConfig(**config)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.last_only = sizes.last_only
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = self.places.weight[: tokens.shape[1]]
        hidden = self.norm(self.blocks(self.tokens(tokens) + places))
        logits: torch.Tensor = self.head(hidden[:, -1] if self.last_only else hidden)
        return logits if self.last_only else logits.transpose(1, 2)


class Images(Dataset[Any]):
    """`length` rows of a few images of normal numbers, with a class."""

    def __init__(self, length: int, size: int = 224, classes: int = 1000, different: int = 64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.length = length
        self.images = torch.randn(min(length, different), 3, size, size, generator=generator)
        self.targets = torch.randint(classes, (length,), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.images[index % len(self.images)], self.targets[index]


class Texts(Dataset[Any]):
    """`length` rows of random tokens, and the next ones."""

    def __init__(self, length: int, context: int = 1024, vocabulary: int = 50257) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocabulary, (length, context + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def deep(width: int, layers: int) -> nn.Module:
    """As many linear layers of `width` by `width`, each before a ReLU: rows of vectors to the same."""
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


class Vectors(Dataset[Any]):
    """`length` rows of a vector, and one to come near to."""

    def __init__(self, length: int, width: int) -> None:
        self.length = length
        self.width = width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), float(index % 7)), torch.full((self.width,), 0.5)
