"""What a fault costs: from the kill to training again, against Ray Train's defaults with a loop written by hand."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import dp_ray
from benchmarks import recovering
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import Pairs, at_most, compared
from benchmarks.measure import alternate
from benchmarks.pulses import PULSED_BLOCK, Pulses, pulsed
from benchmarks.start import ROOT, unpack
from benchmarks.table import Row, time_text
from benchmarks.turns import take_turns
from dp_ray.cluster.channel import open_channel
from dp_ray.cluster.internals.variables import TRAIN_VARIABLES

REPEATS = 3
NODE_REPEATS = 2  # each waits for a minute
STEPS = 240
MARKED = 60  # marks of all workers, after which one is killed; half of the steps that a run does at least
MOST_SECONDS = 300.0  # of each training, and of what is waited for in it
EARLIER = "b16e1ce"  # the commit before restarts were shortened
Kill = Callable[[list[int]], None]


def measure() -> list[Row]:
    return [_node(), *_worker(), *_own_ray(), _pulse()]


def _own_ray() -> Iterator[Row]:
    """The program, with a Ray of its own, at this commit and at an earlier one."""
    with scratch() as folder:
        if not unpack(EARLIER, folder / "earlier"):
            return
        shutil.copy(Path(__file__).with_name("marked.py"), folder)
        for workers, processes in [(2, 0), (3, 0), (2, 2), (3, 2)]:
            run = partial(command, workers=workers, processes=processes)
            mine = partial(run, ROOT, on_lost_worker="restart")  # the earlier one knows no other way
            ours = partial(seconds_lost, folder, kill_one, mine, MARKED)
            theirs = partial(seconds_lost, folder, kill_one, partial(run, folder / "earlier"), MARKED)
            loaders = f", {processes} loader processes each" if processes else ""
            what = f"a worker killed, a Ray of its own: to the next finished step, {workers} workers{loaders}"
            limit = at_most(0.6 if processes else 0.7)
            yield compared(f"faults: {what}", alternate(ours, theirs, REPEATS), time_text, f"at {EARLIER}", limit)


def command(code: Path, marks: Path, workers: int, processes: int, **keys: Any) -> None:
    """Train by the program that stands in `code`; nobody has started a Ray."""
    line = [sys.executable, "-m", "dp_ray", "run", str(job_file(marks, processes, **keys))]
    line += ["--workers", str(workers), "--quiet", "--storage", str(marks.parent / "runs")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), str(marks.parent)])}
    subprocess.run(line, cwd=code, env=environment, check=True, timeout=MOST_SECONDS)


def job_file(marks: Path, processes: int, **keys: Any) -> Path:
    """Write the job of a training that marks its steps, with so many loader processes for each worker."""
    job = {
        "task": "train",
        "model": "marked:model",
        "dataset": "marked:Slow",
        "loss": "torch.nn:MSELoss",
        "optimizer": {"target": "marked:MarkedSGD", "args": {"lr": 0.01, "marks": str(marks)}},
        "loader": {"processes": processes},
        "batch_size": recovering.BATCH,
        "shards": 6,
        "epochs": 1000,
        "max_steps": 2 * MARKED,
        "checkpoint": {"every_steps": 10},
        **keys,
    }
    file = marks.with_suffix(".yaml")
    file.write_text(json.dumps(job))  # JSON is YAML
    return file


def _worker() -> list[Row]:
    with local_ray(), scratch() as folder:
        again: list[int] = []

        def ours() -> float:
            seconds, result = _ours(folder, kill_one, workers=2)
            (interruption,) = result.interruptions
            again.append(interruption["step"] - interruption["resumed_step"])
            return seconds

        found = alternate(ours, lambda: theirs_of(folder, kill_one, 2), REPEATS)
    return [
        _row("a worker killed: to training again, 2 workers", found, 0.8),
        Row(
            "faults: steps computed twice, a checkpoint every 50",
            f"{max(again)}",
            "",
            "",
            "at most 50",
            max(again) <= 50,
        ),
    ]


def _node() -> Row:
    found = []
    for _ in range(NODE_REPEATS):
        with three_nodes() as (folder, kill_node):
            mine, _ = _ours(folder, kill_node, workers={"min": 1, "max": 3})
        with three_nodes() as (folder, kill_node):
            found.append((mine, theirs_of(folder, kill_node, (1, 3))))
    return _row("a node lost: to training again, elastic 3 to 2", found, 0.3)


def _row(what: str, found: Pairs, limit: float) -> Row:
    return compared(f"faults: {what}", found, time_text, "Ray Train", at_most(limit))


def _pulse() -> Row:
    with local_ray():
        channel = open_channel()
        costs = take_turns(lambda control: pulsed(Pulses(channel, control)), pulsed, PULSED_BLOCK)
    pairs = [(ours.wall, theirs.wall) for ours, theirs in costs]
    return compared("faults: a step with watchdog and ledger", pairs[1:], time_text, "without", at_most(1.01))


def kill_one(pids: list[int]) -> None:
    os.kill(pids[-1], signal.SIGKILL)


@contextmanager
def three_nodes() -> Iterator[tuple[Path, Kill]]:
    """A Ray of three nodes with a CPU each, the last of which can be killed; Ray Train's own defaults."""
    before = dict(os.environ)
    for key in before:
        if key.startswith(TRAIN_VARIABLES):
            del os.environ[key]
    with scratch() as folder:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": str(folder / "ray")})
        try:
            last = [cluster.add_node(num_cpus=1) for _ in range(2)][-1]
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            cluster.wait_for_nodes()
            yield folder, lambda pids: cluster.remove_node(last, allow_graceful=False)
        finally:
            ray.shutdown()
            cluster.shutdown()
            os.environ.clear()
            os.environ.update(before)


def _ours(folder: Path, kill: Kill, workers: Any) -> tuple[float, dp_ray.Result]:
    results = []

    def train(ticks: Path) -> None:
        result = dp_ray.run(
            task="train",
            model="benchmarks.recovering:model",
            dataset={"target": "benchmarks.recovering:Ticking", "args": {"ticks": str(ticks)}},
            loss="torch.nn:MSELoss",
            optimizer={"target": "torch.optim:SGD", "args": {"lr": 0.01}},
            batch_size=recovering.BATCH,
            shards=3,
            epochs=1000,
            max_steps=STEPS,
            workers=workers,
            checkpoint={"every_steps": 50},
            on_lost_worker="restart",
            storage=str(ticks.parent),
            name=f"ours-{ticks.name}",
            quiet=True,
        )
        results.append(result)

    return seconds_lost(folder, kill, train), results[0]


def theirs_of(folder: Path, kill: Kill, workers: int | tuple[int, int]) -> float:
    return seconds_lost(folder, kill, lambda ticks: recovering.run(ticks, workers, STEPS))


def seconds_lost(folder: Path, kill: Kill, train: Callable[[Path], None], marked: int = 0) -> float:
    """From the kill until a worker that was not there before has done a step: until it reads for the next one.

    With `marked`, the kill comes after so many steps, and the training itself marks the end of each.
    """
    ticks = folder / f"ticks-{time.time_ns()}"
    ticks.touch()
    found: list[float] = []

    def watch() -> None:
        come_to(lambda: len(seen(ticks)) >= (marked or 240))
        time.sleep(0.5 if marked else 2.0)
        before = {pid for _, pid in seen(ticks)}
        killed = time.time()
        kill(sorted(before))
        most = 0 if marked else recovering.MOST_IN_A_STEP
        come_to(lambda: bool(step_output(ticks, before, most)))
        found.append(min(step_output(ticks, before, most)) - killed)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    train(ticks)
    watching.join(1)
    return found[0]


def seen(ticks: Path) -> list[tuple[float, int]]:
    """When which process read a sample."""
    lines = ticks.read_text().splitlines()
    return [(float(at), int(pid)) for at, pid in (line.split() for line in lines if line.count(" ") == 1)]


def step_output(ticks: Path, before: set[int], most: int) -> list[float]:
    """When each new process read more samples than the `most` that a worker reads for one step."""
    read: dict[int, list[float]] = {}
    for at, pid in seen(ticks):
        if pid not in before:
            read.setdefault(pid, []).append(at)
    return [times[most] for times in read.values() if len(times) > most]


def come_to(holds: Callable[[], bool]) -> None:
    """Wait until this holds."""
    end = time.monotonic() + MOST_SECONDS
    while not holds():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
