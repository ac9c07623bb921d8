"""Jobs on Ray whose workers go on where others are killed: the undisturbed run's bits, and what is told."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.cluster.channel import GROUP
from dp_ray.driver.sessions import Session
from dp_ray.errors import WorkerError
from tests.support.cluster import Run
from tests.support.drivers import SLOW, told
from tests.support.models import SlowPairs
from tests.support.within import within

GOES_ON: dict[str, Any] = {**SLOW, "epochs": 12, "checkpoint": {"every_steps": 50}}
PREDICTS: dict[str, Any] = {
    "task": "predict",
    "model": {"target": "tests.support.training:conv"},
    "dataset": {"target": "tests.support.models:SlowPairs", "args": {"seconds": 0.05}},
    "collate": {"target": "tests.support.training:as_images"},
    "batch_size": 6,
    "shards": 3,
    "bitwise": True,
}


@pytest.mark.ray
def test_a_prediction_whose_worker_is_killed(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults = "kill worker 1 at step 4; kill worker 5 at step 2"
    result = run(None, **PREDICTS, workers=3, quiet=False, inject=faults)
    (never,) = [line for line in capfd.readouterr().err.splitlines() if "never came" in line]
    assert never == (
        "run: fault injection: kill worker 5 at step 2 never came: no such worker was there then, or no such step"
    )
    undisturbed = run(None, **PREDICTS, workers=0, name="undisturbed")
    assert result.outputs_sha256 == undisturbed.outputs_sha256
    assert [one["level"] for one in result.interruptions] == ["memory"]


@pytest.mark.full
@pytest.mark.ray
def test_a_worker_killed_in_each_part_of_a_step(run: Run, tmp_path: Path) -> None:
    dataset = {"target": "tests.support.training:Images", "args": {"length": 20}}
    keys = {**GOES_ON, "checkpoint": {"every_steps": 9}, "eval": {"dataset": dataset, "every_steps": 9}}
    parts = {5: "1 {} in forward", 29: "1 {} in exchange", 53: "1 {} in update", 77: "2 {} in evaluation"}
    faults = [f"kill worker {text.format(f'at step {step}')}" for step, text in parts.items()]
    result = run(None, **keys, workers=3, inject="; ".join([*faults, "kill worker 0 at step 98 in checkpoint"]))
    undisturbed = run(None, **keys, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)
    assert [one["level"] for one in result.interruptions] == ["memory"] * 5
    resumed = [one["resumed_step"] for one in result.interruptions]
    assert resumed[:2] == [5, 29] and resumed[2] in (53, 54)  # in an update, the others have the sums already
    assert resumed[3] % 9 == 0 and resumed[4] % 9 == 0 and 81 <= resumed[3] < resumed[4]
    assert all(one["step"] == one["resumed_step"] for one in result.interruptions)


class DeadlyToNewcomers(SlowPairs):
    """Kills each worker that builds it after the first three. The others read on once three have died."""

    def __init__(self, folder: str) -> None:
        super().__init__(0.001)
        self.built = Path(folder, "built")
        self.left = 200  # reads before that
        if GROUP in os.environ:
            with self.built.open("ab") as built:
                built.write(b"x")
            if self.built.stat().st_size > 3:
                os.kill(os.getpid(), signal.SIGKILL)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if GROUP in os.environ and self.left < 0:
            assert within(200, lambda: self.built.stat().st_size >= 6)
        return super().__getitem__(index)


@pytest.mark.full
@pytest.mark.ray
def test_newcomers_that_die_as_they_start_are_no_more_started_and_the_others_go_on(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = {"target": "tests.driver.test_survivors:DeadlyToNewcomers", "args": {"folder": str(tmp_path)}}
    keys = {**GOES_ON, "retries": 1, "dataset": dataset}
    result = run(None, **keys, workers=3, quiet=False, inject="kill worker 1 at step 5")
    undisturbed = run(None, **keys, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert result.world_sizes == [3, 2]
    says = "no other worker is started: 3 were lost as they started: its process was killed"
    assert says in capfd.readouterr().err
    assert (tmp_path / "built").read_text() == "x" * 6


@pytest.mark.ray
def test_workers_of_a_session_go_on_and_its_next_job_has_all_of_them(session: Session, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**GOES_ON, "epochs": 2, "workers": 2, "storage": str(tmp_path), "quiet": True}
    expected = dp_ray.run(None, **{**keys, "workers": 0}, name="expected")
    killed = session.run(None, **keys, name="killed", inject="kill worker 1 at step 3")
    with pytest.raises(WorkerError, match="workers were lost, more often than retries allows: rank"):
        session.run(None, **keys, name="lost", inject="kill worker 0 at step 2", retries=0)
    after = session.run(None, **keys, name="after")
    assert killed.weights_sha256 == after.weights_sha256 == expected.weights_sha256
    assert [one["level"] for one in killed.interruptions] == ["memory"]
    assert after.world_sizes == [2]


@pytest.mark.full
@pytest.mark.ray
def test_a_session_goes_on_with_those_that_stay_where_others_are_killed_between_two_jobs(
    session: Session, tmp_path: Path, in_project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = "jobs/tutorial.yaml"
    keys: dict[str, Any] = {"workers": 3, "shards": 3, "storage": str(tmp_path), "overwrite": True}
    expected = dp_ray.run(job, **{**keys, "workers": 0}, name="expected", quiet=True)

    def ran(**more: Any) -> list[int]:
        """The processes of a job on the session's workers."""
        result = session.run(job, **keys, name="job", **more)
        assert result.outputs_sha256 == expected.outputs_sha256
        assert (result.restarts, result.interruptions) == (0, [])
        return [worker["pid"] for worker in result.workers]

    stays, *lost = ran()
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    there = ran()
    assert stays in there and not set(lost) & set(there)
    assert within(200, lambda: len(ran()) == 3), "others come in the places of the lost"
    whole = ran()
    assert stays in whole
    assert set(ran(on_lost_worker="restart")) == set(whole), "it takes those that were replaced alone too"
    assert "started anew" not in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_between_two_jobs_is_left_out_of_the_next_one(
    session: Session, tmp_path: Path, in_project: Path, rank: int
) -> None:
    keys: dict[str, Any] = {**GOES_ON, "epochs": 2, "workers": 2, "storage": str(tmp_path), "quiet": True}
    first = session.run(None, **keys, name="first")
    stopped = first.workers[rank]["pid"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        began = time.monotonic()
        after = session.run(None, **keys, name="after", timeouts={"step": 5, "rejoin": 3})
        assert time.monotonic() - began < 60
    finally:
        os.kill(stopped, signal.SIGKILL)
    assert after.weights_sha256 == first.weights_sha256
    assert stopped not in [worker["pid"] for worker in after.workers]


@pytest.mark.full
@pytest.mark.ray
def test_three_workers_of_which_two_are_killed_at_once_and_then_rank_0(run: Run, tmp_path: Path) -> None:
    faults = "kill worker 1 at step 5; kill worker 2 at step 5; kill worker 0 at step 95"
    result = run(None, **GOES_ON, workers=3, inject=faults)
    undisturbed = run(None, **GOES_ON, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)
    assert {one["level"] for one in result.interruptions} == {"memory"}
    assert sorted(rank for one in result.interruptions for rank in one["ranks"]) == [0, 1, 2]
    assert all(one["step"] == one["resumed_step"] for one in result.interruptions), "no step is run again"
    assert result.world_sizes[0] == 3 and max(result.world_sizes[2:]) == 3, "others come in their places"


@pytest.mark.full
@pytest.mark.ray
def test_sharded_workers_go_on_in_their_processes_from_the_newest_checkpoint(run: Run, tmp_path: Path) -> None:
    keys: dict[str, Any] = {**GOES_ON, "epochs": 6, "checkpoint": {"every_steps": 5}, "strategy": "fsdp"}
    result = run(None, **keys, workers=3, inject="kill worker 0 at step 8; kill worker 2 at step 23")
    undisturbed = run(None, **keys, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)
    assert {(one["level"], one["why"]) for one in result.interruptions} == {("checkpoint", "strategy: fsdp")}
    assert all(one["resumed_step"] == one["step"] // 5 * 5 for one in result.interruptions)


LOOP: dict[str, Any] = {
    "task": "train",
    "model": "tests.support.loops:Gan",
    "dataset": {"target": "tests.support.loops:SlowPoints", "args": {"seconds": 0.02}},
    "loop": "tests.support.loops:gan",
    "batch_size": 6,
    "shards": 3,
    "shuffle": False,
    "epochs": 12,
    "bitwise": True,
    "checkpoint": {"every_steps": 5},
}


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.parametrize("rejoin", [3, 10])
def test_a_loop_whose_worker_hangs_goes_on_after_that_is_named_and_killed(
    run: Run, tmp_path: Path, rejoin: int
) -> None:
    """With 3 it has been silent for so long that the others leave it out before its death is known."""
    times = {"step": 4, "rejoin": rejoin}
    result = run(None, **LOOP, workers=3, inject="pause worker 1 at step 8", timeouts=times)
    undisturbed = run(None, **LOOP, workers=0, name="undisturbed")
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert told(result) == told(undisturbed)
    (hang,) = result.interruptions
    assert (hang["kind"], hang["ranks"], hang["level"], hang["why"]) == ("hang", [1], "checkpoint", "loop")
    assert 5 <= hang["step"] <= 8 and hang["resumed_step"] == 5  # the driver may not have heard yet of the last steps
