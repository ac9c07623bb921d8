"""Files of the outputs are merged exactly once, whoever dies when: schedules of workers through real files."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.errors import ModelError, StorageError
from dp_ray.outputs import files as output_files
from dp_ray.outputs import parts as outputs
from dp_ray.outputs.files import MANIFEST, OUTPUTS, FileMerge, RowProof, forget_lost, outputs_sha256, prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, FilePlan, Frontier, Range, Shard, Split, Work, num_files
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, PARTS, Ledger
from dp_ray.storage import Storage
from tests.support.builders import file_merge_of, writer_of

SPLITS = st.builds(
    Split, rows=st.integers(1, 24), batch_size=st.integers(1, 9), shards=st.integers(1, 4), drop_last=st.booleans()
).filter(lambda split: split.steps > 0)


class Died(BaseException):
    """A process was killed."""


class Mortal(Storage):
    """A worker's view of the storage: the worker dies before, or right after, one of its operations."""

    def __init__(self, location: str, life: list[float]) -> None:
        super().__init__(location)
        self.life = life  # operations left; its children share it

    @contextmanager
    def _named(self, what: str, is_writing: bool = False) -> Iterator[None]:
        self._age()
        with super()._named(what, is_writing):
            yield
        self._age()

    def _age(self) -> None:
        self.life[0] -= 1
        if self.life[0] < 0:
            raise Died


class Worker:
    """One worker of an attempt: it runs a step, or merges what is there, whenever it is its turn."""

    def __init__(self, run: Storage, begun: Ledger, split: Split, order: Order, world: tuple[int, int]) -> None:
        self.has_ended = False
        self._run = run
        self._begun = begun
        self._split = split
        self._order = order
        size, rank = world
        work = Work(split, size, rank, Done(ledger.done_ranges(begun.parts)))
        cut = FilePlan(ledger.files_in(ledger.committed(run)) or 1, split.total_steps)
        left = [number for number in range(cut.files) if number not in ledger.records_in(begun.parts)]
        self.merges = [file_merge_of(run, split, order, cut, number, begun) for number in left[rank::size]]
        self._steps = iter(work)
        self._writer = writer_of(run.child(PARTS), work.shards, cut, attempt=begun.attempt, num_workers=size)

    @property
    def is_killed(self) -> bool:
        return isinstance(self._run, Mortal) and self._run.life[0] < 0

    def step(self) -> None:
        found = next(self._steps, None)
        if found is None:
            self._writer.commit()
            self.has_ended = True
            return
        for shard in found[1]:
            samples = self._order.indices(shard.start, shard.stop)
            self._writer.on_shard(shard, samples, value_of(torch.from_numpy(samples)))
        self._writer.on_step(found[0])

    def commit(self) -> None:
        self._writer.commit()

    def close(self) -> None:
        """Close what a killed process has no more."""
        if isinstance(self._run, Mortal):
            self._run.life[0] = 9e9
        for merge in self.merges:
            with suppress(Exception):  # it may have died in the midst of closing the file
                merge.close()
        if self._writer._file:
            with suppress(Exception):
                self._writer._file.discard()

    def merge(self) -> None:
        if self.merges and self.merges[0].advance():
            self.merges.pop(0)


def close(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close()


def value_of(samples: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"wide": torch.stack([samples, samples * 3], 1).float(), "flag": samples % 2 == 0}


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(split=SPLITS, shuffle=st.booleans(), data=st.data())
def test_any_schedule_of_parts_merging_deaths_and_resumes_gives_each_row_once(
    tmp_path_factory: pytest.TempPathFactory, split: Split, shuffle: bool, data: st.DataObject
) -> None:
    """Attempts on other numbers of workers; any dies at any operation, or lives on while the next has begun."""
    where, order = str(tmp_path_factory.mktemp("run")), Order(split.rows, 5, 0, shuffle)
    run = Storage(where)
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    files = data.draw(st.integers(1, split.steps), label="files")
    every: list[Worker] = []
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(close, every)
        patch.setattr(pq.ParquetWriter, "__del__", lambda writer: None)  # a killed process writes no footer
        patch.setattr(outputs, "GROUP_BYTES", data.draw(st.sampled_from([1, 1 << 20]), label="group"))
        for number in range(data.draw(st.integers(0, 3), label="deadly attempts")):
            attempt(data, where, split, order, files, f"{number:032x}", every)
        attempt(data, where, split, order, files, "f" * 32, every, is_last=True)
        for worker in every:  # superseded ones wake when all is done
            turn(worker, data.draw(TURNS))
    prove_outputs(run, split.rows_kept)
    check_whole(run, split, order)


TURNS: st.SearchStrategy[str] = st.sampled_from(["step", "step", "commit", "merge"])


def attempt(
    data: st.DataObject,
    where: str,
    split: Split,
    order: Order,
    files: int,
    name: str,
    every: list[Worker],
    is_last: bool = False,
) -> None:
    """Run an attempt, whose workers join those of earlier attempts that may live on: superseded ones."""
    run, superseded, workers = Storage(where), list(every), list[Worker]()
    with suppress(Died):
        rank_0 = run if is_last else mortal(data, where)
        forget_lost(rank_0)
        begun = ledger.begin(rank_0, name)
        if ledger.files_in(begun.parts) is None:
            ledger.note_files(ledger.fenced(rank_0, name), name, files)
        size = data.draw(st.integers(1, split.shards), label="world size")
        for rank in range(size):
            view = run if is_last else mortal(data, where)
            with suppress(Died):
                workers.append(Worker(view, begun, split, order, (size, rank)))
                every.append(workers[-1])
        turns = st.tuples(st.integers(0, size - 1), st.booleans(), TURNS)
        for rank, is_of_old, act in data.draw(st.lists(turns, max_size=30), label="turns"):
            chosen = superseded if is_of_old and superseded else workers
            turn(chosen[rank % len(chosen)], act) if chosen else None
        if is_last:
            to_the_end(workers)


def mortal(data: st.DataObject, where: str) -> Storage:
    return Mortal(where, [data.draw(st.sampled_from([9e9]) | st.integers(0, 60), label="life")])


def turn(worker: Worker, act: str) -> None:
    """What a worker does next; dead ones do nothing, and superseded ones are refused."""
    try:
        if not worker.is_killed:
            getattr(worker, act)()
    except BaseException as error:
        if not worker.is_killed and not isinstance(error, StorageError):
            raise  # of one that is killed, pyarrow may have made another error


def to_the_end(workers: list[Worker]) -> None:
    """Nobody dies any more: all run their steps, then all end their files."""
    for worker in workers:
        while not worker.has_ended:
            worker.step()
    for worker in workers:
        while worker.merges:
            worker.merge()


def check_whole(run: Storage, split: Split, order: Order) -> None:
    """Each row once, in order, and the hash by its definition."""
    expected = value_of(torch.from_numpy(order.indices(0, split.rows_kept)))
    read = Merged.of(run).read()
    assert torch.equal(read["wide"], expected["wide"]) and torch.equal(read["flag"], expected["flag"])
    digest = hashlib.sha256()
    for first in range(0, split.rows_kept, split.batch_size):
        rows = [expected[name][first : first + split.batch_size].numpy().tobytes() for name in read]
        digest.update(hashlib.sha256(b"".join(rows)).digest())
    assert outputs_sha256(run) == digest.hexdigest()
    names = [name for name in run.child(OUTPUTS).names() if name.endswith(".parquet")]
    samples = [pq.read_table(Path(run.path) / OUTPUTS / name)["sample_index"].to_numpy() for name in names]
    assert np.array_equal(np.concatenate(samples), order.indices(0, split.rows_kept))


@pytest.mark.slow
@given(data=st.data())
def test_a_frontier_says_what_is_done_whatever_the_order(data: st.DataObject) -> None:
    """Against a plain set of steps and shards; a shard is asked for only after its step before is done."""
    frontier, done = Frontier(3), set[tuple[int, int]]()
    for first, length, shard, width in data.draw(
        st.lists(st.tuples(st.integers(3, 12), st.integers(1, 5), st.integers(0, 2), st.integers(1, 2)), max_size=12)
    ):
        frontier.add(Range(first, first + length, shard, shard + width))
        done |= {(step, of) for step in range(first, first + length) for of in range(shard, shard + width)}
    for of in range(4):
        for step in range(3, 20):
            piece = Shard(step, of, 0, 1)
            assert (piece in frontier) == ((step, of) in done)
            frontier.skip(piece)


@given(steps=st.integers(1, 300), data=st.data())
def test_the_steps_are_cut_evenly_and_each_is_in_the_file_that_says_so(steps: int, data: st.DataObject) -> None:
    cut = FilePlan(data.draw(st.integers(1, steps)), steps)
    ranges = [cut.steps_of(number) for number in range(cut.files)]
    assert [step for one in ranges for step in one] == list(range(steps))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert all(cut.number_of(step) == number for number, one in enumerate(ranges) for step in one)
    names = [cut.name(number) for number in range(cut.files)]
    assert names == sorted(names) and len(set(names)) == cut.files


@pytest.mark.parametrize(
    ("total", "file_bytes", "steps", "files"), [(0, 10, 5, 1), (10, 10, 5, 1), (11, 10, 5, 2), (999, 10, 5, 5)]
)
def test_a_file_has_about_so_many_bytes_and_no_less_than_a_step(
    total: int, file_bytes: int, steps: int, files: int
) -> None:
    assert num_files(total, file_bytes, steps) == files


def test_names_sort_whatever_their_number() -> None:
    cut = FilePlan(1_000_000, 2_000_000)
    assert cut.name(99_999) < cut.name(100_000) < cut.name(999_999)


class Counted(Storage):
    """Counts the operations on the storage; its children count with it."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.counts = [0]

    @contextmanager
    def _named(self, what: str, is_writing: bool = False) -> Iterator[None]:
        self.counts[0] += 1
        with super()._named(what, is_writing):
            yield


def whole_files(where: Path, split: Split, files: int) -> None:
    """A run of one worker, whose files are all whole."""
    run, order = Storage(str(where)), Order(split.rows, shuffle=False)
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    ledger.note_files(run, "", files)
    to_the_end([Worker(run, ledger.read(run), split, order, (1, 0))])


def test_the_driver_proves_the_files_without_their_rows(tmp_path: Path) -> None:
    """It does the same for a hundred times the rows, and is content with files of nothing but the right size."""
    operations = []
    for rows in (30, 3000):
        whole_files(tmp_path / str(rows), Split(rows, rows // 6, 2), files=3)
        for path in (tmp_path / str(rows) / OUTPUTS).glob("*.parquet"):
            path.write_bytes(bytes(path.stat().st_size))
        run = Counted(str(tmp_path / str(rows)))
        prove_outputs(run, rows)
        operations.append(run.counts[0])
    assert operations[0] == operations[1] < 30
    assert [one["first"] for one in manifest_of(tmp_path / "3000")["files"]] == [0, 1000, 2000]


def manifest_of(where: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((where / MANIFEST).read_text())
    return manifest


def test_the_manifest_tells_each_file_with_its_bytes_and_hashes(tmp_path: Path) -> None:
    whole_files(tmp_path, Split(50, 10, 2), files=2)
    prove_outputs(Storage(str(tmp_path)), 50)
    told = manifest_of(tmp_path)
    assert told["rows"] == 50 and told["outputs_sha256"] == outputs_sha256(Storage(str(tmp_path)))
    for one, (first, rows) in zip(told["files"], [(0, 20), (20, 30)], strict=True):
        content = (tmp_path / OUTPUTS / one["name"]).read_bytes()
        assert (one["first"], one["rows"], one["bytes"]) == (first, rows, len(content))
        assert one["sha256"] == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(
    ("missing", "rows", "says"),
    [
        ((), 40, None),
        ((), 50, "the outputs end at position 40 of 50"),
        ((3,), 40, "00000-of-00002.parquet: holds 20 rows, where 19 are due"),
    ],
)
def test_files_that_do_not_make_up_the_job_are_refused(
    tmp_path: Path, missing: tuple[int, ...], rows: int, says: str | None
) -> None:
    whole_files(tmp_path, Split(40, 10, 2), files=2)
    with pytest.raises(StorageError, match=says) if says else nullcontext():
        prove_outputs(Storage(str(tmp_path)), rows, missing)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (lambda samples: {"x": torch.from_numpy(samples) / 2}, "output 'x' is not alike on all shards: int64 on one"),
        (lambda samples: {"y": torch.from_numpy(samples)}, "are not nested alike on all shards"),
        (lambda samples: {"x": torch.from_numpy(samples)[:, None]}, None),  # the shapes may differ
    ],
)
def test_files_that_cannot_be_read_as_one_are_told_with_their_steps(tmp_path: Path, after: Any, says: str) -> None:
    """As a resumed run may make them, whose model gives another dtype."""
    run, split, order = Storage(str(tmp_path)), Split(40, 10, 1), Order(40, shuffle=False)
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    ledger.note_files(run, "", 2)
    cut = FilePlan(2, 4)
    for number, give in enumerate([lambda samples: {"x": torch.from_numpy(samples)}, after]):
        writer = writer_of(run.child(PARTS), plan=cut)
        for step in cut.steps_of(number):
            (shard,) = split.worker(1, 0, step)
            samples = order.indices(shard.start, shard.stop)
            writer.on_shard(shard, samples, give(samples))
            writer.on_step(step)
        assert file_merge_of(run, split, order, cut, number).advance()
    if says is None:
        prove_outputs(run, 40)
    else:
        with pytest.raises(ModelError, match=rf"the outputs of steps 2 to 3 do not go with those.*{says}"):
            prove_outputs(run, 40)


def test_positions_that_are_known_to_be_missing_may_be_missing() -> None:
    order, missing = Order(20, 1), (0, 4, 5, 13, 19)
    kept = np.setdiff1d(np.arange(20), missing)
    table = pa.table({"position": kept, "sample_index": order.indices(0, 20)[kept]})
    for cuts in ([15], [1, 6, 15], list(range(1, 16))):
        proof = RowProof(order, 0, 20, missing)
        for first, end in pairwise([0, *cuts]):
            proof.take(table.slice(first, end - first))
        proof.end()
    for lacks in (missing[1:], (*missing, 7)):
        with pytest.raises(StorageError, match=r"position (0|7) is"):
            RowProof(order, 0, 20, lacks).take(table)
    short = RowProof(order, 0, 20, missing)
    short.take(table.slice(0, 14))
    with pytest.raises(StorageError, match="end at position 18 of 20"):
        short.end()


def test_a_look_takes_in_only_the_parts_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 parts in 50 looks, the last ones first: each name is read once, and each step is looked at once."""
    split, names = Split(10_000, 2, 1), list[str]()
    read, looked_at = counted(monkeypatch, ledger, "_attempt_of"), counted(monkeypatch, Split, "worker")
    merge = file_merge_of(Storage(str(tmp_path)), split, Order(10_000, shuffle=False), begun=Ledger("", []))
    monkeypatch.setattr(Storage, "names", lambda folder: names)
    monkeypatch.setattr(FileMerge, "_join", lambda *_: None)
    monkeypatch.setattr(FileMerge, "_commit", lambda *_: None)
    parts = [ledger.part_name(Range(step, step + 1, 0, 1), "") for step in range(5000)]
    for first in range(4900, -100, -100):
        names[:0] = parts[first : first + 100]
        assert merge.advance() == (first == 0)
    assert read[0] == 5000 and looked_at[0] <= 5000 + 50


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """How often a function is called from now on."""
    calls, function = [0], getattr(owner, name)

    def counts(*args: Any) -> Any:
        calls[0] += 1
        return function(*args)

    monkeypatch.setattr(owner, name, counts)
    return calls


@pytest.mark.slow
def test_twenty_gigabytes_take_less_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sizes a hundredth: 200 MB of outputs in files of 10 MB, on four workers, in less than 10 MB."""
    for module, name in ((outputs, "GROUP_BYTES"), (outputs, "PART_BYTES"), (outputs, "MERGE_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) // 100)
    monkeypatch.setattr(output_files, "GROUP_BYTES", output_files.GROUP_BYTES // 100)
    run, split, order = Storage(str(tmp_path)), Split(50_000, 100, 4), Order(50_000, shuffle=False)
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    ledger.note_files(run, "", num_files(50_000 * 4096, (1 << 30) // 100, split.total_steps))
    monkeypatch.setattr("tests.test_merging.value_of", lambda samples: samples[:, None].float().expand(-1, 1024))
    with measured_pool() as pool:
        workers = [Worker(run, ledger.read(run), split, order, (4, rank)) for rank in range(4)]
        for _ in range(split.total_steps + 1):
            for worker in workers:
                worker.step()
                worker.merge()
        to_the_end(workers)
    prove_outputs(run, 50_000)
    assert sum(one["bytes"] for one in manifest_of(tmp_path)["files"]) > 200e6
    assert 1e5 < pool.max_memory() < 10e6, "of all four workers together"


@contextmanager
def measured_pool() -> Iterator[pa.MemoryPool]:
    """Arrow's memory within the block, with its peak."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)
