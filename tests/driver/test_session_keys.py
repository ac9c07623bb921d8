"""What a session has, and what a job of it may ask for; below Ray."""

from typing import Any

import pytest

from dp_ray.driver.sessions import check_covered, keys_for, worker_keys
from dp_ray.errors import JobError
from dp_ray.job.job import Job

EACH = {"CPU": 1.0, "GPU": 1.0, "slot": 2.0}


def job_of(**keys: Any) -> Job:
    return Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 16, "shards": 16, **keys}, "job")


@pytest.mark.parametrize(
    "keys",
    [
        {"workers": 1},
        {"workers": 4},
        {"workers": {"min": 1, "max": 4}},
        {"workers": 2, "gpus_per_worker": 1},
        {"workers": 2, "gpus_per_worker": 0.5},
        {"workers": 2, "gpus_per_worker": 0},
        {"workers": 2, "resources_per_worker": {"slot": 2}},
        {"workers": 2, "accelerator_type": "A100"},
        {"workers": 2, "placement": "PACK"},
        {"workers": 2, "placement": "SPREAD"},
    ],
    ids=str,
)
def test_a_job_within_the_session_is_covered(keys: dict[str, Any]) -> None:
    check_covered(
        job_of(**keys), worker_keys({"workers": 4, "accelerator_type": "A100", "placement": "SPREAD"}), EACH
    )


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"workers": 5}, "workers: the job needs 5, the session has 4"),
        ({"workers": {"min": 3, "max": 4}}, "workers: the job needs at least 3, the session may have only 2"),
        (
            {"workers": 2, "gpus_per_worker": 2},
            "a worker of the job needs 1 CPU, 2 GPU; one of the session has 1 CPU, 1 GPU, 2 slot",
        ),
        (
            {"workers": 2, "cpus_per_worker": 3},
            "a worker of the job needs 3 CPU; one of the session has 1 CPU, 1 GPU, 2 slot",
        ),
        (
            {"workers": 2, "resources_per_worker": {"disk": 1}},
            "a worker of the job needs 1 CPU, 1 disk; one of the session has 1 CPU, 1 GPU, 2 slot",
        ),
        (
            {"workers": 2, "devices": ["cuda:0", "cuda:1"]},
            "a worker of the job needs 1 CPU, 2 GPU for devices: cuda:0, cuda:1; one of the session has 1 CPU, 1 "
            "GPU, 2 slot",
        ),
        ({"workers": 2, "accelerator_type": "H100"}, "accelerator_type: the job needs H100, the session has any"),
        ({"workers": 2, "placement": "STRICT_PACK"}, "placement: the job needs STRICT_PACK, the session has PACK"),
    ],
    ids=str,
)
def test_a_job_that_needs_more_is_refused_with_both(keys: dict[str, Any], says: str) -> None:
    held = worker_keys({"workers": {"min": 2, "max": 4}})
    with pytest.raises(JobError) as caught:
        check_covered(job_of(**keys), held, EACH)
    assert str(caught.value) == says


def test_wrong_keys_of_a_session_are_named() -> None:
    with pytest.raises(JobError, match="workers"):
        worker_keys({"workers": -1})
    with pytest.raises(JobError, match="batch_size"):
        worker_keys({"batch_size": 3})
    with pytest.raises(JobError, match="workers: a session needs at least one"):
        worker_keys({"workers": 0})


def test_the_session_of_several_jobs_covers_each() -> None:
    jobs = [
        job_of(workers=2, gpus_per_worker=1, placement="SPREAD"),
        job_of(workers={"min": 1, "max": 4}, cpus_per_worker=3),
        job_of(workers=3, resources_per_worker={"slot": 1}, accelerator_type="A100"),
        job_of(workers=0),
    ]
    keys = keys_for(jobs)
    assert (keys.min_workers, keys.max_workers) == (3, 4)
    assert (keys.gpus_per_worker, keys.cpus_per_worker, keys.resources_per_worker) == (1, 3, {"slot": 1})
    assert (keys.placement, keys.accelerator_type) == ("SPREAD", "A100")
    for job in jobs[:-1]:
        check_covered(job, keys, {"CPU": 3, "GPU": 1, "slot": 1})


@pytest.mark.parametrize(
    ("gpus", "session"), [((1, 2), 2), (("auto", "auto"), "auto"), (("auto", 0.5), 1), ((0, 0), 0), (("auto", 2), 2)]
)
def test_the_gpus_of_a_session_are_enough_for_each_job(gpus: tuple[Any, Any], session: Any) -> None:
    assert keys_for([job_of(workers=1, gpus_per_worker=gpu) for gpu in gpus]).gpus_per_worker == session


@pytest.mark.parametrize(
    ("devices", "session"),
    [
        ((["cuda:0"], ["cuda:0", "cuda:1"]), 2),
        ((["cuda:0"], None), 1),
        ((["cpu"], ["cpu"]), "auto"),
        ((["cpu"], None), "auto"),
    ],
)
def test_the_gpus_that_jobs_name_are_in_their_session(devices: tuple[Any, ...], session: Any) -> None:
    assert keys_for([job_of(workers=2, devices=device) for device in devices]).gpus_per_worker == session


@pytest.mark.parametrize(
    ("seconds", "session"), [((5, 700), 700), ((700, 5), 700), ((5, None), None), ((None, 5), None), ((5,), 5)]
)
def test_a_session_waits_for_capacity_as_long_as_any_of_its_jobs_would(
    seconds: tuple[Any, ...], session: Any
) -> None:
    jobs = [job_of(workers=1, timeouts={"capacity": capacity}) for capacity in seconds]
    assert keys_for(jobs).timeouts.capacity == session


def test_jobs_that_contradict_each_other_share_no_session() -> None:
    with pytest.raises(JobError, match="placement: jobs of one session must agree, got 'SPREAD' and 'STRICT_PACK'"):
        keys_for([job_of(workers=1, placement=one) for one in ("SPREAD", "PACK", "STRICT_PACK")])
