"""dp_ray's loops on one GPU against plain loops of torch: `python -m benchmarks.gpu`.

Both are in one process and take turns every few steps, so that the GPU's clock and heat are the same for both.
`python -m benchmarks.gpu cpu` runs small models on the CPU, to see that the benchmark itself works.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import nets
from benchmarks.compare import Pairs, at_least, compared
from benchmarks.table import HEADER, Row, line, rate_text
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task

NO_SLOWER = at_least(1 / 1.02)
Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """How large the models and the batches are, and how long the turns.

    A turn has `block` steps. Each side has `warm` turns before the measurement, and `pairs` in it.
    """

    resnet: dict[str, Any]
    images: dict[str, Any]
    image_rows: int
    gpt: dict[str, Any]
    texts: dict[str, Any]
    text_rows: int
    processes: int
    block: int
    warm: int
    pairs: int


LARGE = Sizes({}, {}, 128, {}, {}, 8, processes=6, block=10, warm=3, pairs=30)
SMALL = Sizes(
    {"width": 8, "blocks": (1, 1), "classes": 10},
    {"size": 32, "classes": 10},
    16,
    {"vocabulary": 64, "context": 32, "layers": 2, "heads": 2, "width": 32},
    {"vocabulary": 64, "context": 32},
    8,
    processes=0,
    block=2,
    warm=1,
    pairs=4,
)


@dataclass(frozen=True)
class Case:
    """A comparison: a task, a model and its data."""

    what: str
    task: str
    model: str
    model_args: dict[str, Any]
    dataset: str
    data_args: dict[str, Any]
    rows: int
    precision: str
    sizes: Sizes

    @property
    def num_rows(self) -> int:
        """The rows of all turns of a side."""
        return self.rows * self.sizes.block * (self.sizes.warm + self.sizes.pairs + 1)


def cases(sizes: Sizes) -> Iterator[Case]:
    """All comparisons: train and predict, a ResNet and a GPT."""
    for task in ("train", "predict"):
        images = ("Images", sizes.images, sizes.image_rows)
        for precision in ("fp32", "bf16"):
            yield Case("ResNet-50", task, "resnet", sizes.resnet, *images, precision, sizes)
        gives = {"last_only": True} if task == "predict" else {}
        texts = ("Texts", sizes.texts, sizes.text_rows)
        yield Case("GPT of 124 M", task, "Gpt", {**sizes.gpt, **gives}, *texts, "bf16", sizes)


class Turns(StepControl):
    """Runs a block of the plain loop between two blocks of dp_ray's, and keeps the seconds of each."""

    def __init__(self, plain: Step, block: int, device: torch.device) -> None:
        self._plain = plain
        self._block = block
        self._device = device
        self._began = 0.0
        self.ours: list[float] = []
        self.theirs: list[float] = []

    def before(self, step: int) -> None:
        """At the first step of a block: end dp_ray's last block, and run one of the plain loop."""
        if step % self._block:
            return
        now = self._clock()
        if step:
            self.ours.append(now - self._began)
        started = self._clock()
        for _ in range(self._block):
            self._plain()
        self._began = self._clock()
        self.theirs.append(self._began - started)

    def _clock(self) -> float:
        """The time at which the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def measure(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """A row for each case."""
    for case in cases(sizes):
        control = turns(case, device)
        yield row(case, list(zip(control.ours, control.theirs, strict=False))[sizes.warm :])


def turns(case: Case, device: torch.device) -> Turns:
    """Run dp_ray's loop, with the plain one between its blocks."""
    plain = plain_training(case, device) if case.task == "train" else plain_prediction(case, device)
    control = Turns(plain, case.sizes.block, device)
    with TemporaryDirectory() as folder:
        run = Storage(folder)
        run.child(PARTS).create()
        run_task(job_of(case, device), World(device=device), run, lambda _: None, control)
    return control


def job_of(case: Case, device: torch.device) -> Job:
    """The case as a job, with the same loader, optimizer and precision as the plain loop."""
    trains = {"loss": "torch.nn:CrossEntropyLoss", "optimizer": {"target": "torch.optim:AdamW", "args": {"lr": 1e-4}}}
    given = {
        "task": case.task,
        "model": {"target": f"benchmarks.nets:{case.model}", "args": case.model_args},
        "dataset": {
            "target": f"benchmarks.nets:{case.dataset}",
            "args": {**case.data_args, "length": case.num_rows},
        },
        "inputs": "first",
        "batch_size": case.rows,
        "precision": case.precision,
        "devices": [str(device)],
        "loader": {"processes": case.sizes.processes},
    }
    return Job.make({**given, **(trains if case.task == "train" else {})}, "benchmark")


def plain_batches(case: Case, device: torch.device) -> Iterator[Any]:
    """The batches of a plain loop, on the device."""
    dataset: Any = getattr(nets, case.dataset)(case.num_rows, **case.data_args)
    loader = DataLoader(
        dataset, batch_size=case.rows, num_workers=case.sizes.processes, pin_memory=device.type == "cuda"
    )
    for batch in loader:
        yield [leaf.to(device, non_blocking=True) for leaf in batch]


def plain_model(case: Case, device: torch.device) -> nn.Module:
    model: nn.Module = getattr(nets, case.model)(**case.model_args)
    return model.to(device)


def autocast(case: Case, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16")


def plain_training(case: Case, device: torch.device) -> Step:
    """A step of the loop that torch's documentation shows; it reads no number from the device."""
    model, batches = plain_model(case, device), plain_batches(case, device)
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-4), nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        with autocast(case, device):
            total = loss(model(inputs), targets)
        total.backward()
        optimizer.step()

    return step


def plain_prediction(case: Case, device: torch.device) -> Step:
    """A step of a plain prediction, which keeps the outputs on the CPU.

    On a GPU it is a pipelined loop, as one writes it who has measured: outputs go to pinned memory by a stream of
    their own, and are waited for one step later.
    """
    model, batches = plain_model(case, device).eval(), plain_batches(case, device)
    outputs: list[torch.Tensor] = []
    coming: list[tuple[torch.Tensor, Any]] = []
    beside: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def step() -> None:
        inputs, _ = next(batches)
        with torch.inference_mode(), autocast(case, device):
            computed = model(inputs)
            if beside is None:
                outputs.append(computed)
                return
            here = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=True)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                here.copy_(computed, non_blocking=True)
            computed.record_stream(beside)
        coming.append((here, beside.record_event()))
        if len(coming) > 1:
            one, copied = coming.pop(0)
            copied.synchronize()
            outputs.append(one.clone())

    return step


def row(case: Case, seconds: Pairs) -> Row:
    """A case's row, of the seconds of both sides' turns."""
    rows = case.rows * case.sizes.block
    rates = [(rows / ours, rows / theirs) for ours, theirs in seconds]
    what = f"{case.task}: a {case.what}, {case.precision}, batches of {case.rows}, rows a second"
    return compared(what, rates, rate_text, "plain torch", NO_SLOWER)


def main(names: list[str]) -> None:
    on_cpu = names == ["cpu"]
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("there is no GPU: torch.cuda.is_available() is False; `python -m benchmarks.gpu cpu` tries it out")
    device = torch.device("cpu" if on_cpu else "cuda:0")
    print("the CPU" if on_cpu else torch.cuda.get_device_name(device), f"torch {torch.__version__}", sep=", ")
    print("", f"| {' | '.join(HEADER)} |", f"| {' | '.join(['---'] * len(HEADER))} |", sep="\n", flush=True)
    for found in measure(device, SMALL if on_cpu else LARGE):
        print(line(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
