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


@dataclass(frozen=True)
class Schedule:
    """A training of some workers, and what happens to them."""

    model: str
    keys: dict[str, Any]
    workers: int
    faults: tuple[Fault, ...]
    replaces: bool

    def job(self, workers: int) -> Job:
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


def main(seconds: float, seed: int) -> int:
    """Draw schedules for so long; return how many have failed."""
    until, ran, failed, died = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < until:
        schedule = drawn(seed + ran)
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                died += len(check(schedule, Path(folder)).died)
        except Exception:
            failed += 1
            print(f"seed {seed + ran}: {schedule}\n{traceback.format_exc()[-6000:]}", flush=True)
        ran += 1
        print(f"{ran} schedules, {died} deaths, {failed} failed", flush=True)
    end_idle()  # Python waits for them as it ends
    return failed


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0) > 0)
