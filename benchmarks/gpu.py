"""dp_ray's loops on one GPU against plain loops of torch: `python -m benchmarks.gpu [PART...]`, or all parts.

`gpt` and `resnet` have models of a usual size. In `small` a step is so short that the GPU waits for Python; beside it
stand accelerate and Lightning Fabric too, where they are installed. `memory` is of `benchmarks/memory.py`, `start`
and `large` are of `benchmarks/gpu_start.py`. Each part takes less than ten minutes, and prints each row when it has
it.

Both loops are in one process and take turns every few steps, so that the GPU's clock and heat are the same for both.
`python -m benchmarks.gpu cpu [PART...]` runs small models on the CPU, to see that the benchmark itself works. With
`quick` among the names, `start` takes a minute instead of four.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import gpu_start, memory, nets
from benchmarks.compare import Pairs, at_least, compared
from benchmarks.table import HEADER, Row, line, rate_text
from dp_ray.engine.world import World
from dp_ray.job.job import Job
from dp_ray.messages import StepControl
from dp_ray.rundir.ledger import PARTS
from dp_ray.storage import Storage
from dp_ray.tasks.task import run_task

NO_SLOWER = at_least(1 / 1.02)
Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """How large the models and the batches are, and how long the turns.

    `resnet_is` and `gpt_is` say it in words. A turn has `block` steps. Each side has `warm` turns before the
    measurement, and `pairs` in it.
    """

    resnet_is: str
    resnet: dict[str, Any]
    images: dict[str, Any]
    image_rows: int
    gpt_is: str
    gpt: dict[str, Any]
    texts: dict[str, Any]
    text_rows: int
    processes: int
    block: int
    warm: int
    pairs: int


LARGE = Sizes("ResNet-50", {}, {}, 128, "GPT of 124 M", {}, {}, 8, processes=6, block=10, warm=3, pairs=30)
SMALL = Sizes(
    "ResNet of 2 blocks",
    {"width": 8, "blocks": (1, 1), "classes": 10},
    {"size": 32, "classes": 10},
    16,
    "GPT of 2 layers",
    {"vocabulary": 64, "context": 32, "layers": 2, "heads": 2, "width": 32},
    {"vocabulary": 64, "context": 32},
    8,
    processes=0,
    block=2,
    warm=1,
    pairs=4,
)
SHORT = replace(SMALL, block=50, warm=2, pairs=12)  # of `small` on a GPU
NAMES = ("small", "gpt", "resnet", "memory", "start", "large")


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


def cases(part: str, sizes: Sizes) -> Iterator[Case]:
    """The comparisons of a part: train and predict."""
    for task in ("train", "predict"):
        if part != "gpt":
            images = (sizes.resnet_is, task, "resnet", sizes.resnet, "Images", sizes.images, sizes.image_rows)
            for precision in ("fp32",) if part == "small" else ("fp32", "bf16"):
                yield Case(*images, precision, sizes)
        if part != "resnet":
            gives = {"last_only": True} if task == "predict" else {}
            texts = (sizes.gpt_is, task, "Gpt", {**sizes.gpt, **gives}, "Texts", sizes.texts, sizes.text_rows)
            yield Case(*texts, "fp32" if part == "small" else "bf16", sizes)


@dataclass(frozen=True)
class Loop:
    """What a library makes of a case: all that a step needs. `batches` are on the device."""

    model: Any
    optimizer: Any
    batches: Iterator[Any]
    backward: Callable[[torch.Tensor], object]
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]


Peer = Callable[[Case, torch.device], Loop]


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


def measure(part: str, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """A row for each case and each of the others' loops."""
    for case in cases(part, sizes):
        for against in peers(part):
            control = turns(case, device, PEERS[against])
            pairs = list(zip(control.ours, control.theirs, strict=False))[sizes.warm :]
            yield row(case, pairs, against)


def turns(case: Case, device: torch.device, peer: Peer) -> Turns:
    """Run dp_ray's loop, with the other one between its blocks."""
    loop = peer(case, device)
    plain = training_step(loop) if case.task == "train" else prediction_step(loop, device)
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


def plain_model(case: Case, device: torch.device) -> nn.Module:
    model: nn.Module = getattr(nets, case.model)(**case.model_args).to(device)
    return model.train(case.task == "train")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def plain_loader(case: Case, device: torch.device) -> Any:
    dataset: Any = getattr(nets, case.dataset)(case.num_rows, **case.data_args)
    pins = device.type == "cuda"
    return DataLoader(dataset, batch_size=case.rows, num_workers=case.sizes.processes, pin_memory=pins)


def autocast(case: Case, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16")


def plain(case: Case, device: torch.device) -> Loop:
    """The loop that torch's documentation shows; it reads no number from the device."""
    model, loader = plain_model(case, device), plain_loader(case, device)
    batches = ([leaf.to(device, non_blocking=True) for leaf in batch] for batch in loader)
    return Loop(model, adamw(model), batches, torch.Tensor.backward, lambda: autocast(case, device))


def accelerated(case: Case, device: torch.device) -> Loop:
    """accelerate's loop, as its documentation shows it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # each case has settings of its own
    accelerator = Accelerator(mixed_precision="bf16" if case.precision == "bf16" else "no", cpu=device.type == "cpu")
    model = plain_model(case, torch.device("cpu"))
    model, optimizer, loader = accelerator.prepare(model, adamw(model), plain_loader(case, device))
    return Loop(model, optimizer, iter(loader), accelerator.backward, accelerator.autocast)


def fabric(case: Case, device: torch.device) -> Loop:
    """Lightning Fabric's loop, as its documentation shows it: its model computes in the precision by itself."""
    from lightning_fabric import Fabric

    precision = "bf16-mixed" if case.precision == "bf16" else "32-true"
    lightning = Fabric(accelerator=device.type, devices=1, precision=precision)
    model = plain_model(case, torch.device("cpu"))
    model, optimizer = lightning.setup(model, adamw(model))
    loader = lightning.setup_dataloaders(plain_loader(case, device))
    return Loop(model, optimizer, iter(loader), lightning.backward, contextlib.nullcontext)


PEERS: dict[str, Peer] = {"plain torch": plain, "accelerate": accelerated, "Lightning Fabric": fabric}


def peers(part: str) -> list[str]:
    """The names of the other loops of a part: beside small models all that are installed."""
    libraries = {"accelerate": "accelerate", "lightning_fabric": "Lightning Fabric"}
    there = [name for module, name in libraries.items() if part == "small" and find_spec(module)]
    return ["plain torch", *there]


def training_step(loop: Loop) -> Step:
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = next(loop.batches)
        loop.optimizer.zero_grad()
        with loop.autocast():
            total = loss(loop.model(inputs), targets)
        loop.backward(total)
        loop.optimizer.step()

    return step


def prediction_step(loop: Loop, device: torch.device) -> Step:
    """A step of a prediction, which keeps the outputs on the CPU.

    On a GPU it is a pipelined loop, as one writes it who has measured: outputs go to pinned memory by a stream of
    their own, and are waited for one step later.
    """
    outputs: list[torch.Tensor] = []
    coming: list[tuple[torch.Tensor, Any]] = []
    beside: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def step() -> None:
        inputs, _ = next(loop.batches)
        with torch.inference_mode(), loop.autocast():
            computed = loop.model(inputs)
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
            arrived, copied = coming.pop(0)
            copied.synchronize()
            outputs.append(arrived.clone())

    return step


def row(case: Case, seconds: Pairs, against: str) -> Row:
    """A case's row, of the seconds of both sides' turns."""
    rows = case.rows * case.sizes.block
    rates = [(rows / ours, rows / theirs) for ours, theirs in seconds]
    what = f"{case.task}: a {case.what}, {case.precision}, batches of {case.rows}, rows a second"
    return compared(what, rates, rate_text, against, NO_SLOWER)


def main(names: list[str]) -> None:
    on_cpu, parts = "cpu" in names, [name for name in names if name not in ("cpu", "quick")] or NAMES
    if unknown := set(parts) - set(NAMES):
        sys.exit(
            f"there is no part {min(unknown)!r}; there are {', '.join(NAMES)}, and cpu to try them out, and quick"
        )
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("there is no GPU: torch.cuda.is_available() is False; `python -m benchmarks.gpu cpu` tries it out")
    device = torch.device("cpu" if on_cpu else "cuda:0")
    print("the CPU" if on_cpu else torch.cuda.get_device_name(device), f"torch {torch.__version__}", sep=", ")
    if timed := [part for part in parts if part not in ("start", "large")]:
        print("", f"| {' | '.join(HEADER)} |", f"| {' | '.join(['---'] * len(HEADER))} |", sep="\n", flush=True)
    for part in timed:
        sizes = SMALL if on_cpu else SHORT if part == "small" else LARGE
        for found in memory.measure(str(device)) if part == "memory" else measure(part, device, sizes):
            print(line(found), flush=True)
    if "start" in parts:
        gpu_start.show(on_cpu, "quick" in names)
    if "large" in parts:
        gpu_start.show_large(on_cpu)


if __name__ == "__main__":
    main(sys.argv[1:])
