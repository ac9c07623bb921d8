"""What a lost worker costs if the others go on: against a restart of all, Ray Train, and an earlier commit.

`python -m benchmarks survivors:node` measures the rows of one name of ROWS alone.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import placement_group, remove_placement_group

import dp_ray
from benchmarks import undisturbed
from benchmarks.cluster import NUM_CPUS, local_ray, scratch
from benchmarks.compare import Goal, at_most, compared
from benchmarks.faults import EARLIER, MARKED, Kill, come_to, command, job_file, kill_one, seconds_lost, seen
from benchmarks.start import ROOT, unpack
from benchmarks.table import Row, time_text
from dp_ray.cluster.internals.variables import TMPDIR
from tests.support.hosts import ENVIRONMENT, PORT, Host, namespaces

REPEATS = 3
STEPS = 200  # so many that another worker comes meanwhile
AROUND = 3.0  # seconds before another worker's first step in which it has joined
LIMIT = 400.0  # seconds of each training
RESTART: dict[str, Any] = {"on_lost_worker": "restart", "max_steps": 2 * MARKED}
ALL_START_AGAIN = "bcfaca6b"  # the last commit where all did for further workers
KILLED = "faults: a worker killed, 3 workers, the others go on: to a finished step"


class Lost(NamedTuple):
    """The seconds from the kill to a step that the others have finished, and by which the longest step is longer
    than the median as another worker joins; None if none came."""

    seconds: float
    joins: float | None


def measure(only: str = "") -> Iterator[Row]:
    """Measure all rows, or those of a name."""
    for rows in [ROWS[only]] if only else ROWS.values():
        yield from rows()


def _killed() -> Iterator[Row]:
    """Against a restart of all."""
    found, restarts, again, others = list[Lost](), list[float](), list[int](), list[int]()
    with _folder() as folder:
        for _ in range(REPEATS):
            found.append(_lost(folder, kill_one, partial(_program, twice=again)))
            restarts.append(_restart(folder, partial(_program, twice=others, **RESTART)))
    pairs = list(zip([lost.seconds for lost in found], restarts, strict=True))
    yield compared(KILLED, pairs, time_text, "restart", at_most(0.35), _within(1.0))
    what = "faults: a worker killed, 3 workers, the others go on: steps computed twice"
    yield Row(what, f"{max(again)}", f"{median(others):g} restart", "", "0", max(again) == 0)
    joins = [(lost.joins, lost.joins) for lost in found if lost.joins is not None]
    if joins:
        what = "faults: another worker joins: the longest step, less the median"
        yield compared(what, joins, time_text, "itself", _within(0.5))


def _loaders() -> Iterator[Row]:
    """The same, where each worker has two loader processes."""
    with _folder() as folder:
        mine = partial(_lost, folder, kill_one, partial(_program, processes=2))
        theirs = partial(_restart, folder, partial(_program, processes=2, **RESTART))
        pairs = [(mine().seconds, theirs()) for _ in range(REPEATS)]
    goal = _within(1.2)  # a tenth of what it took before restarts were shortened
    yield compared(f"{KILLED}, 2 loader processes each", pairs, time_text, "restart", at_most(0.35), goal)


def _earlier() -> Iterator[Row]:
    """The same, against the commit before restarts were shortened."""
    with _folder() as folder:
        if not unpack(EARLIER, folder / "earlier"):
            return
        mine = partial(_lost, folder, kill_one, partial(_program, processes=2))
        then = partial(_program, processes=2, code=folder / "earlier", max_steps=2 * MARKED)
        pairs = [(mine().seconds, _restart(folder, then)) for _ in range(REPEATS)]
    yield compared(f"{KILLED}, 2 loader processes each", pairs, time_text, f"at {EARLIER}", at_most(0.1))


def _beside_ray_train() -> Iterator[Row]:
    with _folder() as folder:
        theirs = partial(seconds_lost, folder, kill_one, partial(_bare, "local", [], 3))
        pairs = [(_lost(folder, kill_one, _program).seconds, theirs()) for _ in range(3)]
    yield compared(KILLED, pairs, time_text, "Ray Train", at_most(0.1))


def _node() -> Iterator[Row]:
    """Three hosts in network namespaces, with Ray's own defaults; the link of the last one is set down."""
    # Not within the first folder: that is sent to the workers as the code, and Ray's own files are in the second.
    with _folder() as folder, scratch() as there, namespaces(3, there) as hosts:
        head, *_, last = hosts
        _start(head, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={head.sockets}")
        for host in hosts[1:]:
            _start(host, f"--address={head.address}:{PORT}")
        mine = _lost(folder, lambda _: last.cut(), partial(_on_host, head)).seconds
        print(f"a lost node: {mine:.1f} s", file=sys.stderr, flush=True)  # the other side takes minutes
        last.heal()
        last.kill()
        _start(last, f"--address={head.address}:{PORT}")
        bare = partial(_bare, f"{head.address}:{PORT}", head.command(), [1, 3])
        theirs = seconds_lost(folder, lambda _: last.cut(), bare)
    what = "faults: a node lost (link down), the others go on: to a finished step, elastic 3 to 2"
    yield compared(what, [(mine, theirs)], time_text, "Ray Train", at_most(0.1))


def _grows() -> Iterator[Row]:
    """An elastic job of one worker as room for another one comes, against the commit where all started again."""
    with _folder() as folder, local_ray():
        if not unpack(ALL_START_AGAIN, folder / "earlier"):
            return
        pairs = [(_grown(folder, ROOT), _grown(folder, folder / "earlier")) for _ in range(REPEATS)]
    what, against = "faults: room for another worker, 1 to 2", f"at {ALL_START_AGAIN}"
    for at, (figure, limit) in enumerate([("to the first step of both", 1.0), ("the longest step", 0.3)]):
        found = [(ours[at], theirs[at]) for ours, theirs in pairs]
        yield compared(f"{what}: {figure}", found, time_text, against, at_most(limit))


def _grown(folder: Path, code: Path) -> tuple[float, float]:
    """The seconds from when there is room to the first step of the worker that comes, and of the longest step."""
    marks = folder / f"marks-{time.time_ns()}"
    marks.touch()
    address, others = ray.get_runtime_context().gcs_address, placement_group([{"CPU": NUM_CPUS - 1}])
    ray.get(others.ready())
    freed: list[float] = []

    def watch() -> None:
        come_to(lambda: len(seen(marks)) >= 3 * MARKED)  # by then a job may grow: it has run for long enough
        freed.append(time.time())
        remove_placement_group(others)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    line = [sys.executable, "-m", "dp_ray", "run", str(job_file(marks, 0, max_steps=4 * STEPS)), "--quiet"]
    line += ["--workers", "1:2", "--storage", str(folder / "runs"), "--address", address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(code), str(folder)])}
    subprocess.run(line, cwd=code, env=environment, check=True, timeout=LIMIT)
    watching.join(1)
    all_marks = seen(marks)
    first = next(at for at, pid in all_marks if pid != all_marks[0][1])
    ends = sorted(at for at, _ in all_marks if freed[0] - AROUND < at < first + AROUND)
    return first - freed[0], max(end - began for began, end in pairwise(ends))


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "killed": _killed,
    "loaders": _loaders,
    "earlier": _earlier,
    "ray_train": _beside_ray_train,
    "node": _node,
    "grows": _grows,
    "undisturbed": undisturbed.measure,
}


def _within(seconds: float) -> Goal:
    return Goal(f"at most {seconds:g} s", seconds, is_least=False, absolute=True)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder with the training that marks its steps."""
    with scratch() as folder:
        shutil.copy(Path(__file__).with_name("marked.py"), folder)
        yield folder


def _program(marks: Path, code: Path = ROOT, processes: int = 0, twice: list[int] | None = None, **keys: Any) -> None:
    """Train by the program that stands in `code`, with a Ray of its own; note in `twice` how many steps ran again."""
    command(code, marks, 3, processes, **{"max_steps": STEPS, **keys})
    if twice is not None:
        told = dp_ray.load(marks.parent / "runs" / marks.name).interruptions
        twice += [one["step"] - one["resumed_step"] for one in told]


def _bare(address: str, before: list[str], workers: int | list[int], ticks: Path) -> None:
    """Train by Ray Train, in a process of its own."""
    given = json.dumps([str(ticks), workers, 120, address])
    line = [*before, sys.executable, "-m", "benchmarks.recovering", given]
    # Ray's usual folder may name a cluster that is dead.
    environment = {**ENVIRONMENT, **({TMPDIR: str(ticks.parent)} if address == "local" else {})}
    subprocess.run(line, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=LIMIT)


def _start(host: Host, *args: str) -> None:
    """Start a Ray node of one CPU on a host, with Ray's own defaults."""
    line = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={host.address}", *args]
    log = host.folder / f"host-{host.number}.log"
    with log.open("wb") as file:
        ray = host.command(*line, "--num-cpus=1", "--disable-usage-stats", "--block")
        # Ray Train leaves gloo to the host's name, 127.0.0.1 on all three; dp_ray finds the interface itself.
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0"}
        host.processes.append(subprocess.Popen(ray, stdout=file, stderr=file, cwd="/", env=environment))
    host.wait_until_up()


def _on_host(host: Host, marks: Path) -> None:
    """Train by the program on this host, on its Ray."""
    line = ["dp_ray", "run", str(job_file(marks, 0, max_steps=STEPS)), "--quiet", "--workers", "1:3"]
    line += ["--storage", str(marks.parent / "runs"), "--address", f"{host.address}:{PORT}"]
    done = host.run(sys.executable, "-m", *line, timeout=LIMIT, cwd=marks.parent)
    assert done.returncode == 0, done.stderr


def _restart(folder: Path, train: Callable[[Path], None]) -> float:
    """From the kill until a worker that was not there before has finished a step."""
    return seconds_lost(folder, kill_one, train, MARKED)


def _lost(folder: Path, kill: Kill, train: Callable[[Path], None]) -> Lost:
    """Kill once all workers have done some steps; the training marks the end of each step."""
    marks = folder / f"marks-{time.time_ns()}"
    marks.touch()
    killed: list[float] = []

    def watch() -> None:
        come_to(lambda: len(seen(marks)) >= MARKED)
        killed.append(time.time())
        kill(sorted({pid for _, pid in seen(marks)}))

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    train(marks)
    watching.join(1)
    return lost_of(seen(marks), killed[0])


def lost_of(marks: list[tuple[float, int]], killed: float) -> Lost:
    """Look at what one of those has marked that were there before the kill and after it."""
    steps: dict[int, list[float]] = {}
    for at, pid in marks:
        steps.setdefault(pid, []).append(at)
    lives = next(times for times in steps.values() if times[0] < killed and times[-1] > killed + 2)
    gaps = list(pairwise(lives))
    # The step in flight may have been finished after the kill: its gap is a usual one.
    _, finished = max(
        (pair for pair in gaps if killed - 1 < pair[0] < killed + 30), key=lambda pair: pair[1] - pair[0]
    )
    joined = [times[0] for times in steps.values() if times[0] > finished]
    if not joined:
        return Lost(finished - killed, None)
    around = [end - began for began, end in gaps if began >= finished and joined[0] - AROUND < began]
    usual = median(end - began for began, end in gaps if began >= finished)
    return Lost(finished - killed, max(around) - usual)
