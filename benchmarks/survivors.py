"""What a lost worker costs if the others go on: against a restart of all, Ray Train, and an earlier commit."""

import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import dp_ray
from benchmarks import faults, recovering
from benchmarks.cluster import local_ray, scratch
from benchmarks.compare import Goal, at_most, compared
from benchmarks.faults import EARLIER, MARKED, Kill, kill_one, seen, three_nodes
from benchmarks.start import ROOT, unpack
from benchmarks.table import Row, time_text

REPEATS = 3
STEPS = 300  # so many that another worker comes meanwhile
AROUND = 3.0  # seconds before another worker's first step in which it has joined


class Lost(NamedTuple):
    """The seconds from the kill to a step that the others have finished, and by which the longest step is longer
    than the median as another worker joins; None if none came."""

    seconds: float
    joins: float | None


def measure() -> list[Row]:
    return [*_own_ray(), *_beside_ray_train(), _node()]


def _own_ray() -> list[Row]:
    """The program, with a Ray of its own."""
    with scratch() as folder:
        shutil.copy(Path(__file__).with_name("marked.py"), folder)
        goes_on = partial(_program, ROOT, on_lost_worker="go_on")
        found, restarts, loaders, earlier = [], [], [], []
        has_earlier = unpack(EARLIER, folder / "earlier")
        for _ in range(REPEATS):
            found.append(_lost(folder, kill_one, goes_on))
            restarts.append(_restart(folder, partial(_program, ROOT, steps=2 * MARKED)))
            loaders.append(_lost(folder, kill_one, partial(goes_on, processes=2)).seconds)
            if has_earlier:
                run = partial(_program, folder / "earlier", processes=2, steps=2 * MARKED)
                earlier.append(_restart(folder, run))
    seconds = [lost.seconds for lost in found]
    joins = [lost.joins for lost in found if lost.joins is not None]
    what = "faults: a worker killed, 3 workers, the others go on: to a finished step"
    second = Goal("at most 1 s", 1.0, is_least=False, absolute=True)
    half = Goal("at most 0.5 s", 0.5, is_least=False, absolute=True)
    rows = [
        compared(what, list(zip(seconds, restarts, strict=True)), time_text, "restart", at_most(0.35)),
        compared(what, list(zip(seconds, restarts, strict=True)), time_text, "restart", second),
    ]
    if earlier:
        pairs = list(zip(loaders, earlier, strict=True))
        rows.append(compared(f"{what}, 2 loader processes each", pairs, time_text, f"at {EARLIER}", at_most(0.1)))
    if joins:
        joined = "faults: another worker joins: the longest step, less the median"
        rows.append(compared(joined, [(one, one) for one in joins], time_text, "itself", half))
    return rows


def _beside_ray_train() -> list[Row]:
    """In a Ray of the user's."""
    pairs, again = [], []
    with local_ray(), scratch() as folder:
        for _ in range(REPEATS):
            results: list[dp_ray.Result] = []
            lost = _lost(folder, kill_one, partial(_here, results, 3))
            again += [one["step"] - one["resumed_step"] for one in results[0].interruptions]
            pairs.append((lost.seconds, faults.theirs_of(folder, kill_one, 3)))
    what = "faults: a worker killed, the others go on: to a finished step, 3 workers"
    twice = "faults: steps computed twice, the others go on"
    return [
        compared(what, pairs, time_text, "Ray Train", at_most(0.1)),
        Row(twice, f"{max(again)}", "", "", "0", max(again) == 0),
    ]


def _node() -> Row:
    with three_nodes() as (folder, kill_node):
        mine = _lost(folder, kill_node, partial(_here, [], {"min": 1, "max": 3})).seconds
    with three_nodes() as (folder, kill_node):
        theirs = faults.theirs_of(folder, kill_node, (1, 3))
    what = "faults: a node lost, the others go on: to a finished step, elastic 3 to 2"
    return compared(what, [(mine, theirs)], time_text, "Ray Train", at_most(0.1))


def _program(code: Path, marks: Path, processes: int = 0, steps: int = STEPS, **keys: Any) -> None:
    faults.command(code, marks, 3, processes, max_steps=steps, **keys)


def _here(results: list[dp_ray.Result], workers: Any, marks: Path) -> None:
    given: dict[str, Any] = {
        "task": "train",
        "model": "benchmarks.marked:model",
        "dataset": "benchmarks.marked:Slow",
        "loss": "torch.nn:MSELoss",
        "optimizer": {"target": "benchmarks.marked:MarkedSGD", "args": {"lr": 0.01, "marks": str(marks)}},
        "batch_size": recovering.BATCH,
        "shards": 6,
        "epochs": 1000,
        "max_steps": STEPS,
        "workers": workers,
        "checkpoint": {"every_steps": 50},
        "on_lost_worker": "go_on",
        "storage": str(marks.parent),
        "name": f"ours-{marks.name}",
        "quiet": True,
    }
    results.append(dp_ray.run(**given))


def _restart(folder: Path, train: Callable[[Path], None]) -> float:
    """From the kill until a worker that was not there before has finished a step."""
    return faults.seconds_lost(folder, kill_one, train, MARKED)


def _lost(folder: Path, kill: Kill, train: Callable[[Path], None]) -> Lost:
    """Kill once all workers have done some steps; the training marks the end of each step."""
    marks = folder / f"marks-{time.time_ns()}"
    marks.touch()
    killed: list[float] = []

    def watch() -> None:
        while len(seen(marks)) < MARKED:
            time.sleep(0.05)
        killed.append(time.time())
        kill(sorted({pid for _, pid in seen(marks)}))

    watching = threading.Thread(target=watch)
    watching.start()
    train(marks)
    watching.join()
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
