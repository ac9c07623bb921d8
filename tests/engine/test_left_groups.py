"""A group is gone once its worker leaves it, whatever has failed in it: that is how its peers hear of it."""

import gc
import weakref
from typing import Any

import pytest
import torch

from dp_ray.engine.sums import reduce, tree_sum
from dp_ray.engine.world import without_frames


class Group:
    """In the place of a process group."""


def test_a_sum_that_has_failed_in_its_thread_holds_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr(tree_sum, "tree_sum", fails)
    monkeypatch.setattr(tree_sum, "new_group", Group)
    exchange: Any = tree_sum.TreeExchange()
    reducer: Any = reduce.TreeReducer.__new__(reduce.TreeReducer)
    reducer.exchange, reducer._begun = exchange, []
    group = weakref.ref(exchange._group)

    def step(reducer: Any) -> None:
        flat = torch.zeros(4)
        for _ in range(2):  # nobody waits for the second one
            reducer._begun.append(reducer.exchange.begin(flat, [flat], [[(0, 1)]], (0, 1)))
        reducer.exchange.close()
        reducer.finish()

    with pytest.raises(RuntimeError, match="closed by peer") as raised:
        step(reducer)
    without_frames(raised.value)
    del raised, reducer, exchange
    gc.collect()
    assert group() is None
