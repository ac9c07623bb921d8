"""Where a run's first and last seconds go, beside a plain process of torch: `python -m benchmarks.gpu start [cpu]`.

Three ways to train jobs/digits.yaml for three steps: a fresh process of plain torch, `dp-ray run` with no Ray up, and
the second job of a session. They take turns, and each turn's row is printed at once; nothing else should run on the
machine. `start quick` gives each way a single turn.

`python -m benchmarks.gpu large` trains a model of 2 GB for twelve steps with a checkpoint every five: the seconds of
the first steps, of those after a checkpoint, and after the last step, and the peak of its memory beside the plan's.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import in_process, seconds

JOB = "jobs/digits.yaml"
STEPS, REPEATS = 3, 3
# No evaluation, no best weights: what is left before and after the steps is each run's own.
KEYS: dict[str, Any] = {"workers": 1, "max_steps": STEPS, "eval": None, "checkpoint": {}, "overwrite": True}
SPANS = {"before": "before the first step", "steps": f"{STEPS} steps", "after": "after the last step"}
PLAIN_SPANS = {
    "import": "the import of torch",
    "context": "the first tensor on the device",
    "model": "model and data",
}


def show_large(on_cpu: bool) -> None:
    """Print what a training of a large model found."""
    found = in_process("benchmarks.gpu_start", "large", "cpu" if on_cpu else "cuda")
    print("", f"A model of {found['bytes'] / 1e9:.3g} GB, batches of 16, a checkpoint every 5 steps:", sep="\n")
    print(f"- seconds of its steps: {', '.join(f'{value:.3f}' for value in found['steps'])}")
    print(f"- {found['before']:.2f} s before the first step, {found['after']:.2f} s from the last one's begin on")
    peak = f"{found['peak'] / 1e6:,.0f} MB" if found["peak"] else "not told of a CPU"
    print(f"- peak of what torch holds: {peak}; planned: {found['planned'] / 1e6:,.0f} MB", flush=True)


def show(on_cpu: bool, is_quick: bool) -> None:
    """Print a row for each turn, then the medians, all in seconds. The first of several turns does not count."""
    place = "cpu" if on_cpu else "cuda"
    ways = {
        "plain torch": partial(whole, "benchmarks.gpu_start", "plain", place),
        "dp-ray run": partial(whole, "benchmarks.gpu_start", "run", place),
        "a session's second job": partial(in_process, "benchmarks.gpu_start", "session", place),
    }
    spans = {**SPANS, "whole": "the whole process, or job"}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    print("", f"| seconds | turn | {' | '.join(spans.values())} |", f"| --- |{' --- |' * 5}", sep="\n", flush=True)
    for turn in ["only"] if is_quick else ["first", *map(str, range(1, REPEATS + 1))]:
        for name, way in ways.items():
            found[name].append(way())
            show_row(name, turn, [found[name][-1][span] for span in spans])
    counted = {name: turns[-REPEATS:] for name, turns in found.items()}
    for name, turns in counted.items() if not is_quick else ():
        show_row(name, "median", [median(turn[span] for turn in turns) for span in spans])
    firsts = (
        f"{text} {median(value[name] for value in counted['plain torch']):.2f}" for name, text in PLAIN_SPANS.items()
    )
    print("", f"Plain torch before the first step: {', '.join(firsts)}.", sep="\n", flush=True)


def show_row(way: str, turn: str, taken: list[float]) -> None:
    print(f"| {way} | {turn} | {' | '.join(f'{value:.2f}' for value in taken)} |", flush=True)


def whole(module: str, *args: str) -> dict[str, float]:
    """What a process of its own found, and how long it took in all."""
    found: dict[str, float] = {}
    return {"whole": seconds(lambda: found.update(in_process(module, *args))), **found}


def plain(place: str) -> dict[str, float]:
    """The seconds of this process's own training, from its first import on."""
    began = time.perf_counter()
    import torch

    imported = time.perf_counter()
    torch.zeros(1, device=place)
    synchronize: Callable[[], None] = torch.cuda.synchronize if place == "cuda" else lambda: None
    synchronize()
    there = time.perf_counter()
    from jobs.digits import Digits, Net

    model = Net(16).to(place)
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=0.003), torch.nn.CrossEntropyLoss()
    batches = iter(torch.utils.data.DataLoader(Digits("train"), 32, shuffle=True))
    synchronize()
    ready = time.perf_counter()
    for _ in range(STEPS):
        images, labels = (tensor.to(place) for tensor in next(batches))
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
    synchronize()
    trained = time.perf_counter()
    with TemporaryDirectory() as folder:
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, Path(folder, "weights.pt"))
    after = time.perf_counter() - trained
    firsts = {"import": imported - began, "context": there - imported, "model": ready - there}
    return {**firsts, "before": ready - began, "steps": trained - ready, "after": after}


def run(place: str) -> dict[str, float]:
    """The seconds of a run by a command, as its result tells them."""
    with TemporaryDirectory() as folder:
        sets = [f"--set={key}={json.dumps(value)}" for key, value in keys_on(place).items() if key != "overwrite"]
        line = ["dp_ray", "run", JOB, f"--storage={folder}", "--json", "--quiet", *sets]
        done = subprocess.run([sys.executable, "-m", *line], stdout=subprocess.PIPE, text=True, check=True)
    return spans(json.loads(done.stdout.splitlines()[-1]))


def session(place: str) -> dict[str, float]:
    """The seconds of a session's second job."""
    import dp_ray

    keys = keys_on(place)
    own = {key: keys[key] for key in ("workers", "gpus_per_worker") if key in keys}
    with TemporaryDirectory() as folder, dp_ray.session(**own, quiet=True) as opened:
        for name in ("first", "second"):
            began = time.perf_counter()
            result = opened.run(JOB, storage=folder, name=name, **keys)
            taken = time.perf_counter() - began
    return {**spans(vars(result)), "whole": taken}


def large(place: str) -> dict[str, Any]:
    """The steps of a training of a large model in this process, each waited for."""
    import torch

    from dp_ray.driver.memory import plan_memory
    from dp_ray.engine.world import World
    from dp_ray.job.job import Job
    from dp_ray.messages import StepControl
    from dp_ray.rundir.ledger import PARTS
    from dp_ray.storage import Storage
    from dp_ray.tasks.task import run_task

    class Clock(StepControl):
        def before(self, step: int) -> None:
            synchronize()
            at.append(time.perf_counter())

    at: list[float] = []
    is_gpu, (width, layers) = place == "cuda", (4096, 30) if place == "cuda" else (256, 4)
    synchronize: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
    device = torch.device("cuda:0" if is_gpu else "cpu")
    keys: dict[str, Any] = {
        "task": "train",
        "model": {"target": "benchmarks.nets:deep", "args": {"width": width, "layers": layers}},
        "dataset": {"target": "benchmarks.nets:Vectors", "args": {"length": 16 * 12, "width": width}},
        "batch_size": 16,
        "devices": [str(device)],
        "loss": "torch.nn:MSELoss",
        "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1e-4}},
        "checkpoint": {"every_steps": 5, "every_seconds": None},
    }
    job = Job.make(keys, "large")
    planned = plan_memory(job, torch.cuda.get_device_properties(0).total_memory if is_gpu else None)
    with TemporaryDirectory() as folder:
        run = Storage(folder)
        run.child(PARTS).create()
        began = time.perf_counter()
        run_task(job, World(device=device), run, lambda _: None, Clock())
        ended = time.perf_counter()
    return {
        "bytes": 4 * layers * (width + 1) * width,
        "before": at[0] - began,
        "steps": [after - before for before, after in pairwise(at)],
        "after": ended - at[-1],
        "peak": torch.cuda.max_memory_allocated() if is_gpu else 0,
        "planned": planned.workers[0].total,
    }


def keys_on(place: str) -> dict[str, Any]:
    return {**KEYS, **({"gpus_per_worker": 0} if place == "cpu" else {})}


def spans(result: dict[str, Any]) -> dict[str, float]:
    before, after = result["seconds_before_steps"], result["seconds_after_steps"]
    return {"before": before, "steps": result["seconds"] - before - after, "after": after}


if __name__ == "__main__":
    ways = {"plain": plain, "run": run, "session": session, "large": large}
    print(json.dumps(ways[sys.argv[1]](sys.argv[2])))
