"""An epoch of data, from files on disk to the model's door, on two workers: no model runs.

Parquet is read in shuffled blocks, against Ray Data with a local shuffle and a DataLoader over `datasets`, which maps
the same rows from its Arrow files. Tar shards of JPEGs are read in order, against the loader of `webdataset`. All
give batches of torch tensors; the processes of a side stay from one epoch to the next, and an epoch begins at once in
all of them. The opponents `datasets` and `webdataset` are installed by hand: `pip install datasets webdataset`.
"""

import io
import multiprocessing
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import AHEAD, at_least, compared
from benchmarks.measure import alternate, seconds
from benchmarks.table import Row, rate_text
from dp_ray.data import Parquet, WebDataset
from dp_ray.engine.loads.loading import Source, load_steps
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.plan.split import Work

WORKERS = 2
ROWS, WIDTH, GROUP, FILES = 400_000, 64, 5_000, 4
BATCH_SIZE, WINDOW = 1024, 16
IMAGES, IMAGE_BATCH = 3_000, 64
REPEATS = 9
CPU = torch.device("cpu")
KEYS = {"task": "train", "model": "a:b", "dataset": "a:b", "loss": "a:b", "optimizer": "a:b", "workers": WORKERS}

Epoch = Callable[[int], int]  # goes through the epoch of a number, and returns how many rows it had


def measure() -> Iterator[Row]:
    torch.set_num_threads(1)
    with scratch() as folder:
        _write_tables(folder / "tables")
        yield from _tables(folder)
        if find_spec("webdataset") is None:
            print("feeds: no row of JPEGs: webdataset is not installed", file=sys.stderr)
            return
        _write_shards(folder / "shards")
        yield _shards(folder / "shards")


def _tables(folder: Path) -> Iterator[Row]:
    with ExitStack() as stack:
        ours = stack.enter_context(_processes(_our_tables, folder / "tables"))
        theirs = {"DataLoader over datasets": stack.enter_context(_processes(_their_tables, folder / "saved"))}
        stack.enter_context(local_ray())
        theirs["Ray Data iter_torch_batches"] = _ray_data(folder / "tables")
        for name, side in theirs.items():
            yield _row(f"data: {ROWS:,} rows of Parquet, shuffled blocks, 2 workers", ours, side, ROWS, name)


def _shards(folder: Path) -> Row:
    with _processes(_our_shards, folder) as ours, _processes(_their_shards, folder) as theirs:
        what = f"data: {IMAGES:,} JPEGs of 224 x 224 in tar shards, decoded, 2 workers"
        return _row(what, ours, theirs, IMAGES, "webdataset", at_least(1.0))


def _row(what: str, ours: Epoch, theirs: Epoch, rows: int, against: str, goal: Any = AHEAD) -> Row:
    """The row of two sides, after an epoch of each to warm up."""

    def rate(epoch: Epoch) -> float:
        found = 0

        def act() -> None:
            nonlocal found
            found = epoch(0)

        taken = seconds(act)
        assert found == rows, f"{against}: {found} rows of {rows}"
        return rows / taken

    alternate(lambda: rate(ours), lambda: rate(theirs), 1)
    return compared(what, alternate(lambda: rate(ours), lambda: rate(theirs), REPEATS), rate_text, against, goal)


@contextmanager
def _processes(make: Callable[[Path, int], Epoch], folder: Path) -> Iterator[Epoch]:
    """Two processes that go through epochs at the same time, each through its share; in all, they have all rows."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORKERS):
        here, there = context.Pipe()
        processes.append(context.Process(target=_serve, args=(there, make, folder, rank), daemon=True))
        processes[-1].start()
        pipes.append(here)

    def epoch(number: int) -> int:
        for pipe in pipes:
            pipe.send(number)
        return sum(pipe.recv() for pipe in pipes)

    yield epoch
    for process in processes:
        process.kill()
        process.join()


def _serve(pipe: Any, make: Callable[[Path, int], Epoch], folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    epoch = make(folder, rank)
    while True:
        pipe.send(epoch(pipe.recv()))


def _our_epoch(dataset: Any, rank: int, **keys: Any) -> Epoch:
    job = Job.make({**KEYS, **keys}, "job")
    work = Work(split_of(job, len(dataset)), WORKERS, rank)
    return lambda _: sum(
        len(shard.indices) for step in load_steps(Source(job, dataset), work, CPU) for shard in step.loaded
    )


def _our_tables(folder: Path, rank: int) -> Epoch:
    picks = {"inputs": ["x"], "target": "y", "shuffle": {"window_blocks": WINDOW}}
    # A dataset of its own for each epoch: nothing that was read stays in memory.
    return lambda number: _our_epoch(Parquet(folder), rank, batch_size=BATCH_SIZE, **picks)(number)


def _their_tables(folder: Path, rank: int) -> Epoch:
    import datasets

    dataset = datasets.load_from_disk(folder).with_format("torch")

    def epoch(number: int) -> int:
        sampler: Any = DistributedSampler(dataset, WORKERS, rank, shuffle=True)
        sampler.set_epoch(number)
        loader = DataLoader(dataset, BATCH_SIZE // WORKERS, sampler=sampler)
        return sum(len(batch["y"]) for batch in loader)

    return epoch


def _ray_data(folder: Path) -> Epoch:
    ray.data.DataContext.get_current().enable_progress_bars = False
    shares = ray.data.read_parquet(str(folder)).streaming_split(WORKERS, equal=True)
    readers = [ray.remote(RayReader).remote(share) for share in shares]
    return lambda _: sum(ray.get([reader.epoch.remote() for reader in readers]))


class RayReader:
    """An actor that goes through its share; the buffer holds as many rows as our window."""

    def __init__(self, share: Any) -> None:
        self.share = share

    def epoch(self) -> int:
        buffer = WINDOW * GROUP // WORKERS
        sizes = {"batch_size": BATCH_SIZE // WORKERS, "local_shuffle_buffer_size": buffer}
        return sum(len(batch["y"]) for batch in self.share.iter_torch_batches(**sizes))


def _our_shards(folder: Path, rank: int) -> Epoch:
    picks = {"inputs": ["jpg"], "target": "cls", "batch_size": WORKERS * IMAGE_BATCH}
    # Where the samples lie is kept beside the shards from the first epoch on.
    return lambda number: _our_epoch(WebDataset(folder), rank, **picks)(number)


def _their_shards(folder: Path, rank: int) -> Epoch:
    import webdataset

    names = sorted(map(str, folder.glob("*.tar")))[rank::WORKERS]

    def epoch(_: int) -> int:
        samples = webdataset.WebDataset(names, shardshuffle=False).decode("torchrgb8").to_tuple("jpg", "cls")
        batches = webdataset.WebLoader(samples.batched(IMAGE_BATCH), batch_size=None, num_workers=0)
        return sum(len(batch[0]) for batch in batches)

    return epoch


def _write_tables(folder: Path) -> None:
    """The same rows as Parquet, and beside it as what `datasets` saves."""
    import datasets

    write_tables(folder, ROWS)
    datasets.disable_progress_bars()
    files = [str(path) for path in sorted(folder.iterdir())]
    datasets.Dataset.from_parquet(files, cache_dir=str(folder.parent / "cache")).save_to_disk(folder.parent / "saved")


def write_tables(folder: Path, all_rows: int) -> None:
    """Rows of WIDTH floats and a label, as Parquet."""
    folder.mkdir()
    generator, rows = np.random.default_rng(0), all_rows // FILES
    for number in range(FILES):
        x = pa.array(generator.standard_normal(rows * WIDTH, np.float32))
        columns = {"x": pa.FixedSizeListArray.from_arrays(x, WIDTH), "y": generator.integers(0, 10, rows)}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=GROUP)


def _write_shards(folder: Path) -> None:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number in range(FILES):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for image in range(IMAGES // FILES):
                _add(tar, f"{image:06}.jpg", _jpeg(generator))
                _add(tar, f"{image:06}.cls", str(image % 10).encode())


def _jpeg(generator: np.random.Generator) -> bytes:
    small = Image.fromarray(generator.integers(0, 256, (28, 28, 3), np.uint8))
    stream = io.BytesIO()
    small.resize((224, 224), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _add(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(contents)
    tar.addfile(info, io.BytesIO(contents))
