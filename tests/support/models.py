"""Models and datasets of the tests, each at its own corner of what a user may write."""

import dataclasses
import json
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from dp_ray.engine.world import own_rank


class Rows(Dataset[torch.Tensor]):
    """`length` rows of 5 normal numbers."""

    loader_context: str | None = None

    def __init__(self, length: int = 100, size: int = 5) -> None:
        self.data = torch.randn(length, size, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class SaysSecret(Rows):
    """Tells how long DP_SECRET is, and what torch has read of the environment."""

    def __init__(self) -> None:
        super().__init__()
        if "DP_SECRET" in os.environ:
            level = dist.get_debug_level().name  # type: ignore[attr-defined]
            print(f"the secret has {len(os.environ['DP_SECRET'])} letters, and torch says {level}")


class Linear(nn.Module):
    """5 numbers to 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Like Hugging Face's: a dataclass and an ordered dict at once, whose None fields are no keys."""

    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Items are dicts of token ids and a mask, as tokenizers give them."""

    def __init__(self, length: int = 20) -> None:
        self.ids = torch.arange(length * 6).reshape(length, 6) % 11

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": (self.ids[index] > 2).long()}


class Transformerish(nn.Module):
    """Keywords in, a ModelOutput out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> ModelOutput:
        hidden = self.embedding(input_ids) * attention_mask.unsqueeze(-1)
        return ModelOutput(logits=self.head(hidden.mean(1)), hidden_states=(hidden, hidden.sum(1)))


class Sequences(Dataset[torch.Tensor]):
    """Items are [time 4, features 3]."""

    def __init__(self, length: int = 17) -> None:
        self.data = torch.randn(length, 4, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Recurrent(nn.Module):
    """An RNN that wants [time, batch, features] and gives its outputs and its last state so too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 6)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, state = self.rnn(inputs)
        return outputs, state


class Doubler(nn.Module):
    """No parameters at all."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2


class Ragged(Dataset[torch.Tensor]):
    """Items of 1 to 4 numbers, for a collate that pads."""

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(1 + index % 4, dtype=torch.float32) + index


def pad(items: list[torch.Tensor]) -> torch.Tensor:
    """Pad to the longest that there is, of 4."""
    return torch.stack([nn.functional.pad(item, (0, 4 - len(item)), value=-1.0) for item in items])


class Breaks(Rows):
    """Sample 7 cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise OSError("the disk has a hole")
        return super().__getitem__(index)


class RaisesOn(nn.Module):
    """Raises on rows whose first number is the one of `sample`."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.bad = float(Rows().data[sample, 0])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if (inputs[:, 0] == self.bad).any():
            raise ArithmeticError("a number that I do not like")
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


class Talks(nn.Module):
    """Prints what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        print(f"forward of {len(inputs)} rows")
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


class ScalarMean(nn.Module):
    """Gives one number a shard, which nobody can merge."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean()


class SlowPairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """96 pairs of 6 numbers and a class of 3, each read in a hundredth of a second."""

    def __init__(self, seconds: float = 0.01) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(96, 6, generator=generator)
        self.targets = torch.randint(3, (96,), generator=generator)
        self.seconds = seconds

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


class KnowsItsRank(nn.Module):
    """A model that is wrong in one place: from its fourth forward on it looks at which worker it runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden = self.first(inputs)
        if self.calls > 3 and own_rank() > 0:
            hidden = hidden + 1e-3
        outputs: torch.Tensor = self.second(hidden)
        return outputs


def mean_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss as it is mostly written, and wrongly for a part of a batch."""
    return nn.functional.cross_entropy(outputs, target)


class Cache:
    """Like Hugging Face's DynamicCache: no mapping or dataclass, with a tensor for each layer, rows first."""

    def __init__(self, layers: list[torch.Tensor], name: str = "cache") -> None:
        self.layers = layers
        self.name = name


class PlainCache(Cache):
    """One that nobody registered."""


torch.utils._pytree.register_pytree_node(
    Cache, lambda one: ([one.layers], one.name), lambda values, name: Cache(next(iter(values)), name)
)


class Caching(nn.Module):
    """Outputs with a cache of the class, beside a number of numpy's and a type."""

    def __init__(self, kind: type[Cache] = Cache) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        cache = self.kind([inputs * 2, inputs[:, None] + 1])
        return {"logits": self.layer(inputs), "cache": cache, "of": (np.float32(1.5), inputs.dtype), "n": 7}


class OnTwoTypes(nn.Module):
    """A part that runs on the first device, and one on the last that is there only."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2, device=devices[0])
        self.spare = nn.Linear(5, 2, device=devices[-1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


class OnCaches(nn.Module):
    """A model whose inputs are a cache."""

    def forward(self, cache: Cache) -> torch.Tensor:
        return cache.layers[0] + cache.layers[1][:, 0]


def cached(items: list[torch.Tensor]) -> Cache:
    rows = torch.stack(items)
    return Cache([rows, rows[:, None] * 3], "collated")


def note_modules(view: Any) -> None:
    """A hook that notes which modules its worker has imported."""
    Path(view.run_dir, "modules.json").write_text(json.dumps(sorted(sys.modules)))
