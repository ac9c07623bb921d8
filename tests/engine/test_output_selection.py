"""What is kept of a prediction's outputs: `after`, `keep` and `dtype`, against plain torch."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import dp_ray
from dp_ray.engine.selection import chosen
from dp_ray.errors import JobError, ModelError
from dp_ray.job.job import Job
from dp_ray.job.keys import Outputs
from dp_ray.tensors.tree import ends, flatten, subtree
from tests.support.alone import predict_parts
from tests.support.merging import merged
from tests.support.models import ModelOutput, Rows

ROWS = 20
DATA = Rows(ROWS).data


class Layers(nn.Module):
    """Logits, and hidden states of which all but the first cannot be copied from their device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, rows: torch.Tensor) -> dict[str, Any]:
        there = torch.empty(len(rows), 4, device="meta")
        return {"logits": self.layer(rows), "hidden_states": (rows * 2, there, there), "name": "odd"}


class Pair(NamedTuple):
    """A named tuple of outputs."""

    first: Any
    second: Any


@dataclasses.dataclass
class Both:
    """A dataclass of outputs."""

    first: Any
    second: Any


class Gives(nn.Module):
    """A model that gives what a function makes of its inputs."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def forward(self, rows: torch.Tensor) -> Any:
        return self.given(rows)


def predicted(folder: Path, model: Any, quiet: bool = True, precision: str = "fp32", **outputs: Any) -> dp_ray.Result:
    """A prediction in this process, whose job has these keys in `outputs`."""
    keys: dict[str, Any] = {"storage": str(folder), "name": "run", "shards": 3, "batch_size": 7, "workers": 0}
    keys |= {"quiet": quiet, "precision": precision}
    return dp_ray.run(model=model, dataset=Rows(ROWS), outputs=outputs, **keys)


def test_what_is_not_kept_never_leaves_its_device(tmp_path: Path) -> None:
    model = Layers()
    with pytest.raises(ModelError, match=r"step 0, shard 0: output 'hidden_states.1' is a tensor of the meta device"):
        predicted(tmp_path / "all", model)
    outputs = predicted(tmp_path / "kept", model, keep=["logits", "hidden_states.0"]).outputs
    assert outputs.keys() == {"logits", "hidden_states"}
    with torch.inference_mode():
        assert torch.allclose(outputs["logits"], model.layer(DATA), atol=1e-6)
    assert torch.equal(outputs["hidden_states"][0], DATA * 2)
    assert pq.read_schema(tmp_path / "kept/run/outputs/00000-of-00001.parquet").names == [
        "sample_index",
        "logits",
        "hidden_states.0",
    ]


def test_neither_does_what_after_leaves(tmp_path: Path) -> None:
    def largest(outputs: Any) -> Any:
        return {"label": outputs["logits"].argmax(1), **outputs}

    model = Layers()
    outputs = predicted(tmp_path, model, after=largest, keep=["label"]).outputs
    with torch.inference_mode():
        assert torch.equal(outputs["label"], model.layer(DATA).argmax(1))


TREE = {"a": torch.ones(2), "b": (torch.zeros(2), [torch.zeros(2), torch.ones(2)], "text"), "c.d": torch.ones(2)}


@pytest.mark.parametrize(
    ("patterns", "paths"),
    [
        (["a"], ["a"]),
        (["b"], ["b.0", "b.1.0", "b.1.1", "b.2"]),
        (["b.*"], ["b.0", "b.1.0", "b.1.1", "b.2"]),
        (["b.1.1", "b.2"], ["b.1.1", "b.2"]),
        (["b.?"], ["b.0", "b.1.0", "b.1.1", "b.2"]),
        (["*.1"], ["b.1.0", "b.1.1"]),
        (["c.d", "a"], ["a", "c.d"]),
        (["*"], ["a", "b.0", "b.1.0", "b.1.1", "b.2", "c.d"]),
    ],
)
def test_paths_and_globs(patterns: list[str], paths: list[str]) -> None:
    kept = subtree(TREE, chosen(ends(flatten(TREE)[1]), patterns, "step 0, shard 0"))
    assert [".".join(map(str, keys)) for keys in ends(flatten(kept)[1])] == paths


ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("tree", "wanted", "left"),
    [
        ((ONE, TWO, THREE), {(0,), (1,), (2,)}, (ONE, TWO, THREE)),
        ((ONE, TWO, THREE), {(0,), (2,)}, {0: ONE, 2: THREE}),
        ([ONE, "x", None], {(0,), (1,), (2,)}, [ONE, "x", None]),
        ([ONE, "x", None], {(0,)}, {0: ONE}),
        ({"a": (ONE, TWO), "b": THREE}, {("a", 0), ("a", 1)}, {"a": (ONE, TWO)}),
        ({"a": (ONE, TWO), "b": THREE}, {("a", 1), ("b",)}, {"a": {1: TWO}, "b": THREE}),
        (Pair(ONE, TWO), {("second",)}, {"second": TWO}),
        (Pair(ONE, (TWO, THREE)), {("first",), ("second", 1)}, Pair(ONE, {1: THREE})),
        (Both(ONE, TWO), {("first",)}, {"first": ONE}),
        (Both(ONE, TWO), {("first",), ("second",)}, Both(ONE, TWO)),
        (ModelOutput(ONE, (TWO, THREE)), {("hidden_states", 1)}, ModelOutput(None, {1: THREE})),  # type: ignore[arg-type]
        (ONE, {()}, ONE),
        ({"a": {}, "b": ONE}, {("a",), ("b",)}, {"a": {}, "b": ONE}),
    ],
)
def test_what_is_left_stays_under_its_path(tree: Any, wanted: set[Any], left: Any) -> None:
    kept = subtree(tree, wanted)
    (leaves, spec), (expected, nesting) = flatten(kept), flatten(left)
    assert spec == nesting
    assert all(leaf is other for leaf, other in zip(leaves, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "keep", "expected"),
    [
        (lambda x: (x, x * 2, x * 3), ["1", "2"], {1: DATA * 2, 2: DATA * 3}),
        (lambda x: [x, (x * 2,)], ["1"], {1: (DATA * 2,)}),
        (lambda x: Both(x, x * 2), ["second"], {"second": DATA * 2}),
        (lambda x: ModelOutput(x, (x * 2, x * 3)), ["logits"], ModelOutput(DATA)),
        (lambda x: ModelOutput(x, (x * 2, x * 3)), ["hidden_states.1"], {"hidden_states": {1: DATA * 3}}),
        (lambda x: x, ["output"], DATA),
        (lambda x: {"a": x, "text": "t", "none": None}, ["a"], {"a": DATA}),
        (lambda x: {"a": x, "text": "t", "none": None}, ["*"], {"a": DATA, "text": "t", "none": None}),
    ],
)
def test_what_is_kept_is_read_back_in_its_nesting(tmp_path: Path, given: Any, keep: list[str], expected: Any) -> None:
    result = predicted(tmp_path, Gives(given), keep=keep)
    leaves, spec = flatten(result.outputs)
    wanted, nesting = flatten(expected)
    assert spec.paths == nesting.paths
    assert all(torch.equal(*pair) for pair in zip(leaves, wanted, strict=True))
    if isinstance(expected, ModelOutput):
        assert result.outputs.logits is leaves[0]


def test_a_path_that_is_not_there_is_told_at_the_first_shard(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        predicted(tmp_path, Layers(), keep=["logits", "hidden_states.3"])
    assert str(caught.value) == (
        "outputs.keep: the outputs of step 0, shard 0 have no 'hidden_states.3'; did you mean 'hidden_states.2'?; "
        "they have logits, hidden_states.0, hidden_states.1, hidden_states.2, name"
    )


def pooled(outputs: Any, inputs: Any, scale: float = 1.0) -> Any:
    assert not torch.is_grad_enabled()
    return (outputs["hidden_states"][0] * inputs).sum(1) * scale


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (
            {"target": "tests.engine.test_output_selection:pooled", "args": {"scale": 3.0}},
            (DATA * 2 * DATA).sum(1) * 3,
        ),
        (pooled, (DATA * 2 * DATA).sum(1)),
        (lambda outputs: outputs["hidden_states"][0].argmax(1), (DATA * 2).argmax(1)),
        (lambda inputs: inputs["hidden_states"][0], DATA * 2),
    ],
)
def test_after_takes_the_place_of_the_outputs(tmp_path: Path, after: Any, expected: torch.Tensor) -> None:
    assert torch.equal(predicted(tmp_path, Layers(), after=after).outputs, expected)


def test_after_may_be_a_function_or_a_class_of_torch(tmp_path: Path) -> None:
    labels = predicted(tmp_path / "f", nn.Linear(5, 3), after={"target": "torch:argmax", "args": {"dim": 1}}).outputs
    shares = predicted(tmp_path / "c", nn.Linear(5, 3), after={"target": "torch.nn:Softmax", "args": {"dim": 1}})
    dropped = predicted(tmp_path / "m", Gives(lambda x: x), after=nn.Dropout(0.9)).outputs
    assert labels.dtype == torch.int64 and labels.shape == (ROWS,)
    assert torch.allclose(shares.outputs.sum(1), torch.ones(ROWS))
    assert torch.equal(dropped, DATA), "in eval mode"


def test_after_runs_under_autocast(tmp_path: Path) -> None:
    result = predicted(tmp_path, Gives(identity), precision="bf16", after=lambda one: one @ one.new_ones(5, 5))
    assert result.outputs.dtype == torch.bfloat16


class Noisy:
    """A function with a generator of its own, which draws from the global one too."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + torch.rand(len(outputs), 1) + torch.rand(len(outputs), 5, generator=self.generator)


def test_what_after_draws_depends_on_the_shard_alone(tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        keys: dict[str, Any] = {"dataset": Rows(ROWS), "batch_size": 7, "shards": 3, "workers": workers}
        job = Job.make({"model": Gives(identity), "outputs": {"after": Noisy()}, **keys}, "job")
        predict_parts(job, tmp_path / str(workers))
        found.append(merged(job, tmp_path / str(workers), ROWS).read())
    assert torch.equal(found[0], found[1])
    again = predicted(tmp_path / "again", Gives(lambda x: x), after=Noisy()).outputs
    assert torch.equal(found[0], again)
    assert len(torch.unique(again - DATA)) == ROWS * 5


def identity(rows: torch.Tensor) -> torch.Tensor:
    return rows


def raises(outputs: Any) -> Any:
    raise KeyError("logit")


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            {"after": raises},
            "step 0, shard 0: outputs.after raised KeyError: 'logit'; it got {logits: float32 [3, 3]",
        ),
        (
            {"after": lambda outputs: None},
            "step 0, shard 0: outputs.after must return tensors, arrays or texts, got None",
        ),
        (
            {"after": lambda outputs: outputs["logits"][0].repeat(2)},
            "step 0, shard 0: shard 0: output has 6 rows (size [6]), not 3: return one row of output per row",
        ),
        (
            {"after": lambda outputs: np.zeros(3), "dtype": "bfloat16"},
            "outputs.dtype: output is a numpy array, which cannot be bfloat16; return a tensor",
        ),
    ],
)
def test_an_error_names_step_and_shard(tmp_path: Path, outputs: Any, says: str) -> None:
    with pytest.raises((ModelError, JobError)) as caught:
        predicted(tmp_path, Layers(), **outputs)
    assert says in str(caught.value)


def typed(rows: torch.Tensor) -> dict[str, Any]:
    return {
        "float": rows * 100,
        "double": rows.double(),
        "whole": rows.long(),
        "truth": rows > 0,
        "complex": torch.complex(rows, rows),
        "array": (rows * 2).numpy(),
        "count": np.ones(len(rows), np.int32),
    }


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_floating_outputs_alone_change_their_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    names = [key for key in typed(DATA) if key != "array" or name != "bfloat16"]
    outputs = predicted(tmp_path, Gives(typed), keep=names, dtype=name).outputs
    for key, leaf in typed(DATA).items():
        if key not in names:
            continue
        changes = key in ("float", "double", "array")
        expected = torch.as_tensor(leaf).to(dtype) if changes else torch.as_tensor(leaf)
        assert torch.equal(torch.as_tensor(outputs[key]), expected)
        assert isinstance(outputs[key], type(leaf))


def test_a_number_that_becomes_infinite_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def large(rows: torch.Tensor) -> Any:
        return {"a": rows, "b": (rows.abs() + 1) * 1e5, "c": rows / 0.0}

    result = predicted(tmp_path, Gives(large), quiet=False, dtype="float16")
    assert bool(result.outputs["b"].isinf().all()) and result.outputs["a"].isfinite().all()
    told = [line for line in capsys.readouterr().err.splitlines() if "outputs.dtype" in line]
    assert len(told) == 1
    says = "outputs.dtype: b has numbers too large for float16, which are kept as inf"
    assert told[0].endswith(says)


def test_pandas_polars_and_duckdb_read_half_precision(tmp_path: Path) -> None:
    predicted(tmp_path, Gives(lambda x: x[:, 0]), dtype="float16")
    column = pd.read_parquet(tmp_path / "run/outputs/00000-of-00001.parquet")["output"]
    assert column.dtype == np.float16
    assert torch.equal(torch.tensor(column.to_numpy()), DATA[:, 0].half())


def make(**outputs: Any) -> Job:
    return Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, "workers": 1, "outputs": outputs}, "job")


def test_what_is_kept_belongs_to_a_jobs_identity_and_its_absence_changes_none() -> None:
    plain = make().fingerprint()
    assert plain == "a60a221bfa4f4f3873ab73b80564526af48dc7418ce5ea20d254e0ea7adbad61"
    assert make(file_bytes=3).fingerprint() == plain
    others: list[dict[str, Any]] = [
        {"keep": ["a"]},
        {"keep": ["b"]},
        {"after": "a:b"},
        {"dtype": "float16"},
        {"carry": ["id"]},
        {"ragged": True},
    ]
    assert len({make(**other).fingerprint() for other in others} | {plain}) == len(others) + 1
    train = {"task": "train", "loss": "a:l", "optimizer": "a:o"}
    plain_training, keeping = (
        Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 3, **train, "outputs": outputs}, "job")
        for outputs in (Outputs(), Outputs(keep=["a"]))
    )
    assert plain_training.fingerprint() == keeping.fingerprint()


def test_a_run_that_keeps_something_else_is_not_resumed(tmp_path: Path) -> None:
    model = {"target": "torch.nn:Linear", "args": {"in_features": 5, "out_features": 2}}
    dataset = {"target": "tests.support.models:Rows", "args": {}}
    keys: dict[str, Any] = {"model": model, "dataset": dataset, "batch_size": 7, "workers": 0, "quiet": True}
    keys |= {"storage": str(tmp_path), "name": "run"}
    with pytest.raises(JobError):
        dp_ray.run(**keys, outputs={"keep": ["logits"]})
    (tmp_path / "run" / "parts" / "kept").touch()
    with pytest.raises(JobError, match=r"a different job \(outputs.keep.0: 'logits' there, 'output' here\)"):
        dp_ray.run(**keys, outputs={"keep": ["output"]})
    with pytest.raises(JobError, match=r"a different job \(outputs.keep: \['logits'\] there, not set here"):
        dp_ray.run(**keys, outputs={"file_bytes": 7})


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ({"keep": []}, "outputs.keep: must"),
        ({"keep": "logits"}, "outputs.keep: must"),
        ({"dtype": "fp16"}, "outputs.dtype: must be 'float16', 'bfloat16', 'float32' or 'float64', got 'fp16'"),
        ({"carry": ["id", "id"]}, "outputs: carry names 'id' twice"),
        ({"kep": ["a"]}, "outputs.kep: is no key of a job; did you mean outputs.keep?"),
        ({"columns": ["a"]}, "outputs.columns: is no key of a job; here it is outputs.keep"),
        ({"after": 5}, "outputs.after: must be a target"),
    ],
)
def test_a_wrong_key_is_told(outputs: Any, says: str) -> None:
    with pytest.raises(JobError) as caught:
        make(**outputs)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("after", "says"),
    [
        ("torch:argmx", "outputs.after: torch has no attribute 'argmx'; did you mean 'argmax'?"),
        ("torch:pi", "outputs.after: must be a function of the outputs, got a float"),
        (
            {"target": "tests.engine.test_output_selection:pooled", "args": {"skale": 2}},
            "outputs.after.args: tests.engine.test_output_selection:pooled takes no 'skale', but",
        ),
        ({"target": "torch.nn:Softmax", "args": {"dimm": 2}}, "outputs.after.args: torch.nn:Softmax takes no 'dimm'"),
        (Both(1, 2), "outputs.after: must be a function of the outputs, got a Both"),
    ],
)
def test_an_after_that_cannot_be_called_is_told_before_anything_starts(tmp_path: Path, after: Any, says: str) -> None:
    with pytest.raises(JobError) as caught:
        predicted(tmp_path, nn.Linear(5, 2), after=after)
    assert says in str(caught.value)
    assert not list(tmp_path.iterdir())
