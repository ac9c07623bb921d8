"""Workers that go on where others are killed, in real processes: the bits of one undisturbed process."""

import copy
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support import around
from tests.support.group import history_of, run_group, weights_of
from tests.support.loops import keys_of
from tests.support.survivors import Fault, run_surviving
from tests.support.training import Pairs, mlp
from tests.support.trainings import SGD, job_of
from tests.tasks.test_loops import PPO

KEYS: dict[str, Any] = {
    "batch_size": 22,
    "shards": 6,
    "bitwise": True,
    "epochs": 3,
    "eval": {"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 4},
    "ema": {"decay": 0.8},
    "checkpoint": {"every_steps": 5, "best": "eval_loss"},
}


def images(length: int | None = None) -> dict[str, Any]:
    args = {} if length is None else {"length": length}
    return {"target": "tests.support.training:Images", "args": args}


OF_IMAGES = {"dataset": images(), "eval": {"dataset": images(20), "every_steps": 4}}


def made(model: Any = "mlp", **keys: Any) -> Job:
    return job_of(model, **{**KEYS, **(OF_IMAGES if model == "conv" else {}), **keys})


def undisturbed(tmp_path: Path, model: Any = "mlp", **keys: Any) -> Path:
    folder = tmp_path / "undisturbed"
    run_group(made(model, workers=1, **keys), folder)
    return folder


def assert_same(folder: Path, expected: Path) -> None:
    there, here = weights_of(expected), weights_of(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert history_of(folder) == history_of(expected)


@pytest.mark.full(but=["0", "2"])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_one_of_three_is_killed(tmp_path: Path, slot: int) -> None:
    expected = undisturbed(tmp_path)
    told = run_surviving(made(workers=3), tmp_path / "run", [Fault(slot, 7)])
    assert told.groups == [[0, 1, 2], [one for one in (0, 1, 2) if one != slot]]
    assert_same(tmp_path / "run", expected)


@pytest.mark.full(but=["0-exchange", "1-update"])
@pytest.mark.parametrize("part", ["backward", "exchange", "update", "after", "evaluation", "checkpoint", "weights"])
@pytest.mark.parametrize("slot", [0, 1])
def test_a_worker_is_killed_in_a_part_of_a_step(tmp_path: Path, part: str, slot: int) -> None:
    expected = undisturbed(tmp_path, "conv")
    job = made("conv", workers=3)
    step = {"weights": 14, "evaluation": 7}.get(part, 9)
    told = run_surviving(job, tmp_path / "run", [Fault(slot, step, part)])
    assert len(told.groups) == (1 if part == "checkpoint" and slot == 1 else 2)
    assert_same(tmp_path / "run", expected)


@pytest.mark.parametrize("part", ["backward", "exchange"])
def test_what_a_loss_over_the_batch_has_written_is_undone_with_the_step(tmp_path: Path, part: str) -> None:
    """The loss moves its centre before the shards run again, of which one does not end."""
    case: dict[str, Any] = {"has": ["over", "moves"], "rows": 24, "batch_size": 6, "shards": 3, "optimizer": "SGD"}
    case |= {"grad_clip": None, "bitwise": True, "kept": 99, "eval_rows": None, "processes": 0, "objects": False}
    case |= {"loops": False, "step": None, "draws": None}
    job = Job.make({**around.keys_of(case), "workers": 3}, "job")
    told = run_surviving(job, tmp_path / "run", [Fault(0, 1, part), Fault(1, 5, part)])
    assert len(told.views) == 3
    around.compare(case, tmp_path / "run")


@pytest.mark.parametrize("part", ["weights", "naming"])
def test_what_is_not_kept_yet_is_kept_by_the_others_if_rank_0_dies_at_the_end(tmp_path: Path, part: str) -> None:
    """The others have run all steps; they hold what they have trained, and no checkpoint does."""
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 99}, "eval": None}
    expected = undisturbed(tmp_path, **keys)
    told = run_surviving(made(workers=3, **keys), tmp_path / "run", [Fault(0, 14, part)])
    assert told.views == [[0, 1, 2], [1, 2]]
    assert max(step for slot, step in told.ran) == 14 and len(told.ran) == 3 * 15, "no step runs again"
    assert_same(tmp_path / "run", expected)


@pytest.mark.full(but=["faults1-False"])
@pytest.mark.parametrize("bitwise", [True, False])
@pytest.mark.parametrize("faults", [[Fault(0, 6, "update"), Fault(2, 6, "exchange")], [Fault(2, 6, "exchange")]])
def test_of_four_those_hear_of_a_death_that_are_no_neighbours(
    tmp_path: Path, faults: list[Fault], bitwise: bool
) -> None:
    expected = undisturbed(tmp_path, "conv", shards=4, bitwise=bitwise)
    told = run_surviving(made("conv", workers=4, shards=4, bitwise=bitwise), tmp_path / "run", faults)
    assert told.views[-1] == [slot for slot in range(4) if slot not in {fault.slot for fault in faults}]
    if bitwise:
        assert_same(tmp_path / "run", expected)
    there, here = weights_of(expected), weights_of(tmp_path / "run")
    assert all(torch.allclose(there[name], here[name], rtol=1e-4, atol=1e-5) for name in there)


@pytest.mark.full
@pytest.mark.parametrize("slot", [0, 2])
def test_another_worker_comes_in_the_place_of_a_dead_one(tmp_path: Path, slot: int) -> None:
    slow: dict[str, Any] = {"epochs": 60, "checkpoint": {"every_steps": 50, "best": "eval_loss"}}
    expected = undisturbed(tmp_path, **slow)
    job = made(workers=3, **slow)
    told = run_surviving(job, tmp_path / "run", [Fault(slot, 7, "exchange")], replaces=True)
    assert sorted(told.views[-1]) == [0, 1, 2] and len(told.views) >= 2
    if slot:
        assert all(view[0] == 0 for view in told.views)
    assert_same(tmp_path / "run", expected)


@pytest.mark.full(but=["faults6-5"])
@pytest.mark.parametrize(
    ("faults", "first"),
    [
        ([Fault(0, 3)], 0),  # there is no checkpoint yet
        ([Fault(1, 9, "gather")], 5),
        ([Fault(0, 9, "update"), Fault(2, 9, "gather")], 5),
        ([Fault(0, 9, "checkpoint")], 5),  # it is half written, and counts as none
        ([Fault(2, 9, "checkpoint")], 5),
        ([Fault(1, 7, "evaluation"), Fault(2, 7, "restore")], 5),
        ([Fault(0, 9, "checkpoint"), Fault(1, 9, "restore"), Fault(2, 9, "level")], 5),
        ([Fault(2, 14, "weights")], None),
    ],
)
def test_sharded_workers_go_on_from_the_newest_checkpoint(
    tmp_path: Path, faults: list[Fault], first: int | None
) -> None:
    """Not all of four are connected to the dead for what they wait for."""
    expected = undisturbed(tmp_path, shards=8)
    told = run_surviving(made(workers=4, shards=8, strategy="fsdp"), tmp_path / "run", faults)
    dead = {fault.slot for fault in faults}
    assert told.views[0] == [0, 1, 2, 3] and told.views[-1] == [slot for slot in range(4) if slot not in dead]
    (lives,) = {3} - dead
    ran = [step for slot, step in told.ran if slot == lives]
    again = [step for step, before in zip(ran[1:], ran, strict=False) if step <= before]
    assert set(again) == (set() if first is None else {first})
    assert_same(tmp_path / "run", expected)


def test_sharded_workers_without_bitwise_leave_no_socket_of_a_broken_group(tmp_path: Path) -> None:
    """Its update moves sharded tensors, of which torch remembers the groups."""
    expected = undisturbed(tmp_path, bitwise=False)
    told = run_surviving(made(workers=2, strategy="fsdp", bitwise=False), tmp_path / "run", [Fault(0, 1, "backward")])
    assert told.views == [[0, 1], [1]]
    there, here = weights_of(expected), weights_of(tmp_path / "run")
    assert all(torch.allclose(there[name], here[name], rtol=1e-4, atol=1e-5) for name in there)


def loop_keys(loop: str, **keys: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"shards": 6, "bitwise": True, "epochs": 4, "checkpoint": {"every_steps": 4}}
    return keys_of(loop, **{**given, **keys, **(PPO if loop == "ppo" else {})})


@pytest.mark.full(but=["faults1-gan"])
@pytest.mark.parametrize("loop", ["gan", "ppo"])
@pytest.mark.parametrize(
    "faults",
    [
        [Fault(1, 5, "backward")],
        [Fault(0, 6, "update")],
        [Fault(0, 7, "checkpoint"), Fault(2, 7, "exchange")],
        [Fault(1, 11, "weights")],
    ],
)
def test_a_loop_goes_on_from_the_newest_checkpoint(tmp_path: Path, loop: str, faults: list[Fault]) -> None:
    """A step of these has several updates: the one in flight may have been half done."""
    run_group(Job.make({**loop_keys(loop), "workers": 1}, "job"), tmp_path / "undisturbed")
    told = run_surviving(Job.make({**loop_keys(loop), "workers": 3}, "job"), tmp_path / "run", faults)
    assert told.views[-1] == [slot for slot in range(3) if slot not in {fault.slot for fault in faults}]
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.full(but=["fault0"])
@pytest.mark.parametrize("fault", [Fault(1, 5), Fault(0, 4, "gather")])
def test_a_sharded_prediction_goes_on(tmp_path: Path, fault: Fault) -> None:
    keys: dict[str, Any] = {
        "task": "predict",
        "model": {"target": "tests.support.training:mlp"},
        "dataset": {"target": "tests.support.training:Pairs"},
        "batch_size": 6,
        "shards": 4,
        "bitwise": True,
    }
    run_group(Job.make({**keys, "workers": 1}, "job"), tmp_path / "undisturbed")
    job = Job.make({**keys, "workers": 3, "strategy": "fsdp"}, "job")
    told = run_surviving(job, tmp_path / "run", [fault])
    assert told.views[-1] == [slot for slot in range(3) if slot != fault.slot]
    found, expected = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "outputs").iterdir() if file.is_file()}
        for name in ("run", "undisturbed")
    )
    assert found == expected and expected


class Removing(Pairs):
    """Removes all weights in a folder when a row behind the first 24 is read: also those that the run has linked."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> Any:
        for file in self.folder.rglob("*.safetensors") if index >= 24 else ():
            file.unlink(missing_ok=True)
        return super().__getitem__(index)


@pytest.mark.full(but=["evaluate"])
@pytest.mark.parametrize("task", ["predict", "evaluate"])
def test_the_weights_that_survivors_have_are_not_read_again(tmp_path: Path, task: str) -> None:
    run_group(made(workers=1), tmp_path / "trained")
    trained = (tmp_path / "trained" / "weights.safetensors").read_bytes()
    weights = tmp_path / "weights.safetensors"
    keys: dict[str, Any] = {
        "task": task,
        "model": {"target": "tests.support.training:mlp"},
        "dataset": {"target": "tests.tasks.test_survivors:Removing", "args": {"folder": str(tmp_path)}},
        "init_from": str(weights),
        "batch_size": 6,
        "shards": 4,
        "bitwise": True,
        **({"loss": "torch.nn:CrossEntropyLoss"} if task == "evaluate" else {}),
    }
    faults = [Fault(1, 5), Fault(0, 6)]
    for name, workers in (("undisturbed", 1), ("run", 3)):
        weights.write_bytes(trained)
        told = run_surviving(Job.make({**keys, "workers": workers}, "job"), tmp_path / name, faults[: workers - 1])
        assert not list(tmp_path.rglob("*.safetensors"))
    assert told.views[-1] == [2] and len(told.views) > 1
    if task == "predict":
        found, expected = (
            {file.name: file.read_bytes() for file in (tmp_path / name / "outputs").iterdir() if file.is_file()}
            for name in ("run", "undisturbed")
        )
        assert found == expected and expected


@pytest.mark.full(but=["second0"])
@pytest.mark.parametrize("second", [Fault(2, 7, "level"), Fault(0, 7, "level"), Fault(2, 7, "level", 3.0)])
def test_another_is_lost_while_the_survivors_level(tmp_path: Path, second: Fault) -> None:
    expected = undisturbed(tmp_path)
    told = run_surviving(made(workers=4), tmp_path / "run", [Fault(1, 7, "exchange"), second])
    assert told.views[-1] == [slot for slot in (0, 2, 3) if slot != second.slot] and len(told.groups) == 3
    assert_same(tmp_path / "run", expected)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp", "loop"])
def test_a_newcomer_reads_the_checkpoint_that_the_others_keep_for_it(tmp_path: Path, kind: str) -> None:
    """No step runs twice for it."""
    if kind == "loop":
        keys = loop_keys("gan", epochs=60, checkpoint={"every_steps": 50})
        run_group(Job.make({**keys, "workers": 1}, "job"), tmp_path / "undisturbed")
        job = Job.make({**keys, "workers": 3}, "job")
    else:
        slow: dict[str, Any] = {"epochs": 40, "checkpoint": {"every_steps": 50, "best": "eval_loss"}}
        undisturbed(tmp_path, **slow)
        job = made(workers=3, strategy="fsdp", **slow)
    told = run_surviving(job, tmp_path / "run", [Fault(1, 52)], replaces=True)
    assert sorted(told.views[-1]) == [0, 1, 2]
    ran = [step for slot, step in told.ran if slot == 0]
    again = [step for step, before in zip(ran[1:], ran, strict=False) if step <= before]
    assert len(again) == 1 and again[0] >= 50, "after the loss alone"
    assert_same(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.full(but=["keys1-fault1"])
@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({}, Fault(1, 7, "forward", 3.0)),
        ({"find_unused_parameters": True}, Fault(2, 7, "exchange", 3.0)),  # DDP has collectives of its own
        ({"bitwise": False}, Fault(0, 7, "exchange", 3.0)),
        ({}, Fault(1, 7, "evaluation", 3.0)),
        ({}, Fault(0, 9, "checkpoint", 3.0)),
        ({}, Fault(0, 14, "weights", 3.0)),
        ({"strategy": "fsdp"}, Fault(2, 9, "gather", 3.0)),
        ({"strategy": "fsdp"}, Fault(0, 9, "checkpoint", 3.0)),  # a commit waits for its rank 0
    ],
)
def test_the_others_leave_a_worker_that_is_stopped_and_closes_nothing(
    tmp_path: Path, keys: dict[str, Any], fault: Fault
) -> None:
    """When it wakes up the others are far, or at the end: it writes nothing."""
    model = "mlp" if "strategy" in keys else "conv"
    expected = undisturbed(tmp_path, model, **keys)
    told = run_surviving(made(model, workers=3, **keys), tmp_path / "run", [fault])
    assert told.groups == [[0, 1, 2], [slot for slot in range(3) if slot != fault.slot]]
    if keys.get("bitwise", True):
        assert_same(tmp_path / "run", expected)


@pytest.mark.full
@pytest.mark.parametrize("part", ["piece", "naming"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "loop"])
def test_a_rank_0_that_sleeps_amid_a_commit_leaves_nothing_once_the_others_have_gone_on(
    tmp_path: Path, kind: str, part: str
) -> None:
    """It wakes up after the end of the others; "naming": it has found that its attempt is the newest."""
    keys = loop_keys("gan", checkpoint={"every_steps": 5})
    alone, several = (
        Job.make({**keys, "workers": workers}, "job") if kind == "loop" else made(workers=workers, strategy=strategy)
        for workers, strategy in ((1, "ddp"), (3, "ddp" if kind == "loop" else kind))
    )
    run_group(alone, tmp_path / "undisturbed")
    told = run_surviving(several, tmp_path / "run", [Fault(0, 9, part, 6.0)])
    assert told.groups == [[0, 1, 2], [1, 2]]
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
    names = ("weights.safetensors", "history/*", "checkpoints/*", "checkpoints/pieces/*")
    files = [file for name in names for file in (tmp_path / "run").glob(name) if file.is_file()]
    weights = files[0].stat().st_mtime_ns
    assert [file.name for file in files if file.stat().st_mtime_ns > weights] == []


def test_the_last_of_three_goes_on_alone(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    faults = [Fault(0, 3, "exchange"), Fault(1, 8, "exchange")]
    told = run_surviving(made(workers=3), tmp_path / "run", faults)
    assert told.groups == [[0, 1, 2], [1, 2], [2]]
    assert_same(tmp_path / "run", expected)


def wide() -> torch.nn.Module:
    """4 MB of parameters, and as much in the optimizer."""
    return torch.nn.Sequential(torch.nn.Linear(6, 1024), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 3))


SLOW_SGD = {"target": "torch.optim:SGD", "args": {"lr": 0.001, "momentum": 0.9}}  # else the weights end as NaN


@pytest.mark.full
@pytest.mark.slow
def test_twenty_are_killed_in_one_run_and_the_one_that_lives_grows_in_nothing(tmp_path: Path) -> None:
    parts = ["forward", "backward", "exchange", "update", "after"]
    faults = [Fault(1 + number % 2, 10 * number + 4, parts[number % 5]) for number in range(1, 21)]
    long: dict[str, Any] = {"epochs": 54, "checkpoint": {"every_steps": 50}, "optimizer": SLOW_SGD}
    model = {"target": "tests.tasks.test_survivors:wide"}
    expected = undisturbed(tmp_path, model, **long)
    told = run_surviving(made(model, workers=3, **long), tmp_path / "run", faults, replaces=True, gates=10)
    assert told.died == [fault.slot for fault in faults]
    sizes = [size for slot, size in told.sizes if slot == 0]
    early, late = sizes[6:12], sizes[-6:]  # not the first ones, which fill caches
    # What grew would do so in each of some twenty views. Some looks come as a writer's thread has a file open.
    assert median(size.files for size in late) <= median(size.files for size in early)
    assert median(size.threads for size in late) <= median(size.threads for size in early)
    # A copy of the model that is held for each view would be 60 MB.
    assert median(size.memory for size in late) - median(size.memory for size in early) < 30e6
    assert_same(tmp_path / "run", expected)


class Early(torch.nn.Module):
    """Its first forward writes a buffer that no state_dict has, and fills another one."""

    seen: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("shift", None, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.seen:
            self.seen.fill_(1)
            self.scale.fill_(0.5)
            self.shift = torch.tensor([0.0, 0.5, -0.5])
        outputs: torch.Tensor = self.linear(inputs) * self.scale + self.shift
        return outputs


class Growing(torch.nn.Module):
    """A loss that counts its calls, and weighs by their number."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.calls / 10 * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class Counting:
    """A loop that wraps parts of the model, and weighs the loss by the number of its steps."""

    def __init__(self, model: Any) -> None:
        self.body, self.head = model[:-1], model[-1]
        self.steps = 0

    def loss(self, batch: Any) -> torch.Tensor:
        outputs = self.head(self.body(batch[0]))
        return self.steps / 10 * torch.nn.functional.cross_entropy(outputs, batch[1], reduction="none")

    def __call__(self, run: Any) -> None:
        update = run.optimizer(torch.optim.SGD(run.model.parameters(), 0.1, 0.9))
        for step in run.steps():
            self.steps += 1
            step.backward(self.loss, of=run.model)
            update.step()


class Fading(Pairs):
    """An object whose rows grow each time that they are read, as one that caches what it has drawn."""

    def __getitem__(self, index: int) -> Any:
        self.inputs[index] *= 2
        return super().__getitem__(index)


BEST: dict[str, Any] = {
    "eval": {**KEYS["eval"], "every_steps": 3},
    "checkpoint": {"every_steps": 9, "best": "eval_loss"},
}


@pytest.mark.parametrize(
    ("kind", "keys", "faults"),
    [
        ("fsdp", {"strategy": "fsdp", "bitwise": True}, [Fault(0, 2), Fault(1, 1, "backward")]),
        ("ddp", BEST, [Fault(0, 2, "checkpoint")]),  # the others have trained on from weights that nobody kept
        ("loop", {}, [Fault(0, 2), Fault(1, 1, "backward")]),
    ],
)
def test_objects_begin_anew_where_step_0_runs_again(
    tmp_path: Path, kind: str, keys: dict[str, Any], faults: list[Fault]
) -> None:
    """A model, a loss, a loop that counts, and a dataset: of the lost views nothing is left in them."""
    torch.manual_seed(0)
    model, loss, data = mlp(), Growing(), Fading()
    loop = Counting(model)
    plain = copy.deepcopy(loop)
    job = {"task": "train", "model": model, "dataset": data, "shards": 3, "batch_size": 22, "workers": 3}
    job |= {"loop": loop} if kind == "loop" else {"loss": loss, "optimizer": SGD}
    told = run_surviving(Job.make({**job, **keys}, "job"), tmp_path / "run", faults)
    assert told.ran.count((2, 0)) >= 2 and sorted(told.died) == sorted(fault.slot for fault in faults)

    sgd = torch.optim.SGD([*plain.body.parameters(), *plain.head.parameters()], 0.1, 0.9)
    for batch in zip(*(torch.split(rows, 22) for rows in (2 * data.inputs, data.targets)), strict=True):
        sgd.zero_grad()
        plain.steps += 1
        torch.autograd.backward(plain.loss(batch).mean())
        sgd.step()
    expected = [*plain.body.parameters(), *plain.head.parameters()]
    for found, tensor in zip(weights_of(tmp_path / "run").values(), expected, strict=True):
        torch.testing.assert_close(found, tensor.detach())


def plainly_trained(epochs: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, loss, data = Early(), Growing(), Pairs()
    sgd = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for _ in range(epochs):
        for inputs, targets in zip(*(torch.split(rows, 22) for rows in (data.inputs, data.targets)), strict=True):
            sgd.zero_grad()
            torch.autograd.backward(loss(model(inputs), targets).mean())
            sgd.step()
    return model.state_dict()


@pytest.mark.parametrize("slot", [0, 2])
def test_what_forwards_have_written_early_survives_the_loss_of_any_rank(tmp_path: Path, slot: int) -> None:
    """Also in the checkpoints that another worker writes then, from which other processes go on."""
    made_by: dict[str, Any] = {"loss": f"{__name__}:Growing", "shuffle": False, "checkpoint": {"every_steps": 1}}
    keys = {**made_by, "eval": None, "ema": None, "epochs": 4}
    job = made({"target": f"{__name__}:Early"}, workers=3, **keys)
    undisturbed(tmp_path, {"target": f"{__name__}:Early"}, **keys)
    others = [Fault(other, 14) for other in range(3) if other != slot]
    told = run_surviving(job, tmp_path / "run", [Fault(slot, 6, "update"), *others])
    assert sorted(told.died) == [0, 1, 2]
    run_group(job, tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
    for name, tensor in plainly_trained(4).items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[name], tensor)


@pytest.mark.parametrize("part", ["second evaluation", "checkpoint"])
def test_an_evaluation_that_rounds_the_weights_is_not_done_twice(tmp_path: Path, part: str) -> None:
    """As of a model that merges a part into its weights in `eval()`: the newest checkpoint is read."""
    evaluation = {"dataset": KEYS["eval"]["dataset"], "every_steps": 4}
    keys = {**KEYS, "ema": None, "eval": {"a": evaluation, "b": evaluation}, "checkpoint": {"every_steps": 4}}
    model = {"target": "tests.support.own_modes:adapted"}
    job = job_of(model, **keys, optimizer={"target": "torch.optim:SGD", "args": {"lr": 0.02}}, workers=1)
    run_group(job, tmp_path / "undisturbed")
    run_surviving(job.model_copy(update={"workers": 2}), tmp_path / "run", [Fault(0, 7, part)])
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
