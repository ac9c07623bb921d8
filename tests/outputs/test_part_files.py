"""Part files and their merging: workers write slices of a known tensor, and plain torch says what is right."""

import functools
import hashlib
import itertools
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_ray.errors import ModelError, StorageError
from dp_ray.outputs import files as output_files
from dp_ray.outputs import parts
from dp_ray.outputs import read as merged
from dp_ray.outputs.files import (
    OpenFile,
    drop_lost,
    outputs_sha256,
)
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, FilePlan, Split, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import OUTPUTS, PARTS, done_ranges
from dp_ray.storage import Storage
from tests.support.builders import writer_of
from tests.support.chance import examples
from tests.support.merging import begin, merge

Forward = Callable[[torch.Tensor], Any]  # from sample indices to the outputs of these rows

WIDE = torch.randn(100, 2, 3, generator=torch.Generator().manual_seed(0))


class Lost(Exception):
    """A worker dies."""


def forward(samples: torch.Tensor) -> dict[str, Any]:
    """Every sample's outputs tell which sample it is."""
    return {"wide": WIDE[samples], "inner": (samples * 2, "constant")}


def run_worker(
    run: Storage,
    work: Work,
    order: Order,
    model: Forward = forward,
    lost_at: int | None = None,
    batch_dim: int = 0,
    attempt: str = "",
) -> list[tuple[int, int]]:
    """Write a worker's parts; the (step, shard) it ran. Dies in step `lost_at`, its last shard not taken."""
    ran = []
    files = ledger.files_in(ledger.committed(run)) or 1
    cut = FilePlan(files, work.split.total_steps)
    with writer_of(run.child(PARTS), work.shards, cut, batch_dim=batch_dim, attempt=attempt) as writer:
        for step, shards in work:
            for shard in shards:
                if step == lost_at and shard == shards[-1]:
                    raise Lost
                samples = order.indices(shard.start, shard.stop)
                writer.on_shard(shard, samples, model(torch.from_numpy(samples)))
                ran.append((step, shard.shard))
            if step == lost_at:
                raise Lost
            writer.on_step(step)
    return ran


def run_workers(
    run: Storage, split: Split, order: Order, world_size: int = 1, model: Forward = forward, files: int = 1
) -> Storage:
    """One attempt in which nobody dies; gives the folder of the parts."""
    folder = begin(run, files)
    for rank in range(world_size):
        run_worker(run, Work(split, world_size, rank), order, model)
    return folder


def positions(folder: Storage) -> list[int]:
    """The positions of all rows of all parts, as pyarrow finds them."""
    streams = [folder.fs.open_input_file(folder.file(name)) for name in folder.names()]
    tables = [pa.ipc.open_file(stream).read_all() for stream in streams]
    return [position for table in tables for position in table["position"].to_pylist()]


@contextmanager
def small_files(group: int, part: int, block: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "GROUP_BYTES", group)
        patch.setattr(parts, "PART_BYTES", part)
        patch.setattr(parts, "MERGE_BYTES", block)
        patch.setattr(output_files, "GROUP_BYTES", group)
        yield


def digest_of(batch_size: int, *leaves: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """By its definition: over the digest of each step, and that over its leaves, one after another, row after row."""
    digest = hashlib.sha256()
    for first in range(0, len(leaves[0]), batch_size):
        rows = [row.numpy().tobytes() for leaf in leaves for row in leaf[first : first + batch_size]]
        digest.update(hashlib.sha256(b"".join(rows)).digest())
    return digest.hexdigest()


def assert_merged(run: Storage, split: Split, order: Order) -> None:
    """The merged file holds what one process would have given, asked in each of its ways."""
    samples = torch.from_numpy(order.indices(0, split.rows_kept))
    wide, doubled = WIDE[samples], samples * 2
    merged = Merged.of(run)
    read = merged.read()
    assert torch.equal(read["wide"], wide) and torch.equal(read["inner"][0], doubled)
    assert read["inner"][1] == "constant"
    batches = list(merged.batches(split.batch_size))
    expected = zip(torch.split(wide, split.batch_size), torch.split(doubled, split.batch_size), strict=True)
    for batch, (some_wide, some_doubled) in zip(batches, expected, strict=True):
        assert torch.equal(batch["wide"], some_wide) and torch.equal(batch["inner"][0], some_doubled)
    assert torch.equal(merged.sample_index(), samples)
    assert outputs_sha256(run) == digest_of(split.batch_size, wide, doubled)
    assert run.child(PARTS).names() == [], "parts go once their file has its record"


splits = st.builds(
    Split, rows=st.integers(1, 30), batch_size=st.integers(1, 12), shards=st.integers(1, 6), drop_last=st.booleans()
).filter(lambda split: split.steps > 0)
sizes = st.tuples(
    st.sampled_from([1, 9000, 1 << 23]), st.sampled_from([1, 500, 1 << 30]), st.sampled_from([1, 99, 1 << 22])
)


@pytest.mark.slow
@settings(max_examples=examples(120), deadline=None)
@given(split=splits, shuffle=st.booleans(), sizes=sizes, data=st.data())
def test_workers_parts_merge_to_one_process_outputs(
    split: Split, shuffle: bool, sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    run, order = Storage("mock:///run"), Order(split.rows, 3, 0, shuffle)
    files = data.draw(st.integers(1, split.steps))
    with small_files(*sizes):
        run_workers(run, split, order, data.draw(st.integers(1, split.shards)), files=files)
        merge(run, split, order)
    assert len(Merged.of(run).names) == files
    assert_merged(run, split, order)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(split=splits, shuffle=st.booleans(), data=st.data())
def test_attempts_that_lose_workers_lose_and_repeat_nothing(split: Split, shuffle: bool, data: st.DataObject) -> None:
    """Each attempt has another number of workers, of which any may die in any step; the last one has luck."""
    run, order = Storage("mock:///run"), Order(split.rows, 3, 0, shuffle)
    folder = begin(run, data.draw(st.integers(1, split.steps), label="files"))
    for _ in range(data.draw(st.integers(1, 4), label="attempts")):
        attempt(data, run, split, order)
    done = Done(done_ranges(folder.names()))
    for rank in range(world_size := data.draw(st.integers(1, split.shards), label="last world size")):
        run_worker(run, Work(split, world_size, rank, done), order)
    merge(run, split, order)
    assert_merged(run, split, order)


def attempt(data: st.DataObject, run: Storage, split: Split, order: Order) -> None:
    """Some workers come through, some die: what these had not committed must not count, what they had must."""
    folder, world_size = run.child(PARTS), data.draw(st.integers(1, split.shards), label="world size")
    done = Done(done_ranges(folder.names()))
    for rank in range(world_size):
        lost_at = data.draw(st.none() | st.integers(0, split.steps - 1), label=f"rank {rank} dies in")
        with small_files(*data.draw(sizes, label="sizes")), suppress(Lost):
            run_worker(run, Work(split, world_size, rank, done), order, lost_at=lost_at)
    assert len(found := positions(folder)) == len(set(found))


def test_steps_that_a_larger_part_holds_too_are_done(tmp_path: Path) -> None:
    """One worker of two commits three small parts and dies; one worker alone does all else, in one part."""
    run, split, order = Storage(str(tmp_path)), Split(20, 2, 2), Order(20)
    folder = begin(run)
    with small_files(1, 1, 1), pytest.raises(Lost):
        run_worker(run, Work(split, 2, 0), order, lost_at=3)
    run_worker(run, Work(split, 1, 0, Done(done_ranges(folder.names()))), order)
    assert sorted(positions(folder)) == list(range(20))
    assert run_worker(run, Work(split, 1, 0, Done(done_ranges(folder.names()))), order) == []


def test_a_part_says_which_steps_and_shards_it_holds(tmp_path: Path) -> None:
    split, order = Split(30, 10, 4), Order(30, shuffle=False)
    with small_files(1, 1, 1):
        folder = run_workers(Storage(str(tmp_path)), split, order, 2)
    assert folder.names() == sorted(
        f"steps-{step}-{step + 1}-shards-{shards}.arrow" for step in range(3) for shards in ("0-2", "2-4")
    )
    frame = pa.ipc.open_file(tmp_path / "parts" / "steps-1-2-shards-2-4.arrow").read_all().to_pandas()
    assert frame["position"].tolist() == [16, 17, 18, 19]
    assert frame["inner.0"].tolist() == [32, 34, 36, 38]


def test_parts_are_committed_when_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS", -1.0)
    folder = run_workers(Storage(str(tmp_path)), Split(30, 10, 1), Order(30))
    assert len(folder.names()) == 3


def test_a_worker_that_is_lost_early_loses_a_tenth_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps of a second each: what is not committed dies with the worker, and runs again."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    folder = run_workers(Storage(str(tmp_path)), Split(300, 1, 1), Order(300), model=lambda samples: samples * 2)
    steps = sorted(tuple(map(int, name.split("-")[1:3])) for name in folder.names())
    assert [stop for _, stop in steps] == [*[start for start, _ in steps[1:]], 300]
    assert all(stop - start <= 4 + 0.1 * stop for start, stop in steps)
    assert len(steps) < 60, "each is a file"


def known(samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs whose form the writer knows after the first shards: it looks at no tree then."""
    return {"wide": WIDE[samples], "doubled": samples * 2}


@pytest.mark.parametrize("rows", [20, 23])
def test_outputs_of_a_known_form_are_kept_among_others(tmp_path: Path, rows: int) -> None:
    """Shards of several sizes, and of rows of several shapes."""
    order, split = Order(rows, 3, 0, True), Split(rows, 7, 3)

    def model(samples: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**known(samples), "some": torch.arange(1 + int(samples[0]) % 3).repeat(len(samples), 1)}

    run = Storage(str(tmp_path))
    run_workers(run, split, order, 2, model, files=2)
    read, samples = merge(run, split, order).read(), torch.from_numpy(order.indices(0, rows))
    assert torch.equal(read["wide"], WIDE[samples]) and torch.equal(read["doubled"], samples * 2)
    shards = [shard for step in range(split.steps) for shard in split.worker(1, 0, step)]
    some = [model(samples[shard.start : shard.stop])["some"] for shard in shards]
    assert [row.tolist() for row in read["some"]] == [row.tolist() for piece in some for row in piece]


def test_scalars_of_shards_of_one_row_are_vectors(tmp_path: Path) -> None:
    """As of a model that squeezes its outputs, in every shard of the worker."""
    run, split, order = Storage(str(tmp_path)), Split(6, 2, 2), Order(6, shuffle=False)
    run_workers(run, split, order, 1, lambda samples: {"doubled": (samples * 2).squeeze(), "wide": WIDE[samples]})
    assert merge(run, split, order).read()["doubled"].tolist() == [0, 2, 4, 6, 8, 10]


def pair(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return WIDE[samples], samples * 2


CHANGES: dict[str, tuple[Forward, Forward, str]] = {
    "dtype": (known, lambda samples: {**known(samples), "doubled": samples * 2.0}, "'doubled' is not alike"),
    "keys": (known, lambda samples: {"wide": WIDE[samples], "twice": samples * 2}, "'doubled' is nothing"),
    "order": (known, lambda samples: dict(reversed(known(samples).items())), "keys in another order"),
    "list": (pair, lambda samples: list(pair(samples)), "output is a list of 2, that of shard 0 is a tuple of 2"),
    "fewer-rows": (pair, lambda samples: pair(samples[1:]), "output '0' has 1 rows"),
    "more-rows": (pair, lambda samples: pair(torch.cat([samples, samples[:1]])), "output '0' has 3 rows"),
    "scalar": (pair, lambda samples: (WIDE[samples], samples.sum()), "output '1' is a scalar per shard"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_that_differ_from_a_known_form_are_an_error(tmp_path: Path, change: str) -> None:
    """The forms of shards of 3 and of 2 rows are known; then the outputs of 2 rows change."""
    before, after, says = CHANGES[change]
    run, order = Storage(str(tmp_path)), Order(10, shuffle=False)
    begin(run)
    with pytest.raises(ModelError, match=says):
        run_worker(run, Work(Split(10, 5, 2)), order, lambda samples: (before if samples[0] < 8 else after)(samples))


def calls_of(run: Callable[[], object]) -> int:
    """Count the functions that `run` calls, of Python and of C."""
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(arg) if event in ("call", "c_call") else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(
    ("model", "most"), [(lambda samples: WIDE[samples], 20), (known, 30)], ids=["tensor", "dict"]
)
def test_a_shard_of_a_known_form_costs_few_calls(tmp_path: Path, model: Forward, most: int) -> None:
    """The thread that launches a GPU's kernels makes them."""
    with writer_of(Storage(str(tmp_path))) as writer:
        for step, (shard,) in Work(Split(8, 2, 1)):
            samples = np.arange(shard.start, shard.stop)
            outputs = model(torch.from_numpy(samples))
            calls = calls_of(functools.partial(writer.on_shard, shard, samples, outputs))
            writer.on_step(step)
    assert calls <= most


def test_a_part_gets_its_name_after_what_must_come_before(tmp_path: Path) -> None:
    folder, split = Storage(str(tmp_path)), Split(4, 2, 1)
    seen: list[list[str]] = []
    writer = writer_of(folder, before_commit=lambda: seen.append(folder.names()))
    with small_files(1, 1, 1), writer:
        for step, shards in Work(split):
            writer.on_shard(shards[0], np.arange(shards[0].start, shards[0].stop), torch.ones(2))
            writer.on_step(step)
    assert seen == [[], ["steps-0-1-shards-0-1.arrow"]]
    assert folder.names() == ["steps-0-1-shards-0-1.arrow", "steps-1-2-shards-0-1.arrow"]


def refuse() -> None:
    raise Lost


def test_a_part_whose_commit_fails_leaves_nothing(tmp_path: Path) -> None:
    writer = writer_of(Storage(str(tmp_path)), before_commit=refuse)
    writer.on_shard(Split(4, 4, 1).shard(0, 0), np.arange(4), torch.ones(4))
    writer.on_step(0)
    with pytest.raises(Lost), writer:
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_leaves_only_what_it_had_committed(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    begin(run)
    with small_files(1, 500, 1), pytest.raises(Lost):
        run_worker(run, Work(Split(30, 5, 2)), Order(30), lost_at=5)
    assert [path.name for path in (tmp_path / PARTS).iterdir()] == ["steps-0-3-shards-0-2.arrow"]


def test_no_part_is_in_two_files(tmp_path: Path) -> None:
    folder = run_workers(Storage(str(tmp_path)), Split(80, 10, 2), Order(80), files=3)
    assert folder.names() == [f"steps-{steps}-shards-0-2.arrow" for steps in ("0-2", "2-5", "5-8")]


def test_a_worker_that_never_learns_of_the_cut_keeps_nothing(tmp_path: Path) -> None:
    """Rank 0 was asked to stop before its first step; so is this worker."""
    known = iter([None, FilePlan(1, 3)])
    split, folder = Split(30, 10, 1), Storage(str(tmp_path))
    with writer_of(folder, plan=lambda row_bytes: next(known)) as writer:
        for step, (shard,) in itertools.islice(Work(split), 2):
            writer.on_shard(shard, np.arange(shard.start, shard.stop), torch.ones(10))
            writer.on_step(step)
            writer.commit()
            assert folder.names() == ["steps-1-2-shards-0-1.arrow"] * step


def test_a_full_disk_is_an_error_that_leaves_no_part(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    begin(run)
    with small_disk(1000), pytest.raises(StorageError, match="cannot write"):
        run_worker(run, Work(Split(100, 10, 1)), Order(100))
    assert list((tmp_path / PARTS).iterdir()) == []


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_a_file_is_merged_loses_nothing(six: Storage) -> None:
    with small_disk(1000), pytest.raises(StorageError, match="cannot write"):
        merge_six(six)
    assert len(six.child(PARTS).names()) == 6 and six.child(OUTPUTS).names() == []
    merge_six(six)
    assert_merged(six, Split(30, 10, 4), SHUFFLED)


@pytest.fixture
def six(tmp_path: Path) -> Storage:
    """A run with six parts: three steps of ten rows, in four shards on two workers."""
    run = Storage(str(tmp_path))
    with small_files(1, 1, 1):
        run_workers(run, Split(30, 10, 4), SHUFFLED, 2)
    return run


SHUFFLED = Order(30, seed=1)


def move(run: Storage, name: str, other: str | None) -> None:
    path = Path(run.child("parts").file(name))
    if other:
        path.with_name(other).write_bytes(path.read_bytes())
    else:
        path.unlink()


def merge_six(run: Storage, order: Order = SHUFFLED) -> None:
    merge(run, Split(30, 10, 4), order)


@pytest.mark.parametrize(
    ("name", "other", "says"),
    [
        ("steps-0-1-shards-0-2.arrow", None, "position 0 is missing"),
        ("steps-1-2-shards-2-4.arrow", None, "position 16 is missing"),
        ("steps-2-3-shards-0-2.arrow", None, "position 20 is missing"),
        ("steps-2-3-shards-2-4.arrow", None, "position 26 is missing"),
        ("steps-0-1-shards-0-2.arrow", "steps-1-2-shards-4-5.arrow", "position 0 is there twice"),
        ("steps-1-2-shards-2-4.arrow", "steps-0-1-shards-4-5.arrow", "position 16 is there twice"),
        ("steps-2-3-shards-2-4.arrow", "steps-1-2-shards-0-2.arrow", "position 10 is missing"),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_parts_that_are_not_whole_are_an_error_that_names_the_position(
    six: Storage, name: str, other: str | None, says: str, block: int
) -> None:
    move(six, name, other)
    with small_files(1, 1, block), pytest.raises(StorageError, match=says):
        merge_six(six)
    assert six.child(OUTPUTS).names() == [] and six.child(PARTS).names() != []


def test_parts_of_another_order_are_an_error_that_names_the_position(six: Storage) -> None:
    other = Order(30, seed=2)
    first = int(np.flatnonzero(SHUFFLED.indices(0, 30) != other.indices(0, 30))[0])
    says = (
        f"position {first} holds the outputs of sample {SHUFFLED[first]}, where the order has sample {other[first]}"
    )
    with pytest.raises(StorageError, match=says):
        merge_six(six, other)


def test_a_part_with_a_wrong_sample_is_an_error_that_names_the_position(six: Storage) -> None:
    name = six.child("parts").file("steps-1-2-shards-0-2.arrow")
    table = pa.ipc.open_file(name).read_all()
    samples = table["sample_index"].to_pylist()
    wrong = pa.array([*samples[:2], samples[2] + 1000, *samples[3:]])
    with pa.ipc.new_file(name, table.schema) as file:
        file.write_table(table.set_column(1, table.schema.field(1), wrong))
    with pytest.raises(StorageError, match=f"position 12 holds the outputs of sample {samples[2] + 1000}"):
        merge_six(six)


@pytest.mark.parametrize(("order", "rows"), [(SHUFFLED, 20), (Order(25, shuffle=False), 25), (SHUFFLED, 29)])
def test_more_rows_than_the_job_has_are_an_error(tmp_path: Path, order: Order, rows: int) -> None:
    run = Storage(str(tmp_path))
    run_workers(run, Split(30, 10, 4), Order(30, seed=1, shuffle=order.shuffle))
    with pytest.raises(StorageError, match=f"outputs of position {rows}"):
        merge(run, Split(rows, 10, 4), order)


def test_no_parts_are_an_error(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    begin(run)
    with pytest.raises(StorageError, match="position 0 is missing"):
        merge(run, Split(1, 1, 1), Order(1))


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.9])
def test_a_part_cut_short_is_an_error_that_names_it(six: Storage, keep: float) -> None:
    path = Path(six.child("parts").file("steps-1-2-shards-0-2.arrow"))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(StorageError, match=r"steps-1-2-shards-0-2\.arrow: is damaged"):
        merge_six(six)


def test_a_merged_file_cut_short_is_an_error(six: Storage) -> None:
    merge_six(six)
    path = Path(six.file(Merged.of(six).names[0]))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StorageError, match=r"outputs/00000-of-00001\.parquet: is damaged"):
        Merged.of(six).read()


def test_other_files_among_the_parts_do_not_count(six: Storage) -> None:
    for name in ("notes.txt", "steps-0-1-shards-0-2.arrow.bak", ".tmp-1-steps-0-9-shards-0-9.arrow"):
        six.child("parts").write_text(name, "")
    assert len(done_ranges(six.child("parts").names())) == 6
    merge_six(six)
    six.child(PARTS).remove()
    assert_merged(six, Split(30, 10, 4), SHUFFLED)


def test_a_file_is_not_there_while_it_is_merged(six: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    write = OpenFile._write_group

    def watched(file: OpenFile) -> None:
        seen.append([path.name for path in Path(six.child(OUTPUTS).path).iterdir()])
        write(file)

    monkeypatch.setattr(OpenFile, "_write_group", watched)
    with small_files(1, 1, 1):
        merge_six(six)
    assert len(seen) > 5 and not any(seen)
    assert six.child(OUTPUTS).names() == ["00000-of-00001.parquet"]


def test_a_file_that_was_cut_short_counts_no_more(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    run_workers(run, Split(30, 10, 4), SHUFFLED, 2, files=3)
    merge_six(run)
    drop_lost(run)
    assert len(done_ranges(ledger.committed(run))) == 3
    path = tmp_path / OUTPUTS / "00001-of-00003.parquet"
    os.truncate(path, path.stat().st_size - 1)
    drop_lost(run)
    assert [done.first_step for done in sorted(done_ranges(ledger.committed(run)))] == [0, 2]


READERS: dict[str, Callable[[str], list[int]]] = {
    "pandas": lambda folder: pd.read_parquet(folder)["sample_index"].tolist(),
    "polars": lambda folder: pl.read_parquet(folder)["sample_index"].to_list(),
    "polars, lazily": lambda folder: pl.scan_parquet(folder).collect()["sample_index"].to_list(),
    "duckdb": lambda folder: [row[0] for row in duckdb.execute(f"from read_parquet('{folder}')").fetchall()],
    "pyarrow": lambda folder: pads.dataset(folder).to_table()["sample_index"].to_pylist(),
}


@pytest.mark.parametrize("reader", READERS)
def test_the_bare_folder_is_read_while_files_are_merged_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    run, folder, read, seen = Storage(str(tmp_path)), str(tmp_path / OUTPUTS), READERS[reader], list[list[int]]()
    run_workers(run, Split(30, 10, 4), SHUFFLED, 2, files=3)
    write = OpenFile._write_group

    def watched(file: OpenFile) -> None:
        if run.child(OUTPUTS).names():
            seen.append(read(folder))
        write(file)

    monkeypatch.setattr(OpenFile, "_write_group", watched)
    merge_six(run)
    samples = SHUFFLED.indices(0, 30).tolist()
    assert seen == [samples[:10], samples[:20]]
    assert read(folder) == samples


@pytest.mark.parametrize("files", [1, 3])
def test_the_files_open_in_pandas_polars_and_duckdb(tmp_path: Path, files: int) -> None:
    run = Storage(str(tmp_path))
    run_workers(run, Split(30, 10, 4), SHUFFLED, 2, files=files)
    merge_six(run)
    paths = sorted(map(str, (tmp_path / OUTPUTS).glob("*.parquet")))
    assert len(paths) == files
    samples = SHUFFLED.indices(0, 30).tolist()
    names = ["sample_index", "wide", "inner.0"]
    wide = WIDE[samples].reshape(30, 6).tolist()
    frame = pd.read_parquet(tmp_path / OUTPUTS)
    assert list(frame) == names
    assert frame["sample_index"].tolist() == samples
    assert frame["inner.0"].tolist() == [2 * sample for sample in samples]
    assert [row.tolist() for row in frame["wide"]] == wide
    table = pl.read_parquet(tmp_path / OUTPUTS)
    assert table.columns == names
    assert pads.dataset(tmp_path / OUTPUTS).to_table()["sample_index"].to_pylist() == samples
    assert table["sample_index"].to_list() == samples
    assert [list(row) for row in table["wide"].to_list()] == wide
    rows = duckdb.execute(f"select sample_index, wide, \"inner.0\" from '{tmp_path / OUTPUTS}/*.parquet'").fetchall()
    assert rows == [(sample, row, 2 * sample) for sample, row in zip(samples, wide, strict=True)]


def odd(samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of which Arrow has no plain column: empty, bfloat16, complex and, by step, of another width."""
    width = 1 + int(samples.max()) // 10
    return {
        "empty": torch.ones(len(samples), 0),
        "short": samples.to(torch.bfloat16) / 2,
        "pair": torch.complex(samples.float(), -samples.float()),
        "ragged": samples[:, None].repeat(1, width),
    }


def test_odd_outputs_open_in_pandas_polars_and_duckdb_too(tmp_path: Path) -> None:
    run, order = Storage(str(tmp_path)), Order(30, shuffle=False)
    run_workers(run, Split(30, 10, 2), order, 2, odd)
    merge(run, Split(30, 10, 2), order)
    path = run.file(Merged.of(run).names[0])
    ragged = [[number] * (1 + number // 10) for number in range(30)]
    frame = pd.read_parquet(path)
    assert [row["data"].tolist() for row in frame["ragged"]] == ragged
    assert [row["data"].tolist() for row in frame["empty"]] == [[]] * 30
    assert frame["short"].tolist() == [number / 2 for number in range(30)]
    table = pl.read_parquet(path)
    assert [row["data"] for row in table["ragged"].to_list()] == ragged
    assert [row["shape"] for row in table["ragged"].to_list()] == [[len(row)] for row in ragged]
    rows = duckdb.execute(f"select ragged.data, empty.data, short, pair from '{path}'").fetchall()
    assert rows == [(row, [], row[0] / 2, [float(row[0]), -float(row[0])]) for row in ragged]
    read = Merged.of(run).read()
    assert read["empty"].shape == (30, 0)
    assert torch.equal(read["short"], torch.arange(30).bfloat16() / 2)
    assert [row.tolist() for row in read["ragged"]] == ragged


def wide_in(widths: Callable[[int], int]) -> Forward:
    """A model whose outputs' width depends on the first sample it sees."""
    return lambda samples: samples[:, None].repeat(1, widths(int(samples[0])))


@pytest.mark.parametrize(("world_size", "files"), [(1, 1), (2, 1), (4, 1), (2, 3)])
@pytest.mark.parametrize(
    "widths",
    [
        lambda first: 1 + first // 10,  # between steps
        lambda first: 1 + (first % 10 >= 6),  # between workers, and between shards of one
        lambda first: first % 3,  # empty rows too
        lambda first: 2 if first == 26 else 3,  # one shard of them all
    ],
)
def test_rows_of_other_shapes_merge(world_size: int, files: int, widths: Callable[[int], int]) -> None:
    run, split, order = Storage("mock:///run"), Split(30, 10, 4), Order(30, shuffle=False)
    firsts = [first for step in (0, 10, 20) for first in [step, step + 3, step + 6, step + 9]]
    pieces = [torch.arange(first, first + 3 if first % 10 < 9 else first + 1) for first in firsts]
    expected = [row for piece in pieces for row in wide_in(widths)(piece)]
    with small_files(1, 1 << 30, 1):
        run_workers(run, split, order, world_size, wide_in(widths), files)
        merge(run, split, order)
    assert_rows(Merged.of(run).read(), expected)
    assert outputs_sha256(run) == digest_of(10, expected)
    for step, batch in enumerate(Merged.of(run).batches(10)):
        assert_rows(batch, expected[step * 10 : step * 10 + 10])


def assert_rows(got: Any, expected: Sequence[torch.Tensor]) -> None:
    """A tensor where all rows are of one shape, else a list of rows; never a list in a batch whose rows are alike."""
    assert [row.tolist() for row in got] == [row.tolist() for row in expected]
    assert [row.dtype for row in got] == [row.dtype for row in expected]


def test_a_batch_of_like_rows_is_a_tensor_beside_others() -> None:
    run, order = Storage("mock:///run"), Order(30, shuffle=False)
    model = wide_in(lambda first: 1 + first // 10)
    run_workers(run, Split(30, 10, 4), order, 2, model, files=3)
    merge(run, Split(30, 10, 4), order)
    shapes = [tuple(batch.shape) for batch in Merged.of(run).batches(10)]
    assert shapes == [(10, 1), (10, 2), (10, 3)]
    assert [type(batch) for batch in Merged.of(run).batches(15)] == [list, list]


@pytest.mark.parametrize("lengths", [[10], [3, 3, 4], [1] * 10, [7, 1, 2], [4, 0, 6]])
def test_batches_are_whole_however_the_file_gives_its_rows(lengths: list[int]) -> None:
    cuts = np.cumsum([0, *lengths]).tolist()
    pieces = [pa.table({"x": pa.array(range(first, end), pa.int64())}) for first, end in itertools.pairwise(cuts)]
    tables = merged._slices(iter(pieces), iter([4, 4, 2]))
    assert [table["x"].to_pylist() for table in tables] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    "other",
    [
        lambda samples: samples.float(),
        lambda samples: (samples,),
        lambda samples: samples.numpy(),
        lambda samples: {"output": samples},
    ],
)
def test_outputs_of_another_kind_are_an_error(other: Forward) -> None:
    run, order = Storage("mock:///run"), Order(30, shuffle=False)

    def changing(samples: torch.Tensor) -> Any:
        return other(samples) if samples[0] >= 15 else samples

    with pytest.raises(ModelError, match="alike on all shards"):
        run_workers(run, Split(30, 10, 2), order, 1, changing)


def test_outputs_of_another_kind_on_another_worker_are_an_error() -> None:
    run, order, split = Storage("mock:///run"), Order(20, shuffle=False), Split(20, 10, 2)
    begin(run)
    run_worker(run, Work(split, 2, 0), order, lambda samples: samples.float())
    run_worker(run, Work(split, 2, 1), order, lambda samples: samples.double())
    with pytest.raises(ModelError, match="float32 on one, float64 on another"):
        merge(run, split, order)
    assert run.child(OUTPUTS).names() == []


@pytest.mark.parametrize("reverse", [False, True])
def test_columns_whose_names_begin_alike_are_not_mixed_up(reverse: bool) -> None:
    """Parquet's own names are dotted too: `x.data` could be a column, or a part of the ragged `x`."""
    run, order = Storage("mock:///run"), Order(30, shuffle=False)
    names = ["x", "x.data", "a.b.c", "a.b", "a", "position", "sample_index"]
    places = {name: number for number, name in enumerate(names)}

    def model(samples: torch.Tensor) -> dict[str, torch.Tensor]:
        named = {name: samples + 1000 * place for name, place in places.items()}
        named["x"] = named["x"][:, None].repeat(1, 1 + int(samples[0]) // 10)
        return dict(sorted(named.items(), reverse=reverse))

    run_workers(run, Split(30, 10, 2), order, 2, model)
    merge(run, Split(30, 10, 2), order)
    read = Merged.of(run).read()
    expected = {name: torch.arange(30) + 1000 * place for name, place in places.items() if name != "x"}
    for name, values in expected.items():
        assert torch.equal(read[name], values), name
    ragged = [torch.full((1 + number // 10,), number) for number in range(30)]
    assert [row.tolist() for row in read["x"]] == [row.tolist() for row in ragged]
    leaves: dict[str, Any] = {**expected, "x": ragged}
    assert outputs_sha256(run) == digest_of(10, *[leaves[name] for name in read])


def test_rows_in_dimension_one_and_numpy_outputs() -> None:
    run, order, split = Storage("mock:///run"), Order(30, seed=4), Split(30, 8, 3)
    states = torch.randn(5, 30, 2)
    begin(run)

    def model(samples: torch.Tensor) -> Any:
        return {"states": states[:, samples], "labels": samples.numpy() * 3}

    for rank in range(2):
        run_worker(run, Work(split, 2, rank), order, model, batch_dim=1)
    merge(run, split, order)
    samples = order.indices(0, 30)
    read = Merged.of(run).read()
    assert torch.equal(read["states"], states[:, samples])
    assert isinstance(read["labels"], np.ndarray) and read["labels"].tolist() == (samples * 3).tolist()
    expected = torch.split(states[:, samples], 8, dim=1)
    for batch, some in zip(Merged.of(run).batches(8), expected, strict=True):
        assert torch.equal(batch["states"], some)
    leaves = states[:, samples].movedim(1, 0), torch.from_numpy(samples * 3)
    assert outputs_sha256(run) == digest_of(8, *leaves)


def test_the_hash_does_not_depend_on_the_parts() -> None:
    """Numbers that Arrow lacks are converted block by block, NaN among them; the blocks depend on the workers."""
    numbers = torch.full((100, 3), float("nan")).bfloat16()
    numbers[::2] = torch.tensor(float("nan"), dtype=torch.float64).to(torch.bfloat16)
    numbers[::3] = 1.5
    digests = set()
    for world_size, group, files in [(1, 1 << 23, 1), (1, 1, 6), (3, 1, 1), (4, 5000, 2)]:
        run, order = Storage("mock:///run"), Order(100, seed=2)
        with small_files(group, group, group):
            run_workers(run, Split(100, 17, 4), order, world_size, lambda samples: numbers[samples], files)
            merge(run, Split(100, 17, 4), order)
        digests.add(outputs_sha256(run))
    assert digests == {digest_of(17, numbers[order.indices(0, 100)].view(torch.int16))}


class Memory:
    """The most bytes that Arrow and Python have held at once, looked at now and then, since the block began."""

    def __enter__(self) -> "Memory":
        self.peak = 0
        self._before = pa.total_allocated_bytes()
        tracemalloc.start()
        return self

    def look(self) -> None:
        held = pa.total_allocated_bytes() - self._before + tracemalloc.get_traced_memory()[1]
        self.peak = max(self.peak, held)

    def __exit__(self, *_: object) -> None:
        self.look()
        tracemalloc.stop()


@pytest.mark.full(but=["4"])
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 4])
def test_merging_holds_a_few_blocks_at_a_time(
    tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, split, order = Storage(str(tmp_path)), Split(200_000, 1000, 4), Order(200_000, seed=1)
    table, memory = torch.randn(200_000, 32), Memory()

    write = OpenFile._write_group

    def watched(file: OpenFile) -> None:
        memory.look()
        write(file)

    monkeypatch.setattr(OpenFile, "_write_group", watched)
    with small_files(1 << 18, 1 << 22, 1 << 17):
        run_workers(run, split, order, world_size, lambda samples: table[samples])
        with memory:
            merge(run, split, order)
    assert torch.equal(Merged.of(run).read(), table[order.indices(0, 200_000)])
    assert 1 << 17 < memory.peak < table.nbytes / 3


def test_batches_are_read_as_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "GROUP_BYTES", 1 << 19)
    run, order = Storage(str(tmp_path)), Order(200_000, shuffle=False)
    table = torch.randn(200_000, 32)
    run_workers(run, Split(200_000, 4000, 1), order, 1, lambda samples: table[samples])
    merge(run, Split(200_000, 4000, 1), order)
    with Memory() as memory:
        for batch, expected in zip(Merged.of(run).batches(1000), torch.split(table, 1000), strict=True):
            assert torch.equal(batch, expected)
            memory.look()
    assert 128_000 <= memory.peak < table.nbytes / 4
