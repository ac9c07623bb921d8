"""A language model of characters: it learns the help texts of Python, which come with it, and writes some of its own.

`python -m jobs.characters` trains jobs/characters.yaml and prints what the model writes.
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import Dataset

import dp_ray

TEXT = "\n".join(topics[name] for name in sorted(topics))  # of the Python documentation, under Python's licence
LETTERS = sorted({one for one in TEXT if one.isascii()})
NUMBERS = {letter: number for number, letter in enumerate(LETTERS)}
JOB = "jobs/characters.yaml"


class Characters(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `length` characters of the text; the target of each character is the next one."""

    def __init__(self, length: int = 64, windows: int = 2048) -> None:
        self.numbers = torch.tensor([NUMBERS[one] for one in TEXT[: length * windows + 1] if one in NUMBERS])
        self.length = length

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.numbers[index * self.length : (index + 1) * self.length + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention to the characters before, and a layer for each by itself: [rows, length, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.queries(self.norms[0](hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.attended(seen.transpose(1, 2).reshape(rows, length, width))
        outputs: torch.Tensor = hidden + self.layers(self.norms[1](hidden))
        return outputs


class Gpt(nn.Module):
    """Characters [rows, length] to logits [rows, characters, length], with tied embeddings."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(LETTERS), bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(numbers) + self.places(torch.arange(numbers.shape[1], device=numbers.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


@torch.no_grad()
def written(model: Gpt, begin: str = "The ", count: int = 200, seed: int = 0) -> Iterator[str]:
    """The characters that a model writes after `begin`, each drawn by the model's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [NUMBERS[one] for one in begin]
    for _ in range(count):
        logits = model(torch.tensor([numbers[-model.length :]]))[0, :, -1]
        numbers.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        yield LETTERS[numbers[-1]]


def of_run(result: dp_ray.Result) -> Gpt:
    """The model that a run has trained."""
    weights = result.weights
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    model = Gpt(weights["embedding.weight"].shape[1], depth)
    model.load_state_dict(weights)
    return model.eval()


if __name__ == "__main__":
    print("The " + "".join(written(of_run(dp_ray.run(JOB)))))
