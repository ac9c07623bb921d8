"""Blocks that are read before they are needed: which, when, in how much memory, and what is left at the end."""

import functools
import itertools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.data import Parquet
from dp_ray.data.blocks import Block, Cache
from dp_ray.engine.loads.loader import StepTimes
from dp_ray.errors import DataError
from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.job.samples import LEAST_AHEAD, IndexLists, look_ahead
from dp_ray.plan.order import BlockOrder, Order
from dp_ray.plan.split import Shard, Split, Work
from tests.support.builders import loader_of
from tests.support.within import within

CPU = torch.device("cpu")
GROUP, GROUPS = 20, 16
SECONDS = 0.05  # that reading a row group takes
BATCH = 10
READER = "reading-ahead"


class Slow(Parquet):
    """Takes SECONDS to read a row group, and counts what is read; row group `broken` cannot be read."""

    def __init__(self, paths: str, cache_bytes: int = 1 << 20, broken: int = -1, log: str = os.devnull) -> None:
        super().__init__(paths, cache_bytes=cache_bytes)
        self._log = log
        self.reads: Counter[int] = Counter()
        self.ahead: set[int] = set()  # what was read in the background
        self._broken = broken

    def _table(self, block: Block[int]) -> pa.Table:
        self.reads[block.source] += 1
        name = threading.current_thread().name
        if name == READER:
            self.ahead.add(block.source)
        with open(self._log, "a") as log:
            log.write(f"{name}\n")
        time.sleep(SECONDS)
        if block.source == self._broken:
            raise pa.ArrowInvalid("it is broken")
        return super()._table(block)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("table")
    columns = {"x": np.arange(GROUP * GROUPS, dtype=np.float32), "y": np.arange(GROUP * GROUPS)}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=GROUP)
    return str(folder)


def job(**keys: Any) -> Job:
    given = {"task": "train", "model": "a:b", "loss": "a:b", "optimizer": "a:b", "dataset": "a:b", "workers": 1}
    return Job.make({**given, "batch_size": BATCH, "inputs": ["x"], "target": "y", **keys}, "job")


def feed(dataset: Any, times: StepTimes | None = None, workers: int = 1, **keys: Any) -> Any:
    made = job(workers=workers, **keys)
    return loader_of(made, dataset, Work(split_of(made, len(dataset)), workers, 0), times=times)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == READER]


ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": {"window_blocks": 4}},
    {"shuffle": {"window_blocks": 4, "block_rows": 7}},
]


@pytest.mark.full(but=["keys2"])
@pytest.mark.slow
@pytest.mark.parametrize("keys", ORDERS)
def test_a_slow_model_does_not_wait_for_a_slow_store(table: str, keys: dict[str, Any]) -> None:
    dataset, times, found = Slow(table), StepTimes(), []
    for indices, batch in feed(dataset, times, **keys):
        while readers():  # as long as this step takes
            time.sleep(SECONDS / 10)
        found.append((indices.tolist(), batch))
    plain = [(indices.tolist(), batch) for indices, batch in feed(Parquet(table), **keys)]
    assert str(found) == str(plain)
    assert dict(dataset.reads) == dict.fromkeys(range(GROUPS), 1), "each row group is read once"
    first = GROUPS - len(dataset.ahead)
    assert first <= (4 if keys else 1), "those of the first batch, which nothing comes before"
    assert times.data_wait < (first + GROUPS / 2) * SECONDS
    assert times.load > 0.9 * len(dataset.ahead) * SECONDS, "what was read in the background counts as loading"


@pytest.mark.slow
def test_without_reading_ahead_the_loop_waits_for_each_row_group(table: str) -> None:
    dataset, times = Slow(table, cache_bytes=0), StepTimes()
    assert len(list(feed(dataset, times))) == GROUPS * GROUP // BATCH
    assert times.data_wait >= GROUPS * SECONDS
    assert not dataset.ahead


@pytest.mark.full(but=["shuffle1"])
@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [False, {"window_blocks": 4}])
def test_loader_processes_read_ahead_too(table: str, tmp_path: Path, shuffle: Any) -> None:
    log = str(tmp_path / "log")
    batches = []
    for indices, batch in feed(Slow(table, log=log), shuffle=shuffle, loader={"processes": 2, "prefetch": 1}):
        time.sleep(SECONDS / 2)
        batches.append((indices.tolist(), batch))
    alone = [(indices.tolist(), batch) for indices, batch in feed(Parquet(table), shuffle=shuffle)]
    assert str(batches) == str(alone)
    read = Counter(Path(log).read_text().split())
    assert read["MainThread"] <= (2 * 4 if shuffle else 2), "what the first batch of each process needs"
    assert read[READER] >= GROUPS


def test_a_read_that_fails_in_the_background_is_told_at_the_sample_that_needs_it(table: str) -> None:
    told, seen = [], []
    for cache_bytes in (1 << 20, 0):
        dataset, given = Slow(table, cache_bytes, broken=11), list[Any]()
        with pytest.raises(DataError) as error:
            given.extend(iter(feed(dataset).__next__, None))
        told.append(str(error.value))
        seen.append((len(given), dataset.reads[11]))
    assert told[0] == told[1]
    assert "row group 11: is damaged: it is broken" in told[0]
    assert seen[0][0] == seen[1][0] == 11 * GROUP // BATCH
    assert seen[0][1] > seen[1][1], "it was read in the background before"


def test_a_loop_that_ends_early_leaves_no_thread_and_nothing_in_memory(table: str) -> None:
    dataset = Slow(table)
    batches = feed(dataset)
    next(batches)
    assert readers()
    batches.close()
    for reader in readers():
        reader.join(60)
    assert not readers()
    before = sum(dataset.reads.values())
    assert before < GROUPS / 2
    assert dataset._cache._bytes == sum(size for _, size in dataset._cache._held.values())
    time.sleep(2 * SECONDS)
    assert sum(dataset.reads.values()) == before


def test_a_loop_that_is_done_leaves_no_thread(table: str) -> None:
    list(feed(Slow(table), shuffle="blocks"))
    assert not readers()


@pytest.mark.slow
def test_a_process_that_is_forked_while_blocks_are_read_reads_by_itself(table: str) -> None:
    dataset = Slow(table)
    dataset.hold_blocks(1)
    dataset[0]
    dataset.read_ahead(range(GROUPS))
    for number in range(4):
        pid = os.fork()
        if not pid:  # the child
            signal.alarm(5)  # it could wait for a lock that no thread of it holds
            try:
                dataset.read_ahead(range(number, GROUPS))
                os._exit([item["y"] for item in dataset.__getitems__(range(50))] != list(range(50)))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        dataset.__getitems__([number * GROUP])
    dataset.stop_reading_ahead()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(0, 150), st.integers(1, 4))
def test_memory_stays_bounded(sizes: list[int], most: int, least: int) -> None:
    """Never more than the bound, but while blocks are read that are larger than all before them."""
    cache, held = Cache(most, least), []

    def load(key: int) -> tuple[int, int]:
        return -key, sizes[key]

    for key in range(len(sizes)):
        cache.read_ahead(range(key, min(len(sizes), key + 8)), load)
        assert cache.get(key, load) == -key
        with cache._changed:
            held.append(cache._bytes)
            assert cache._bytes == sum(size for of in (cache._held, cache._ahead) for _, size in of.values())
    cache.stop_reading_ahead()
    assert cache._bytes <= max(most, least * max(sizes))
    if len(set(sizes)) == 1:
        assert max(held) <= max(most, least * sizes[0])


def test_nothing_is_read_ahead_without_room(table: str) -> None:
    size = Slow(table)._load(0)[1]
    for cache_bytes in (0, 1, 2 * size - 1):
        dataset = Slow(table, cache_bytes)
        dataset.hold_blocks(1)
        dataset[0]
        dataset.read_ahead([1])
        assert not readers(), f"{cache_bytes} bytes hold one row group of {size}"
    dataset = Slow(table, 2 * size)
    dataset.hold_blocks(1)
    dataset[0]
    dataset.read_ahead([1, 2])
    assert within(60, lambda: 1 in dataset.reads)
    time.sleep(2 * SECONDS)
    assert dict(dataset.reads) == {0: 1, 1: 1}
    dataset[GROUP]
    assert within(60, lambda: 2 in dataset.reads)
    time.sleep(2 * SECONDS)
    assert dict(dataset.reads) == {0: 1, 1: 1, 2: 1}


class OfBlocks:
    """Tells blocks as a dataset does."""

    reads_ahead = True

    def __init__(self, sizes: list[int], held: int) -> None:
        self.starts = np.cumsum([0, *sizes])
        self.blocks_held = held

    def blocks_at(self, first: int, stop: int) -> range:
        begin, last = np.searchsorted(self.starts, [first, stop - 1], side="right").tolist()
        return range(begin - 1, last)

    def blocks_of(self, indices: list[int]) -> set[int]:
        return set((np.searchsorted(self.starts, indices, side="right") - 1).tolist())


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(sum),
    st.sampled_from(["order", "blocks", "rows"]),
    *(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5), st.booleans()),
)
def test_what_is_read_ahead_is_what_the_process_needs_and_in_time(
    sizes: list[int], kind: str, batch: int, shards: int, workers: int, processes: int, window: int, whole: bool
) -> None:
    dataset = OfBlocks(sizes, held=3)
    split, rank = Split(sum(sizes), batch, shards, epochs=2), workers - 1
    order: Any = Order(sum(sizes), shuffle=False)
    if kind != "order":
        of_order = sizes if kind == "blocks" else [4] * (sum(sizes) // 4) + [sum(sizes) % 4] * bool(sum(sizes) % 4)
        order = BlockOrder(np.array(of_order), window, batch, shards)
    work = Work(split, workers, rank)

    def pieces() -> Any:
        if whole:
            return (split.whole(step) for step, mine in work if mine)
        return (shard for _, mine in work for shard in mine)

    requests = list(IndexLists(order, pieces, look_ahead(order, dataset, processes)))
    for process in range(max(1, processes)):
        mine = requests[process :: max(1, processes)]
        told: set[tuple[int, int]] = set()
        needed = [(request.epoch, block) for request in mine for block in dataset.blocks_of(request.indices)]
        for request in mine:
            told |= {(epoch, block) for block in request.ahead for epoch in (0, 1)}
            assert {(request.epoch, block) for block in dataset.blocks_of(request.indices)} <= told
        if kind == "order" or processes < 2:  # else a process may take no sample of some block of a stretch
            assert {block for _, block in told if sizes[block]} == {block for _, block in needed}


def test_only_what_comes_soon_is_read_ahead() -> None:
    dataset = OfBlocks([1000] * 100, held=1)
    pieces = [Shard(step, 0, step * 10, step * 10 + 10) for step in range(10_000)]
    ahead: Any = look_ahead(Order(100_000, shuffle=False), dataset, 0)
    told = list(itertools.islice(ahead(iter(pieces)), 3000))
    for number in range(0, 3000, 100):
        last = max(itertools.chain(*told[: number + 1]))
        assert last <= number // 100 + LEAST_AHEAD
    assert max(itertools.chain(*told)) == 3000 // 100 + LEAST_AHEAD - 1
    assert look_ahead(Order(100_000, shuffle=True), dataset, 0) is None
    assert look_ahead(Order(100, shuffle=False), torch.utils.data.TensorDataset(torch.zeros(100)), 0) is None
    assert functools.reduce(int.__add__, map(len, told)) == len(set(itertools.chain(*told))), "each once"


def test_a_system_without_a_thread_left_costs_only_the_reading_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that could not be started left whoever needed its value waiting without an end."""
    started, loaded = [0], threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == READER:
            started[0] += 1
            if started[0] > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    def load(key: int) -> tuple[int, int]:
        loaded.wait(60)
        return key, 10

    monkeypatch.setattr(threading.Thread, "start", refuse)
    cache = Cache(1000, 1)
    cache.get(0, lambda key: (key, 10))
    cache.read_ahead(range(1, 5), load)
    loaded.set()  # the first reader ends, and cannot start the next one
    found: list[int] = []
    needs = threading.Thread(target=lambda: found.extend(cache.get(key, load) for key in range(1, 5)), daemon=True)
    needs.start()
    needs.join(60)
    assert found == [1, 2, 3, 4] and started[0] > 1
