"""What a training step costs beside the bare loop: the CPU time that each library adds to a small model's step.

One process, batches of 32, three layers, clipping on. Each library takes turns with the bare loop every few steps,
in the same process. accelerate and Lightning Fabric do less in a step: dp_ray also seeds it, votes, checks that no
forward writes what it may not, keeps the history, the shapes and the times of its parts. Fabric has a row where it is
installed. The last rows are what a user pays: the CPU time of whole processes, with all their threads, of which each
runs one library, with dp_ray's as `workers: 0` runs by default.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dp_ray
from benchmarks.cluster import scratch
from benchmarks.compare import at_most, compared
from benchmarks.measure import in_process, in_processes
from benchmarks.table import Row, time_text
from benchmarks.training import as_a_worker, ours
from benchmarks.turns import take_turns
from dp_ray.engine.clock import StepClock
from dp_ray.engine.forward.state import StepState
from dp_ray.engine.loads import loading
from dp_ray.engine.random import ForwardSeeds, SampleSeeds
from dp_ray.engine.sums.votes import StepSums
from dp_ray.engine.world import World
from dp_ray.messages import StepControl
from dp_ray.rundir.history import History
from dp_ray.telemetry.shapes import Probe, Recorder

ROWS, BATCH, WIDTH = 3200, 32, 64
BLOCK, WARM, TURNS = 50, 4, 60  # steps in a turn; turns that are not measured, and that are
STEPS = BLOCK * (WARM + TURNS) + 1
EPOCHS = -(-STEPS * BATCH // ROWS)
FEW, MANY, WHOLES = 1_000, 5_000, 3  # steps of whole processes, and how many of each there are
CLIP, RATE = 1.0, 1e-3
KEYS: dict[str, Any] = {
    "model": {"target": "benchmarks.tax:three_layers"},
    "dataset": {"target": "benchmarks.tax:Rows"},
    "batch_size": BATCH,
    "epochs": EPOCHS,
    "max_steps": STEPS,
    "grad_clip": CLIP,
    "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": RATE}},
    "checkpoint": {"every_seconds": None, "every_steps": STEPS},
}


class Rows(Dataset[Any]):
    """Rows of normal numbers and a class of 10."""

    def __init__(self, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, WIDTH, generator=generator)
        self.targets = torch.randint(10, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def bare(control: StepControl, rows: int = ROWS, steps: int = STEPS) -> None:
    """The loop of torch's tutorials."""
    _loop(control, steps, *_parts(rows), torch.Tensor.backward, nn.utils.clip_grad_norm_)


def accelerated(control: StepControl, rows: int = ROWS, steps: int = STEPS) -> None:
    """accelerate's loop, as its documentation shows it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*_parts(rows))
    _loop(control, steps, model, optimizer, loader, accelerator.backward, accelerator.clip_grad_norm_)


def fabric(control: StepControl) -> None:
    """Lightning Fabric's loop, as its documentation shows it."""
    from lightning_fabric import Fabric

    lightning = Fabric(accelerator="cpu", devices=1)
    plain_model, plain_optimizer, plain_loader = _parts(ROWS)
    model, optimizer = lightning.setup(plain_model, plain_optimizer)
    loader = lightning.setup_dataloaders(plain_loader)

    def clip(_: Any, most: float) -> None:
        lightning.clip_gradients(model, optimizer, max_norm=most)

    _loop(control, STEPS, model, optimizer, loader, lightning.backward, clip)


def _parts(rows: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = three_layers()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE), DataLoader(Rows(rows), BATCH, shuffle=True)


def _loop(
    control: StepControl,
    steps: int,
    model: Any,
    optimizer: Any,
    loader: Any,
    backward: Callable[[torch.Tensor], object],
    clip: Callable[[Any, float], object],
) -> None:
    loss, step = nn.CrossEntropyLoss(), 0
    while True:
        for inputs, targets in loader:
            if step == steps:
                return
            control.before(step)
            optimizer.zero_grad()
            backward(loss(model(inputs), targets))
            clip(model.parameters(), CLIP)
            optimizer.step()
            step += 1


# What a step does for promises that the other libraries do not make, by the methods that do it.
PROMISES: dict[str, list[tuple[Any, str]]] = {
    "seeds": [(ForwardSeeds, "begin"), (loading, "seed_all"), (SampleSeeds, "begin"), (SampleSeeds, "learn")],
    "votes and sums": [(StepSums, "begin"), (StepSums, "put"), (StepSums, "total")],
    "what forwards write": [
        (StepState, "begin"),
        (StepState, "__exit__"),
        (StepState, "keep"),
        (StepState, "finish"),
    ],
    "history": [(History, "add")],
    "shapes": [(Probe, "_before"), (Probe, "_after"), (Recorder, "on_shard"), (Recorder, "on_step")],
    "times": [(StepClock, "enter"), (StepClock, "end_step"), (Recorder, "on_times")],
}


def promised(found: Any) -> None:
    """One process: the seconds of wall time that a step of dp_ray spends on each of its promises."""
    as_a_worker()
    spent = dict.fromkeys(PROMISES, 0.0)

    def timed(promise: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keys: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **keys)
            finally:
                spent[promise] += time.perf_counter() - began

        return called

    with ExitStack() as patched:
        for promise, methods in PROMISES.items():
            for owner, name in methods:
                patched.enter_context(mock.patch.object(owner, name, timed(promise, getattr(owner, name))))
        SIDES["dp_ray"](StepControl())
    found.put({promise: seconds / STEPS for promise, seconds in spent.items()})


SIDES: dict[str, Callable[[StepControl], object]] = {
    "dp_ray": partial(ours, "mlp", KEYS, World()),  # KEYS has a model of its own
    "accelerate": accelerated,
    "Lightning Fabric": fabric,
}


def taxes(name: str, found: Any) -> None:
    """One process: what the library's step takes longer than the bare one, in seconds of CPU time, turn by turn."""
    as_a_worker()
    costs = take_turns(SIDES[name], bare, BLOCK)[WARM:]
    found.put([ours.cpu - theirs.cpu for ours, theirs in costs])


def measure() -> Iterator[Row]:
    names = [name for name in SIDES if name != "Lightning Fabric" or find_spec("lightning_fabric")]
    rounds: dict[str, list[float]] = {name: [] for name in names}
    context = multiprocessing.get_context("spawn")
    for _ in range(5):  # a process of each, in turns
        for name in names:
            rounds[name].append(median(in_processes(context, taxes, [(name,)])[0]))
    what = (
        f"tax: CPU time that a step adds to the bare loop's, one process, batches of {BATCH}, three layers, clipped"
    )
    parts = in_processes(context, promised, [()])[0]
    what += f"; {time_text(sum(parts.values()))} go into " + ", ".join(
        f"{promise} ({time_text(seconds)})" for promise, seconds in parts.items()
    )
    for name in names[1:]:
        pairs = list(zip(rounds["dp_ray"], rounds[name], strict=True))
        yield compared(what, pairs, time_text, name, at_most(1.2))
    whole = {name: [_added(name) for _ in range(WHOLES)] for name in ("bare", "dp_ray", "accelerate")}
    what = f"tax: CPU time that a step adds to a whole process, of {MANY:,} steps less {FEW:,}, all threads"
    found = zip(*(whole[name] for name in ("dp_ray", "accelerate", "bare")), strict=True)
    yield compared(
        what, [(ours - none, theirs - none) for ours, theirs, none in found], time_text, "accelerate", at_most(1.2)
    )


def _added(name: str) -> float:
    """Seconds of CPU time by which a step makes a process of this library longer."""
    few, many = (in_process("benchmarks.tax", name, steps) for steps in (FEW, MANY))
    return float(many - few) / (MANY - FEW)


def alone(name: str, steps: int) -> None:
    """Be a process that runs a library alone, in one epoch of so many steps; print its seconds of CPU time."""
    as_a_worker()
    if name == "dp_ray":
        dataset = {"target": "benchmarks.tax:Rows", "args": {"rows": steps * BATCH}}
        given = {**KEYS, "dataset": dataset, "epochs": 1, "max_steps": None, "checkpoint": {}, "task": "train"}
        with scratch() as folder:
            dp_ray.run(**given, loss=nn.CrossEntropyLoss, shuffle=True, workers=0, storage=str(folder), verbose=False)
    else:
        {"bare": bare, "accelerate": accelerated}[name](StepControl(), steps * BATCH, steps)
    print(json.dumps(time.process_time()))


if __name__ == "__main__":
    alone(sys.argv[1], int(sys.argv[2]))
