"""`compile: true`: how many graphs torch makes of a model, and when DDP sums what they give."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compiler import told
from tests.support.group import run_group, weights_of
from tests.support.trainings import job_of

FORWARD, BACKWARD = "forward graph", "backward graph"


def trained(folder: Path, model: str = "in_two_buckets", **keys: Any) -> Path:
    """A compiled training of three steps; returns its folder, where each rank has told what its compiler did."""
    folder.mkdir()
    target = {"target": f"tests.support.compiler:{model}", "args": {"folder": str(folder)}}
    hooks = {"on_step": "tests.support.compiler:tell_step"}
    given = {"workers": 2, "shards": 2, "batch_size": 16, "max_steps": 3, "hooks": hooks, **keys}
    run_group(job_of(target, compile=True, **given), folder)
    return folder


@pytest.mark.slow
def test_a_bucket_is_summed_during_the_backward(tmp_path: Path) -> None:
    """torch cuts the graph where a bucket of DDP ends, also in the trial that looks for unused parameters."""
    folder = trained(tmp_path / "run")
    for rank in (0, 1):
        lines = told(folder, rank)
        assert (lines.count(FORWARD), lines.count(BACKWARD)) == (2, 2)
    lines = told(folder)
    assert lines[-7:] == ["forward", "forward", "backward", "sum", "backward", "sum", "step, 1 DDP"]
    assert [line for line in lines if "step" in line] == 3 * ["step, 1 DDP"], "the trial's DDP is gone"


@pytest.mark.full
@pytest.mark.slow
def test_a_bitwise_job_has_the_same_graphs_on_any_number_of_workers(tmp_path: Path) -> None:
    """Here a graph that is cut gives other bits."""
    one = trained(tmp_path / "one", workers=1, bitwise=True)
    for finds_unused in ("auto", True):
        two = trained(tmp_path / str(finds_unused), bitwise=True, find_unused_parameters=finds_unused)
        for lines in (told(one), told(two), told(two, 1)):
            assert (lines.count(FORWARD), lines.count(BACKWARD)) == (1, 1)
        got, expected = weights_of(two), weights_of(one)
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.full
@pytest.mark.slow
def test_every_block_of_fsdp_is_compiled(tmp_path: Path) -> None:
    lines = told(trained(tmp_path / "run", "numbered_blocks", strategy="fsdp", fsdp={"blocks": ["Numbered"]}))
    assert (lines.count(FORWARD), lines.count(BACKWARD)) == (10, 10)
