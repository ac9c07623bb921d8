"""A small GPT on two kinds of text that come with Python, packed: its help texts, and the source of its library.

A token is a byte. Rows are documents of several lengths; `pack` joins them to windows, in which a document sees
itself alone. `python -m jobs.gpt` trains jobs/gpt.yaml and prints what the model writes.
"""

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import dp_ray
from dp_ray.data import document_mask

JOB = "jobs/gpt.yaml"
TOKENS = 256
PACKAGES = ("asyncio", "collections", "concurrent", "email", "html", "http", "importlib", "json", "logging")


@cache
def texts_of(source: str) -> list[str]:
    """The texts of a source: of `words`, a paragraph of the help each; of `code`, a function or a class each."""
    if source == "words":
        whole = [topics[name] for name in sorted(topics)]  # of the Python documentation, under Python's licence
        return [part for text in whole for part in text.split("\n\n") if part.strip()]
    library = Path(sysconfig.get_path("stdlib"))
    files = [path for name in PACKAGES for path in sorted((library / name).rglob("*.py"))]
    parts = [part for path in files for part in path.read_text(errors="replace").split("\n\n\n")]
    return [part for part in parts if part.strip()]


class Texts(Dataset[dict[str, torch.Tensor]]):
    """The documents of a source, `words` or `code`, as tokens: at most `longest` of each document."""

    def __init__(self, source: str = "words", longest: int = 4096, documents: int = 512) -> None:
        every = [text.encode()[:longest] for text in texts_of(source)[:documents]]
        self.numbers = torch.frombuffer(bytearray(b"".join(every)), dtype=torch.uint8).long()
        self.sizes = np.array([len(each) for each in every])
        self.ends = self.sizes.cumsum()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = int(self.ends[index])
        return {"input_ids": self.numbers[end - int(self.sizes[index]) : end]}

    def lengths(self, field: str) -> np.ndarray:
        """The tokens of each document: without it, dp_ray would read them all once to know."""
        return self.sizes


class Block(nn.Module):
    """Attention to the tokens that the mask shows, and a layer for each by itself: [rows, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.queries(self.norms[0](hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
        hidden = hidden + self.attended(seen.transpose(1, 2).reshape(rows, length, width))
        outputs: torch.Tensor = hidden + self.layers(self.norms[1](hidden))
        return outputs


class Gpt(nn.Module):
    """Tokens [rows, length] to logits [rows, tokens, length], with tied embeddings; a document sees itself alone."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(TOKENS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, document_ids: torch.Tensor
    ) -> torch.Tensor:
        mask = document_mask(document_ids)
        hidden = self.embedding(input_ids) + self.places(position_ids)
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


@torch.no_grad()
def written(model: Gpt, begin: str = "The ", count: int = 200, seed: int = 0) -> Iterator[str]:
    """The characters that a model writes after `begin`, each drawn by the model's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    numbers = list(begin.encode())
    for _ in range(count):
        window = torch.tensor([numbers[-model.length :]])
        places = torch.arange(window.shape[1])[None]
        logits = model(window, places, torch.zeros_like(window))[0, :, -1]
        numbers.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        yield chr(numbers[-1])


def of_run(result: dp_ray.Result) -> Gpt:
    """The model that a run has trained."""
    weights = result.weights
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    length, width = weights["places.weight"].shape
    model = Gpt(width, depth, length=length)
    model.load_state_dict(weights)
    return model.eval()


if __name__ == "__main__":
    print("The " + "".join(written(of_run(dp_ray.run(JOB)))))
