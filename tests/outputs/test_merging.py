"""Outputs are merged exactly once, whoever dies when, and only the parts that count: schedules through real files.

Attempts that are superseded leave nothing; a loop that outruns its merging waits for it, and no two workers ever wait
for each other.
"""

import hashlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_ray
from dp_ray.engine.world import World
from dp_ray.errors import ModelError, StorageError
from dp_ray.job.job import Job
from dp_ray.messages import Report, StepControl, StopRequested
from dp_ray.outputs import files as output_files
from dp_ray.outputs import merging
from dp_ray.outputs import parts as outputs
from dp_ray.outputs.files import (
    FILE_JSON,
    MANIFEST,
    FileMerge,
    RowProof,
    drop_lost,
    outputs_sha256,
    prove_outputs,
)
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, FilePlan, Range, Shard, Split, Work, num_files
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, OUTPUTS, PARTS, Ledger
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task
from tests.support import models
from tests.support.builders import file_merge_of, merger_of, writer_of
from tests.support.chance import examples
from tests.support.merging import begin

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
        self.has_ended = self.is_refused = False
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
@settings(max_examples=examples(100), deadline=None)
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
        drop_lost(rank_0)
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
    """What a worker does next; dead ones do nothing, and superseded ones are refused, which ends them."""
    try:
        if not worker.is_killed and not worker.is_refused:
            getattr(worker, act)()
    except BaseException as error:
        worker.is_refused = isinstance(error, StorageError)
        if not worker.is_killed and not worker.is_refused:
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
    """Prove the files; they hold each row once, in order, and have the hash by its definition."""
    prove_outputs(run, split.rows_kept)
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
def test_done_says_what_is_done_whatever_the_order(data: st.DataObject) -> None:
    """Against a plain set of steps and shards, while ranges are added."""
    finished, done = Done(), set[tuple[int, int]]()
    for first, length, shard, width in data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 2), st.integers(1, 2)), max_size=12)
    ):
        finished.add(Range(first, first + length, shard, shard + width))
        done |= {(step, of) for step in range(first, first + length) for of in range(shard, shard + width)}
        for of in range(4):
            for step in range(20):
                assert (Shard(step, of, 0, 1) in finished) == ((step, of) in done)
    reached = [next(step for step in range(20) if (step, of) not in done) for of in range(3)]
    assert finished.through(range(3)) == min(reached)


@given(steps=st.integers(1, 300), data=st.data())
def test_the_steps_are_cut_evenly_and_each_is_in_the_file_that_says_so(steps: int, data: st.DataObject) -> None:
    cut = FilePlan(data.draw(st.integers(1, steps)), steps)
    ranges = [cut.steps_of(number) for number in range(cut.files)]
    assert [step for steps_of_file in ranges for step in steps_of_file] == list(range(steps))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert all(cut.number_of(step) == number for number, steps_of_file in enumerate(ranges) for step in steps_of_file)
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
    begin(run, files)
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
    assert [file["first"] for file in manifest_of(tmp_path / "3000")["files"]] == [0, 1000, 2000]


def manifest_of(where: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((where / MANIFEST).read_text())
    return manifest


def test_the_manifest_tells_each_file_with_its_bytes_and_hashes(tmp_path: Path) -> None:
    whole_files(tmp_path, Split(50, 10, 2), files=2)
    prove_outputs(Storage(str(tmp_path)), 50)
    told = manifest_of(tmp_path)
    assert told["rows"] == 50 and told["outputs_sha256"] == outputs_sha256(Storage(str(tmp_path)))
    for file, (first, rows) in zip(told["files"], [(0, 20), (20, 30)], strict=True):
        content = (tmp_path / OUTPUTS / file["name"]).read_bytes()
        assert (file["first"], file["rows"], file["bytes"]) == (first, rows, len(content))
        assert file["sha256"] == hashlib.sha256(content).hexdigest()


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
    begin(run, 2)
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


@pytest.mark.full
@pytest.mark.slow
def test_twenty_gigabytes_take_less_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all sizes a hundredth: 200 MB of outputs in files of 10 MB, on four workers, in less than 10 MB."""
    for module, name in ((outputs, "GROUP_BYTES"), (outputs, "PART_BYTES"), (outputs, "MERGE_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) // 100)
    monkeypatch.setattr(output_files, "GROUP_BYTES", output_files.GROUP_BYTES // 100)
    run, split, order = Storage(str(tmp_path)), Split(50_000, 100, 4), Order(50_000, shuffle=False)
    begin(run, num_files(50_000 * 4096, (1 << 30) // 100, split.total_steps))
    monkeypatch.setattr(
        "tests.outputs.test_merging.value_of", lambda samples: samples[:, None].float().expand(-1, 1024)
    )
    with measured_pool() as pool:
        workers = [Worker(run, ledger.read(run), split, order, (4, rank)) for rank in range(4)]
        for _ in range(split.total_steps + 1):
            for worker in workers:
                worker.step()
                worker.merge()
        to_the_end(workers)
    prove_outputs(run, 50_000)
    assert sum(file["bytes"] for file in manifest_of(tmp_path)["files"]) > 200e6
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


JOB = Job.make(
    {"model": "tests.support.models:Linear", "dataset": models.Rows(60), "batch_size": 10, "workers": 1, "shards": 2},
    "j",
)


class StopsAt(StepControl):
    """Asks to stop before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before(self, step: int) -> None:
        self.wants_stop = step == self.step

    def through(self) -> None:
        self.wants_stop = True


def run_until(run: Storage, step: int) -> None:
    with pytest.raises(StopRequested):
        run_task(JOB, World(), run, lambda report: None, StopsAt(step))


def expected() -> torch.Tensor:
    torch.manual_seed(0)
    with torch.inference_mode():
        return models.Linear()(models.Rows(60).data)  # type: ignore[no-any-return]


def test_what_a_dead_attempt_commits_later_is_not_merged(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    run_until(run, 2)
    (first,) = run.child(ledger.PARTS).names()
    run_until(run, 4)
    assert len(ledger.committed(run)) == 3, "two parts, and into how many files the outputs are cut"
    run_until(run, 5)
    # The first attempt was only cut off: it goes on, and commits steps that the others have run since.
    late = tmp_path / "parts" / first.replace("steps-0-2", "steps-2-6")
    shutil.copy(tmp_path / "parts" / first, late)
    assert len(run.child(ledger.PARTS).names()) == 4
    committed = ledger.committed(run)
    assert len(committed) == 4 and late.name not in committed
    run_task(JOB, World(), run, lambda report: None)
    prove_outputs(run, 60)
    assert torch.allclose(Merged.of(run).read(), expected(), atol=1e-6)


def test_a_superseded_worker_gets_no_file_and_removes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "LOOK_SECONDS", 100.0)  # nothing is merged before the loop has ended
    run, split = Storage(str(tmp_path)), Split(60, 10, 2)
    run_until(run, 5)
    old = ledger.read(run)
    late = file_merge_of(run, split, Order(60, shuffle=False), begun=old)
    assert not late.advance()
    run_until(run, 6)  # the newer attempt commits the last step, and stops before it has merged the file
    parts = run.child(ledger.PARTS).names()
    stray = ledger.part_name(Range(5, 6, 0, 2), old.attempt)
    (last,) = (name for name in parts if old.attempt not in name)
    shutil.copy(tmp_path / "parts" / last, tmp_path / "parts" / stray)
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        late.advance()
    late.close()
    assert run.child("outputs").names() == [] and run.child(ledger.PARTS).names() == sorted([*parts, stray])
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        ledger.note_files(ledger.fenced(run, old.attempt), old.attempt, 7)
    ledger.note_files(run, old.attempt, 7)  # it passed the check just before the newer attempt began
    assert ledger.files_in(ledger.committed(run)) == 1
    run_task(JOB, World(), run, lambda report: None)
    prove_outputs(run, 60)
    assert torch.allclose(Merged.of(run).read(), expected(), atol=1e-6)


def test_parts_stay_if_the_record_of_their_file_comes_too_late_to_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Storage(str(tmp_path))
    monkeypatch.setattr(merging, "LOOK_SECONDS", 100.0)
    run_until(run, 6)

    def late(folder: Storage, record: Any, name: str) -> None:
        """It passed the check just before the newer attempt began."""
        ledger.begin(run, "b" * 32)
        FILE_JSON.write(folder, record, name)

    monkeypatch.setattr(output_files, "FILE_JSON", SimpleNamespace(write=late))
    merge = file_merge_of(run, Split(60, 10, 2), Order(60, shuffle=False))
    parts = run.child(ledger.PARTS).names()
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        merge.advance()
    assert run.child(ledger.PARTS).names() == parts != []


def test_a_later_attempt_runs_only_what_is_in_no_part_that_counts(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.child(ledger.PARTS).create()
    run_until(run, 4)
    (whole,) = run.child(ledger.PARTS).names()
    stray = tmp_path / "parts" / ledger.part_name(Range(4, 6, 0, 2), "f" * 32)
    shutil.copy(tmp_path / "parts" / whole, stray)
    steps: set[int] = set()

    def send(told: Any) -> None:
        if isinstance(told, Report) and told.shapes is not None:
            steps.update(told.shapes["step"].to_pylist())

    run_task(JOB, World(), run, send)
    assert steps == {4, 5}, "what a stranger's part says it holds is run all the same"


def test_a_worker_of_an_attempt_that_is_over_is_refused_what_it_keeps(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run.create()
    ledger.begin(run, "a" * 32)
    ledger.check_newest(run, "a" * 32)
    ledger.begin(run, "b" * 32)
    with pytest.raises(StorageError, match="a newer attempt of the job has begun"):
        ledger.check_newest(run, "a" * 32)


def test_a_damaged_ledger_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / ledger.LEDGER).write_text('{"attempt": "a", "parts": 7}')
    with pytest.raises(StorageError, match=r"attempt\.json: is damaged: .*; start anew \(--overwrite"):
        ledger.committed(Storage(str(tmp_path)))


SPLIT, ORDER = Split(240, 4, 4), Order(240, 5, 0, True)  # 60 steps


class Control(StepControl):
    """Counts what keeps a watchdog quiet."""

    touches = 0

    def touch(self) -> None:
        self.touches += 1


class WorkerThread(threading.Thread):
    """One worker of an attempt in a thread: its loop, with the thread that merges."""

    def __init__(self, run: Storage, begun: Ledger, world: World, before: Callable[[int, int], None]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.is_whole = False
        self.control = Control()
        self.most_ahead = 0.0
        self._run, self._begun, self._world, self._before = run, begun, world, before

    def run(self) -> None:
        try:
            self._predict()
        except BaseException as error:
            self.error = error

    def _predict(self) -> None:
        run, world = self._run, self._world
        work = Work(SPLIT, world.world_size, world.rank, Done(ledger.done_ranges(self._begun.parts)))
        plan, merger = merger_of(run, self._begun, SPLIT, ORDER, world, lambda: self.control.wants_stop)
        parts, name, size = run.child(PARTS), self._begun.attempt, world.world_size
        with merger:
            with writer_of(parts, work.shards, plan.agree, attempt=name, num_workers=size) as writer:
                for step, shards in work:
                    if shards:
                        merger.make_room(writer.commit, self.control)
                        if self.control.wants_stop:
                            return
                        self.most_ahead = max(self.most_ahead, merger._steps - merger._through)
                        self._before(world.rank, step)
                    for shard in shards:
                        samples = ORDER.indices(shard.start, shard.stop)
                        writer.on_shard(shard, samples, value_of(torch.from_numpy(samples)))
                    writer.on_step(step)
                    merger.on_step(step)
            self.is_whole = merger.finish(self.control)


def attempt_in_threads(
    run: Storage, size: int, before: Callable[[int, int], None] = lambda rank, step: None
) -> list[WorkerThread]:
    """Run an attempt in threads; once a worker has failed, the others are asked to stop, as Ray ends them."""
    drop_lost(run)
    begun = ledger.begin(run, f"{time.monotonic_ns():032x}")
    workers = [WorkerThread(run, begun, World(rank, size), before) for rank in range(size)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + 200
    while any(worker.is_alive() for worker in workers):
        assert time.monotonic() < until, "the workers wait for each other"
        if any(worker.error for worker in workers):
            for worker in workers:
                worker.control.wants_stop = True
        time.sleep(0.001)
    return workers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A run directory of outputs in 12 files of 5 steps; the workers know of each other."""
    monkeypatch.setattr(merging, "has_peers", lambda: True)
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(merging, "END_SECONDS", 0.001)
    found = Storage(str(tmp_path / "run"))
    begin(found, 12)
    return found


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Make each file's merging take longer."""
    advance = FileMerge.advance

    def slowly(merge: FileMerge) -> bool:
        time.sleep(seconds())
        return advance(merge)

    monkeypatch.setattr(FileMerge, "advance", slowly)


@pytest.mark.full(but=["3"])
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loop_is_never_further_ahead_of_its_merging_than_a_file_for_each_worker(
    run: Storage, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    slow(monkeypatch, lambda: 0.02)
    workers = attempt_in_threads(run, size)
    check_whole(run, SPLIT, ORDER)
    for worker in workers:
        assert worker.error is None and worker.is_whole
        assert worker.most_ahead <= size * 5 + 1
    assert sum(worker.control.touches for worker in workers) > 3, "a watchdog would take it for a hang"


@pytest.mark.full(but=["0"])
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_workers_that_are_slow_die_or_stop_come_to_the_end(
    run: Storage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Attempts on several numbers of workers; one is slow, one dies at some step; the last attempt ends."""
    random = Random(seed)
    slow(monkeypatch, lambda: random.choice([0, 0.01]))

    def before(rank: int, step: int) -> None:
        time.sleep(0.004 if rank == slow_one else 0)
        if (rank, step) == dies:
            raise InterruptedError("killed")

    for last in (False, False, True):
        size = random.randint(1, 4)
        slow_one = random.randrange(size)
        dies = (-1, -1) if last else (random.randrange(size), random.randrange(60))
        workers = attempt_in_threads(run, size, before)
        assert all(isinstance(worker.error, InterruptedError | None) for worker in workers)
    assert all(worker.is_whole for worker in workers)
    check_whole(run, SPLIT, ORDER)


@pytest.mark.full(but=["2"])
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_that_waits_wakes_its_merging(run: Storage, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """With a file for each step the loop waits often; it does not wait for the next look that is due."""
    monkeypatch.setattr(merging, "LOOK_SECONDS", 2.0)
    run.child(FILES).delete("cut-12")
    ledger.note_files(run, "", 60)
    began = time.monotonic()
    assert all(worker.is_whole for worker in attempt_in_threads(run, size))
    assert time.monotonic() - began < 15, "20 looks of a second each are too late"
    check_whole(run, SPLIT, ORDER)


def test_an_error_of_the_merging_reaches_a_loop_that_waits(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(Control, "touch", lambda control: waits.set())

    def fails(merge: FileMerge) -> bool:
        assert waits.wait(100)
        raise StorageError("the disk is full")

    monkeypatch.setattr(FileMerge, "advance", fails)
    (worker,) = attempt_in_threads(run, 1)
    assert isinstance(worker.error, StorageError) and "the disk is full" in str(worker.error)


def test_a_loop_that_waits_stops_when_it_is_asked_to(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has kept its steps: the next attempt goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Control, "touch", lambda control: setattr(control, "wants_stop", True))
        slow(patch, lambda: 0.05)
        (worker,) = attempt_in_threads(run, 1)
    assert worker.error is None and not worker.is_whole
    ran: list[int] = []
    attempt_in_threads(run, 1, lambda rank, step: ran.append(step))
    assert ran[0] >= 5 and ran == list(range(ran[0], 60))
    check_whole(run, SPLIT, ORDER)


def test_workers_that_run_one_after_another_do_not_wait(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the merging needs are those of workers that run later."""
    monkeypatch.setattr(merging, "has_peers", lambda: False)
    begun = ledger.begin(run, "a" * 32)
    for rank in range(2):
        worker = WorkerThread(run, begun, World(rank, 2), lambda *_: None)
        worker.run()
        assert worker.error is None and worker.control.touches == 0


class Model:
    """The rule alone, without files: who may run a step, and how far each worker's merging can go."""

    def __init__(self, cut: FilePlan, size: int) -> None:
        self.cut = cut
        self.size = size
        mergers = min(size, cut.files)
        self.most, self.enough = cut.most_ahead(mergers), cut.enough_room(mergers)
        self.ran, self.kept = [0] * size, [0] * size
        self.left = [list(range(rank, cut.files, size)) for rank in range(size)]
        self.through: list[float] = [cut.steps_of(files[0]).start if files else math.inf for files in self.left]
        self.waits = [False] * size

    def step(self, rank: int, keeps: bool) -> bool:
        """Whether the worker's loop moves."""
        ahead = self.ran[rank] - self.through[rank]
        self.waits[rank] = ahead > (self.enough if self.waits[rank] else self.most)
        moves = not self.waits[rank] and self.ran[rank] < self.cut.steps
        self.ran[rank] += moves
        if self.waits[rank] or keeps or self.ran[rank] == self.cut.steps:
            self.kept[rank] = self.ran[rank]
        return moves

    def merge(self, rank: int) -> bool:
        """Whether the worker's merging moves."""
        if not self.left[rank]:
            return False
        before, steps = self.through[rank], self.cut.steps_of(self.left[rank][0])
        self.through[rank] = max(before, min(steps.stop, *self.kept, math.inf))
        if self.through[rank] == steps.stop:
            del self.left[rank][0]
            rest = self.left[rank]
            self.through[rank] = self.cut.steps_of(rest[0]).start if rest else math.inf
        return self.through[rank] != before


@given(steps=st.integers(1, 60), size=st.integers(1, 6), data=st.data())
def test_somebody_can_always_go_on(steps: int, size: int, data: st.DataObject) -> None:
    """After any schedule; and if nobody keeps anything but what the rule asks for, all come to the end."""
    model = Model(FilePlan(data.draw(st.integers(1, steps)), steps), size)
    assert 0 <= model.enough <= model.most
    moves = st.tuples(st.integers(0, size - 1), st.sampled_from(["step", "step", "merge"]), st.booleans())
    for rank, act, keeps in data.draw(st.lists(moves, max_size=60)):
        model.merge(rank) if act == "merge" else model.step(rank, keeps)
    while any(model.left):
        assert any([*(model.step(rank, False) for rank in range(size)), *map(model.merge, range(size))])
    assert model.ran == [steps] * size


@pytest.mark.slow
def test_the_wait_for_the_merging_is_time_of_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time split of a whole prediction, whose merging takes most of its time."""
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.001)
    slow(monkeypatch, lambda: 0.05)
    keys = {"model": "torch.nn:Identity", "dataset": torch.arange(60.0)[:, None], "batch_size": 2, "workers": 0}
    result = dp_ray.run(**keys, outputs={"file_bytes": 64}, storage=str(tmp_path), name="run", quiet=True)
    assert torch.equal(result.outputs, torch.arange(60.0)[:, None])
    assert result.time_split is not None
    assert result.time_split["all"]["outputs"] > 0.2
