"""Mistakes in user code, and what the world may do to a run: each ends in one clear error, and nothing is lost."""

import contextlib
import functools
import shutil
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

import dp_ray
from dp_ray.cli import main
from dp_ray.cluster.workers import check_can_be_shipped
from dp_ray.engine.forward.model import build_model
from dp_ray.engine.forward.weights import synchronise
from dp_ray.engine.world import alone
from dp_ray.errors import DataError, Error, JobError, ModelError, RunInterrupted, StorageError
from dp_ray.job.job import Job
from tests.support import models
from tests.support.builders import run_dir_of
from tests.support.group import ProcessExit, run_group

pytestmark = pytest.mark.usefixtures("in_project")


def run(folder: Path, model: Any, dataset: Any, **keys: Any) -> dp_ray.Result:
    values = {"batch_size": 7, "workers": 0, "shards": 3, "quiet": True, "storage": str(folder), **keys}
    return dp_ray.run(model=model, dataset=dataset, name="run", **values)


class Exits(nn.Module):
    """Ends the program from within."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sys.exit(0)


def test_a_model_that_exits_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="step 0, shard 0: model raised SystemExit: 0"):
        run(tmp_path, Exits(), models.Rows(9))


class Timed(nn.Linear):
    """Has cuDNN choose its kernels by their time."""

    def __init__(self) -> None:
        super().__init__(models.Rows(1).data.shape[1], 1)
        torch.backends.cudnn.benchmark = True


def test_kernels_that_are_chosen_by_their_time_have_no_place_in_a_bitwise_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # the caller's own counts nothing
    run(tmp_path / "plain", models.Doubler(), models.Rows(9), bitwise=True)
    with pytest.raises(JobError, match=r"^bitwise: the model's code sets torch.backends.cudnn.benchmark, .* or set"):
        run(tmp_path, Timed, models.Rows(9), bitwise=True)
    assert torch.backends.cudnn.benchmark
    run(tmp_path / "without", Timed, models.Rows(9))


class TreeModel(nn.Module):
    """Calls itself on parts of what it gets."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.ndim == 0:
            return inputs * 2
        return torch.stack([self(part) for part in inputs])


def test_a_model_that_calls_itself_is_seen_from_outside(tmp_path: Path) -> None:
    result = run(tmp_path, TreeModel(), models.Rows(9))
    assert torch.equal(result.outputs, models.Rows(9).data * 2)
    assert result.shapes[0].input_size == torch.Size([3, 5])


class SharedBuffer(nn.Module):
    """Gives the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.empty(7, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.memory[: len(inputs)] = inputs
        return self.memory[: len(inputs)]


def test_outputs_that_the_model_overwrites_are_kept_as_they_were(tmp_path: Path) -> None:
    assert torch.equal(run(tmp_path, SharedBuffer(), models.Rows(20)).outputs, models.Rows(20).data)


class Items(models.Rows):
    """Batched reads that give `items`."""

    def __init__(self, items: Any) -> None:
        super().__init__(9)
        self.items = items

    def __getitems__(self, indices: list[int]) -> Any:
        indices.reverse()
        return self.items


@pytest.mark.parametrize(("items", "got"), [(None, "a NoneType"), ([1], "1 items"), (torch.zeros(3), "a Tensor")])
def test_batched_reads_must_give_one_item_each(tmp_path: Path, items: Any, got: str) -> None:
    with pytest.raises(DataError, match=rf"__getitems__ gave {got} for samples 0, 1, 2"):
        run(tmp_path, models.Doubler(), Items(items))


def broken_collate(items: list[Any]) -> Any:
    raise LookupError("no such thing")


def test_a_collate_that_raises_is_told_with_its_samples(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="collate raised LookupError: no such thing; it got samples 0, 1, 2"):
        run(tmp_path, models.Doubler(), models.Rows(9), collate=broken_collate)


class SparseOutput(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to_sparse()


def test_outputs_that_cannot_be_kept_are_told_by_step_and_shard(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="step 0, shard 0"):
        run(tmp_path, SparseOutput(), models.Rows(9))


def test_dropping_everything_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="drop_last: drops all 5 rows, because batch_size is 7"):
        run(tmp_path, models.Doubler(), models.Rows(5), drop_last=True)
    assert not (tmp_path / "run").exists()


def test_a_dict_for_a_model_of_keywords_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="to pass its keys as keywords, set call: kwargs"):
        run(tmp_path, models.Transformerish(), models.Tokens())


class OfList(nn.Module):
    """Takes a list of rows."""

    def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows) * 2


def test_a_list_for_a_model_that_takes_it_as_one_argument_gets_a_hint(tmp_path: Path) -> None:
    says = r"the model got the 3 items of a list: to give it them as one, have a collate return \(inputs,\); it got"
    with pytest.raises(ModelError, match=says):
        run(tmp_path, OfList(), models.Rows(9), collate=lambda items: items)
    result = run(tmp_path, OfList(), models.Rows(9), collate=lambda items: (items,))
    assert torch.equal(result.outputs, models.Rows(9).data * 2)


class Classifier(nn.Module):
    """Takes keywords, and gives a loss beside its logits if it gets labels, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, torch.Tensor]:
        assert input_ids.size() == attention_mask.size()
        lengths = attention_mask.sum(1, keepdim=True)
        logits = self.head((self.embed(input_ids) * attention_mask[..., None]).sum(1) / lengths)
        given = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**given, "logits": logits}


class Tokenized(models.Rows):
    """Texts of several lengths as a tokenizer gives them, each with its label and a name."""

    def __getitem__(self, index: int) -> Any:
        ids = [(index * 7 + place) % 50 for place in range(3 + index % 4)]
        return {"id": f"t{index}", "input_ids": ids, "attention_mask": [1] * len(ids), "labels": index % 3}


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)
    names = [name for name in ("input_ids", "attention_mask") if name in items[0]]
    rows = {name: [item[name] + [0] * (longest - len(item[name])) for item in items] for name in names}
    return {name: torch.tensor(row) for name, row in rows.items()} | {"labels": torch.tensor([0] * len(items))}


LEARNS = {"task": "train", "optimizer": "torch.optim:SGD", "loss": "torch.nn:CrossEntropyLoss"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, r"model raised AttributeError: .* the model got one dict: .* call: kwargs; it got \{input_ids: int64"),
        (
            {"call": "kwargs"},
            r"output 'loss' is a scalar per shard, .*, or keep the others alone: outputs\.keep: \[logits\]",
        ),
        ({"inputs": ["input_ids", "mask"]}, r"no 'mask'; the item has id, .*, labels before the collate"),
        (
            {"inputs": ["input_ids"]},
            r"collate raised TypeError: .* got samples 0, 1, 2, of which inputs and target pick keys before the",
        ),
        ({"inputs": "first"}, r"\(inputs, target\), got a batch of a dict after the collate; leave inputs out"),
        (
            LEARNS,
            r"a batch of a dict after the collate; name keys of its items.*\(it has input_ids, .*, labels\), which"
            r" are picked before the collate; or write a step",
        ),
        (
            {**LEARNS, "collate": "tests.driver.test_user_mistakes:padded_pairs"},
            r"model raised AttributeError: .* the model got one dict: .* call: kwargs; it got \{input_ids",
        ),
    ],
)
def test_the_ways_to_run_a_model_of_keywords_wrongly_lead_to_the_right_one(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(Error, match=says):
        run(tmp_path, Classifier(), Tokenized(9), **{"collate": padded, **keys})


def padded_pairs(items: list[Any]) -> Any:
    batch = padded(items)
    return batch, batch.pop("labels")


def test_a_model_of_keywords_predicts_with_its_ids(tmp_path: Path) -> None:
    model, keys = Classifier().eval(), {"call": "kwargs", "outputs": {"keep": ["logits"], "carry": ["id"]}}
    result = run(tmp_path, model, Tokenized(9), collate=padded, **keys)
    alone = [model(**padded([Tokenized(9)[index]]))["logits"] for index in range(9)]
    assert torch.allclose(result.outputs["logits"], torch.cat(alone), atol=1e-6)
    assert list(result.carried["id"]) == [f"t{index}" for index in range(9)]


def test_the_corrected_command_replaces_a_run_that_failed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="set call: kwargs"):
        run(tmp_path, Classifier(), Tokenized(9), collate=padded)
    keys = {"call": "kwargs", "outputs": {"keep": ["logits"]}}
    assert run(tmp_path, Classifier(), Tokenized(9), collate=padded, **keys, quiet=False).rows == 9
    said = capsys.readouterr().err
    assert said.count("run: replaces the run of this name, which had ended before it kept a step") == 1
    with pytest.raises(JobError, match="holds a run of a different job"):
        run(tmp_path, Classifier(), Tokenized(9), collate=padded, **keys, seed=3)


class Forward(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from models.Rows(9).data


class Drawn(models.Rows):
    """Draws its rows by weights, as a DataLoader is told to."""

    def __init__(self) -> None:
        super().__init__(9)
        self.sampler = torch.utils.data.WeightedRandomSampler([1.0] * 9, 9)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"dataset": Forward()},
            r"dataset: .*Forward lacks .*there is a Stream: \{target: 'dp_ray.data:Stream', args:",
        ),
        ({"dataset": iter([1])}, r"dataset: .* there is a Stream"),
        ({"dataset": Drawn()}, r"dataset: its sampler would not be used; the job orders its samples by shuffle and"),
        (
            {"dataset": torch.utils.data.DataLoader(models.Rows(9))},
            r"DataLoader lacks __getitem__; give the dataset that it loads. In place of its sampler",
        ),
        ({"dataset": [models.Rows(9), models.Rows(9)]}, r"dataset: is a list of 2 datasets, .* ConcatDataset"),
        ({"dataset": [{"target": "a:b"}, "a:c"]}, r"dataset: is a list of 2 datasets, .* ConcatDataset"),
        ({"eval": {"dataset": (models.Rows(9),)}}, r"eval.dataset: is a tuple of 1 datasets, .* ConcatDataset"),
        ({"dataset": {"a": models.Rows(9), "b": models.Rows(9)}}, r"dataset: must be one target, got a dict of a, b"),
        ({"optimizer": ["torch.optim:SGD", "torch.optim:SGD"]}, r"optimizer\.0\.match: is missing, so no parameter"),
        ({"scheduler": ["torch.optim.lr_scheduler:StepLR"]}, r"scheduler: is a list; .* SequentialLR"),
    ],
)
def test_what_is_not_supported_points_to_what_is_before_anything_starts(
    tmp_path: Path, keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        run(tmp_path, nn.Linear(5, 2), **{"dataset": models.Rows(9), **LEARNS, **keys})
    assert not (tmp_path / "run").exists()


def test_lists_of_samples_are_datasets_as_before(tmp_path: Path) -> None:
    for samples in ([torch.ones(2), torch.ones(2)], ([1.0, 2.0], [3.0, 4.0])):
        assert run(tmp_path, lambda: models.Doubler(), samples, collate=in_one, overwrite=True).rows == 2


def in_one(items: list[Any]) -> tuple[torch.Tensor]:
    """The inputs as one argument."""
    return (torch.tensor([[float(number) for number in item] for item in items]),)


class Prints(models.Rows):
    """Prints wherever it can."""

    def __init__(self) -> None:
        super().__init__(9)
        print("made")

    def __getitem__(self, index: int) -> torch.Tensor:
        print("read")
        return super().__getitem__(index)


def test_stdout_is_for_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "{model: 'tests.support.models:Doubler', dataset: 'tests.driver.test_user_mistakes:Prints', batch_size: 9, "
        f"workers: 0, storage: '{tmp_path}'}}"
    )
    for args in (["run", "--shapes", "--json"], ["plan", "--json"]):
        monkeypatch.setattr(sys, "argv", ["dp-ray", args[0], str(job), *args[1:]])
        main.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9].strip() for line in lines] == ["In Model", "Outside:", '{"run_dir', '{"rows":']


def test_env_is_there_in_this_process_too_and_gone_afterwards(tmp_path: Path) -> None:
    dataset = {"target": "tests.driver.test_user_mistakes:NeedsVariable"}
    assert run(tmp_path, "tests.support.models:Doubler", dataset, env={"DP_RAY_TEST": "5"}).rows == 9


class NeedsVariable(models.Rows):
    """Reads an environment variable with each row."""

    def __init__(self) -> None:
        super().__init__(9)

    def __getitem__(self, index: int) -> torch.Tensor:
        import os

        assert os.environ["DP_RAY_TEST"] == "5"
        return super().__getitem__(index)


def test_a_driver_that_was_overtaken_writes_nothing_more(tmp_path: Path) -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1}, "run")
    first = run_dir_of(tmp_path, job)
    first.check_ours()
    run_dir_of(tmp_path, job)
    with pytest.raises(StorageError, match="was taken over by another driver"):
        first.check_ours()


class TakesOver(nn.Module):
    """While it runs, another driver claims its run directory."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        (Path(self.folder) / "run" / "run.json").write_text('{"token": "of another"}')
        return inputs


def test_the_result_of_another_driver_is_left_alone(tmp_path: Path) -> None:
    model = {"target": "tests.driver.test_user_mistakes:TakesOver", "args": {"folder": str(tmp_path)}}
    with pytest.raises(StorageError, match="was taken over by another driver"):
        run(tmp_path, model, "tests.support.models:Rows")
    assert not (tmp_path / "run" / "result.json").exists()


class Removes(TakesOver):
    """While it runs, somebody removes its run directory."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shutil.rmtree(Path(self.folder) / "run", ignore_errors=True)
        return inputs


def test_a_run_directory_that_was_removed_is_told_as_that(tmp_path: Path) -> None:
    model = {"target": "tests.driver.test_user_mistakes:Removes", "args": {"folder": str(tmp_path)}}
    with pytest.raises(StorageError, match=rf"{tmp_path}/run was removed while this driver ran in it: its run.json"):
        run(tmp_path, model, "tests.support.models:Rows")


def test_overwriting_needs_a_job_that_can_be_written_down(tmp_path: Path) -> None:
    first = run(
        tmp_path, "tests.support.models:Doubler", {"target": "tests.support.models:Rows", "args": {"length": 9}}
    )
    with pytest.raises(JobError, match="args: must be plain YAML values"):
        run_dir_of(
            tmp_path,
            Job.make(
                {"model": {"target": "a:b", "args": {"x": {1: 2, "a": 3}}}, "dataset": "a:c", "batch_size": 1}, "run"
            ),
            overwrite=True,
        )
    assert dp_ray.load(first.run_dir) == first


def test_a_dataset_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    data = models.Rows(9)
    data.lock = (number for number in range(3))  # type: ignore[attr-defined]
    job = Job.make({"model": models.Doubler(), "dataset": data, "batch_size": 1}, "run")
    with pytest.raises(JobError, match="dataset: its attribute lock cannot be pickled: TypeError"):
        check_can_be_shipped(job)


class OddState(nn.Module):
    """Buffers of dtypes and layouts that process groups do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shorts", torch.arange(3, dtype=torch.int16))
        self.register_buffer("strided", torch.arange(10.0)[::2])
        self.register_buffer("eighth", torch.ones(2, dtype=torch.float8_e4m3fn))
        self.register_buffer("expanded", torch.arange(5.0).expand(3, -1))
        self.layer = nn.Linear(5, 2)


class LazyState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(3)


def test_odd_buffers_pass_through_a_process_group_and_lazy_ones_are_named() -> None:
    keys = {"dataset": "tests.support.models:Rows", "batch_size": 1}
    with alone(needs_group=True):
        odd = build_model(Job.make({"model": OddState(), **keys}, "job"), [torch.device("cpu")])
        synchronise(odd)
        lazy = build_model(Job.make({"model": LazyState(), **keys}, "job"), [torch.device("cpu")])
        with pytest.raises(ModelError, match=r"layer\.weight has no shape yet"):
            synchronise(lazy)


def test_every_error_of_ours_is_an_error() -> None:
    kinds = [kind for kind in vars(dp_ray.errors).values() if getattr(kind, "__module__", "") == "dp_ray.errors"]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    assert JobError in kinds and all(issubclass(kind, Error | RunInterrupted) for kind in kinds)
    assert (JobError.exit_status, DataError.exit_status) == (2, 1)


class Unsendable(models.Rows):
    """Rows with one attribute more, which a process that is not forked cannot get."""

    def __init__(self, held: Any, context: str) -> None:
        super().__init__(9)
        self.held, self.loader_context = held, context


@pytest.mark.full(but=["partial-spawn", "in lists-spawn"])
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"to": [str, lambda one: one]}, r"held\['to'\]\[1\], a function, .*; give a function that a module names"),
        (functools.partial(max, key=lambda one: -one), r"held\.keywords\['key'\], a function, .*'fork'$"),
        (
            Unsendable(threading.Lock(), "spawn"),
            r"held\.held, a _thread\.lock, cannot be pickled: TypeError.*; open it where",
        ),
        ([torch.ones(3), threading.Lock()], r"held\[1\], a _thread\.lock, cannot be pickled: TypeError.*"),
    ],
    ids=["in lists", "partial", "object", "beside a tensor"],
)
def test_what_cannot_be_sent_to_a_loader_process_is_named(tmp_path: Path, context: str, held: Any, says: str) -> None:
    with pytest.raises(JobError, match=rf"loader.processes: {context} .*, and the dataset's attribute {says}"):
        run(tmp_path, models.Doubler(), Unsendable(held, context), loader={"processes": 1})


def test_a_way_to_start_processes_that_there_is_not_is_told(tmp_path: Path) -> None:
    says = r"the dataset's attribute loader_context: must be None, 'fork' or 'spawn' or 'forkserver', got 'froks'"
    for processes in (0, 1):
        with pytest.raises(JobError, match=says) if processes else contextlib.nullcontext():
            loader = {"processes": processes}
            run(tmp_path, models.Doubler(), Unsendable(None, "froks"), loader=loader, overwrite=True)


def test_what_cannot_be_sent_is_named_where_processes_are_not_forked_by_default(tmp_path: Path) -> None:
    """As by Python 3.14: the processes of a test's group, which a server forks, are such."""
    args = {"length": 9, "has": [], "nest": "closure", "kind": "torch", "parts": "whole"}
    dataset = {"target": "tests.support.around:drawing", "args": args}
    model = {"target": "tests.support.around:Model", "args": {"has": []}}
    job = Job.make({"model": model, "dataset": dataset, "batch_size": 3, "loader": {"processes": 1}}, "job")
    with pytest.raises(
        ProcessExit, match=r"loader.processes: forkserver .*, and the dataset's attribute held\['of'\]"
    ):
        run_group(job, tmp_path)


def test_an_open_database_is_told_to_be_opened_in_each_process(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as opened:
        dataset: Any = Subset(Unsendable(opened, "spawn"), range(5))
        dataset.loader_context = "spawn"  # a wrapper has one of its own
        says = r"the dataset's attribute dataset\.held, a sqlite3\.Connection, .*; open it where it is used first"
        with pytest.raises(JobError, match=says):
            run(tmp_path, models.Doubler(), dataset, loader={"processes": 1})


def test_a_collate_that_cannot_be_sent_to_a_loader_process_is_named(tmp_path: Path) -> None:
    keys = {"collate": lambda items: torch.stack(items), "loader": {"processes": 1}}
    with pytest.raises(JobError, match=r"spawn .*, and collate, a function, cannot be pickled"):
        run(tmp_path, models.Doubler(), Unsendable(None, "spawn"), **keys)
