"""How often a training keeps its state by itself: as often as is nearly free, by its own measure."""

from itertools import pairwise
from pathlib import Path

import pytest

from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.job.keys import CheckpointKeys
from dp_ray.tasks.checkpoints import CheckpointPace
from tests.support.group import StopsBefore, run_group, weights_of
from tests.support.trainings import job_of


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def walked(
    when: CheckpointKeys, steps: int, step_seconds: float, loop: float, writing: float, num_bytes: int = 1000
) -> tuple[list[float], float]:
    """When a training of such steps saves, in seconds since its start, and how long it took in all.

    A save takes `loop` seconds of the training's, and `writing` in the background.
    """
    clock = Clock()
    pace = CheckpointPace(when, clock)
    saved: list[float] = []
    written, busy_until = 0.0, 0.0
    for step in range(steps):
        clock.now += step_seconds
        if step == 0:
            pace.expect(num_bytes)
        done = clock.now >= busy_until
        not_before = pace.not_before
        if pace.is_due(written, is_writing=not done):
            assert clock.now >= not_before, "the loop would not have asked"
            with pace.saving():
                clock.now += loop
            written, busy_until = written + writing, clock.now + writing
            saved.append(clock.now - 1000.0)
    return saved, clock.now - 1000.0


def test_at_most_a_hundredth_of_the_time_is_spent_on_checkpoints() -> None:
    saved, seconds = walked(CheckpointKeys(), steps=2000, step_seconds=0.05, loop=0.004, writing=0.016)
    assert len(saved) >= 20 and len(saved) * 0.02 <= 0.01 * seconds
    assert saved[0] < 3.0, "a run of seconds has one"
    assert max(later - before for before, later in pairwise(saved)) < 5.0


def test_one_that_costs_much_is_kept_every_300_seconds_all_the_same() -> None:
    saved, _ = walked(CheckpointKeys(), steps=2000, step_seconds=1.0, loop=2.0, writing=60.0, num_bytes=10**10)
    gaps = [later - before for before, later in zip([0.0, *saved], saved, strict=False)]
    assert len(saved) >= 5 and all(300 <= gap <= 305 for gap in gaps)


def test_a_long_run_does_not_leave_a_file_a_second() -> None:
    """Each checkpoint leaves a piece of the history; none loses more than a hundredth of what was done."""
    saved, _ = walked(CheckpointKeys(), steps=86_400, step_seconds=1.0, loop=0.0001, writing=0.0)
    assert len(saved) < 1500
    gaps = [(before, later - before) for before, later in pairwise(saved)]
    assert all(gap <= 0.011 * before + 2.0 for before, gap in gaps)
    assert max(gap for _, gap in gaps) <= 302


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        (CheckpointKeys(every_seconds=10.0), 10),
        (CheckpointKeys(every_seconds=None), 0),
        (CheckpointKeys(every_steps=7), 0),
        (CheckpointKeys(every_steps=7, every_seconds=50.0), 2),
    ],
)
def test_what_the_job_says_is_done(when: CheckpointKeys, expected: int) -> None:
    saved, _ = walked(when, steps=1000, step_seconds=0.1, loop=0.0, writing=0.0)
    assert len(saved) in (expected, expected - 1 if expected else 0)


def test_with_steps_alone_it_is_every_300_seconds_beside() -> None:
    saved, _ = walked(CheckpointKeys(every_steps=7), steps=1000, step_seconds=1.0, loop=0.0, writing=0.0)
    assert len(saved) == 3


def default_job() -> Job:
    """45 steps, 15 in an epoch, in a fraction of a second."""
    return job_of("mlp", workers=2, shards=2, bitwise=True, epochs=3, checkpoint={"keep": 9})


def kept(folder: Path) -> set[int]:
    return {int(path.stem[5:]) for path in (folder / "checkpoints").iterdir()}


def test_each_epochs_end_is_kept_by_default(tmp_path: Path) -> None:
    run_group(default_job(), tmp_path)
    assert {15, 30, 45} <= kept(tmp_path)


@pytest.mark.slow
def test_a_short_run_that_is_killed_does_not_begin_anew(tmp_path: Path) -> None:
    run_group(default_job(), tmp_path / "killed", StopsBefore(40))
    assert max(kept(tmp_path / "killed")) >= 30
    run_group(default_job(), tmp_path / "killed")
    run_group(default_job(), tmp_path / "whole")
    killed, whole = weights_of(tmp_path / "killed"), weights_of(tmp_path / "whole")
    assert all(killed[name].equal(whole[name]) for name in whole)


def test_what_the_key_may_be_is_told() -> None:
    with pytest.raises(JobError, match=r"checkpoint\.every_seconds: must be 'auto', null or seconds from 0 up, got"):
        job_of("mlp", workers=1, checkpoint={"every_seconds": "often"})
