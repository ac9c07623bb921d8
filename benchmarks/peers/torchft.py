"""torchft's example, `train_ddp.py`, one of three replicas killed: against dp_ray's survivors on the same work.

Its model has a layer of 1 GB, of no use but to take long. It has 40 MB here, on both sides: three replicas of some
7 GB do not fit. Their launcher starts the killed one again, as dp_ray does. The package is its nightly one, as their
README has it: with torchft 0.2.0 a kill within an all-reduce ends the others too, by an assertion in its DDP.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import dp_ray
from benchmarks.cluster import scratch
from benchmarks.compare import at_most, compared
from benchmarks.faults import MOST_SECONDS, come_to, kill_one
from benchmarks.peers.cifar import make
from benchmarks.peers.needed import environment, script
from benchmarks.peers.sides import ROUNDS, Times, stamped, stamps_in, times_of
from benchmarks.start import ROOT
from benchmarks.table import Row, time_text
from benchmarks.train import free_port
from dp_ray.cluster.internals.variables import TMPDIR

PACKAGES = ("torchft-nightly==2026.10.26", "torchvision==0.28.0", "torchdata==0.11.0")
SCRIPT = ("meta-pytorch/torchft", "7eb7087885f7ffaf51148a9df3289d73b8709fbd", "train_ddp.py")
TRACES = (Path("/tmp/trace_16.json"), Path("/tmp/trace_32.json"))  # that it leaves
THEIR_LAYER, LAYER = "1_000_000_000", 40_000_000  # bytes
BATCH, WORKERS = 64, 3  # samples of each replica
BEFORE, AFTER = 41, 25  # steps of each process until one is killed, and of the others from then on
STEADY = slice(33, BEFORE)  # in some of its first steps it profiles itself
STARTS, HEALS = "Creating LighthouseClient", "fetching checkpoint from"  # what its replicas log
SAME = "an undisturbed run's bits"
WHAT = "peers: torchft's train_ddp.py, 3 workers, one killed"
SECONDS = {
    "start": "from the start to the first step of all",
    "step": "a step before",
    "lost": "to the next step of the others",
}
SAMPLES = {"samples": "samples lost", "again": "samples read twice"}


@dataclass(frozen=True)
class Killed(Times):
    """With the number of samples that are not trained on, of those that are read again, and what the weights are."""

    samples: int
    again: int
    weights: str


def measure() -> Iterator[Row]:
    python, theirs = environment("torchft", *PACKAGES), script(*SCRIPT).read_text()
    assert theirs.count(THEIR_LAYER) == 1
    with scratch() as folder:
        make(folder / "cifar")
        (folder / SCRIPT[2]).write_text(theirs.replace(THEIR_LAYER, str(LAYER)))
        calm = Path(mkdtemp(dir=folder))
        undisturbed = _result(_dp_ray(python, folder, calm), calm).weights_sha256
        found = []
        for _ in range(ROUNDS):
            found.append((_ours(python, folder, undisturbed), _theirs(python, folder)))
            print(*found[-1], sep="\n", file=sys.stderr, flush=True)  # a round takes a minute
        weights = _theirs(python, folder, BITS="1").weights  # not in the rounds: it takes time
    for name, what in SECONDS.items():
        pairs = [(getattr(ours, name), getattr(other, name)) for ours, other in found]
        yield compared(f"{WHAT}: {what}", pairs, time_text, "torchft", at_most(1.0, "ahead"))
    for name, what in SAMPLES.items():
        most, others = (max(getattr(side, name) for side in sides) for sides in zip(*found, strict=True))
        yield Row(f"{WHAT}: {what}", f"{most}", f"{others} torchft", "", "0", most == 0)
    told = "; ".join(sorted({ours.weights for ours, _ in found}))
    yield Row(f"{WHAT}: weights after", told, f"{weights} torchft", "", SAME, told == SAME)


def _kill_one(stamps: Path) -> float:
    """Kill the last process once all have made their steps; when that was."""
    come_to(lambda: sum(len(kept) >= BEFORE for kept in stamps_in(stamps).values()) == WORKERS)
    killed = time.time()
    kill_one(sorted(stamps_in(stamps)))
    return killed


def _ours(python: Path, folder: Path, undisturbed: str | None) -> Killed:
    stamps, began = Path(mkdtemp(dir=folder)), time.time()
    training = _dp_ray(python, folder, stamps)
    killed = _kill_one(stamps)
    result = _result(training, stamps)
    (interruption,) = result.interruptions
    again = BATCH * WORKERS * (interruption["step"] - interruption["resumed_step"])
    samples = BATCH * WORKERS * (BEFORE + AFTER - len(result.history))
    weights = SAME if result.weights_sha256 == undisturbed else "others"
    times = vars(times_of(stamps_in(stamps), began, killed, STEADY))
    return Killed(**times, samples=samples, again=again, weights=weights)


def _dp_ray(python: Path, folder: Path, stamps: Path) -> subprocess.Popen[bytes]:
    """Start a training by a Ray of its own; it ends by itself."""
    job = {
        "task": "train",
        "model": {"target": "benchmarks.peers.cifar:Net", "args": {"layer": LAYER}},
        "dataset": {"target": "benchmarks.peers.cifar:train_set", "args": {"root": str(folder / "cifar")}},
        "loss": "torch.nn:CrossEntropyLoss",
        "optimizer": "torch.optim:AdamW",
        "loader": {"processes": 2},
        "batch_size": BATCH * WORKERS,
        "workers": WORKERS,
        "shuffle": True,
        "bitwise": True,
        "epochs": 100,
        "max_steps": BEFORE + AFTER,
    }
    file = folder / f"{stamps.name}.yaml"
    file.write_text(json.dumps(job))  # JSON is YAML
    line = [python, "-m", "dp_ray", "run", file, "--quiet", "--storage", folder / "runs"]
    return subprocess.Popen(list(map(str, line)), cwd=ROOT, env=stamped(stamps, **{TMPDIR: str(folder)}))


def _theirs(python: Path, folder: Path, **variables: str) -> Killed:
    """Start the lighthouse and three replicas as their README does; end them once the killed one is there again."""
    stamps, port = Path(mkdtemp(dir=folder)), free_port()
    logs = [folder / f"{stamps.name}-{replica}.log" for replica in range(WORKERS)]
    shared = {**variables, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "NUM_REPLICA_GROUPS": f"{WORKERS}"}
    with ExitStack() as ends:

        def start(line: list[object], log: Path, **variables: str) -> None:
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            with log.open("wb") as file:
                environment = stamped(stamps, **shared, **variables, PYTHONPATH=path)
                process = subprocess.Popen(
                    list(map(str, line)), cwd=folder, env=environment, stdout=file, stderr=file
                )
            ends.callback(process.wait)
            ends.callback(process.terminate)

        lighthouse = [python.with_name("torchft_lighthouse"), "--min_replicas", "1", "--quorum_tick_ms", "100"]
        start([*lighthouse, "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"], folder / "lighthouse.log")
        began = time.time()
        for replica, log in enumerate(logs):
            launcher = [python, "-m", "torch.distributed.run", f"--master_port={free_port()}", "--nnodes=1"]
            program = ["--nproc_per_node=1", "--max_restarts=10", "-m", "benchmarks.peers.cifar", SCRIPT[2]]
            start([*launcher, *program], log, REPLICA_GROUP_ID=f"{replica}")
        killed = _kill_one(stamps)
        sizes = [log.stat().st_size for log in logs]
        come_to(lambda: len(stamps_in(stamps)) > WORKERS)
        come_to(lambda: min(len(kept) for kept in stamps_in(stamps).values()) > 5)
    for trace in TRACES:
        trace.unlink(missing_ok=True)
    found = stamps_in(stamps)
    texts = [(log.read_text()[:size], log.read_text()[size:]) for log, size in zip(logs, sizes, strict=True)]
    (lives,) = (before for before, after in texts if STARTS in after)  # the killed one's, until then
    in_flight = lives.count("Start quorum") - lives.count("should_commit=True enough")
    dropped = sum(after.count("should_commit=False enough") + after.count(HEALS) for _, after in texts)
    again = sum(stamp.at < killed for stamp in found[sorted(found)[WORKERS - 1]])  # it begins its share anew
    bits = [{stamp.bits for stamp in kept[-4:-1]} for kept in found.values() if kept[-1].at > killed]
    weights = "the same on all" if set.intersection(*bits) else "others on each"
    times = vars(times_of(found, began, killed, STEADY))
    return Killed(**times, samples=BATCH * (in_flight + dropped), again=BATCH * again, weights=weights)


def _result(training: subprocess.Popen[bytes], stamps: Path) -> dp_ray.Result:
    try:
        assert training.wait(MOST_SECONDS) == 0
    finally:
        training.terminate()
    return dp_ray.load(stamps.parent / "runs" / stamps.name)
