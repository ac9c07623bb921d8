"""accelerate's own test and Lightning Fabric's parity tests, on their libraries, and the same checks made of dp_ray.

Not made of dp_ray: what has no counterpart there, as code for the main process alone, or a trigger of one process.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import accelerate

from benchmarks.cluster import scratch
from benchmarks.compare import Quartiles, at_most, quartiles
from benchmarks.peers.checks import EPOCHS, WORKERS
from benchmarks.peers.needed import environment, script
from benchmarks.peers.sides import Timed, in_turns, rows, timed
from benchmarks.start import ROOT
from benchmarks.table import Row, time_text
from benchmarks.train import free_port

THEIR_TEST = Path(accelerate.__file__).parent / "test_utils" / "scripts" / "test_script.py"
TITLES = {  # of accelerate's test, by the names of ours
    "split between processes": "Test split between processes as a dict",
    "random numbers in sync": "Test random number generator synchronization",
    "partition of the data": "DataLoader integration test",
}
OF_ONE = 4 * EPOCHS  # steps of each of its trainings
NEAR = 1e-6  # to plain torch, in its test
FABRIC = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
PACKAGES = ("lightning==2.6.6", "jsonargparse[signatures]==4.53.0")
FILES = (
    *(f"parity_fabric/{name}.py" for name in ("__init__", "conftest", "models", "utils", "test_parity_simple")),
    *("tests_fabric/__init__.py", "tests_fabric/helpers/__init__.py", "tests_fabric/helpers/runif.py"),
    "parity_fabric/test_parity_ddp.py",
)
STEPS, FIRST = 1000, 3  # of each training, and those that it does not time
ONE = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_parity_simple.py", "-k", "32-cpu"]
TWO = ["-m", "test_parity_ddp", "--accelerator=cpu", f"--devices={WORKERS}"]


def measure() -> Iterator[Row]:
    yield from _accelerate()
    python = environment("lightning", *PACKAGES)
    tests = [script(*FABRIC, f"tests/{file}") for file in FILES][-1].parents[1]
    yield from _fabric(python, tests, "one process", ONE, 0, 2)
    yield from _fabric(python, tests, f"{WORKERS} processes", TWO, WORKERS, 0)


def _accelerate() -> Iterator[Row]:
    with scratch() as folder:
        theirs = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={WORKERS}"]
        sides: dict[str, Callable[[], Timed]] = {
            "dp_ray": lambda: timed([sys.executable, "-m", "benchmarks.peers.checks"], ROOT),
            "accelerate": lambda: timed(
                [*theirs, f"--master_port={free_port()}", THEIR_TEST], folder, ACCELERATE_USE_CPU="true", BITS="1"
            ),
        }
        found = in_turns(sides)
    ours, other = json.loads(found["dp_ray"][-1].output.splitlines()[-1]), found["accelerate"][-1]
    what = f"peers: accelerate's test, {WORKERS} workers"
    for name, title in TITLES.items():
        passed = ["passes" if each else "FAILS" for each in (ours[name], f"**{title}**" in other.output)]
        yield Row(f"{what}: {name}", passed[0], f"{passed[1]} accelerate", "", "passes", bool(ours[name]))
    ends = [stamp.bits for stamp in next(iter(other.processes.values()))][OF_ONE - 1 :: OF_ONE]
    halves = [ends[: len(ends) // 2], ends[len(ends) // 2 :]]  # each begins with a loop of plain torch
    alike = sum(bits == half[0] for half in halves for bits in half[1:])
    mine = f"{ours['distance']:.1g} from plain torch; {ours['same']} of {ours['trainings']} the same bits on 1 and 2"
    against = f"at most {NEAR:g}; {alike} of {len(ends) - 2} plain torch's bits accelerate"
    reached = ours["distance"] <= NEAR and ours["same"] == ours["trainings"]
    yield Row(f"{what}: training as in one process", mine, against, "", f"at most {NEAR:g}, the same bits", reached)
    yield from rows(f"{what}: all of it", found, lambda side: side.whole, {"accelerate": at_most(1.0, "ahead")})


def _fabric(python: Path, tests: Path, name: str, test: list[str], workers: int, processes: int) -> Iterator[Row]:
    """Its script trains by Fabric, and then by torch; it fails if the weights differ."""
    given = {"PYTHONPATH": str(tests), "BITS": f"{STEPS}"}
    theirs = partial(timed, [python, *test], tests / "parity_fabric", **given, PYTHONDONTWRITEBYTECODE="1")
    with scratch() as folder:
        job = {
            "task": "train",
            "model": "benchmarks.peers.checks:fabric_model",
            "dataset": {"target": "benchmarks.peers.checks:fabric_data", "args": {"workers": max(workers, 1)}},
            "loss": "torch.nn.functional:cross_entropy",
            "optimizer": {"target": "torch.optim:SGD", "args": {"lr": 0.0001}},
            "loader": {"processes": processes},
            "batch_size": 4 * max(workers, 1),
            "workers": workers,
            "bitwise": True,
            "max_steps": STEPS,
        }
        (folder / "job.yaml").write_text(json.dumps(job))
        line = [
            sys.executable,
            "-m",
            "dp_ray",
            "run",
            folder / "job.yaml",
            "--storage",
            folder,
            "--overwrite",
            "--quiet",
        ]
        found = in_turns({"dp_ray": partial(timed, line, ROOT, **given), "Fabric": theirs})
    what = f"peers: Fabric's parity test, {name}"
    ours, fabric, torchs = (_steps(found, *which) for which in (("dp_ray", 0), ("Fabric", 0), ("Fabric", STEPS)))
    same = [{bits for _, bits in side} for side in (ours, fabric, torchs)]
    told = [f"{'torch' if side == same[2] and len(side) == 1 else 'OTHER'}'s bits" for side in same]
    yield Row(f"{what}: weights", told[0], f"{told[1]} Fabric", "", "torch's bits", same[0] == same[2])
    spread = [quartiles(list(chain.from_iterable(gaps for gaps, _ in side))) for side in (ours, torchs, fabric)]
    against = f"{_text(spread[1])} torch; {_text(spread[2])} Fabric"
    overlap = spread[0].lower <= spread[1].upper
    yield Row(f"{what}: a step", _text(spread[0]), against, "", "quartiles overlap with torch's, or below", overlap)
    yield from rows(f"{what}: start", found, lambda side: side.start, {"Fabric": at_most(1.0, "ahead")})


def _steps(found: dict[str, list[Timed]], side: str, first: int) -> list[tuple[Sequence[float], int]]:
    """Of each round: the seconds of each step, and the weights' checksum after the last one."""
    kept = [max(run.processes.values(), key=len)[first : first + STEPS] for run in found[side]]
    return [([end.at - start.at for start, end in pairwise(steps[FIRST:])], steps[-1].bits) for steps in kept]


def _text(spread: Quartiles) -> str:
    return f"{time_text(spread.median)} ({time_text(spread.lower)} to {time_text(spread.upper)})"
