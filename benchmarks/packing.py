"""A small GPT on rows of several lengths, packed, against the same padded; two workers.

A side is a whole run. Its figure is the tokens of the rows, which are the same on both sides, by the seconds of its
steps but the first two. Padded, a batch is as long as its longest row. About as many tokens are in a batch of both.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import dp_ray
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import at_least, compared
from benchmarks.measure import alternate
from benchmarks.table import Row, rate_text
from jobs.gpt import Texts

LENGTH, DOCUMENTS = 512, 384
WINDOWS, ROWS = 8, 24  # in a batch
WARM_UP = 2  # steps
REPEATS = 3
OTHERS = {"streaming": "mosaicml-streaming", "litdata": "litdata"}
KEYS: dict[str, Any] = {
    "task": "train",
    "model": {"target": "jobs.gpt:Gpt", "args": {"length": LENGTH}},
    "dataset": {"target": "jobs.gpt:Texts", "args": {"source": "words", "longest": LENGTH, "documents": DOCUMENTS}},
    "call": "kwargs",
    "shuffle": True,
    "workers": 2,
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.003}},
    "checkpoint": {"every_seconds": None},
}
INPUTS = ("input_ids", "position_ids", "document_ids")
PACKED: dict[str, Any] = {
    "pack": {"length": LENGTH, "how": "cut"},
    "batch_size": WINDOWS,
    "inputs": list(INPUTS),
    "target": "labels",
}
PADDED: dict[str, Any] = {"batch_size": ROWS, "collate": "benchmarks.packing:padded", "scatter": "batch"}


def padded(items: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch as long as its longest row: what a collate without packing does."""
    sizes = [len(item["input_ids"]) for item in items]
    inputs = torch.zeros(len(items), max(sizes), dtype=torch.long)
    labels, documents = torch.full_like(inputs, -100), torch.full_like(inputs, -1)
    for row, (size, item) in enumerate(zip(sizes, items, strict=True)):
        inputs[row, :size], documents[row, :size] = item["input_ids"], row
        labels[row, : size - 1] = item["input_ids"][1:]
    places = torch.arange(max(sizes)).expand_as(inputs).contiguous()
    return dict(zip(INPUTS, (inputs, places, documents), strict=True)), labels


def measure() -> list[Row]:
    for module, package in OTHERS.items():
        if find_spec(module) is None:
            print(f"packing: no row beside {package}: it is not installed", file=sys.stderr)
    tokens = int(Texts("words", LENGTH, DOCUMENTS).sizes.sum())
    with scratch() as folder, local_ray():

        def rate(side: dict[str, Any]) -> float:
            return tokens * _rate(folder, side)

        pairs = alternate(lambda: rate(PACKED), lambda: rate(PADDED), REPEATS)
    what = f"packing: a GPT on {tokens:,} tokens in rows of up to {LENGTH}, 2 workers"
    return [compared(what, pairs, lambda value: rate_text(value).replace("rows", "tokens"), "padded", at_least(1.0))]


def _rate(folder: Path, side: dict[str, Any]) -> float:
    """The share of an epoch in a second."""
    result = dp_ray.run(**{**KEYS, **side}, storage=str(folder), quiet=True)
    steps = result.history[WARM_UP:]
    share = sum(step["rows"] for step in steps) / sum(step["rows"] for step in result.history)
    return float(share / sum(step["rows"] / step["rows_per_second"] for step in steps))
