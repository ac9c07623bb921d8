"""`dp_ray.data.Mix` in trainings, predictions, replays and quarantines, against plain torch; and what it refuses."""

import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import dp_ray
from dp_ray.data import Csv, JsonLines, Mix, Parquet
from dp_ray.driver.planning import plan_job
from dp_ray.driver.replay import replay
from dp_ray.engine.loads.items import ItemKeys, SampleReader
from dp_ray.errors import DataError, JobError, ModelError
from dp_ray.plan.costs import plan_table
from dp_ray.plan.mixture import MixtureOrder
from dp_ray.replay.replay import StepChoice
from dp_ray.results.replayed import Replayed
from dp_ray.rundir.quarantine import QUARANTINED, merge_quarantine
from dp_ray.storage import Storage
from tests.support.group import ProcessExit, StopsBefore, history_of, run_group, weights_of
from tests.support.training import IGNORED, Pairs, PartlyLabelled, mlp
from tests.support.trainings import initial, job_of, keys_of

SOURCES: dict[str, Any] = {
    "web": {"target": "tests.support.training:Pairs", "args": {"length": 40}},
    "code": {"target": "tests.support.training:PartlyLabelled", "args": {"length": 9}},
}
WEIGHTS: list[dict[str, Any]] = [{"from": 0, "web": "2/3", "code": "1/3"}, {"from": 50, "web": 0.25, "code": 0.75}]


def mixed(**args: Any) -> dict[str, Any]:
    return {
        "target": "dp_ray.data:Mix",
        "args": {"sources": SOURCES, "weights": WEIGHTS, "stop": {"rows": 33}, **args},
    }


def mix(**args: Any) -> Mix:
    sources: dict[str, Any] = {"web": Pairs(40), "code": PartlyLabelled(9)}
    return Mix(**{"sources": sources, "weights": WEIGHTS, "stop": {"rows": 33}, **args})


class Told(Dataset[Any]):
    """Five rows that tell the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(self.epoch)), torch.tensor(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Dicts(Dataset[Any]):
    """Rows with these keys."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return dict.fromkeys(self.keys, index)


def test_a_training_is_plain_torchs_with_its_loss_by_source(tmp_path: Path) -> None:
    run_group(job_of("mlp", mixed(), workers=1, shards=3, epochs=4), tmp_path)
    data, model, rows = mix(), initial(mlp), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        order = MixtureOrder(data.mixture, 0, epoch).indices(0, 33).tolist()
        for start in range(0, 33, 7):
            ids = order[start : start + 7]
            inputs, targets = default_collate([data[number] for number in ids])
            losses = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none")
            names = [data.locate(number)[0] for number in ids]
            kept = targets != IGNORED
            (losses.sum() / kept.sum()).backward()
            row: dict[str, Any] = {"loss": (losses.sum() / kept.sum()).item()}
            for name in ("code", "web"):
                own = torch.tensor([source == name for source in names])
                row[f"rows_of_{name}"] = int(own.sum())
                labels = int((own & kept).sum())
                row[f"loss_of_{name}"] = losses[own].sum().item() / labels if labels else None
            rows.append(row)
            optimizer.step()
            optimizer.zero_grad()
    history = history_of(tmp_path)
    for got, expected in zip(history, rows, strict=True):
        known = {name: value for name, value in expected.items() if value is not None}
        assert {name: got[name] for name in known} == pytest.approx(known, rel=1e-5)
        assert all(got[name] is None for name in expected.keys() - known.keys())
    assert None in [row["loss_of_code"] for row in rows], "a step without a label of a source has no loss of it"
    trained = weights_of(tmp_path)
    assert all(
        torch.allclose(trained[name], tensor, rtol=1e-5, atol=1e-6) for name, tensor in model.state_dict().items()
    )


def pairs(outputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(outputs, target, reduction="sum"), len(target)


def of_rows(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, target, reduction="none")


def users_step(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return of_rows(model(batch[0]), batch[1])


@pytest.mark.full(but=["keys3-False"])
@pytest.mark.parametrize(
    ("keys", "is_there"),
    [
        ({"loss": of_rows}, True),
        ({"step": users_step, "loss": None}, True),
        ({"loss": pairs}, False),
        ({"loss": {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}}, False),
    ],
)
def test_the_loss_by_source_is_there_where_rows_have_losses(
    tmp_path: Path, keys: dict[str, Any], is_there: bool
) -> None:
    data = Mix({"a": Pairs(20), "b": Pairs(30)}, {"a": "1/3", "b": "2/3"}, {"rows": 14})
    given = keys_of(storage=str(tmp_path), dataset=data, shuffle=True, batch_size=14, shards=3)
    (row,) = dp_ray.run(**{**given, **keys}).history
    ids = MixtureOrder(data.mixture).indices(0, 14).tolist()
    inputs, targets = default_collate([data[number] for number in ids])
    losses = of_rows(initial(mlp)(inputs), targets)
    assert row["loss"] == pytest.approx(losses.mean().item())
    names = [data.locate(number)[0] for number in ids]
    assert {name: row[f"rows_of_{name}"] for name in "ab"} == Counter(names)
    assert ("loss_of_a" in row) == is_there
    for name in "ab" if is_there else "":
        own = torch.tensor([source == name for source in names])
        assert row[f"loss_of_{name}"] == pytest.approx(losses[own].mean().item())


def in_columns(items: list[Any]) -> Any:
    inputs, targets = default_collate(items)
    return inputs.T, targets


def of_columns(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.T, target, reduction="none")


class Columns(torch.nn.Module):
    """A linear layer of columns: [6, rows] to [3, rows]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight @ inputs


def test_a_loss_of_each_row_is_told_by_source_whatever_dimension_holds_the_rows(tmp_path: Path) -> None:
    data = Mix({"a": Pairs(20), "b": Pairs(30)}, {"a": "1/3", "b": "2/3"}, {"rows": 14})
    given = keys_of(storage=str(tmp_path), dataset=data, batch_size=14, shards=3)
    (row,) = dp_ray.run(**{**given, "model": Columns, "loss": of_columns}, batch_dim=1, collate=in_columns).history
    ids = MixtureOrder(data.mixture, shuffle=False).indices(0, 14).tolist()
    inputs, targets = default_collate([data[number] for number in ids])
    losses = of_rows((initial(Columns)(inputs.T)).T, targets)
    for name in "ab":
        own = torch.tensor([data.locate(number)[0] == name for number in ids])
        assert row[f"loss_of_{name}"] == pytest.approx(losses[own].mean().item())


@pytest.mark.parametrize("task", ["train", "evaluate"])
def test_an_evaluation_tells_the_loss_by_source(task: str, tmp_path: Path) -> None:
    """Over 33 rows of a mixture in order, some without a label; source `none` has no row in them."""
    data = {"web": Pairs(40), "code": PartlyLabelled(9), "none": Pairs(3)}
    weights = {"web": "2/3", "code": "1/3", "none": 0}
    over = Mix(data, weights, {"rows": 33})
    keys = keys_of(storage=str(tmp_path), shards=3, batch_size=7, metrics={"right": "tests.support.training:right"})
    if task == "train":
        named = {"hard": {"dataset": over}, "bare": {"dataset": Pairs(5), "metrics": []}}
        result = dp_ray.run(
            **{**keys, "dataset": Pairs(7), "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}}},
            eval=named,
        )
        told = {name.removeprefix("eval_hard_"): value for name, value in result.history[-1].items()}
        assert not [name for name in told if name.startswith("eval_bare_loss_of")]
        page = (Path(result.run_dir) / "report.html").read_text()
        assert "Loss by source" in page and "eval_hard_loss_of_web" in page
    else:
        del keys["optimizer"]
        told = dp_ray.run(**{**keys, "task": "evaluate", "dataset": over}).metrics
    ids = MixtureOrder(over.mixture, shuffle=False).indices(0, 33).tolist()
    inputs, targets = default_collate([over[number] for number in ids])
    losses, kept = of_rows(initial(mlp)(inputs), targets), targets != IGNORED
    for name in ("web", "code"):
        own = torch.tensor([over.locate(number)[0] == name for number in ids])
        assert told[f"loss_of_{name}"] == pytest.approx((losses[own].sum() / (own & kept).sum()).item())
    assert told["loss"] == pytest.approx((losses.sum() / kept.sum()).item())
    assert "loss_of_none" not in told


def test_an_evaluation_by_a_loss_without_rows_tells_no_source(tmp_path: Path) -> None:
    over = Mix({"a": Pairs(20), "b": Pairs(30)}, {"a": "1/3", "b": "2/3"}, {"rows": 14})
    keys = keys_of(storage=str(tmp_path), dataset=over, task="evaluate", optimizer=None)
    for loss in (pairs, {"target": "torch.nn:CrossEntropyLoss", "over": "batch"}):
        assert set(dp_ray.run(**{**keys, "loss": loss}).metrics) == {"loss"}


def two_views(items: list[Any]) -> Any:
    inputs, targets = default_collate(items)
    return torch.cat([inputs, -inputs]), torch.cat([targets, targets])


def test_losses_of_views_are_not_told_by_source(tmp_path: Path) -> None:
    """Of 28 losses for 14 rows, nothing tells which two belong to a row."""
    data = Mix({"a": Pairs(20), "b": Pairs(30)}, {"a": "1/3", "b": "2/3"}, {"rows": 14})
    given = keys_of(storage=str(tmp_path), dataset=data, batch_size=14, collate=two_views)
    (row,) = dp_ray.run(**given).history
    assert row.get("loss_of_a") is None and row["rows_of_a"] + row["rows_of_b"] == 14


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("augment", [False, True])
def test_any_workers_and_loaders_end_at_the_same_bits(tmp_path: Path, augment: bool) -> None:
    sources = {"web": {"target": "tests.support.training:Pairs", "args": {"length": 40, "augment": augment}}}
    data = mixed(sources={**sources, "code": SOURCES["code"]})
    keys = {"shards": 3, "bitwise": True, "epochs": 3, "checkpoint": {"every_steps": 1}}
    keys["eval"] = {"dataset": data}
    run_group(job_of("mlp", data, workers=1, **keys), tmp_path / "whole")
    assert "eval_loss_of_web" in history_of(tmp_path / "whole")[-1]
    run_group(job_of("mlp", data, workers=3, loader={"processes": 1}, **keys), tmp_path / "three")
    run_group(job_of("mlp", data, workers=2, **keys), tmp_path / "parts", StopsBefore(4))
    run_group(job_of("mlp", data, workers=1, **keys), tmp_path / "parts", StopsBefore(9))
    run_group(job_of("mlp", data, workers=3, **keys), tmp_path / "parts")
    for folder in ("three", "parts"):
        assert repr(history_of(tmp_path / folder)) == repr(history_of(tmp_path / "whole"))
        weights, whole = weights_of(tmp_path / folder), weights_of(tmp_path / "whole")
        assert all(torch.equal(weights[name], whole[name]) for name in whole)


@pytest.mark.ray
def test_workers_on_ray_end_at_the_bits_of_one_process(run_in_session: Any) -> None:
    job = job_of("mlp", mixed(), shards=4, bitwise=True)
    alone, together = (run_in_session(job, workers=workers, name=f"on-{workers}") for workers in (0, 2))
    assert together.weights_sha256 == alone.weights_sha256
    told = [
        [{name: row.get(name) for name in ("loss_of_web", "rows_of_code")} for row in run.history]
        for run in (alone, together)
    ]
    assert told[0] == told[1]


def test_other_weights_are_another_job_and_named(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 1}, "workers": 1}
    run_group(job_of("mlp", dataset=mix(), **keys), tmp_path, StopsBefore(3))
    other = [WEIGHTS[0], {"from": 50, "web": 0.5, "code": 0.5}]
    says = r"differ from this job's \(dataset.weights.1.code: '3/4' there, '1/2' here"
    with pytest.raises(ProcessExit, match=says):
        run_group(job_of("mlp", dataset=mix(weights=other), **keys), tmp_path)


def test_a_job_file_with_other_weights_is_refused_by_the_keys_name(tmp_path: Path) -> None:
    keys = keys_of(storage=str(tmp_path), name="mixed", shuffle=True, workers=0)
    dp_ray.run(**{**keys, "dataset": mixed()})
    other = [WEIGHTS[0], {**WEIGHTS[1], "from": 60}]
    with pytest.raises(JobError, match=r"dataset.args.weights.1.from: 50 there, 60 here"):
        dp_ray.run(**{**keys, "dataset": mixed(weights=other)})


def test_the_order_in_which_sources_are_named_does_not_count() -> None:
    weights = [dict(reversed(stage.items())) for stage in WEIGHTS]
    turned = Mix({"code": PartlyLabelled(9), "web": Pairs(40)}, weights, {"rows": 33})
    orders = [MixtureOrder(data.mixture, 0).indices(0, 33).tolist() for data in (mix(), turned)]
    assert orders[0] == orders[1]


def test_the_plan_and_the_page_tell_the_sources(tmp_path: Path) -> None:
    plan = plan_job(job_of("mlp", mixed(), workers=1, epochs=3, storage=str(tmp_path)))
    order = [MixtureOrder(mix().mixture, 0, epoch).indices(0, 33).tolist() for epoch in range(3)]
    counts = Counter(mix().locate(number)[0] for ids in order for number in ids)
    told = {source["name"]: (source["size"], source["rows"]) for source in plan.to_json()["sources"]}
    assert told == {"code": (9, counts["code"]), "web": (40, counts["web"])}
    assert f"source code: {counts['code']} rows, {counts['code'] / 9:.4g} times through its 9" in plan_table(plan)
    cut = plan_job(job_of("mlp", mixed(), workers=1, epochs=3, max_steps=6, storage=str(tmp_path)))
    assert sum(source.rows for source in cut.sources) == cut.split.total_rows == 33 + 7
    result = dp_ray.run(**keys_of(storage=str(tmp_path), dataset=mixed(), shuffle=True))
    page = (Path(result.run_dir) / "report.html").read_text()
    assert "Loss by source" in page and "Rows by source" in page and "loss_of_web" in page


def test_a_replay_names_the_rows_of_sources(tmp_path: Path) -> None:
    result = dp_ray.run(**keys_of(storage=str(tmp_path), dataset=mixed(), shuffle=True, epochs=2, batch_size=7))
    (replayed,) = replay(str(result.run_dir), StepChoice(8), lambda line: None)
    assert isinstance(replayed, Replayed) and replayed.loss == replayed.history_loss
    data = mix()
    ids = MixtureOrder(data.mixture, 0, 1).indices(21, 28).tolist()
    rows = {row.position: row for row in replayed.rows}
    assert [rows[at].source for at in range(21, 28)] == [data.locate(number) for number in ids]
    name, epoch, index = data.locate(ids[0])
    assert any(f"{name} {index}, epoch {epoch}" in line for line in replayed.lines())
    told = next(row for row in replayed.to_json()["rows"] if row["position"] == 21)
    assert (told["source"], told["source_epoch"], told["source_index"]) == (name, epoch, index)


def test_a_bad_row_is_set_aside_once_whatever_its_sources_epoch(tmp_path: Path) -> None:
    bad = {"target": "tests.support.bad_data:Broken", "args": {"length": 9, "raises": [2]}}
    data = mixed(sources={"web": SOURCES["web"], "code": bad})
    messages = run_group(job_of("mlp", data, workers=1, epochs=4, on_error={"quarantine": 1}), tmp_path)
    said = [message.text for message in messages if "set aside" in getattr(message, "text", "")]
    assert (
        len(said) == 1
        and "row 2 of source 'code' of dataset" in said[0]
        and "ValueError: no such image: 2" in said[0]
    )
    merge_quarantine(Storage(str(tmp_path)))
    rows = pq.read_table(tmp_path / QUARANTINED).to_pylist()
    order = [MixtureOrder(mix().mixture, 0, epoch).indices(0, 33).tolist() for epoch in range(4)]
    expected = [
        (epoch, at, *mix().locate(number))
        for epoch, ids in enumerate(order)
        for at, number in enumerate(ids)
        if mix().locate(number)[::2] == ("code", 2)
    ]
    named = ("epoch", "position", "source", "source_epoch", "source_index")
    assert [tuple(row[name] for name in named) for row in rows] == expected and len(expected) > 3


def test_predictions_are_in_the_order_of_the_mixture_and_name_its_rows(tmp_path: Path) -> None:
    data = mix()
    for order in ("dataset", "shuffled"):
        given = {"task": "predict", "model": "torch.nn:Flatten", "dataset": mixed(), "inputs": "first"}
        result = dp_ray.run(
            **given, batch_size=7, workers=0, storage=str(tmp_path), name=order, order=order, quiet=True
        )
        ids = MixtureOrder(data.mixture, 0, 0, order == "shuffled").indices(0, 33).tolist()
        assert result.sample_index.tolist() == ids
        rows = [data.sources[name][index][0] for name, _, index in map(data.locate, ids)]
        assert torch.equal(result.outputs, torch.stack(rows))


def test_a_source_is_told_the_epoch_of_the_mixture(tmp_path: Path) -> None:
    data = Mix({"told": Told(), "web": Pairs(20)}, {"told": 0.5, "web": 0.5}, "first")
    assert mix().set_epoch is None
    data.set_epoch(3)
    assert data[0][0].tolist() == [3.0] * 6
    args = {"sources": {"told": "tests.data.test_mix:Told"}, "weights": {"told": 1}, "stop": "all"}
    keys: dict[str, Any] = {"batch_size": 5, "epochs": 3, "metrics": {"told": "tests.data.test_mix:told"}}
    run_group(job_of("mlp", {"target": "dp_ray.data:Mix", "args": args}, workers=1, **keys), tmp_path)
    assert [row["told"] for row in history_of(tmp_path)] == [0, 1, 2]


def test_parquet_files_are_pinned_and_a_row_that_cannot_be_read_names_its_source_and_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        values = [1, None if name == "b" else 2, 3]
        pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), tmp_path / f"{name}.parquet")
    paths = {name: str(tmp_path / f"{name}.parquet") for name in "ab"}
    sources = {name: {"target": "dp_ray.data:Parquet", "args": {"paths": path}} for name, path in paths.items()}
    data = Mix(sources, {"a": "1/2", "b": "1/2"}, "all")
    assert isinstance(data.sources["a"], Parquet)
    assert set(data.pins or {}) == {str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")}
    assert [item["x"] for item in data.__getitems__([3, 0, 6 + 2])] == [1, 1, 3]
    with pytest.raises(DataError, match=r"rows 1, 0 of source 'b': row 1 of .*b.parquet, .*'x'"):
        data.__getitems__([4, 0, 3])


def test_unlike_fields_are_refused_by_source_and_row_or_those_named_are_taken() -> None:
    sources = {"a": Dicts("text", "url"), "b": Dicts("text", "repo")}
    data = Mix(sources, {"a": 0.5, "b": 0.5})
    says = r"row 3 of source 'b' is a dict of repo, text, and row 1 of source 'a' is a dict of text, url; .*fields: "
    with pytest.raises(DataError, match=says):
        data.__getitems__([1, 7])
    taken = Mix(sources, {"a": 0.5, "b": 0.5}, fields=["text"])
    assert taken.__getitems__([1, 7]) == [{"text": 1}, {"text": 3}]
    with pytest.raises(DataError, match=r"row 3 of source 'b' has no 'url', but text, repo; fields names keys"):
        Mix(sources, {"a": 0.5, "b": 0.5}, fields=["url"])[7]
    with pytest.raises(DataError, match=r"row 0 of source 'a' is no dict"):
        Mix({"a": Pairs(3)}, {"a": 1}, fields=["url"])[0]


def test_a_column_that_text_files_give_two_types_is_refused_or_has_the_one_that_is_given(tmp_path: Path) -> None:
    """Else the type of a batch would be that of the sources whose rows it happens to hold."""
    (tmp_path / "a.csv").write_text("x,code\n1,7\n2,8\n")
    (tmp_path / "b.jsonl").write_text('{"x": 0.5, "code": 7}\n{"x": 1, "code": 9}\n')
    weights = {"a": 0.5, "b": 0.5}

    def of(types: dict[str, str], **args: Any) -> Mix:
        return Mix({"a": Csv(tmp_path / "a.csv", types=types), "b": JsonLines(tmp_path / "b.jsonl")}, weights, **args)

    says = r"column 'x' is int64 in source 'a', and float32 in source 'b'; give it .* types: \{x: float32\}"
    with pytest.raises(DataError, match=says):
        of({})
    assert [item["code"] for item in of({}, fields=["code"]).__getitems__([0, 2])] == [7, 7]
    batch = default_collate(of({"x": "float32"}).__getitems__([0, 2, 3]))
    assert (batch["x"].dtype, batch["x"].tolist()) == (torch.float32, [1.0, 0.5, 1.0])
    assert (batch["code"].dtype, batch["code"].tolist()) == (torch.int64, [7, 7, 9])


def test_a_row_that_raises_is_named() -> None:
    data = Mix(
        {"a": [1, 2], "b": {"target": "tests.support.bad_data:Broken", "args": {"raises": [4]}}}, {"a": 0.5, "b": 0.5}
    )
    with pytest.raises(DataError, match=r"^row 4 of source 'b' raised ValueError: no such image: 4$"):
        data.__getitems__([2 + 3, 103 + 2 + 4])


PAIR = {"a": [1, 2], "b": [3, 4, 5]}
HALVES = {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"weights": {"a": 0.5, "b": 0.6}}, r"weights: must add up to 1, and add up to 1.1.*a: 5/11, b: 6/11"),
        ({"weights": {"a": 3, "b": 1}}, r"weights: must add up to 1, and add up to 4; .*a: 3/4, b: 1/4"),
        ({"weights": {"a": 1 / 3, "b": 1 / 3}}, r"weights: must add up to 1"),
        ({"weights": {"a": -0.5, "b": 1.5}}, r"weights.a: must be a number from 0 to 1.* got -0.5"),
        ({"weights": {"a": "half", "b": 0.5}}, r"weights.a: must be .*like '1/3'; got 'half'"),
        ({"weights": {"a": "1/0", "b": 0.5}}, r"weights.a: must be"),
        ({"weights": {"a": float("nan"), "b": 0.5}}, r"weights.a: must be"),
        ({"weights": {"a": True, "b": 0}}, r"weights.a: must be"),
        (
            {"weights": {"a": 0.5, "c": 0.5}},
            r"weights.c: there is no such source; did|weights.c: there is no such source",
        ),
        ({"weights": {"a": 1}}, r"weights: source 'b' has no weight; .* 0 to leave it out"),
        ({"weights": []}, r"weights: must map each source"),
        ({"weights": "half"}, r"weights: must map each source"),
        ({"weights": [HALVES]}, r"weights\[0\].from: must be 0, where the run begins; got None"),
        ({"weights": [{"from": 5, **HALVES}]}, r"weights\[0\].from: must be 0"),
        (
            {"weights": [{"from": 0, **HALVES}, {"from": 0, **HALVES}]},
            r"weights\[1\].from: must be a row of the run, above 0",
        ),
        ({"weights": [{"from": 0, **HALVES}, {"from": 7, "a": 1}]}, r"weights\[1\]: source 'b' has no weight"),
        (
            {"weights": [{"from": 0, **HALVES}, {"from": 2**63, **HALVES}]},
            r"weights\[1\].from: must be a row of the run, above 0 and below 2\*\*63; got 9223372036854775808",
        ),
        ({"fields": "text"}, r"fields: must be a list of keys that each item has, like \[text\]; got 'text'"),
        ({"fields": []}, r"fields: must be a list"),
        ({"fields": 3}, r"fields: must be a list"),
        ({"stop": "last"}, r"stop: must be first, all, or \{rows: N\} .*got 'last'"),
        ({"stop": {"rows": 0}}, r"stop: must be"),
        ({"stop": {"rows": True}}, r"stop: must be"),
        ({"stop": 7}, r"stop: must be"),
        ({"weights": {"a": 1, "b": 0}, "stop": "all"}, r"stop: all: source 'b' is never through"),
        ({"sources": {}}, r"sources: must map names to datasets"),
        ({"sources": ["a"]}, r"sources: must map names to datasets"),
        ({"sources": {"from": [1]}}, r"none of them 'from'"),
        ({"sources": {**PAIR, "b": 7}}, r"sources.b: must be map-style, with .*; int lacks __len__ and __getitem__"),
        ({"sources": {**PAIR, "b": "no.such:thing"}}, r"sources.b: cannot import 'no.such'"),
        ({"sources": {**PAIR, "b": "nothing"}}, r"sources.b.*must be 'module:attribute'"),
        ({"sources": {**PAIR, "b": {"target": "a:b", "arg": {}}}}, r"sources.b.arg"),
        ({"sources": {**PAIR, "b": Mix(PAIR, HALVES)}}, r"sources.b: is a Mix itself"),
    ],
)
def test_bad_arguments_are_told_by_source_and_key(args: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        Mix(**{"sources": PAIR, "weights": HALVES, **args})


def test_iteration_ends() -> None:
    data = Mix(PAIR, HALVES)
    assert list(islice(data, 100)) == [data[index] for index in range(len(data))]
    data = Mix(PAIR, {"a": "1/7", "b": "6/7"}, {"rows": 2**40})
    assert [item for item, _ in zip(data, range(7), strict=False)] == [1, 2, 3, 4, 5, 1, 2]


def logs(run: dp_ray.Loop) -> None:
    update = run.optimizer(torch.optim.SGD(run.model.parameters(), 0.1))
    for step in run.steps():
        step.backward(lambda batch: of_rows(run.model(batch[0]), batch[1]), run.model)
        update.step()
        step.log(rows_of_code=1.0)


def test_a_column_of_a_source_is_no_name_for_a_metric(tmp_path: Path) -> None:
    for name in ("loss_of_web", "rows_of_code"):
        metrics = {name: "tests.support.training:right"}
        with pytest.raises(JobError, match=f"metrics.{name}: is a column of the history for a source of the Mix"):
            plan_job(job_of("mlp", mixed(), storage=str(tmp_path), metrics=metrics))
    plan_job(job_of("mlp", mixed(), storage=str(tmp_path), metrics={"loss_of_news": "tests.support.training:right"}))
    keys = {**keys_of(storage=str(tmp_path), dataset=mixed()), "loss": None, "optimizer": None}
    with pytest.raises(ModelError, match=r"step.log: rows_of_code is a column that each history has"):
        dp_ray.run(**keys, loop=logs)


def test_a_key_that_an_item_lacks_is_told_by_source_and_row() -> None:
    data = Mix({"a": Dicts("text"), "b": Dicts("text")}, {"a": 0.5, "b": 0.5})
    reader = SampleReader(data, "the dataset", ItemKeys(["text"], "label"))
    with pytest.raises(DataError, match=r"^row 3 of source 'b' of the dataset: there is no 'label'"):
        reader([7])


def refuses(items: list[Any]) -> Any:
    raise ValueError("unlike sizes")


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_of_a_collate_names_the_rows_of_sources(processes: int, tmp_path: Path) -> None:
    keys = keys_of(storage=str(tmp_path), dataset=mixed(), batch_size=2, collate=refuses, shuffle=False)
    named = [(number, *mix().locate(number)) for number in MixtureOrder(mix().mixture, shuffle=False).indices(0, 2)]
    rows = ", ".join(f"{number} (row {row} of source '{source}')" for number, source, _, row in named)
    with pytest.raises(DataError, match=re.escape(f"unlike sizes; it got samples {rows}")):
        dp_ray.run(**keys, loader={"processes": processes})


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"sources.b: list is empty"):
        Mix({"a": [1], "b": []}, HALVES)


def test_a_source_is_checked_as_any_dataset() -> None:
    class NoItems(Dataset[Any]):  # torch's base class has a __getitem__ that only raises
        def __len__(self) -> int:
            return 3

    with pytest.raises(JobError, match=r"Mix: sources.b: must be map-style, .*NoItems lacks __getitem__"):
        Mix({"a": [1], "b": NoItems()}, HALVES)


def test_what_a_job_cannot_do_with_a_mixture_is_said_before_it_runs(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"shuffle": "blocks"}, r"shuffle: blocks: a Mix shuffles the rows of each of its sources"),
        ({"skip": [3]}, r"skip: numbers the samples of one dataset"),
    ]
    for keys, says in refused:
        with pytest.raises(JobError, match=says):
            plan_job(job_of("mlp", mixed(), storage=str(tmp_path), **keys))
    stream = {"target": "dp_ray.data:Stream", "args": {"iterable": "tests.data.test_mix:numbers", "rows": 5}}
    data = {"target": "dp_ray.data:Mix", "args": {"sources": {"a": stream}, "weights": {"a": 1}}}
    with pytest.raises(JobError, match=r"shuffle: a Mix is read in its own order"):
        plan_job(job_of("mlp", data, storage=str(tmp_path)))
    assert plan_job(job_of("mlp", data, storage=str(tmp_path), shuffle=False)).split.rows == 5


def told(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target.float()


def numbers() -> Any:
    yield from range(5)


def test_fractions_are_exact() -> None:
    data = Mix(PAIR, {"a": 0.1, "b": 0.9}, {"rows": 10})
    assert data.mixture.stages[0].weights == (Fraction(1, 10), Fraction(9, 10))
    thirds = Mix(PAIR, {"a": "1/3", "b": Fraction(2, 3)}, {"rows": 9})
    assert thirds.mixture.counts(9) == [3, 6]
    np32 = Mix(PAIR, {"a": np.float64(0.25), "b": 0.75}, {"rows": 8})
    assert re.fullmatch(r"\{'a': 2, 'b': 6\}", str(np32.mixture.counts_between(0, 0, 8)))
