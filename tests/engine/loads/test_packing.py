"""Packed datasets against lists, and trainings on them against the rows one by one: on any workers, from anywhere."""

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

import dp_ray
from dp_ray.data import Parquet, Stream, Tokens
from dp_ray.driver.planning import plan_job
from dp_ray.engine.loads.loading import seeded_dataset
from dp_ray.engine.loads.packing import PackedDataset, packings, rows_of_window
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import Pack
from dp_ray.job.samples import order_of
from dp_ray.plan import packing
from dp_ray.plan.order import Order
from jobs.gpt import Gpt
from tests.support.group import StopsBefore, history_of, run_group, weights_of
from tests.support.trainings import initial

Rows = Sequence[Sequence[int]]
HERE = "tests.engine.loads.test_packing"
SIZES = [5, 1, 9, 0, 3, 12, 7, 2, 2, 11, 4, 6, 8, 1, 10] * 3
KEYS = ("input_ids", "position_ids", "document_ids")

some_rows = st.lists(st.lists(st.integers(0, 250), max_size=9), min_size=1, max_size=12).filter(any)


class Lists(Dataset[dict[str, Any]]):
    """Rows of tokens, of which some things are as a test wants them."""

    def __init__(self, rows: Rows, labels: Rows | None = None, **more: Any) -> None:
        self.rows = rows
        self.labels = labels
        self.more = more

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.more.get("raises", ()):
            raise ValueError("no such text")
        of_labels = {} if self.labels is None else {"labels": self.labels[index]}
        return {"input_ids": self.rows[index], **of_labels, "id": index}


class Texts(Lists):
    """Rows of drawn tokens, the same in each process."""

    def __init__(self, raises: Sequence[int] = ()) -> None:
        generator = np.random.default_rng(0)
        super().__init__([generator.integers(0, 250, size).tolist() for size in SIZES], raises=raises)


def gpt() -> Gpt:
    return Gpt(width=16, depth=2, heads=2, length=16)


def job_of(**keys: Any) -> Job:
    common: dict[str, Any] = {
        "task": "train",
        "model": f"{HERE}:gpt",
        "dataset": f"{HERE}:Texts",
        "loss": "torch.nn:CrossEntropyLoss",
    }
    common |= {"pack": {"length": 16, "how": "cut"}, "inputs": list(KEYS), "target": "labels", "call": "kwargs"}
    sgd = {"target": "torch.optim:SGD", "args": {"lr": 0.5}}
    return Job.make({**common, "optimizer": sgd, "batch_size": 5, "shuffle": True, "epochs": 2, **keys}, "job")


def windows_by_lists(rows: Rows, labels: Rows | None, parts: Sequence[Any], length: int) -> dict[str, list[int]]:
    """The definition of a window, of its parts (row, start, stop)."""
    of = rows if labels is None else labels
    found: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "document_ids": []}
    for row, start, stop in parts:
        found["input_ids"] += rows[row][start:stop]
        found["labels"] += [of[row][at + 1] if at + 1 < len(rows[row]) else -100 for at in range(start, stop)]
        found["position_ids"] += range(stop - start)
        found["document_ids"] += [row] * (stop - start)
    rest = length - len(found["input_ids"])
    for key, fill in (("input_ids", 0), ("labels", -100), ("document_ids", -1)):
        found[key] += [fill] * rest
    found["position_ids"] += range(rest)
    return found


@settings(deadline=None)
@given(rows=some_rows, more=st.integers(0, 9), how=st.sampled_from(["cut", "whole"]), data=st.data())
def test_windows_are_those_of_lists(rows: list[list[int]], more: int, how: Any, data: st.DataObject) -> None:
    length = max(2, more, max(map(len, rows)) + more if how == "whole" else 0)
    has_labels = data.draw(st.booleans())
    labels = [[-100 if token % 3 else token for token in row] for row in rows] if has_labels else None
    fields = ["input_ids", "labels"] if has_labels else ["input_ids"]
    dataset = PackedDataset(Lists(rows, labels), Pack(length=length, how=how, fields=fields))
    windows = [dataset[number] for number in range(len(dataset))]
    for number, window in enumerate(windows):
        expected = windows_by_lists(rows, labels, dataset.parts(number), length)
        assert {key: value.tolist() for key, value in window.items()} == expected
        assert all(value.dtype == torch.int64 for value in window.values())
    by_documents: dict[int, list[int]] = {}
    for window in windows:  # no token is lost, and none is there twice
        for row, token in zip(window["document_ids"].tolist(), window["input_ids"].tolist(), strict=True):
            by_documents.setdefault(row, []).append(token)
    by_documents.pop(-1, None)
    assert by_documents == {number: row for number, row in enumerate(rows) if row}
    together = dataset.__getitems__([*range(len(dataset))][::-1])
    assert [each["labels"].tolist() for each in together[::-1]] == [each["labels"].tolist() for each in windows]


@pytest.mark.parametrize(
    ("kind", "values", "tensors"),
    [
        (np.float32, "wide", torch.float32),  # numpy's arrays keep their type
        (np.float16, "half", torch.float16),
        (None, "listed", torch.float32),  # a list of floats is float32, as in the default collate of a job
        (np.bool_, "mask", torch.bool),
    ],
)
def test_values_have_one_type_in_all_windows(kind: Any, values: str, tensors: torch.dtype) -> None:
    rows = [[1, 2, 3], [4], [5] * 10]
    given = [[token % 2 if kind is np.bool_ else token / 4 for token in row] for row in rows]
    kept: list[Any] = [row if kind is None else np.array(row, kind) for row in given]
    items: Any = [{"input_ids": row, values: value} for row, value in zip(rows, kept, strict=True)]
    dataset = PackedDataset(items, Pack(length=4, how="cut", fields=["input_ids", values]))
    windows = dataset.__getitems__(range(len(dataset)))
    assert {window[values].dtype for window in windows} == {tensors}
    assert torch.cat([window[values] for window in windows])[:14].tolist() == [
        number for row in given for number in row
    ]
    items = [{"input_ids": row, "labels": value} for row, value in zip(rows, kept, strict=True)]
    dataset = PackedDataset(items, Pack(length=4, how="cut", fields=["input_ids", "labels"]))
    windows = dataset.__getitems__(range(len(dataset)))
    of_labels = torch.int64 if kind is np.bool_ else tensors
    assert {window["labels"].dtype for window in windows} == {of_labels}
    expected = [number for row in given for number in [*row[1:], -100]] + [-100, -100]
    assert torch.cat([window["labels"] for window in windows]).tolist() == expected


@pytest.mark.parametrize("how", ["cut", "whole"])
def test_all_sources_give_the_same_windows(how: Any, tmp_path: Path) -> None:
    rows = Texts().rows
    pq.write_table(
        pa.table({"input_ids": pa.array(rows, pa.list_(pa.uint16()))}), tmp_path / "a.parquet", row_group_size=4
    )
    datasets = pytest.importorskip("datasets")
    of_datasets = datasets.Dataset.from_dict({"input_ids": rows})
    of_datasets.save_to_disk(tmp_path / "saved")
    sources: list[Any] = [Lists(rows), of_datasets, Parquet(tmp_path / "a.parquet"), Tokens(tmp_path / "a.parquet")]
    sources += [Tokens(tmp_path / "saved"), datasets.load_from_disk(tmp_path / "saved")]
    expected, *others = [PackedDataset(source, Pack(length=16, how=how)) for source in sources]
    for other in [*others, pickle.loads(pickle.dumps(others[2]))]:
        assert len(other) == len(expected) and other.description == expected.description
        for mine, its in zip(
            expected.__getitems__(range(len(other))), other.__getitems__(range(len(other))), strict=True
        ):
            assert mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


def test_the_windows_of_each_block_are_counted_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": Texts().rows}), tmp_path / "a.parquet")
    before = PackedDataset(Parquet(tmp_path / "a.parquet"), Pack(length=16, how="whole"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "best_fit", None)  # nothing is packed until a window is asked for
        again = PackedDataset(Parquet(tmp_path / "a.parquet"), Pack(length=16, how="whole"))
    assert [again.parts(at) for at in range(len(again))] == [before.parts(at) for at in range(len(before))]
    longer = PackedDataset(Parquet(tmp_path / "a.parquet"), Pack(length=24, how="whole"))
    assert len(longer) < len(before)


@pytest.mark.parametrize("how", ["cut", "whole"])
def test_a_window_has_the_loss_of_its_rows_one_by_one(how: Any) -> None:
    """Attention, positions and labels stay within each part: plain torch, with a causal mask alone, is the oracle."""
    rows, model = Texts().rows, initial(gpt).double()
    dataset = PackedDataset(Lists(rows), Pack(length=16, how=how))
    for number in range(len(dataset)):
        window = {key: value[None] for key, value in dataset[number].items()}
        logits = model(*(window[key] for key in KEYS))
        total = nn.functional.cross_entropy(logits, window["labels"], reduction="sum")
        alone = torch.zeros((), dtype=torch.float64)
        for row, start, stop in dataset.parts(number):
            tokens = torch.tensor(rows[row][start:stop])[None]
            after = torch.tensor(rows[row][start + 1 : stop + 1])[None]
            if after.numel():
                places = torch.arange(tokens.shape[1])[None]
                seen = model(tokens, places, torch.zeros_like(tokens))[:, :, : after.shape[1]]
                alone = alone + nn.functional.cross_entropy(seen, after, reduction="sum")
        assert total.item() == pytest.approx(alone.item(), rel=1e-12)


def plain_losses(how: Any, epochs: int = 2) -> list[float]:
    """The losses of the training by plain torch, of whole batches of windows made by lists."""
    rows, model = Texts().rows, initial(gpt)
    dataset = PackedDataset(Lists(rows), Pack(length=16, how=how))
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for epoch in range(epochs):
        order = [Order(len(dataset), 0, epoch)[at] for at in range(len(dataset))]
        for at in range(0, len(order), 5):
            made = [windows_by_lists(rows, None, dataset.parts(number), 16) for number in order[at : at + 5]]
            batch = {key: torch.tensor([each[key] for each in made]) for key in made[0]}
            logits = model(*(batch[key] for key in KEYS))
            loss = nn.functional.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "whole"])
def test_a_training_is_that_of_plain_torch_on_any_workers(how: Any, tmp_path: Path) -> None:
    losses, found = plain_losses(how), []
    for workers in (1, 2, 3, 5):
        folder = tmp_path / str(workers)
        pack = {"length": 16, "how": how}
        run_group(job_of(pack=pack, workers=workers, shards=5, bitwise=True), folder)
        found.append((weights_of(folder), history_of(folder)))
    first, *others = found
    assert [row["loss"] for row in first[1]] == pytest.approx(losses, rel=1e-4)
    for weights, history in others:
        assert history == first[1]
        assert all(torch.equal(weights[name], first[0][name]) for name in weights)


@pytest.mark.full(but=["blocks"])
@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "blocks"])
def test_a_training_goes_on_anywhere_with_another_number_of_workers(
    shuffle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"shuffle": shuffle, "shards": 4, "bitwise": True, "checkpoint": {"every_steps": 1}}
    keys |= {"pack": {"length": 16, "how": "whole"}}
    run_group(job_of(workers=2, **keys), tmp_path / "whole")
    steps = len(history_of(tmp_path / "whole"))
    run_group(job_of(workers=1, **keys), tmp_path / "parts", StopsBefore(1))
    run_group(job_of(workers=4, **keys), tmp_path / "parts", StopsBefore(steps // 2 + 1))
    run_group(job_of(workers=3, **keys), tmp_path / "parts", StopsBefore(steps - 1))
    run_group(job_of(workers=2, **keys), tmp_path / "parts")
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


@pytest.mark.full(but=["0"])
@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_blocks_of_files_are_read_for_their_windows_alone(processes: int, tmp_path: Path) -> None:
    """A training on two workers, by blocks, from Parquet: the same bits as from lists."""
    rows = [*Texts().rows] * 60
    pq.write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet", row_group_size=100)
    found: list[Any] = []
    for data, more in (
        ({"target": "dp_ray.data:Parquet", "args": {"paths": str(tmp_path / "a.parquet")}}, {"processes": processes}),
        ({"target": f"{HERE}:Lists", "args": {"rows": rows}}, {}),
    ):
        folder = tmp_path / f"run-{len(found)}"
        keys = {"dataset": data, "loader": more, "shuffle": {"window_blocks": 2}, "batch_size": 200, "epochs": 1}
        run_group(job_of(**keys, workers=2, shards=4, bitwise=True, pack={"length": 16, "how": "cut"}), folder)
        found.append(history_of(folder))
    assert found[0] == found[1] and len(found[0]) > 3


def test_the_plan_tells_the_padding(tmp_path: Path) -> None:
    plan = plan_job(job_of(storage=str(tmp_path), workers=0, shuffle=False))
    windows = math.ceil(sum(SIZES) / 16)
    assert plan.split.rows == windows
    (told,) = plan.packed
    batches = [SIZES[at : at + 5] for at in range(0, len(SIZES), 5)]
    padded = 1 - sum(SIZES) / sum(5 * max(each) for each in batches)
    assert (told.rows, told.tokens, told.windows, told.length) == (len(SIZES), sum(SIZES), windows, 16)
    assert told.padding_before == pytest.approx(padded)
    assert told.empty == pytest.approx(1 - sum(SIZES) / (16 * windows))
    text = f"dataset: 45 rows of {sum(SIZES)} tokens are packed into {windows} windows of 16: "
    assert str(told).startswith(text) and f"would be {100 * padded:.1f} % padding" in str(told)
    assert json.loads(json.dumps(plan.to_json()))["packed"][0]["windows"] == windows


def test_an_evaluation_packs_its_dataset_too(tmp_path: Path) -> None:
    keys = {"eval": {"dataset": f"{HERE}:Texts"}, "workers": 0, "storage": str(tmp_path), "epochs": 1}
    result = dp_ray.run(job_of(**keys), quiet=True)
    assert math.isfinite(result.metrics["eval_loss"])
    page = (Path(result.run_dir) / "report.html").read_text()
    assert "tokens are packed into" in page, "the page has the plan"
    assert [own.key for own in plan_job(job_of(**{**keys, "storage": str(tmp_path / "other")})).packed] == [
        "dataset",
        "eval.dataset",
    ]


def test_rows_have_their_predictions_by_their_documents(tmp_path: Path) -> None:
    keys = {"outputs": {"carry": ["document_ids"], "after": f"{HERE}:best"}, "workers": 0, "shards": 3}
    result = dp_ray.run(job_of(task="predict", storage=str(tmp_path), order="dataset", **keys), quiet=True)
    found: dict[int, list[int]] = {}
    table = pq.read_table(next(result.outputs_dir.glob("*.parquet"))) if hasattr(result, "outputs_dir") else None
    carried = result.carried["document_ids"] if table is None else table.column("document_ids").to_pylist()
    for documents, tokens in zip(carried, result.outputs.tolist(), strict=True):
        for row, token in zip(documents, tokens, strict=True):
            found.setdefault(row, []).append(token)
    assert {row: len(tokens) for row, tokens in found.items() if row >= 0} == {
        row: size for row, size in enumerate(SIZES) if size
    }


def best(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1)


def test_a_bad_row_sets_its_window_aside_and_is_named(tmp_path: Path) -> None:
    data = {"target": f"{HERE}:Raising", "args": {"raises": [6]}}
    keys = {"dataset": data, "on_error": {"quarantine": 9}, "workers": 0, "storage": str(tmp_path), "epochs": 1}
    result = dp_ray.run(job_of(**keys, shuffle=False), quiet=True)
    dataset = PackedDataset(Texts(), Pack(length=16, how="cut"))
    bad = [number for number in range(len(dataset)) if any(part.row == 6 for part in dataset.parts(number))]
    records = pq.read_table(Path(result.run_dir) / "quarantine.parquet").to_pylist()
    assert sorted(record["sample_index"] for record in records) == bad
    says = "sample 6 of the rows of dataset raised ValueError: no such text (a row of a window)"
    assert {(record["message"], record["type"]) for record in records} == {(says, "ValueError")}


class Raising(Texts):
    """Rows of which some raise, but whose lengths are known."""

    def lengths(self, field: str) -> list[int]:
        return SIZES


def test_a_replay_tells_the_rows_of_a_window(tmp_path: Path) -> None:
    result = dp_ray.run(job_of(workers=0, storage=str(tmp_path), epochs=1), quiet=True)
    from tests.support.replays import replayed

    again = replayed(result.run_dir, 1)
    dataset = PackedDataset(Texts(), Pack(length=16, how="cut"))
    assert again.loss == pytest.approx(result.history[1]["loss"])
    for row in again.rows:
        assert row.sample is not None and list(row.parts) == [tuple(part) for part in dataset.parts(row.sample)]
        assert row.to_json()["parts"] == [list(part) for part in row.parts]
    assert any(line.startswith(f"sample {again.rows[0].sample} is packed of ") for line in again.lines())


def mixed(**more: Any) -> dict[str, Any]:
    lists, texts = {"target": f"{HERE}:Lists", "args": {"rows": [[7] * 40, [8] * 30]}}, f"{HERE}:Texts"
    weights = [{"from": 0, "a": "1/4", "b": "3/4"}, {"from": 20, "a": "1/2", "b": "1/2"}]
    args = {"sources": {"a": lists, "b": texts}, "weights": weights, "stop": {"rows": 40}, **more}
    return {"target": "dp_ray.data:Mix", "args": args}


def test_the_sources_of_a_mixture_are_packed_each_by_itself() -> None:
    job = job_of(dataset=mixed(fields=["input_ids"]), shuffle=False)
    dataset = seeded_dataset(job)
    assert [(own.name, len(own)) for own in packings(dataset)] == [("dataset.a", 5), ("dataset.b", 16)]
    order = order_of(job, dataset).indices(0, 40).tolist()
    of_sources = [dataset.locate(sample) for sample in order]
    assert [name for name, _, _ in of_sources].count("a") == 20 // 4 + 20 // 2
    for sample, (name, _, index) in zip(order, of_sources, strict=True):
        assert rows_of_window(dataset, sample) == dataset.sources[name].parts(index)
        assert torch.equal(dataset[sample]["input_ids"], dataset.sources[name][index]["input_ids"])


@pytest.mark.slow
def test_a_training_on_a_packed_mixture_is_the_same_on_any_workers(tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        job = job_of(dataset=mixed(), workers=workers, shards=3, bitwise=True, batch_size=8)
        run_group(job, tmp_path / str(workers))
        found.append(history_of(tmp_path / str(workers)))
    assert found[0] == found[1] and len(found[0]) == 10
    assert all({"loss_of_a", "loss_of_b"} <= row.keys() for row in found[0])


@pytest.mark.full(but=["True"])
@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
def test_a_mixture_of_tokens_goes_on_with_another_number_of_workers(packs: bool, tmp_path: Path) -> None:
    sources = {}
    for name, rows in (("a", Texts().rows), ("b", [[5] * 30, [6] * 50])):
        pq.write_table(pa.table({"input_ids": rows}), tmp_path / f"{name}.parquet")
        args = {"paths": str(tmp_path / f"{name}.parquet"), **({} if packs else {"length": 16})}
        sources[name] = {"target": "dp_ray.data:Tokens", "args": args}
    data = mixed(sources=sources, weights={"a": "2/3", "b": "1/3"}, stop="all")
    keys: dict[str, Any] = {"dataset": data, "shards": 3, "bitwise": True, "checkpoint": {"every_steps": 1}}
    if not packs:
        keys |= {"pack": None, "model": f"{HERE}:Plain", "inputs": ["input_ids"], "call": "auto"}
    run_group(job_of(workers=2, **keys), tmp_path / "whole")
    run_group(job_of(workers=3, **keys), tmp_path / "parts", StopsBefore(2))
    run_group(job_of(workers=1, **keys), tmp_path / "parts", StopsBefore(5))
    run_group(job_of(workers=2, **keys), tmp_path / "parts")
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


class Plain(nn.Module):
    """Tokens to logits, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.table(input_ids).transpose(1, 2)
        return logits


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "long": (Lists([[1], [1, 2, 3]]), {}, "row 1 of dataset has 3 tokens, and pack.length is 2; with how: whole"),
    "labels": (
        Lists([[1], [1, 2]], [[1], [1]]),
        {"fields": ["input_ids", "labels"]},
        "row 1 of dataset: 'labels' has 1 values for 2 tokens",
    ),
    "no field": (Lists([[1]]), {"fields": ["input_id"]}, "row 0 of dataset: there is no 'input_id'; did you mean"),
    "number": (Lists([[1]]), {"fields": ["id"]}, r"row 0 of dataset: 'id' must be a list with a number for each tok"),
    "text": (Lists([["a"]]), {}, r"row 0 of dataset: 'input_ids' must be a list with a number for each token"),  # type: ignore[list-item]
    "a pair": (
        [([1], 2)],
        {},
        "row 0 of dataset: 'input_ids': pack.fields names keys of an item, .* got a tuple of 2",
    ),
    "bfloat16": (
        [{"input_ids": [1], "weights": torch.ones(1, dtype=torch.bfloat16)}],
        {"fields": ["input_ids", "weights"]},
        "row 0 of dataset: 'weights': .* Got unsupported ScalarType BFloat16",
    ),
    "above int64": (
        [{"input_ids": np.array(row, np.uint64)} for row in ([1], [1, 2**63])],
        {},
        "row 1 of dataset: number 1 of 'input_ids' is 9223372036854775808, which int64 cannot hold",
    ),
    "empty": (Lists([[], []]), {}, "dataset: has no tokens: 'input_ids' is empty in all of its 2 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_packed_are_named(case: str) -> None:
    dataset, keys, says = REFUSED[case]
    with pytest.raises(DataError, match=says):
        list(PackedDataset(dataset, Pack(**{"length": 2, "how": "whole", **keys})))


def test_a_row_that_cannot_be_read_for_its_length_is_named() -> None:
    with pytest.raises(DataError, match="sample 2 of the rows of dataset raised ValueError: no such text"):
        PackedDataset(Lists([[1], [2], [3], [4]], raises=[2]), Pack(length=2, how="cut"))


def test_lengths_must_be_numbers() -> None:
    class Told(Lists):
        def lengths(self, field: str) -> Any:
            return self.more["lengths"]

    for lengths in ([1.5, 2], [1], ["a", "b"], [-1, 2], [[1], [2]]):
        with pytest.raises(
            DataError, match=r"lengths\('input_ids'\) must give one whole number from 0 up for each of the 2"
        ):
            PackedDataset(Told([[1], [2]], lengths=lengths), Pack(length=2, how="cut"))
    with pytest.raises(DataError, match=r"dataset: lengths\('input_ids'\) raised KeyError"):
        PackedDataset(Told([[1], [2]]), Pack(length=2, how="cut"))
    with pytest.raises(DataError, match="row 1 of dataset: has 1 tokens now, and had 2 when the rows were packed"):
        PackedDataset(Told([[1], [2]], lengths=[1, 2]), Pack(length=3, how="cut"))[0]


def test_a_long_row_of_a_file_is_named_with_its_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1], [1, 2, 3]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1 of dataset \(row 1 of .*a\.parquet, counted from 0\) has 3 tokens"):
        PackedDataset(Parquet(tmp_path / "a.parquet"), Pack(length=2, how="whole"))


def test_what_can_only_be_read_forward_is_not_packed() -> None:
    with pytest.raises(JobError, match="pack: a Stream can only be read forward"):
        seeded_dataset(
            job_of(
                dataset={"target": "dp_ray.data:Stream", "args": {"iterable": f"{HERE}:some", "rows": 1}},
                shuffle=False,
            )
        )
    assert len(Stream(some, 1)) == 1


def some() -> Any:
    return iter([{"input_ids": [1, 2]}])


@pytest.mark.parametrize(
    ("pack", "says"),
    [
        ({"length": 0, "how": "cut"}, r"pack\.length: "),
        ({"length": 8}, r"pack\.how: is missing"),
        ({"length": 8, "how": "best"}, r"pack\.how: must be 'cut' or 'whole'"),
        ({"length": 8, "how": "cut", "fields": ["a", "a"]}, "pack: fields names 'a' twice"),
        ({"length": 8, "how": "cut", "fields": ["a", "position_ids"]}, "pack: fields names 'position_ids', which"),
        ({"length": 8, "how": "cut", "fields": ["labels"]}, "pack: fields: the first one is to hold the tokens"),
        (8, "pack: must be null or a mapping"),
    ],
)
def test_the_key_is_checked(pack: Any, says: str) -> None:
    with pytest.raises(JobError, match=says):
        job_of(pack=pack)


def test_a_resumed_training_refuses_other_lengths(tmp_path: Path) -> None:
    keys = {"checkpoint": {"every_steps": 1}, "workers": 1, "shuffle": False}
    for sizes, control in (([9, 20, 3], StopsBefore(1)), ([9, 19, 4], None)):
        job = Job.make(
            {
                **job_of(batch_size=1).model_dump(),
                **keys,
                "model": gpt(),
                "dataset": Lists([[1] * size for size in sizes]),
            },
            "job",
        )
        if control:
            run_group(job, tmp_path, control)
        else:
            with pytest.raises(Exception, match=r"differ from this job's: .*windows of 16, cut, of 3 rows, hash"):
                run_group(job, tmp_path)
