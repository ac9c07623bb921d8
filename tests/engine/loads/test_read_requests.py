"""What a worker's loader is asked to read: the samples of its own pieces, each at its position of the order."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.engine.loads.bad_samples import Quarantine, Reference, item_form
from dp_ray.errors import DataError, Error
from dp_ray.job.job import Job
from dp_ray.job.samples import PIECES_AT_ONCE, POSITIONS_AT_ONCE, IndexLists
from dp_ray.plan.order import Order
from dp_ray.plan.split import Split, Work
from tests.support.bad_data import Broken
from tests.support.builders import steps_of


@given(
    st.integers(1, 60),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 12),
    st.booleans(),
    st.data(),
)
def test_each_piece_gets_the_samples_at_its_positions(
    rows: int, shards: int, workers: int, epochs: int, shuffle: bool, data: st.DataObject
) -> None:
    split = Split(rows, data.draw(st.integers(1, rows)), max(shards, workers), epochs=epochs)
    rank, start = data.draw(st.integers(0, workers - 1)), data.draw(st.integers(0, split.total_steps))
    work = Work(split, workers, rank, start=start)
    pieces = [piece for _, mine in work for piece in mine]
    requests = list(IndexLists(Order(rows, 3, 0, shuffle), lambda: iter(pieces)))
    assert [(request.epoch, request.step, request.shard) for request in requests] == [
        (p.epoch, p.step, p.shard) for p in pieces
    ]
    for piece, request in zip(pieces, requests, strict=True):
        order = Order(rows, 3, piece.epoch, shuffle)
        assert request.indices == [order[position] for position in range(piece.start, piece.stop)]


@pytest.mark.parametrize("batch_size", [64, 1024, 64 * 5000])
def test_a_worker_computes_its_own_positions_alone(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    asked: list[int] = []
    at = Order.at

    def counted(order: Order, positions: np.ndarray) -> np.ndarray:
        asked.append(len(positions))
        return at(order, positions)

    monkeypatch.setattr(Order, "at", counted)
    work = Work(Split(batch_size * 200, batch_size, 64), world_size=64, rank=63)
    lists = IndexLists(Order(batch_size * 200, 1), lambda: (piece for _, mine in work for piece in mine))
    assert sum(len(one.indices) for one in lists) == sum(asked) == 200 * batch_size // 64
    pieces_at_once = max(1, min(PIECES_AT_ONCE, POSITIONS_AT_ONCE // (batch_size // 64)))
    assert len(asked) == -(-200 // pieces_at_once)


class Noted(Broken):
    """Notes the samples that are read, but for the first one, which is the reference."""

    def __init__(self, **bad: Any) -> None:
        super().__init__(12, **bad)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


PREDICTION: dict[str, Any] = {"model": "a:b", "batch_size": 6, "shards": 3, "order": "dataset", "inputs": "first"}


def test_a_steps_first_shard_is_read_before_it_is_given_and_the_others_as_they_are_asked_for() -> None:
    dataset = Noted()
    steps = steps_of(Job.make({**PREDICTION, "dataset": dataset}, "job"), dataset)
    assert dataset.read == []
    for number, step in enumerate(steps):
        shards = [shard.shard for shard in step.shards]
        assert (step.step, shards, step.whole.rows) == (number, [0, 1, 2], 6)
        for place, one in enumerate(step.loaded):
            assert dataset.read == list(range(number * 6 + place * 2 + 2))
            assert one.indices.tolist() == dataset.read[-2:] and one.shard == step.shards[place]


def test_with_a_quarantine_a_step_is_read_before_it_is_given_and_its_shards_are_without_bad_samples() -> None:
    dataset, kept = Noted(raises=[3, 8, 9]), list[tuple[int, int, list[int]]]()
    reference = Reference(0, item_form(Broken(12)[0]))
    quarantine = Quarantine(reference, lambda shard, bad: kept.append((shard.step, shard.shard, sorted(bad))))
    keys = {**PREDICTION, "dataset": dataset, "on_error": {"quarantine": 5}}
    found = []
    for step in steps_of(Job.make(keys, "job"), dataset, quarantine=quarantine):
        assert set(dataset.read) == set(range(step.step * 6 + 6))
        assert kept == [(0, 1, [3]), (1, 1, [8, 9])][: step.step + 1]
        loaded = list(step.loaded)
        assert [one.shard for one in loaded] == step.shards
        found += [one.indices.tolist() for one in loaded]
        assert [one.batch is None for one in loaded] == [not one.shard.rows for one in loaded]
    assert found == [[0, 1], [2], [4, 5], [6, 7], [], [10, 11]]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_an_error_of_a_read_names_its_step_and_shard_and_nothing_is_read_after_the_end(taken: int) -> None:
    dataset = Noted(raises=[4])
    steps = steps_of(Job.make({**PREDICTION, "dataset": dataset}, "job"), dataset)
    loaded = iter(next(steps).loaded)
    for _ in range(taken):
        next(loaded)
    if taken == 2:
        with pytest.raises(DataError, match=r"^step 0, shard 2: sample 4 of the dataset raised ValueError: no such"):
            next(loaded)
    steps.close()
    count = len(dataset.read)
    with suppress(Error):  # what was read is handed on, and nothing more
        list(loaded)
    assert len(dataset.read) == count
