"""nanoGPT's characters on a CPU: its train.py with the options of its README, and dp_ray with its model.py.

The text is what Python's help() says, which each Python has. Steps, batches, rates and initial weights are the same.
On several processes train.py has a fused AdamW, draws other windows on each, and prints rank 0's loss.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

from benchmarks.cluster import scratch
from benchmarks.compare import at_least, at_most
from benchmarks.peers.needed import script
from benchmarks.peers.sides import Timed, in_turns, rows, timed
from benchmarks.table import Row

ROOT = Path(__file__).parents[2]
NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
CONFIG, PREPARE = "config/train_shakespeare_char.py", "data/shakespeare_char/prepare.py"
FILES = ("train.py", "model.py", "configurator.py", CONFIG, PREPARE)
STEPS, BATCH, LENGTH, EVALUATED = 300, 12, 64, 20
MODEL = {"block_size": LENGTH, "n_layer": 4, "n_head": 4, "n_embd": 128, "dropout": 0.0}
EVALUATION = {"eval_iters": EVALUATED, "eval_interval": STEPS, "log_interval": 1}
DEVICE = {"device": "cpu", "compile": False, "dtype": "float32", "backend": "gloo"}
OPTIONS = {**MODEL, **EVALUATION, **DEVICE, "max_iters": STEPS, "lr_decay_iters": STEPS}
# Under torchrun train.py asks for CUDA, whatever its options say. It runs each file of options that it is given among
# its own names: this one puts the CPU in the place of a GPU.
ON_CPU = """
def _on_cpu(to):
    return lambda self, *args, **kwargs: to(self, *("cpu" if "cuda" in str(arg) else arg for arg in args), **kwargs)
torch.cuda.set_device = lambda device: None
torch.Tensor.pin_memory = lambda self: self
torch.Tensor.to, torch.nn.Module.to = _on_cpu(torch.Tensor.to), _on_cpu(torch.nn.Module.to)
_ddp = DDP
DDP = lambda model, device_ids: _ddp(model)
"""
COUNTS = (1, 2, 3)
THEIRS = "train.py, its GPU replaced by a CPU"


def measure() -> Iterator[Row]:
    with scratch() as folder:
        make(folder)
        place = Place(folder)
        place.ours(2, "warm-up")  # files are read into memory
        place.theirs(2)
        found = in_turns({"dp_ray": partial(place.ours, 2, "turn"), THEIRS: partial(place.theirs, 2)})
        what = f"nanogpt: {STEPS + 1:,} steps of {BATCH} x {LENGTH} characters, 2 workers"
        goal = {THEIRS: at_least(1.0, "ahead")}
        speed = f"{what}, characters a second"
        yield from rows(speed, found, lambda run: BATCH * LENGTH / run.step, goal, lambda rate: f"{rate:,.0f}/s")
        ahead = {THEIRS: at_most(1.0, "ahead")}
        yield from rows(f"{what}, until the first step has ended", found, lambda run: run.start, ahead)
        yield from rows(f"{what}, the whole command", found, lambda run: run.whole, ahead)
        yield place.losses()


@dataclass(frozen=True)
class Place:
    """The folder with nanoGPT's files and its data."""

    folder: Path

    def ours(self, workers: int, name: str, *more: str) -> Timed:
        shutil.rmtree(self.folder / "runs" / name, ignore_errors=True)
        job = str(ROOT / "benchmarks" / "peers" / "nanogpt.yaml")
        words = ["run", job, f"--name={name}", f"--workers={workers}", "--quiet", *more]
        return timed([sys.executable, "-m", "dp_ray", *words], self.folder, PYTHONPATH=str(ROOT))

    def theirs(self, workers: int) -> Timed:
        """Batches of 12 windows in all. Of one process without torchrun, which then asks for no GPU."""
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
        cpu = ["on_cpu.py"] if workers > 1 else []
        options = {**OPTIONS, "gradient_accumulation_steps": workers, "batch_size": BATCH // workers}
        given = [f"--{key}={value}" for key, value in options.items()]
        return timed([sys.executable, *launch, "train.py", CONFIG, *cpu, *given], self.folder)

    def losses(self) -> Row:
        """The loss of each step on several numbers of workers, beside train.py on one process: the same windows."""
        import dp_ray

        ours = []
        for count in COUNTS:
            self.ours(count, f"on-{count}", "--set=shards=6")
            ours.append([row["loss"] for row in dp_ray.load(self.folder / "runs" / f"on-{count}").history])
        printed = [re.findall(r"iter \d+: loss ([\d.]+)", self.theirs(count).output) for count in COUNTS]
        theirs = [[float(loss) for loss in losses] for losses in printed]
        apart = max(abs(one - other) for one, other in zip(ours[0], theirs[0], strict=True))
        counts = ", ".join(map(str, COUNTS))
        same = all(one == other for one, other in pairwise(ours))
        return Row(
            f"nanogpt: last loss on {counts} workers (dp_ray: 6 shards), and all losses beside train.py on one",
            ", ".join(f"{losses[-1]:.4f}" for losses in ours) + (", the same bits" if same else ", other bits"),
            ", ".join(f"{losses[-1]:.4f}" for losses in theirs) + " train.py, whose ranks draw other windows",
            f"at most {apart:.4f} apart",
            "the same bits",
            same,
        )


def make(folder: Path) -> None:
    """Bring nanoGPT's files here, and let its prepare.py encode the text."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script(*NANOGPT, name), folder / name)
    text = "\n".join(topics[name] for name in sorted(topics))
    (folder / PREPARE).with_name("input.txt").write_text("".join(one for one in text if one.isascii()))
    subprocess.run([sys.executable, PREPARE], cwd=folder, capture_output=True, check=True)
    (folder / "on_cpu.py").write_text(ON_CPU)
