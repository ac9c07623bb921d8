"""A small GPT on rows of several lengths, packed, against the same padded, and against loops fed by others.

Against padded, a side is a whole run. Its figure is the tokens of the rows, which are the same on both sides, by the
seconds of its steps but the first two. Padded, a shard is as long as its longest row. About as many tokens are in a
batch of both.

The others are Streaming and LitData: each feeds a loop with DDP with windows that were packed before, by its own
loader, which cuts them among the ranks. dp_ray packs the same windows as it reads. Both sides take turns.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dp_ray
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import at_least, compared
from benchmarks.measure import alternate
from benchmarks.table import Row, rate_text
from benchmarks.train import in_turns
from benchmarks.training import STEPS, job_of
from dp_ray.data import Tokens
from dp_ray.engine.loads.packing import PackedDataset
from dp_ray.engine.world import World
from dp_ray.job.keys import Pack
from dp_ray.messages import StepControl
from dp_ray.storage import Storage
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train
from jobs.gpt import Gpt, Texts

LENGTH, DOCUMENTS = 512, 384
WINDOWS, ROWS = 8, 24  # in a batch
WARM_UP = 2  # steps
REPEATS = 3
LONG = 1 << 16  # the longest row beside others' loaders: many steps in an epoch
INSTALL = {
    "streaming": "pip install --no-deps mosaicml-streaming Brotli python-snappy cramjam zstd xxhash catalogue",
    "litdata": "pip install --no-deps litdata",
}
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
PADDED: dict[str, Any] = {"batch_size": ROWS, "collate": "benchmarks.packing:padded"}


def padded(items: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A shard as long as its longest row: what a collate without packing does."""
    sizes = [len(item["input_ids"]) for item in items]
    inputs = torch.zeros(len(items), max(sizes), dtype=torch.long)
    labels, documents = torch.full_like(inputs, -100), torch.full_like(inputs, -1)
    for row, (size, item) in enumerate(zip(sizes, items, strict=True)):
        inputs[row, :size], documents[row, :size] = item["input_ids"], row
        labels[row, : size - 1] = item["input_ids"][1:]
    places = torch.arange(max(sizes)).expand_as(inputs).contiguous()
    return dict(zip(INPUTS, (inputs, places, documents), strict=True)), labels


def measure() -> Iterator[Row]:
    yield _beside_padded()
    with scratch() as folder:
        windows = _windows(folder)
        for module, (write, feed) in OTHERS.items():
            if find_spec(module) is None:
                print(f"packing: no row beside {module}: {INSTALL[module]}", file=sys.stderr)
                continue
            write(folder / module, windows)
            seconds = in_turns(partial(ours, folder), partial(by_hand, feed, folder / module), workers=2)
            rates = [(WINDOWS * LENGTH / mine, WINDOWS * LENGTH / theirs) for mine, theirs in seconds]
            what = f"packing: a GPT on windows of {LENGTH}, {WINDOWS} in a batch, 2 workers"
            yield compared(what, rates, _tokens_text, f"DDP fed by {module}", at_least(1.0))


def _beside_padded() -> Row:
    tokens = int(Texts("words", LENGTH, DOCUMENTS).sizes.sum())
    with scratch() as folder, local_ray():

        def rate(side: dict[str, Any]) -> float:
            return tokens * _rate(folder, side)

        pairs = alternate(lambda: rate(PACKED), lambda: rate(PADDED), REPEATS)
    what = f"packing: a GPT on {tokens:,} tokens in rows of up to {LENGTH}, 2 workers"
    return compared(what, pairs, _tokens_text, "padded", at_least(1.0))


def _tokens_text(rate: float) -> str:
    return rate_text(rate).replace("rows", "tokens")


def _rate(folder: Path, side: dict[str, Any]) -> float:
    """The share of an epoch in a second."""
    result = dp_ray.run(**{**KEYS, **side}, storage=str(folder), quiet=True)
    steps = result.history[WARM_UP:]
    share = sum(step["rows"] for step in steps) / sum(step["rows"] for step in result.history)
    return float(share / sum(step["rows"] / step["rows_per_second"] for step in steps))


def _windows(folder: Path) -> PackedDataset:
    """Write the rows to a file, as tokens; return the windows of them that both sides train on."""
    texts = Texts("code", LONG, 10**6)
    lists = pa.array([item["input_ids"].numpy() for item in texts], pa.list_(pa.uint8()))  # type: ignore[attr-defined]
    table = pa.table({"input_ids": lists})
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=256)
    windows = PackedDataset(Tokens(folder / "rows.arrow"), Pack(**PACKED["pack"]))
    assert len(windows) >= STEPS * WINDOWS, f"{len(windows)} windows are fewer than the steps take"
    return windows


def ours(folder: Path, world: World, control: StepControl) -> None:
    """dp_ray's training on this worker, with all that it reports and keeps but the checkpoints."""
    rows = {"target": "dp_ray.data:Tokens", "args": {"paths": str(folder / "rows.arrow")}}
    keys = {
        **KEYS,
        **PACKED,
        "dataset": rows,
        "epochs": 1,
        "checkpoint": {"every_seconds": None, "every_steps": STEPS},
    }
    with TemporaryDirectory() as run:
        train(Context(job_of("mlp", keys, world), world, Storage(run), lambda _: None, control))


def by_hand(feed: Any, folder: Path, world: World, control: StepControl) -> None:
    """The loop that torch's documentation shows, fed by a loader that gives each rank its windows."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt(length=LENGTH))
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=0.003), nn.CrossEntropyLoss()
    batches = iter(feed(folder, world))
    for step in range(STEPS):
        control.before(step)
        batch = next(batches)
        optimizer.zero_grad()
        loss(model(*(batch[name] for name in INPUTS)), batch["labels"]).backward()
        optimizer.step()


def write_mds(folder: Path, windows: PackedDataset) -> None:
    """Write the windows as Streaming reads them."""
    columns = dict.fromkeys((*INPUTS, "labels"), "ndarray:int64")
    with _streaming().MDSWriter(out=str(folder), columns=columns) as out:
        for window in windows:  # type: ignore[attr-defined]
            out.write({name: value.numpy() for name, value in window.items()})


def by_streaming(folder: Path, world: World) -> Iterable[Any]:
    """Streaming's loader; its rank stands in variables, as a launcher sets them."""
    size = str(world.world_size)
    os.environ |= {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    package, each = _streaming(), WINDOWS // world.world_size
    loader: Iterable[Any] = package.StreamingDataLoader(
        package.StreamingDataset(local=str(folder), batch_size=each, shuffle=True), batch_size=each
    )
    return loader


def _streaming() -> Any:
    """Streaming, without its datasets of images: only these need torchvision."""
    images = ModuleType("streaming.vision")
    images.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules.setdefault(images.__name__, images)
    import streaming

    return streaming


def write_litdata(folder: Path, windows: PackedDataset) -> None:
    """Write the windows as LitData reads them."""
    import litdata

    numbers = list(range(len(windows)))
    litdata.optimize(windows.__getitem__, numbers, str(folder), chunk_bytes="64MB", num_workers=1, verbose=False)


def by_litdata(folder: Path, world: World) -> Iterable[Any]:
    """LitData's loader, which asks torch for the rank."""
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    loader: Iterable[Any] = litdata.StreamingDataLoader(dataset, batch_size=WINDOWS // world.world_size)
    return loader


OTHERS: dict[str, tuple[Any, Any]] = {
    "streaming": (write_mds, by_streaming),
    "litdata": (write_litdata, by_litdata),
}
