"""Drawn trainings whose workers are killed or stopped at drawn moments: what is left is the undisturbed one's.

`make quick` leaves this out and `make test` draws a few schedules, the same each time. To draw for long:
`python -m tests.tasks.test_drawn_kills SECONDS [SEED]`, which prints each schedule that fails.
"""

import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dp_ray.job.job import Job
from tests.support import around
from tests.support.group import end_idle, history_of, run_group, weights_of
from tests.support.survivors import Fault, Told, run_surviving
from tests.tasks.test_survivors import loop_keys, made

FEW = 6
LOOSE = {"rtol": 1e-4, "atol": 1e-5}
PARTS = ["forward", "backward", "exchange", "update", "after", "evaluation", "checkpoint", "weights", "level"]
PARTS += ["piece", "naming"]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {}),
    ("mlp", {"bitwise": False}),
    ("conv", {}),
    ("mlp", {"strategy": "fsdp"}),
    ("gan", {}),
]
KEPT = ["metric", "adapter", "experts", "early"]  # around and in a model


@dataclass(frozen=True)
class Schedule:
    """A training of some workers, and what happens to them."""

    model: str
    keys: dict[str, Any]
    workers: int
    faults: tuple[Fault, ...]
    replaces: bool
    dies: int | None = None  # the step in which the last one dies too; then others go on with the run

    def job(self, workers: int) -> Job:
        if self.model == "objects":
            return Job.make({**around.keys_of(self.keys), "workers": workers}, "job")
        if self.model == "gan":
            return Job.make({**loop_keys("gan", **self.keys), "workers": workers}, "job")
        alone = {"strategy": "ddp"} if workers == 1 else {}
        return made(self.model, workers=workers, **{**self.keys, **alone})


def drawn(seed: int) -> Schedule:
    """A schedule; one worker at least lives, so that nothing restarts."""
    chance = random.Random(seed)
    model, keys = chance.choice(KINDS)
    workers, replaces = chance.choice([2, 3, 3, 4]), chance.random() < 0.4
    epochs = chance.choice([6, 10]) if replaces else 3
    lives = chance.randrange(workers)
    slots = [slot for slot in range(workers) if slot != lives]
    steps = epochs * 4 - 2
    faults: dict[tuple[int, int], Fault] = {}
    for _ in range(chance.choice([1, 2, 2, 3, 5])):
        slot, step = chance.choice(slots), chance.randrange(1, steps)
        seconds = chance.choice([0.0, 0.0, 0.0, 2.0])
        faults[slot, step] = Fault(slot, step, chance.choice(PARTS), seconds)
    return Schedule(model, {**keys, "epochs": epochs}, workers, tuple(faults.values()), replaces)


def drawn_objects(seed: int) -> Schedule:
    """A schedule of a training, or a loop, whose parts are objects that have a state; the last worker may die too."""
    chance = random.Random(seed)
    loops, rows, shards = chance.random() < 0.35, chance.randrange(8, 25), chance.choice([2, 3, 5])
    has = [] if loops else list(chance.choice([[], ["moves"], ["moves"], ["ignored"], ["over", "moves"]]))
    draws = chance.choice(around.NESTS), chance.choice(sorted(around.GENERATORS)), chance.choice(["whole", "parts"])
    case: dict[str, Any] = {
        "has": [*has, *(part for part in KEPT if chance.random() < 0.4)],
        "loops": loops,
        "rows": rows,
        "batch_size": chance.randrange(-(-rows // 5), 9),
        "shards": shards,
        "optimizer": chance.choice(["SGD", "AdamW"]),
        "grad_clip": chance.choice([None, 0.05]),
        "bitwise": chance.random() < 0.6,
        "kept": chance.choice([1, 2, 4, 99]),
        "eval_rows": chance.choice([None, 7, 12]),
        "processes": 0,
        "objects": chance.random() < 0.8,
        "step": chance.choice([None, *around.STEPS]),
        "draws": chance.choice([None, draws]),
    }
    workers, steps = chance.randrange(2, shards + 1), around.EPOCHS * -(-rows // case["batch_size"])
    lives = chance.randrange(workers)
    faults: dict[tuple[int, int], Fault] = {}
    for slot in chance.sample([slot for slot in range(workers) if slot != lives], chance.randrange(1, workers)):
        step = chance.randrange(steps)
        faults[slot, step] = Fault(slot, step, chance.choice(PARTS), chance.choice([0.0, 0.0, 0.0, 2.0]))
    dies = chance.choice([None, None, steps - 1])
    if dies is not None:
        faults[lives, dies] = Fault(lives, dies)
    return Schedule("objects", case, workers, tuple(faults.values()), False, dies)


def check_objects(schedule: Schedule, folder: Path) -> Told:
    """Run the schedule, and compare it with one plain process; bit for bit with the undisturbed training, too."""
    told = run_surviving(schedule.job(schedule.workers), folder / "run", schedule.faults)
    if schedule.dies is not None:
        run_group(schedule.job(1 + schedule.workers % 2), folder / "run")
    around.compare(schedule.keys, folder / "run")
    if schedule.keys["bitwise"]:
        run_group(schedule.job(1), folder / "undisturbed")
        there, here = weights_of(folder / "undisturbed"), weights_of(folder / "run")
        assert all(torch.equal(there[name], here[name]) for name in there)
        # As texts: a loss of no labels is NaN, which equals nothing.
        assert repr(history_of(folder / "run")) == repr(history_of(folder / "undisturbed"))
    return told


def check(schedule: Schedule, folder: Path) -> Told:
    """Run the schedule, and compare it with the undisturbed training."""
    run_group(schedule.job(1), folder / "undisturbed")
    told = run_surviving(
        schedule.job(schedule.workers), folder / "run", schedule.faults, schedule.replaces, 5 * schedule.replaces
    )
    there, here = weights_of(folder / "undisturbed"), weights_of(folder / "run")
    assert there.keys() == here.keys()
    is_exact = schedule.keys.get("bitwise", True)
    for name in there:
        torch.testing.assert_close(here[name], there[name], **({"rtol": 0, "atol": 0} if is_exact else LOOSE))
    rows, expected = history_of(folder / "run"), history_of(folder / "undisturbed")
    assert rows == expected if is_exact else [row["step"] for row in rows] == [row["step"] for row in expected]
    return told


@pytest.mark.full(but=["1", "2"])
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW))
def test_drawn_kills_and_stops(tmp_path: Path, seed: int) -> None:
    check(drawn(seed), tmp_path)


@pytest.mark.full(but=["0", "1"])
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW))
def test_drawn_kills_of_what_holds_objects(tmp_path: Path, seed: int) -> None:
    check_objects(drawn_objects(seed), tmp_path)


def main(seconds: float, seed: int) -> int:
    """Draw schedules for so long, of both kinds; return how many have failed."""
    until, ran, failed, died = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < until:
        schedule = (drawn, drawn_objects)[ran % 2](seed + ran)
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                checked = check_objects if schedule.model == "objects" else check
                died += len(checked(schedule, Path(folder)).died)
        except Exception:
            failed += 1
            print(f"seed {seed + ran}: {schedule}\n{traceback.format_exc()[-6000:]}", flush=True)
        ran += 1
        print(f"{ran} schedules, {died} deaths, {failed} failed", flush=True)
    end_idle()  # Python waits for them as it ends
    return failed


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
