"""The file that `init_from` names is pinned when a run begins: no other ever takes its place."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.driver.from_run import follow_up
from dp_ray.engine.placement import Placement, ShardedPlacement
from dp_ray.engine.world import World
from dp_ray.errors import DataError, JobError, ModelError, StorageError
from dp_ray.job.job import Job
from dp_ray.outputs import parts
from dp_ray.plan.history import CLOCKED
from dp_ray.rundir.checkpoint import CheckpointWriter
from dp_ray.rundir.start import read_start
from dp_ray.storage import Storage
from dp_ray.tensors.files import write_tensors
from tests.support import training
from tests.support.cluster import Run

pytestmark = pytest.mark.usefixtures("in_project")
GONE = r"init_from: .*step-3\.safetensors, with which this run began \(sha256 [0-9a-f]{64}\), is gone.*--overwrite"
OTHER = (
    r"init_from: .*step-3\.safetensors is not .* this run began: its sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}"
)


def keep(folder: Path, step: int, value: float, keeps: int = 1) -> None:
    """A training leaves a checkpoint, and as it does removes the one before."""
    checkpoints = Storage(str(folder / "trained" / "checkpoints"))
    checkpoints.create()
    torch.manual_seed(0)
    model = {name: torch.full_like(tensor, value) for name, tensor in training.mlp().state_dict().items()}
    writer = CheckpointWriter(checkpoints, keeps)
    writer.save(step, {"fingerprint": "another job's"}, {"model": model})
    writer.wait()
    writer.close()


class Fragile(training.Pairs):
    """The inputs of the pairs; sample 50 cannot be read while the file `broken` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 50 and (self.folder / "broken").exists():
            raise OSError("sector 50")
        return self.inputs[index]


def keys(folder: Path, **others: Any) -> dict[str, Any]:
    dataset = {"target": "tests.engine.forward.test_init_from:Fragile", "args": {"folder": str(folder)}}
    given = {"model": "tests.support.training:mlp", "dataset": dataset, "init_from": str(folder / "trained")}
    return {**given, "batch_size": 7, "workers": 0, "name": "run", "storage": str(folder), "quiet": True, **others}


def break_off(folder: Path, **others: Any) -> None:
    (folder / "broken").touch()
    with pytest.raises(DataError, match="sector 50"):
        dp_ray.run(**keys(folder, **others))
    (folder / "broken").unlink()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prediction with step-3 that broke off after a few committed steps."""
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    keep(tmp_path, 3, 0.25)
    break_off(tmp_path)
    return tmp_path


def expected(value: float) -> torch.Tensor:
    """What the model of a checkpoint gives, by plain torch."""
    model = training.mlp().eval()
    model.load_state_dict({name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        return model(training.Pairs().inputs)  # type: ignore[no-any-return]


def test_rows_of_two_models_never_end_in_one_file(begun: Path) -> None:
    keep(begun, 6, 0.5, keeps=2)
    result = dp_ray.run(**keys(begun))
    assert torch.allclose(result.outputs, expected(0.25))
    assert not torch.allclose(result.outputs, expected(0.5))
    assert torch.allclose(dp_ray.run(**keys(begun, name="later")).outputs, expected(0.5))
    assert not (begun / "run" / "init_from").exists(), "what kept the file is gone with the end"


def test_a_file_that_the_training_has_removed_is_there_until_the_end(begun: Path) -> None:
    keep(begun, 6, 0.5)
    assert not (begun / "trained" / "checkpoints" / "step-3.safetensors").exists()
    assert torch.allclose(dp_ray.run(**keys(begun)).outputs, expected(0.25))


def no_links(*_: Any, **__: Any) -> None:
    raise OSError("no links here")


def test_what_cannot_be_kept_and_is_gone_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    keep(tmp_path, 3, 0.25)
    break_off(tmp_path)
    keep(tmp_path, 6, 0.5)
    with pytest.raises(JobError, match=GONE):
        dp_ray.run(**keys(tmp_path))
    assert torch.allclose(dp_ray.run(**keys(tmp_path, overwrite=True)).outputs, expected(0.5))


def in_place(path: Path, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.write(data)


def replaced(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("write", [in_place, replaced])
def test_other_bytes_under_the_same_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    monkeypatch.setattr(parts, "PART_SECONDS", 0.0)
    if write is replaced:
        monkeypatch.setattr(os, "link", no_links)
    keep(tmp_path, 3, 0.25)
    break_off(tmp_path)
    pinned = tmp_path / "trained" / "checkpoints" / "step-3.safetensors"
    first = pinned.read_bytes()
    keep(tmp_path / "elsewhere", 3, 0.5)
    write(pinned, (tmp_path / "elsewhere" / "trained" / "checkpoints" / "step-3.safetensors").read_bytes())
    with pytest.raises(JobError, match=OTHER):
        dp_ray.run(**keys(tmp_path))
    write(pinned, first)
    assert torch.allclose(dp_ray.run(**keys(tmp_path)).outputs, expected(0.25))


def test_each_attempt_reads_the_file_of_the_first(tmp_path: Path) -> None:
    """Workers that start anew while the driver lives on."""
    keep(tmp_path, 3, 0.25)
    run = Storage(str(tmp_path / "run"))
    run.create()
    first = read_start(run, str(tmp_path / "trained"))[0]
    keep(tmp_path, 6, 0.5)
    again = read_start(run, str(tmp_path / "trained"))[0]
    assert all(torch.equal(first[name], again[name]) for name in first)


TRAINING: dict[str, Any] = {
    "task": "train",
    "model": "tests.support.training:mlp",
    "dataset": "tests.support.training:Pairs",
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 0.01}},
    "eval": {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4},
    "checkpoint": {"every_steps": 2, "best": "eval_loss"},
    "batch_size": 22,
    "shards": 3,
    "shuffle": True,
    "bitwise": True,
    "epochs": 3,
}


def trained(folder: Path, name: str, **others: Any) -> dp_ray.Result:
    given = {**TRAINING, "workers": 0, "storage": str(folder), "quiet": True, "name": name, **others}
    return dp_ray.run(**given)


def told(result: dp_ray.Result, first: int = 0) -> str:
    """The rows of the history from the `first` on, without what the clock says."""
    return repr([{**row, **dict.fromkeys(CLOCKED)} for row in result.history[first:]])


def check_goes_on(run: Callable[..., dp_ray.Result], folder: Path) -> None:
    """From a run, and from a checkpoint: the history begins where they end, the weights are those of one long run."""
    long = trained(folder, "long")
    short = trained(folder, "short", max_steps=6)
    for number, start in enumerate((short.run_dir, f"{short.run_dir}/checkpoints/step-6.safetensors")):
        result = run(f"on-{number}", init_from=start)
        assert result.status == "done"
        assert result.weights_sha256 == long.weights_sha256
        assert told(result) == told(long, 6)
        assert {shape.step for shape in result.shapes} == set(range(6, 15))
        assert result.metrics == long.metrics


@pytest.mark.slow
def test_a_training_goes_on_from_where_another_ended(tmp_path: Path) -> None:
    check_goes_on(lambda name, **keys: trained(tmp_path, name, **keys), tmp_path)


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_too(run_in_session: Run, tmp_path: Path) -> None:
    trained(tmp_path, "short", max_steps=6)
    result = run_in_session(None, **TRAINING, workers=2, name="on", init_from=str(tmp_path / "short"))
    assert told(result) == told(trained(tmp_path, "long"), 6)


@pytest.mark.slow
def test_a_training_that_broke_off_after_it_went_on_needs_its_start_no_more(tmp_path: Path) -> None:
    short = trained(tmp_path, "short", max_steps=6, checkpoint={"every_steps": 6})
    data = {"target": "tests.engine.forward.test_init_from:FragilePairs", "args": {"folder": str(tmp_path)}}
    (tmp_path / "broken").touch()
    with pytest.raises(DataError, match="sector 50"):
        trained(tmp_path, "on", dataset=data, init_from=short.run_dir)
    (tmp_path / "broken").unlink()
    kept = {path.stem for path in (tmp_path / "on" / "checkpoints").iterdir()}
    assert "step-8" in kept and "step-14" not in kept, "it broke off on its way"
    for path in (tmp_path / "short" / "checkpoints").iterdir():
        path.unlink()
    result = trained(tmp_path, "on", dataset=data, init_from=short.run_dir)
    assert result.weights_sha256 == trained(tmp_path, "long").weights_sha256
    assert [row["step"] for row in result.history] == list(range(6, 15))


class FragilePairs(training.Pairs):
    """Pairs, of which no more than 60 can be read while the file `broken` is there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.reads = Path(folder), 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads > 60 and (self.folder / "broken").exists():
            raise OSError("sector 50")
        return super().__getitem__(index)


def test_a_checkpoint_under_the_name_of_another_step_is_told(tmp_path: Path) -> None:
    short = trained(tmp_path, "short", max_steps=6)
    (tmp_path / "step-5.safetensors").write_bytes(
        (Path(short.run_dir) / "checkpoints/step-6.safetensors").read_bytes()
    )
    with pytest.raises(JobError, match=r"step-5.safetensors holds step 6, but its name says 5"):
        trained(tmp_path, "on", init_from=str(tmp_path / "step-5.safetensors"))


class Headed(nn.Module):
    """The pairs' model under a name of its own, with a head for a number of classes."""

    def __init__(self, classes: int, extra: bool = False) -> None:
        super().__init__()
        self.body, self.head = training.mlp(), nn.Linear(3, classes)
        if extra:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))  # type: ignore[no-any-return]


def headed(classes: int, **args: Any) -> dict[str, Any]:
    return {"model": {"target": "tests.engine.forward.test_init_from:Headed", "args": {"classes": classes, **args}}}


STAYS: dict[str, Any] = {
    "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0}},
    "max_steps": 1,
    "eval": None,
}
STAYS["checkpoint"] = {}
LOADS = r"; loads 4 of 7 tensors of the model; missing: scale; of another size: head.weight \[3, 3\] in place of "


@pytest.mark.parametrize("start", ["", "weights.safetensors"])
def test_a_new_head_starts_as_it_is_built_on_the_weights_that_fit(
    tmp_path: Path, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained(tmp_path, "first", **headed(3), max_steps=4)
    new = {**headed(5, extra=True), **STAYS, "init_from": f"{first.run_dir}/{start}", "quiet": False}
    with pytest.raises(ModelError, match=r"; to load the weights that fit, .*, set strict: false$"):
        trained(tmp_path, "new", **{**new, "optimizer": TRAINING["optimizer"], "max_steps": 9})
    with pytest.raises(ModelError, match=r"(not this model's|\"head.bias\"\. )$"):
        trained(tmp_path, "other", init_from=new["init_from"], max_steps=9)  # no tensor has the name of another
    result = trained(tmp_path, "new", **new, strict=False)
    assert re.search(LOADS + r"\[5, 3\], head.bias \[3\] in place of \[5\]\n", capsys.readouterr().err)
    assert [row["step"] for row in result.history] == [0], "a checkpoint is weights here"
    torch.manual_seed(0)
    wanted = Headed(5, extra=True)
    wanted.load_state_dict({k: v for k, v in first.weights.items() if k.startswith("body")}, strict=False)
    assert all(torch.equal(tensor, result.weights[name]) for name, tensor in wanted.state_dict().items())
    assert follow_up("predict", result.run_dir, None, {}).job.strict, "these weights are the model's own"


def test_weights_of_which_nothing_fits_are_refused_without_strict_too(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(2), "0.bias": torch.zeros(7)}, tmp_path / "w.pt")
    says = (
        r"w.pt have no tensor that fits this model by name and size; missing: 0.weight, .*; unexpected: other; of an"
    )
    with pytest.raises(ModelError, match=says):
        dp_ray.run(**{**keys(tmp_path), "init_from": str(tmp_path / "w.pt")}, strict=False)


class Wrapper(nn.Module):
    """The pairs' model, whose tensors have names that begin as if it were wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.module = training.mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)  # type: ignore[no-any-return]


def said(location: Path, capsys: pytest.CaptureFixture[str], **others: Any) -> str:
    """What a prediction from these weights says of them. Its outputs are those of the weights 0.25."""
    result = dp_ray.run(**{**keys(location.parent), "init_from": str(location), "quiet": False, **others})
    assert torch.allclose(result.outputs, expected(0.25))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "init_from" in line)
    return line.partition(location.name)[2]


@pytest.mark.parametrize("before", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_what_a_wrapper_puts_before_all_names_is_stripped_and_told(
    tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {before + name: torch.full_like(tensor, 0.25) for name, tensor in training.mlp().state_dict().items()}
    write_tensors(Storage(str(tmp_path)), "w.safetensors", weights)
    says = f"; without {before!r} before all names"
    assert said(tmp_path / "w.safetensors", capsys) == says
    torch.save(weights, tmp_path / "w.pt")
    more = "; loads 4 of 4 tensors of the model"
    assert said(tmp_path / "w.pt", capsys, strict=False, overwrite=True) == says + more


@pytest.mark.parametrize(("before", "says"), [("", ""), ("module.", "; without 'module.' before all names")])
def test_what_fits_is_never_stripped(
    tmp_path: Path, before: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {before + name: torch.full_like(tensor, 0.25) for name, tensor in Wrapper().state_dict().items()}
    torch.save(weights, tmp_path / "w.pt")
    assert said(tmp_path / "w.pt", capsys, model="tests.engine.forward.test_init_from:Wrapper") == says


@pytest.mark.parametrize("kind", [Placement, ShardedPlacement])
def test_what_is_stripped_is_so_of_a_part_of_the_tensors_too(kind: type[Placement]) -> None:
    """As with `strategy: fsdp`, here with one worker, which holds all rows."""
    model = Headed(5)
    sharded: dict[str, Any] = {"sharded": None} if kind is ShardedPlacement else {}
    job = Job.make({key: value for key, value in keys(Path()).items() if key != "quiet"}, "run")
    placement = kind(job, model, model, World(), **sharded)
    weights = {f"module.{name}": torch.full_like(tensor, 0.5) for name, tensor in Headed(3).state_dict().items()}
    with pytest.raises(ModelError, match=r"(?s)of w, without 'module.' before all names, are .*head.bias.*; set it$"):
        placement.load_weights(weights, "w", advice="; set it")
    says = placement.load_weights(weights, "w", is_strict=False)
    assert says.startswith("; without 'module.' before all names; loads 4 of 6 tensors of the model; of another size")
    assert {float(one.unique()) for one in model.body.state_dict().values()} == {0.5}


NESTED = {"epoch": 3, "model": {"module.0.bias": torch.zeros(2)}}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("weights", "end"),
    [
        ({"other": torch.zeros(2)}, r'("other"\. |unexpected: other)'),
        ({"0.bias": torch.zeros(7)}, r"(model is torch.Size\(\[16\]\)|0.bias \[7\] in place of \[16\])"),
        (NESTED, r"; it holds weights in 'model': save that alone, torch.save\(found\['model'\], file\)"),
    ],
    ids=["names", "sizes", "nested"],
)
def test_strict_false_is_not_advised_where_nothing_fits(
    tmp_path: Path, weights: dict[str, Any], end: str, strict: bool
) -> None:
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=end + "$"):
        dp_ray.run(**{**keys(tmp_path), "init_from": str(tmp_path / "w.pt"), "strict": strict})


@pytest.mark.parametrize("sharers", [None, World()])
@pytest.mark.parametrize("name", ["weights.safetensors", "trained/checkpoints/step-3.safetensors"])
def test_a_file_that_was_damaged_before_the_run_began_is_told(
    tmp_path: Path, name: str, sharers: World | None
) -> None:
    """The hash that is pinned is that of the wrong bytes."""
    keep(tmp_path, 3, 0.25)
    write_tensors(Storage(str(tmp_path)), "weights.safetensors", {"w": torch.ones(3)})
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 4
    (tmp_path / name).write_bytes(data)
    run = Storage(str(tmp_path / "run"))
    run.create()
    with pytest.raises(StorageError, match=r"safetensors: is damaged: its bytes are not those that were written"):
        read_start(run, str(tmp_path / name), sharers=sharers)
