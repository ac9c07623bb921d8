"""Fault injection: the faults that --inject takes, and which worker each one hits."""

from typing import Any

import pytest

from dp_ray.engine.world import World
from dp_ray.errors import JobError
from dp_ray.job.job import Job
from dp_ray.monitor.faults import faults_for, parse_faults
from tests.support.trainings import job_of

PLAN = "kill worker 1 at step 20; kill node 2 at step 40; pause worker 0 for 30s at step 60"


def test_the_plan_of_the_manual() -> None:
    faults = parse_faults(PLAN)
    assert "; ".join(map(str, faults)) == PLAN
    assert [(fault.action, fault.what, fault.which, fault.seconds, fault.step) for fault in faults] == [
        ("kill", "worker", "1", None, 20),
        ("kill", "node", "2", None, 40),
        ("pause", "worker", "0", 30.0, 60),
    ]
    parts = "kill worker 1 at step 20 in exchange; pause worker 0 for 5s at step 3 in evaluation"
    assert "; ".join(map(str, parse_faults(parts))) == parts
    assert [fault.part for fault in parse_faults(f"{parts}; {PLAN}")] == ["exchange", "evaluation", "", "", ""]
    others = "kill driver at step 3; pause worker 2 at step 4; drain node 1 for 2.5s at step 5;"
    assert "; ".join(map(str, parse_faults(others))) == others.rstrip(";")
    assert parse_faults("") == ()


def test_a_slow_worker_is_slow_from_its_step_on() -> None:
    slow = parse_faults("slow worker 1 by 50ms from step 10; slow worker 0 by 1.5s from step 0")
    assert [(fault.action, fault.which, fault.seconds, fault.step) for fault in slow] == [
        ("slow", "1", 0.05, 10),
        ("slow", "0", 1.5, 0),
    ]
    assert [str(fault) for fault in slow] == [
        "slow worker 1 by 50ms from step 10",
        "slow worker 0 by 1500ms from step 0",
    ]
    assert [slow[0].is_due(World(rank, 2), step) for rank, step in ((1, 9), (1, 10), (1, 30), (0, 30))] == [
        *(False, True, True, False)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "kill worker at step 3",
        "kill driver 1 at step 3",
        "kill worker 10.0.0.1 at step 3",
        "kill worker 1",
        "pause node 1 at step 3",
        "drain worker 1 at step 3",
        "kill worker 1 for 3s at step 3",
        "break worker 1 at step 3",
        "kill worker -1 at step 3",
        "kill worker 1 at 3",
        "slow worker 1 at step 3",
        "slow worker 1 by 50 from step 3",
        "slow worker 1 by 50ms at step 3",
        "slow node 1 by 50ms from step 3",
        "slow worker by 50ms from step 3",
        "kill worker 1 from step 3",
        "kill worker 1 at step 3 in backwards",
        "kill worker 1 in exchange at step 3",
        "kill node 1 at step 3 in exchange",
        "kill driver at step 3 in exchange",
        "slow worker 1 by 50ms from step 3 in forward",
    ],
)
def test_what_is_no_fault_is_told_with_what_is(text: str) -> None:
    with pytest.raises(JobError, match=r"--inject '.*': .*'kill worker 1 at step 20', 'kill node 2 at step 40'"):
        parse_faults(f"kill worker 0 at step 1; {text}")


@pytest.mark.parametrize(
    ("keys", "fault", "why"),
    [
        ({"task": "predict"}, "kill worker 1 at step 3 in update", "a step of task predict has no update"),
        ({}, "kill worker 1 at step 3 in evaluation", "the job has no eval"),
        ({"workers": 1}, "kill worker 0 at step 3 in exchange", "a single worker exchanges nothing"),
        ({}, "pause worker 1 for 3s at step 3 in checkpoint", "only worker 0 writes checkpoints"),
    ],
)
def test_a_part_that_never_comes_is_refused_with_the_reason(keys: dict[str, Any], fault: str, why: str) -> None:
    job = job_of("mlp", **{"workers": 2, **keys}) if keys.get("task") != "predict" else predicting()
    with pytest.raises(JobError, match=f"^--inject '{fault}': {why}$"):
        faults_for(job, fault)
    assert faults_for(job, "kill worker 0 at step 3 in forward")
    assert faults_for(job_of("mlp", workers=2, strategy="fsdp"), "kill worker 1 at step 3 in checkpoint")


def predicting() -> Job:
    target = "tests.support.training"
    return Job.make(
        {"task": "predict", "model": f"{target}:mlp", "dataset": f"{target}:Pairs", "workers": 2, "batch_size": 4},
        "job",
    )


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("kill worker 2 at step 5", 2),
        ("kill node 1 at step 5", 2),
        ("kill node 10.0.0.1 at step 5", 2),
        ("kill driver at step 5", 0),
    ],
)
def test_each_fault_falls_on_one_worker_at_its_step_or_the_first_after(text: str, hit: int) -> None:
    (fault,) = parse_faults(text)
    worlds = [World(rank, 4, rank % 2, rank // 2, f"10.0.0.{rank // 2}") for rank in range(4)]
    assert [world.rank for world in worlds if fault.is_due(world, 5)] == [hit]
    assert fault.is_due(worlds[hit], 9)
    assert not any(fault.is_due(world, 4) for world in worlds)
