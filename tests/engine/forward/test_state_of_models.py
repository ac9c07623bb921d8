"""A model's tensors, modes, buffers and generators: alike on all workers, and as its user left them."""

import weakref
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils.data import Dataset

import dp_ray
from dp_ray.driver.checks import check_targets
from dp_ray.engine.forward.model import build_model, evaluating, returning
from dp_ray.engine.prediction import PredictedShard
from dp_ray.engine.world import World
from dp_ray.errors import Error, JobError
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.plan.split import Split, Work
from dp_ray.storage import Storage
from dp_ray.tasks.task import compiling, run_task
from tests.support.builders import prediction_of, predictions_of
from tests.support.group import ProcessExit, StopsBefore, measured, run_group, weights_of
from tests.support.odd import Counted, Observed
from tests.support.training import Pairs, mlp
from tests.support.trainings import job_of

CPU = torch.device("cpu")


def odd(name: str) -> dict[str, str]:
    return {"target": f"tests.support.odd:{name}"}


class Listens(StepControl):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def before(self, step: int) -> None:
        self.steps.append(step)


def test_models_with_another_order_of_tensors_are_told(tmp_path: Path) -> None:
    """They are sent by their place: a worker's alpha would become another's beta."""
    says = r"where rank 0 has alpha.weight \[3, 6\] torch.float32, rank 1 has beta.weight"
    for keys in ({"task": "train"}, {"task": "evaluate"}):
        with pytest.raises(ProcessExit, match=says):
            run_group(job_of(odd("Unordered"), workers=2, **keys), tmp_path / keys["task"])


@pytest.mark.slow
def test_random_data_is_the_same_on_every_worker(tmp_path: Path) -> None:
    for data in ("RandomPairs", "OwnNoise"):
        keys = {"task": "evaluate", "shards": 3, "eval": None}
        found = [
            measured(run_group(job_of("mlp", odd(data), workers=workers, **keys), tmp_path / f"{data}{workers}"))
            for workers in (1, 2, 3)
        ]
        assert found[0] == found[1] == found[2]


def test_what_a_module_draws_when_it_is_imported_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import torch\nDRAWN = torch.rand(7)\ndef net():\n    return torch.nn.Linear(4, 4)\n"
    (tmp_path / "draws_when_imported.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    job = Job.make({"model": "draws_when_imported:net", "dataset": [1], "batch_size": 1}, "job")
    first, second = (build_model(job, [CPU]).state_dict() for _ in range(2))
    assert torch.equal(first["weight"], second["weight"])


def test_a_shard_of_a_prediction_leaves_no_trace_in_buffers() -> None:
    job = Job.make({"model": Observed, "dataset": [1], "batch_size": 4, "shards": 2}, "job")
    inputs, split = Pairs(12).inputs, Split(12, 4, 2)
    model = Observed()

    def run(work: Work) -> dict[tuple[int, int], torch.Tensor]:
        shards = [shard for _, shards in work for shard in shards]
        return predictions_of(job, model, work, ((None, inputs[shard.start : shard.stop]) for shard in shards))

    whole = run(Work(split))
    halves = {**run(Work(split, 2, 0)), **run(Work(split, 2, 1))}
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[at], halves[at]) for at in whole)
    assert dict(model.named_buffers())["0.largest"].item() == 1.0


def modes() -> tuple[bool, bool, bool]:
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


class SeesModes(nn.Linear):
    """Notes in which modes it runs, returns its weight too, and writes a buffer."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.runs: torch.Tensor
        self.register_buffer("runs", torch.zeros(()))
        self.seen: list[tuple[bool, bool, bool]] = []

    def forward(self, inputs: torch.Tensor) -> Any:
        self.seen.append(modes())
        self.runs += 1
        return {"outputs": super().forward(inputs), "weight": self.weight[: len(inputs)]}


@pytest.mark.parametrize("taken", [1, 3, 99])
def test_where_the_outputs_are_taken_nothing_of_the_models_modes_is_left(taken: int) -> None:
    """Also where the taking ends early: the model has its mode and its buffers again."""
    job = Job.make({"model": SeesModes, "dataset": [1], "batch_size": 4, "shards": 2, "precision": "bf16"}, "job")
    model, inputs, work = SeesModes(), Pairs(12).inputs, Work(Split(12, 4, 2))
    batches = ((None, inputs[shard.start : shard.stop]) for _, shards in work for shard in shards)
    outside, found = modes(), []
    with closing(prediction_of(job, model, work, batches)) as finished:
        for done in islice(finished, taken):
            assert modes() == outside and not model.training
            torch.ones(2, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            if isinstance(done, PredictedShard):
                found.append(done.outputs["outputs"].dtype)
    assert modes() == outside and not model.training and model.runs == 0
    assert set(model.seen) == {(False, False, True)} and set(found) == {torch.bfloat16}
    assert len(model.seen) == min(6, taken - taken // 3)  # each third one is the end of a step


class HoldsFew(nn.Linear):
    """Counts the outputs of earlier shards that are alive when it runs, in the class: a run copies the model."""

    outputs: ClassVar[list["weakref.ref[torch.Tensor]"]] = []
    alive: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.alive.append(sum(output() is not None for output in self.outputs))
        outputs: torch.Tensor = super().forward(inputs)
        self.outputs.append(weakref.ref(outputs))
        return outputs


@pytest.mark.parametrize("keys", [{}, {"outputs": {"dtype": "float16"}}])
def test_the_outputs_of_a_shard_are_freed_before_the_next_one_runs(tmp_path: Path, keys: dict[str, Any]) -> None:
    HoldsFew.alive.clear()
    given: dict[str, Any] = {"dataset": Pairs(12).inputs, "batch_size": 4, "shards": 2, "storage": str(tmp_path)}
    dp_ray.run(model=HoldsFew(), workers=0, name="run", quiet=True, **given, **keys)
    # Twice to tell which outputs have rows, then all shards.
    assert HoldsFew.alive == [0] * (2 + 6)


class Computes(Dataset[torch.Tensor]):
    """Samples that are the results of a matrix product, with gradients."""

    def __init__(self) -> None:
        self.inputs, self.weight = Pairs(12).inputs, torch.linspace(0, 1, 36).reshape(6, 6).requires_grad_()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inputs[index] @ self.weight


def test_what_a_dataset_computes_is_not_in_the_models_precision(tmp_path: Path) -> None:
    """As in a loader process, and in a training or an evaluation."""
    dataset = Computes()
    result = dp_ray.run(
        model=nn.Identity(),
        dataset=dataset,
        batch_size=4,
        shards=2,
        precision="bf16",
        workers=0,
        name="run",
        storage=str(tmp_path),
        quiet=True,
    )
    assert torch.equal(result.outputs, torch.stack([dataset[index] for index in range(12)]).detach())


class Merges(nn.Linear):
    """As adapters do, it changes its weight when it is set to eval mode, and back."""

    def train(self, mode: bool = True) -> "Merges":
        if mode != self.training:
            self.weight.data += -1 if mode else 1
        super().train(mode)
        return self


def test_each_module_has_its_own_mode_again_after_an_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)), Merges(3, 3))
    model[1].eval()
    weight = model.state_dict()["2.weight"].clone()
    modes = [module.training for module in model.modules()]
    with returning(model), evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    torch.testing.assert_close(model.state_dict()["2.weight"], weight)


@pytest.mark.parametrize(
    ("keys", "says", "steps"),
    [
        ({"model": odd("Extra")}, r"model._extra_state is of type object: a weights file", []),
        ({"model": odd("Counted")}, r"model.0._extra_state is of type dict: a weights file", []),
        ({"model": odd("Double")}, r"model.phase is of torch.complex128", []),
        ({"scheduler": odd("FunctionScheduler")}, r"scheduler.function.* is of type function", []),
        ({"optimizer": odd("ObjectSGD")}, r"optimizer.state.0.kept.* is of type object", [0]),
        ({"model": odd("Expanded")}, r"weight is an expanded tensor.*clone\(\) it", []),
    ],
)
def test_what_cannot_be_kept_or_trained_is_said_at_once(
    tmp_path: Path, keys: dict[str, Any], says: str, steps: list[int]
) -> None:
    control = Listens()
    job = job_of("mlp", workers=1, **keys)
    with pytest.raises(Error, match=says):
        run_task(job, World(), Storage(str(tmp_path)), lambda what: None, control)
    assert control.steps == steps


def test_an_extra_state_that_is_a_tensor_comes_back_with_the_weights(tmp_path: Path) -> None:
    given = {**odd("Counted"), "args": {"is_tensor": True}}
    place: dict[str, Any] = {"workers": 0, "storage": str(tmp_path)}
    trained = dp_ray.run(job_of(given, **place), quiet=True, name="trained")
    model = Counted(is_tensor=True)
    model.load_state_dict(trained.weights)
    assert model[0].calls == len(trained.history) > 1
    data = Pairs(10).inputs
    keys = {"task": "predict", "model": given, "init_from": trained.weights_path, "dataset": list(data)}
    outputs = dp_ray.run(**keys, **place, batch_size=5, name="predicted", quiet=True).outputs
    torch.testing.assert_close(outputs, model.eval()(data).detach())


@pytest.mark.slow
def test_an_extra_state_of_a_sharded_model_comes_back(tmp_path: Path) -> None:
    """From a checkpoint, and from weights."""
    given: dict[str, Any] = {**odd("Counted"), "args": {"is_tensor": True}}
    keys: dict[str, Any] = {"workers": 2, "strategy": "fsdp", "shards": 2}
    for name in ("straight", "broken"):
        job = job_of(given, **keys, checkpoint={"every_steps": 2})
        run_group(job, tmp_path / name, StopsBefore(4) if name == "broken" else None)
    run_group(job, tmp_path / "broken")
    counts = [int(weights_of(tmp_path / name)["0._extra_state"]) for name in ("straight", "broken")]
    assert counts[0] == counts[1] > 0
    start = str(tmp_path / "straight" / "weights.safetensors")
    run_group(job_of(given, **keys, init_from=start, max_steps=1), tmp_path / "on")
    assert int(weights_of(tmp_path / "on")["0._extra_state"]) == counts[0] + 1


def test_an_optimizer_that_wants_a_closure_is_refused_before_anything_starts() -> None:
    with pytest.raises(JobError, match=r"optimizer: LBFGS computes the loss several times"):
        check_targets(job_of("mlp", optimizer={"target": "torch.optim:LBFGS"}))


@pytest.mark.full
@pytest.mark.slow
def test_a_bitwise_job_compiles_for_every_shape_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops after 8 shapes of a module, and runs it uncompiled."""
    compiled_shapes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_shapes.append(1)
        return graph.forward

    job = job_of("mlp", bitwise=True, compile=True)
    cuts = torch._dynamo.config.optimize_ddp
    with compiling(job):
        assert not torch._dynamo.config.optimize_ddp, "it would cut the graphs of several workers"
        model = torch.compile(mlp(), dynamic=False, backend=backend)
        for rows in range(1, 21):
            model(torch.zeros(rows, 6))
    torch.compiler.reset()
    assert len(compiled_shapes) == 20
    assert torch._dynamo.config.optimize_ddp == cuts
    monkeypatch.setattr("dp_ray.tasks.task.KERNELS", 3)
    other = torch.compile(mlp(), dynamic=False, backend=backend)
    with compiling(job):
        for rows in (1, 2, 3):
            other(torch.zeros(rows, 6))
        with pytest.raises(FailOnRecompileLimitHit, match="recompile_limit"):
            other(torch.zeros(4, 6))
    torch.compiler.reset()
