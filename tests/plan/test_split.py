"""The split against torch.chunk, for every small size, and against the PyTorch tutorial's counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.plan.split import Done, Range, Split, Work, chunk_sizes, worker_pieces, worker_shards


def torch_chunks(rows: int, shards: int) -> list[int]:
    """What torch itself cuts: torch.chunk gives one empty chunk of an empty tensor, which no shard is."""
    return [len(chunk) for chunk in torch.arange(rows).chunk(shards) if len(chunk)]


@pytest.mark.parametrize("shards", range(1, 18))
def test_shards_are_what_torch_chunk_cuts(shards: int) -> None:
    for rows in range(65):
        expected = torch_chunks(rows, shards)
        assert chunk_sizes(rows, shards) == expected + [0] * (shards - len(expected))


@pytest.mark.parametrize(
    ("rows", "shards", "expected"),
    [
        (30, 1, [30]),
        (30, 2, [15, 15]),
        (30, 3, [10, 10, 10]),
        (30, 8, [4, 4, 4, 4, 4, 4, 4, 2]),
        (10, 2, [5, 5]),
        (10, 3, [4, 4, 2]),
        (10, 8, [2, 2, 2, 2, 2, 0, 0, 0]),
    ],
)
def test_the_tutorials_counts(rows: int, shards: int, expected: list[int]) -> None:
    assert chunk_sizes(rows, shards) == expected


@given(shards=st.integers(1, 300), data=st.data())
def test_every_shard_runs_on_exactly_one_worker_in_order(shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, shards))
    dealt = [shard for rank in range(world_size) for shard in worker_shards(shards, world_size, rank)]
    assert dealt == list(range(shards))
    counts = [len(worker_shards(shards, world_size, rank)) for rank in range(world_size)]
    assert max(counts) - min(counts) <= 1


@given(
    rows=st.integers(0, 200),
    batch_size=st.integers(1, 60),
    shards=st.integers(1, 12),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_every_position_is_in_exactly_one_shard(
    rows: int, batch_size: int, shards: int, drop_last: bool, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, shards))
    split = Split(rows, batch_size, shards, drop_last)
    batches = [list(batch) for batch in torch.split(torch.arange(rows), batch_size)] if rows else []
    if drop_last and batches and len(batches[-1]) < batch_size:
        batches.pop()
    assert split.steps == len(batches)
    assert split.dropped == rows - sum(len(batch) for batch in batches)
    for step, batch in enumerate(batches):
        pieces = [shard for rank in range(world_size) for shard in split.worker(world_size, rank, step)]
        walked = [position for piece in pieces for position in range(piece.start, piece.stop)]
        assert walked == [int(position) for position in batch]
    assert sum(steps * size for steps, size in split.batch_sizes()) == split.rows_kept


def test_a_step_outside_the_epoch_is_an_error() -> None:
    with pytest.raises(IndexError, match="step 4 is outside the job's 4 steps"):
        Split(100, 30, 8).batch(4)


@pytest.mark.parametrize("max_steps", [None, 1, 3, 4, 9, 99])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_rows_of_all_epochs_are_those_of_its_steps(max_steps: int | None, drop_last: bool) -> None:
    split = Split(100, 30, 8, drop_last, epochs=3, max_steps=max_steps)
    sizes = [stop - start for start, stop in map(split.batch, range(split.total_steps))]
    assert split.total_rows == sum(sizes)


@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_a_workers_pieces_are_its_shards_with_rows(rows: int, shards: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, shards))
    pieces = [piece for rank in range(world_size) for piece in worker_pieces(rows, shards, world_size, rank)]
    cut = torch.arange(rows).chunk(shards) if rows else ()
    assert pieces == [(shard, int(piece[0]), int(piece[-1]) + 1) for shard, piece in enumerate(cut)]


@pytest.mark.parametrize("done", [Done(), Done([Range(0, 3, 0, 2), Range(4, 9, 5, 6)])], ids=["nothing done", "some"])
def test_a_worker_has_a_step_that_leaves_it_shards(done: Done) -> None:
    split = Split(25, 10, 6, epochs=3)  # the last batch of an epoch has 5 rows, for 5 of the 6 shards
    for rank in range(4):
        work = Work(split, 4, rank, done)
        assert [work.has(step) for step in range(9)] == [bool(shards) for _, shards in work]
