"""What the messages of a training cost: the shares of a core that the channel's actor and the driver take.

Two workers make 10, 60 and 300 steps a second: the model sleeps for the rest of each step. CPU time is read twice,
some seconds apart, while the training goes on.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import nn

from benchmarks.cluster import scratch
from benchmarks.compare import Goal, compared
from benchmarks.start import ROOT
from benchmarks.table import Row

RATES = (10, 60, 300)  # steps a second
BEGINS, SECONDS, REPEATS = 10.0, 15.0, 3
LITTLE = Goal("at most 5 % of a core", 0.05, is_least=False, absolute=True)


class Sleeping(nn.Linear):
    """A linear layer whose forward begins as long after the one before as makes so many steps a second."""

    def __init__(self, rate: float) -> None:
        super().__init__(4, 2)
        self.rate = rate
        self.next = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(max(0.0, self.next - time.monotonic()))
        self.next = time.monotonic() + 1 / self.rate
        return super().forward(inputs)


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """As many rows as a training reads in an hour."""

    def __len__(self) -> int:
        return 2 * 300 * 3600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(4), index % 2


def measure() -> Iterator[Row]:
    for rate in RATES:
        found = [_shares(rate) for _ in range(REPEATS)]
        for name, shares in zip(("channel's actor", "driver"), zip(*found, strict=True), strict=True):
            what = f"channel: CPU time of the {name}, a training of 2 workers, {rate} steps/s"
            yield compared(what, [(share, share) for share in shares], "{:.1%} of a core".format, "itself", LITTLE)


def _shares(rate: int) -> tuple[float, float]:
    """CPU time of the actor and of the driver, for each second of a training."""
    keys = {
        "task": "train",
        "model": {"target": "benchmarks.channel:Sleeping", "args": {"rate": rate}},
        "dataset": "benchmarks.channel:Rows",
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.1}},
        "batch_size": 2,
        "workers": 2,
    }
    with scratch() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({**keys, "storage": str(folder)}))
        command = [sys.executable, "-m", "dp_ray", "run", str(job), "--quiet"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as driver:
            this = psutil.Process(driver.pid)
            try:
                actor = _actor(this)
                time.sleep(BEGINS)
                began, before = time.monotonic(), (_cpu(actor), _cpu(this))
                time.sleep(SECONDS)
                after, seconds = (_cpu(actor), _cpu(this)), time.monotonic() - began
            finally:
                driver.terminate()
    return (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds


def _actor(driver: psutil.Process) -> psutil.Process:
    """The process of the channel's actor, once there are workers."""
    while True:
        titles = {" ".join(process.cmdline()): process for process in driver.children(recursive=True)}
        channel = [process for title, process in titles.items() if title.startswith("ray::Channel")]
        if channel and any(title.startswith("ray::RayTrainWorker") for title in titles):
            return channel[0]
        time.sleep(0.5)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
