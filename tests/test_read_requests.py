"""What a worker's loader is asked to read: the samples of its own pieces, each at its position of the order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.job.samples import PIECES_AT_ONCE, POSITIONS_AT_ONCE, IndexLists
from dp_ray.plan.order import Order
from dp_ray.plan.split import Split, Work


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
    assert [(one.epoch, one.step, one.shard) for one in requests] == [(p.epoch, p.step, p.shard) for p in pieces]
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
