"""A group is gone once its worker leaves it, whatever has failed in it: that is how its peers hear of it."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dp_ray.engine import reduce
from dp_ray.engine.world import without_frames


class Group:
    """In the place of a process group."""


def test_a_sum_that_has_failed_in_its_thread_holds_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr(reduce, "tree_sum", fails)
    reducer: Any = reduce.TreeReducer.__new__(reduce.TreeReducer)
    reducer._group, reducer._thread, reducer._begun = Group(), ThreadPoolExecutor(1), []
    reducer._nodes, reducer._root = [[(0, 1)]], (0, 1)
    group = weakref.ref(reducer._group)

    def step(reducer: Any) -> None:
        flat = torch.zeros(4)
        for _ in range(2):  # nobody waits for the second one
            reducer._begun.append((reducer._begin_exchange(flat, [flat], [[flat]]), [flat]))
        reducer.close()
        list(reducer.summed())

    with pytest.raises(RuntimeError, match="closed by peer") as raised:
        step(reducer)
    without_frames(raised.value)
    del raised, reducer
    gc.collect()
    assert group() is None
