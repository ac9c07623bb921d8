"""Outputs that are lists with an entry for each row: what plain torch returned comes back from the files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow.dataset as pads
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dp_ray
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.outputs.files import outputs_sha256, prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import FilePlan, Split, Work
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tensors.ragged import without_lists
from tests.support.alone import predict_parts
from tests.support.builders import writer_of
from tests.support.chance import examples
from tests.support.group import StopsBefore, run_group
from tests.support.merging import begin, merge

HERE = "tests.outputs.test_ragged_outputs"
ROWS = 23


class Found(NamedTuple):
    boxes: Any
    more: Any


def same(value: Any, other: Any) -> bool:
    """Whether two nestings hold the same types, dtypes, shapes and bits, by plain torch and Python."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        value, other = value.numpy(), other.numpy()
    if isinstance(value, np.ndarray):
        return bool(value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes())
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(same, value, other))
    return bool(value == other)


def written(outputs: Sequence[Any], split: Split, workers: int, files: int, folder: Path) -> Storage:
    """The outputs of each row, written by several workers shard by shard, and merged."""
    run = Storage(str(folder))
    begin(run, files)
    for rank in range(workers):
        work = Work(split, workers, rank)
        with writer_of(run.child(PARTS), work.shards, FilePlan(files, split.total_steps)) as writer:
            for step, shards in work:
                for shard in shards:
                    of_shard = without_lists(list(outputs[shard.start : shard.stop]), shard.rows)
                    writer.on_shard(shard, np.arange(shard.start, shard.stop), of_shard)
                writer.on_step(step)
    merge(run, split, Order(split.rows, 0, 0, False))
    return run


DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def entries(draw: st.DrawFn) -> list[Any]:
    """The outputs of some rows: one nesting of leaves; each leaf has a dtype and a way to vary from row to row."""
    leaf = st.tuples(st.sampled_from(DTYPES), st.sampled_from(["scalar", "list", "inner", "any"]), st.booleans())
    nesting = draw(
        st.recursive(
            leaf.map(lambda drawn: ("leaf", *drawn)) | st.just(("constant", "a", None, None)),
            lambda inner: st.tuples(st.just("dict"), inner, inner) | st.tuples(st.just("pair"), inner, inner),
            max_leaves=4,
        ).filter(lambda drawn: "'leaf'" in repr(drawn))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    lengths = st.integers(0, 3)

    def entry(node: Any) -> Any:
        kind, first, second, third = (*node, None)[:4]
        if kind == "constant":
            return first
        if kind == "dict":
            return {"boxes": entry(first), "x.y": entry(second)}
        if kind == "pair":
            return Found(entry(first), (entry(second), None))
        shape = {
            "scalar": [],
            "list": [draw(lengths)],
            "inner": [draw(lengths), 2, 3],
            "any": draw(st.lists(lengths, max_size=3)),
        }[second]
        numbers = (torch.randn(shape, generator=generator) * 9).to(first)
        return numbers.numpy() if third else numbers

    return [entry(nesting) for _ in range(draw(st.integers(1, 12)))]


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(entries(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_what_rows_hold_comes_back_from_the_files(
    tmp_path_factory: pytest.TempPathFactory, outputs: list[Any], batch: int, shards: int, workers: int, files: int
) -> None:
    split = Split(len(outputs), batch, shards)
    folder = tmp_path_factory.mktemp("ragged")
    run = written(outputs, split, workers, min(files, split.total_steps), folder / "run")
    prove_outputs(run, len(outputs))
    merged = Merged.of(run)
    assert same(merged.read(), outputs)
    assert same([row for piece in merged.batches(batch) for row in piece], outputs)
    alone = written(outputs, split, 1, 1, folder / "alone")
    prove_outputs(alone, len(outputs))
    assert outputs_sha256(run) == outputs_sha256(alone)


def test_the_hash_tells_where_a_row_ends(tmp_path: Path) -> None:
    numbers = torch.arange(4.0)
    hashes = set()
    for at in (1, 2, 4):
        run = written([numbers[:at], numbers[at:]], Split(2, 2, 1), 1, 1, tmp_path / str(at))
        prove_outputs(run, 2)
        hashes.add(outputs_sha256(run))
    assert len(hashes) == 3


class Images(torch.utils.data.Dataset[Any]):
    """Pairs of an image, of any size, and a dict of boxes."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 4 + index % 5, 6 + index % 3, generator=generator)
        return image, {"boxes": torch.rand(index % 4, 4, generator=generator)}


def columns_of(items: list[Any]) -> Any:
    images, boxes = map(list, zip(*items, strict=True))
    return (images,), boxes


class Detector(nn.Module):
    """Boxes for each image: as many as its size and mean say, none in some."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        assert isinstance(images, list)
        return [self.of(image) for image in images]

    def of(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = image.flatten(1).t()[: image.shape[1] % 4]
        scores = pixels.sum(1).half()
        return {"boxes": self.head(pixels), "labels": torch.arange(len(pixels)), "scores": scores}


def keys(**more: Any) -> dict[str, Any]:
    made = {"model": f"{HERE}:Detector", "dataset": f"{HERE}:Images", "collate": f"{HERE}:columns_of"}
    return {**made, "inputs": "first", "batch_size": 7, "shards": 3, "outputs": {"ragged": True}, **more}


def expected() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Detector()
    with torch.inference_mode():
        return [
            {name: value.clone() for name, value in model.of(image).items()}
            for image, _ in map(Images().__getitem__, range(ROWS))
        ]


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "outputs").iterdir())}


@pytest.mark.full
@pytest.mark.slow
def test_a_detectors_boxes_are_lists_in_the_files_of_any_number_of_workers(tmp_path: Path) -> None:
    result = dp_ray.run(**keys(workers=0), storage=str(tmp_path), name="run", quiet=True)
    wanted = expected()
    assert same(
        result.outputs,
        [{**output, "boxes": got["boxes"]} for output, got in zip(wanted, result.outputs, strict=True)],
    )
    assert all(
        torch.allclose(output["boxes"], got["boxes"]) for output, got in zip(wanted, result.outputs, strict=True)
    )
    assert any(not len(output["boxes"]) for output in wanted), "images without boxes"
    assert same([row for batch in result.batches() for row in batch], result.outputs)
    for workers in (1, 2, 3):
        run_group(Job.make(keys(workers=workers), "job"), tmp_path / str(workers))
        prove_outputs(Storage(str(tmp_path / str(workers))), ROWS)
        assert files_of(tmp_path / str(workers)) == files_of(tmp_path / "run")
    folder = tmp_path / "run" / "outputs"
    first = pads.dataset(folder).to_table()
    assert [str(field.type) for field in first.schema][1:] == [
        "large_list<element: fixed_size_list<element: float>[4]>",
        "large_list<element: int64>",
        "large_list<element: halffloat>",
    ]
    assert first["boxes"].to_pylist() == [output["boxes"].tolist() for output in result.outputs]
    assert [len(label) for label in pd.read_parquet(folder)["labels"]] == [len(output["labels"]) for output in wanted]
    assert pl.read_parquet(folder)["boxes"].to_list() == first["boxes"].to_pylist()
    loaded = datasets.load_dataset("parquet", data_files=str(folder / "*.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"]["boxes"][:] == first["boxes"].to_pylist()


@pytest.mark.slow
def test_a_killed_prediction_of_boxes_ends_with_the_same_files(tmp_path: Path) -> None:
    job = Job.make(keys(workers=2), "job")
    run_group(job, tmp_path / "whole")
    predict_parts(job, tmp_path / "killed", StopsBefore(2))
    assert not list((tmp_path / "killed" / "outputs").iterdir())
    run_group(job, tmp_path / "killed")
    prove_outputs(Storage(str(tmp_path / "killed")), ROWS)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_boxes_are_kept_by_path_in_another_dtype_beside_what_is_carried(tmp_path: Path) -> None:
    outputs = {"ragged": True, "keep": ["boxes", "scores"], "dtype": "bfloat16", "file_bytes": 600}
    job = keys(workers=0, outputs=outputs)
    result = dp_ray.run(**job, storage=str(tmp_path), name="run", quiet=True)
    assert len(files_of(tmp_path / "run")) > 1
    whole = dp_ray.run(**keys(workers=0), storage=str(tmp_path), name="all", quiet=True).outputs
    wanted = [{name: output[name].bfloat16().float() for name in ("boxes", "scores")} for output in whole]
    assert {value.dtype for row in result.outputs for value in row.values()} == {torch.bfloat16}
    assert same([{name: value.float() for name, value in row.items()} for row in result.outputs], wanted)


def refused(outputs: Any, rows: int = 2) -> str:
    with pytest.raises(ModelError) as raised:
        without_lists(outputs, rows)
    return str(raised.value)


def test_entries_that_are_no_rows_or_unlike_each_other_are_told() -> None:
    floats, doubles = {"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(2, 4).double()}
    assert refused({"found": [floats]}) == (
        "output 'found' is a list of 1 for a shard of 2 rows: with outputs.ragged a list has an entry for each row; "
        "a tuple is taken as it is"
    )
    assert "output 'boxes' is torch.float64 in entry 1, torch.float32 in 0: give all rows the same" in refused(
        [floats, doubles]
    )
    assert "entry 1: output 'boxes' is nothing, that of entry 0 is a tensor or array: all" in refused([floats, {}])
    assert "output 'n' is float in entry 1, int in 0: give all rows the same" in refused([{"n": 1}, {"n": 2.0}])
    assert "entry 1: output 'n' is a list of 1, that of entry 0 is None" in refused(
        [{**floats, "n": None}, {**floats, "n": [2]}]
    )
    assert "is a list without tensors, texts and numbers, but [None, None]" in refused([None, None])


def test_a_list_without_the_key_is_told_how_to_be_one_of_rows(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"step 0, shard 0: .*; if a list has an entry for each row, set outputs.ragged"
    ):
        dp_ray.run(**keys(workers=0, outputs={}), storage=str(tmp_path), name="run", quiet=True)
