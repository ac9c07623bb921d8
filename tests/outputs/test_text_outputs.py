"""Outputs that are texts, one for each row: what plain Python made comes back from the files of any workers.

And outputs that no file can hold, which are told.
"""

import dataclasses
import random
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.errors import ModelError
from dp_ray.job.job import Job
from dp_ray.messages import Note
from dp_ray.outputs.files import outputs_sha256
from dp_ray.report.run_data import output_samples
from dp_ray.storage import Storage
from tests.support.alone import predict_parts
from tests.support.group import StopsBefore
from tests.support.merging import merged

HERE = "tests.outputs.test_text_outputs"
ROWS = 19  # in batches of 7: the last one has 5
WORDS = ["", "cat", "naïve", "日本語", "\U0001f600", "a\nb\0c", "x" * 5000, '"quoted", with, commas']


def text_of(index: int) -> str:
    draw = random.Random(index)
    return " ".join(draw.choices(WORDS, k=draw.randint(0, 3)))


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


class Prompts(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"numbers": f"{index}"}


class BareTexts(Numbers):
    """Alone, or beside a target."""

    def __init__(self, is_pair: bool = False) -> None:
        self._is_pair = is_pair

    def __getitem__(self, index: int) -> Any:
        return (text_of(index), torch.tensor(index)) if self._is_pair else text_of(index)


class Lengths(nn.Module):
    def forward(self, texts: Any) -> Any:
        return torch.tensor([len(text) for text in texts])


class Generator(nn.Module):
    """Texts beside numbers; names of classes, as many as shards have rows; texts of numpy."""

    def forward(self, numbers: Any) -> Any:
        texts = [text_of(int(number)) for number in numbers]
        return {
            "twice": torch.as_tensor([float(number) * 2 for number in numbers]),
            "text": texts,
            "names": ["cat", "dog"],
            "version": ["v1"],
            "beams": [texts, [text.upper() for text in texts]],
            "objects": np.array(texts, dtype=object),
            "label": np.array(["cat", "a long name"])[[int(number) % 2 for number in numbers]],
        }


class OnlyTexts(Generator):
    def forward(self, numbers: Any) -> Any:
        return super().forward(numbers)["text"]


class Entries(Generator):
    """A dict for each row, with a text and numbers of Python."""

    def forward(self, numbers: Any) -> Any:
        return [entry_of(int(number)) for number in numbers]


def entry_of(index: int) -> dict[str, Any]:
    return {
        "text": text_of(index),
        "score": index / 3,
        "count": np.int64(-index).item(),
        "is_even": index % 2 == 0,
        "best": [text_of(index), "second"],
        "of": (torch.full((index % 3,), index), None),
    }


def keys(model: type[nn.Module], **more: Any) -> dict[str, Any]:
    made = {"model": f"{HERE}:{model.__name__}", "dataset": f"{HERE}:Numbers", "batch_size": 7, "shards": 4}
    return {**made, **more}  # shards of 2, 2, 2, 1 and of 2, 2, 1, 0 rows


def run(folder: Path, **given: Any) -> Any:
    return dp_ray.run(**given, workers=0, storage=str(folder), name="run", quiet=True)


def joined(pieces: Iterable[Any]) -> Any:
    return [item for piece in pieces for item in piece]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "outputs").iterdir())}


@pytest.mark.parametrize(
    "more", [{}, {"dataset": f"{HERE}:Prompts", "inputs": ["numbers"]}], ids=["numbers", "texts"]
)
def test_texts_come_back_as_they_were(tmp_path: Path, more: dict[str, Any]) -> None:
    result = run(tmp_path, **keys(Generator, **more))
    expected = Generator()([float(index) for index in range(ROWS)])
    found = result.outputs
    assert torch.equal(found.pop("twice"), expected.pop("twice"))
    label = found.pop("label")
    assert found.pop("objects") == expected.pop("objects").tolist()
    assert label.dtype.kind == "U" and label.tolist() == expected.pop("label").tolist()
    assert found == expected
    assert joined(batch["text"] for batch in result.batches()) == expected["text"]
    assert [len(batch["label"]) for batch in result.batches()] == [7, 7, 5]
    folder = tmp_path / "run" / "outputs"
    assert pd.read_parquet(folder)["text"].tolist() == expected["text"]
    assert pl.read_parquet(folder)["beams.1"].to_list() == expected["beams"][1]
    assert output_samples(Storage(str(tmp_path / "run")))[1]["outputs"]["label"] == "a long name"
    assert len({str(shape.output_size) for shape in result.shapes}) == 2  # of the rows of a shard alone
    assert dp_ray.load(tmp_path / "run").outputs["text"] == expected["text"]


@pytest.mark.parametrize("model", [Generator, OnlyTexts, Entries])
def test_the_files_are_the_same_on_any_number_of_workers_and_after_a_kill(
    tmp_path: Path, model: type[nn.Module]
) -> None:
    given = keys(model, outputs={"ragged": model is Entries, "keep": ["text", "best.*", "count"]})
    given = given if model is Entries else keys(model, outputs={"keep": ["text", "names", "label"]})
    given = keys(model) if model is OnlyTexts else given
    result = run(tmp_path, **given)
    for workers, stop in ((1, None), (2, None), (3, None), (2, 1)):
        job, folder = Job.make({**given, "workers": workers}, "job"), tmp_path / f"{workers}-{stop}"
        if stop is not None:
            predict_parts(job, folder, StopsBefore(stop))
            job = Job.make({**given, "workers": 3}, "job")
        predict_parts(job, folder)
        merged(job, folder, ROWS)
        assert files_of(folder) == files_of(tmp_path / "run")
        assert outputs_sha256(Storage(str(folder))) == result.outputs_sha256


@pytest.mark.parametrize("dataset", ["Numbers", "Prompts"])
def test_a_worker_whose_shards_have_one_row_finds_what_has_rows(tmp_path: Path, dataset: str) -> None:
    """A list of one text is a row's, or the same for all rows."""
    given = keys(Generator, dataset=f"{HERE}:{dataset}", batch_size=3, shards=2)  # shards of 2 and 1, at last of 1
    given = given if dataset == "Numbers" else {**given, "inputs": ["numbers"]}
    result = run(tmp_path, **given)
    expected = Generator()([float(index) for index in range(ROWS)])
    assert (result.outputs["version"], result.outputs["text"]) == (["v1"], expected["text"])
    for stop in (None, 6):  # of 7 steps: what goes on has one row alone
        job, folder = Job.make({**given, "workers": 2}, "job"), tmp_path / str(stop)
        if stop is not None:
            predict_parts(job, folder, StopsBefore(stop))
        predict_parts(job, folder)
        merged(job, folder, ROWS)
        assert files_of(folder) == files_of(tmp_path / "run")


@pytest.mark.parametrize("is_pair", [False, True], ids=["texts", "pairs"])
def test_texts_are_one_argument_of_the_model(tmp_path: Path, is_pair: bool) -> None:
    """Also two of them, which are no pair, in a list or, beside a target, in a tuple."""
    dataset = {"target": f"{HERE}:BareTexts", "args": {"is_pair": is_pair}}
    result = run(tmp_path, model=f"{HERE}:Lengths", dataset=dataset, batch_size=7, shards=4)
    assert result.outputs.tolist() == [len(text_of(index)) for index in range(ROWS)]


def test_the_hash_tells_texts_apart(tmp_path: Path) -> None:
    hashes = {
        run(tmp_path / str(at), **{**keys(OnlyTexts), "model": Fixed(texts), "dataset": [0, 1]}).outputs_sha256
        for at, texts in enumerate((["ab", ""], ["a", "b"], ["", "ab"]))
    }
    assert len(hashes) == 3


class Fixed(nn.Module):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self, numbers: torch.Tensor) -> Any:
        return [self.values[int(number)] for number in numbers]


def test_an_entry_may_hold_texts_and_numbers_of_python(tmp_path: Path) -> None:
    result = run(tmp_path, **keys(Entries, outputs={"ragged": True, "dtype": "float16"}))
    for index, (found, expected) in enumerate(zip(result.outputs, map(entry_of, range(ROWS)), strict=True)):
        assert torch.equal(found.pop("of")[0], expected.pop("of")[0])
        assert found == expected and list(map(type, found.values())) == list(map(type, expected.values())), index
    frame = pd.read_parquet(tmp_path / "run" / "outputs")
    assert frame["count"].tolist() == [-index for index in range(ROWS)]
    assert frame["best.1"].tolist() == ["second"] * ROWS


WRONG: dict[str, tuple[Any, str]] = {
    "ints": (
        [[1], [2], [3], [4]],
        r"output is a list with an entry for each row: return a tensor, a list of texts, or",
    ),
    "dicts": (
        [{"a": 1}] * 4,
        r"output is a list with an entry for each row: .*, or a list, with outputs.ragged: true",
    ),
    "surrogate": (["a", "\ud800", "c", "d"], r"step 0, shard 0: output 'output' holds what no column of string can"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_values_of_rows_are_told_what_to_be(tmp_path: Path, name: str) -> None:
    values, says = WRONG[name]
    with pytest.raises(ModelError, match=says):
        run(tmp_path, model=Fixed(values), dataset=range(4), batch_size=4, shards=2)


def test_texts_that_do_not_follow_the_rows_are_told(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, numbers: torch.Tensor) -> Any:
            return {"x": numbers, "texts": ["a"] * (2 * len(numbers))}

    with pytest.raises(
        ModelError,
        match=r"output 'texts' is a list of 8 texts with 4 rows, and of 6 with 3: return a list of texts, one for",
    ):
        run(tmp_path, model=Flat(), dataset=range(7), batch_size=7, shards=2)


def test_where_nothing_can_be_tried_lengths_tell(tmp_path: Path) -> None:
    class OfTwo(nn.Module):
        def forward(self, numbers: torch.Tensor) -> Any:
            if len(numbers) != 2:
                raise ValueError("takes 2 rows")
            return {"texts": [str(int(number)) for number in numbers], "names": ["a", "b", "c"]}

    told: list[Any] = predict_parts(
        Job.make({"model": OfTwo(), "dataset": range(8), "batch_size": 4, "shards": 2, "workers": 1}, "job"), tmp_path
    )
    assert any("only sizes tell" in message.text for message in told if isinstance(message, Note))
    job = Job.make({"model": OfTwo(), "dataset": range(8), "batch_size": 4, "shards": 2}, "job")
    assert merged(job, tmp_path, 8).read() == {"texts": list("01234567"), "names": ["a", "b", "c"]}


NO_ROWS = {
    "coo": r"is a tensor of the layout torch.sparse_coo: return tensor.to_dense\(\)",
    "csr": r"is a tensor of the layout torch.sparse_csr: return tensor.to_dense\(\)",
    "nested": r"is a nested tensor: return list\(tensor.unbind\(\)\) with outputs.ragged: true",
    "jagged": r"is a nested tensor: return list\(tensor.unbind\(\)\) with outputs.ragged: true",
    "quantized": r"is a tensor of torch.qint8: return tensor.dequantize\(\)",
}


class NoRows(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, numbers: torch.Tensor) -> Any:
        rows = numbers[:, None].float().expand(-1, 2)
        made: dict[str, Any] = {
            "coo": rows.to_sparse,
            "csr": rows.to_sparse_csr,
            "nested": lambda: torch.nested.nested_tensor(list(rows)),
            "jagged": lambda: torch.nested.nested_tensor(list(rows), layout=torch.jagged),
            "quantized": lambda: torch.quantize_per_tensor(rows, 0.1, 0, torch.qint8),
        }
        return {"x": numbers, "found": {"inner": made[self.kind]()}}


@pytest.mark.filterwarnings("ignore")  # torch's of beta layouts
@pytest.mark.parametrize("kind", NO_ROWS)
def test_a_tensor_without_rows_of_numbers_is_named_unless_it_is_left_out(tmp_path: Path, kind: str) -> None:
    given: Any = {"model": NoRows(kind), "dataset": range(4), "batch_size": 4, "shards": 2}
    with pytest.raises(ModelError, match=f"step 0, shard 0: output 'found.inner' {NO_ROWS[kind]}"):
        run(tmp_path / "all", **given)
    with pytest.raises(ModelError, match=f"output 'found.inner' {NO_ROWS[kind]}"):
        run(tmp_path / "dtype", **given, outputs={"dtype": "float16"})
    assert run(tmp_path / "kept", **given, outputs={"keep": ["x"]}).outputs["x"].tolist() == [0, 1, 2, 3]


class Unknown(NamedTuple):
    numbers: Any
    text: Any


@dataclasses.dataclass
class OfAScript:
    """A class of a module that the worker which merges has not imported, as that of a script is."""

    found: Any
    inner: Any


class Scripted(Generator):
    def forward(self, numbers: torch.Tensor) -> Any:
        return OfAScript(super().forward(numbers)["text"], Unknown(numbers, ("a",)))


def test_a_class_of_the_script_is_itself_wherever_the_outputs_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (OfAScript, Unknown):
        monkeypatch.setattr(cls, "__module__", "script_of_test")
    result = run(tmp_path, model=Scripted(), dataset=range(ROWS), batch_size=7, shards=4)
    assert type(result.outputs) is dict
    script: Any = types.ModuleType("script_of_test")
    script.OfAScript, script.Unknown = OfAScript, Unknown
    monkeypatch.setitem(sys.modules, "script_of_test", script)
    found = dp_ray.load(tmp_path / "run").outputs
    assert type(found) is OfAScript and type(found.inner) is Unknown
    assert found.found == [text_of(index) for index in range(ROWS)]
