"""The job: every way to get it wrong is told by its key, what was got and what it may be."""

from typing import Any

import pytest

from dp_ray.errors import JobError
from dp_ray.job.files import job_from
from dp_ray.job.job import Job
from dp_ray.plan.history import COLUMNS
from dp_ray.rundir.history import history_schema

GOOD: dict[str, Any] = {"model": "jobs.tutorial:Model", "dataset": "jobs.tutorial:RandomDataset", "batch_size": 30}


def make(**keys: Any) -> Job:
    return Job.make({**GOOD, **keys}, default_name="job")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"batch_size": 0}, "batch_size: must be greater than 0, got 0"),
        ({"batch_size": "30"}, "batch_size: must be a valid integer, got '30'"),
        ({"batch_size": True}, "batch_size: must be a valid integer, got True"),
        ({"batchsize": 3}, "batchsize: is no key of a job; did you mean batch_size?"),
        ({"zzz": 3}, "zzz: is no key of a job; its keys are name, task, model, "),
        ({"workers": -1}, "workers: must be a number of workers from 0 up, or {min: N, max: M}, got -1"),
        ({"workers": {"min": 3, "max": 1}}, "workers: min must not be above max, got min 3 and max 1"),
        ({"workers": {"min": 1, "mx": 3}}, "workers.mx: is no key of a job; did you mean workers.max?"),
        ({"workers": 3, "shards": 2}, "workers: 3 workers cannot share 2 shards; set shards to at least 3"),
        ({"workers": {"min": 1, "max": 9}, "shards": 8}, "workers: 9 workers cannot share 8 shards"),
        (
            {"on_lost_worker": "go_on", "gpus_per_worker": 1},
            "on_lost_worker: go_on is not built for GPUs yet; take restart, which is the default there",
        ),
        ({"on_lost_worker": "go_on", "devices": ["cuda:0"]}, "on_lost_worker: go_on is not built for GPUs yet"),
        ({"on_lost_worker": "stay"}, "on_lost_worker: must be 'go_on' or 'restart', got 'stay'"),
        ({"name": "a/b"}, "name: must be one folder's name of at most 200 letters"),
        ({"name": ".."}, "name: must be one folder's name of at most 200 letters"),
        ({"name": ""}, "name: must be one folder's name of at most 200 letters"),
        ({"name": "x" * 201}, "name: must be one folder's name of at most 200 letters"),
        ({"model": 5}, "model: must be a target, like {target: 'jobs.digits:Net', args: {}}, got 5"),
        ({"optimizer": "Adam"}, "optimizer: must be 'module:attribute', like 'torch.optim:Adam', got 'Adam'"),
        (
            {"precision": "bfloat16"},
            "precision: must be 'fp32', 'bf16' or 'fp16', got 'bfloat16'; did you mean 'bf16'?",
        ),
        ({"eval": 3}, "eval: must be null or a mapping, like {dataset: 'jobs.digits:Digits'}, got 3"),
        ({"model": "jobs.tutorial"}, "model: must be 'module:attribute', like 'jobs.digits:Net', got 'jobs.tut"),
        ({"model": {"targt": "a:b"}}, "model.targt: is no key of a job; did you mean model.target?"),
        ({"loader": {"proceses": 2}}, "loader.proceses: is no key of a job; did you mean loader.processes?"),
        ({"loader": {"pin_memory": "x"}}, "loader.pin_memory: must be 'auto', true or false, got 'x'"),
        ({"gpus_per_worker": "many"}, "gpus_per_worker: must be 'auto' or a number from 0 up, got 'many'"),
        ({"task": "trian"}, "task: must be 'predict', 'evaluate' or 'train', got 'trian'"),
        ({"seed": -1}, "seed: must be greater than or equal to 0, got -1"),
        ({"storage": None}, "storage: must be a valid string, got None"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as caught:
        make(**keys)
    assert says in str(caught.value)
    assert caught.value.exit_status == 2


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(JobError) as caught:
        Job.make({"batch_size": 0, "seeed": 1}, default_name="job")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "model",
        "dataset",
        "batch_size",
        "seeed",
    ]


def test_a_secret_of_env_is_never_told() -> None:
    with pytest.raises(JobError) as caught:
        make(env={"TOKEN": 1234567})
    assert "env.TOKEN" in str(caught.value)
    assert "1234567" not in str(caught.value)


def test_shards_default_to_the_largest_number_of_workers() -> None:
    assert make(workers=3).num_shards == 3
    assert make(workers={"min": 1, "max": 8}).num_shards == 8
    assert make(workers=0).num_shards == 1
    assert make(workers=2, shards=8).num_shards == 8


def test_the_fingerprint_tells_jobs_apart_by_what_can_change_the_result() -> None:
    job = make(workers=2, shards=8)
    alike = make(workers=3, shards=8, loader={"processes": 4}, name="other", storage="elsewhere", env={"A": "b"})
    assert job.fingerprint() == alike.fingerprint()
    spread = make(workers=2, shards=8, devices=["cpu", "cpu"], device_map="auto", timeouts={"step": 1, "capacity": 1})
    assert job.fingerprint() == spread.fingerprint()
    assert job.fingerprint() == make(workers=2, shards=8, outputs={"file_bytes": 1000}).fingerprint()
    for then in ("go_on", "restart"):
        assert job.fingerprint() == make(workers=2, shards=8, on_lost_worker=then).fingerprint()
    changes: list[dict[str, Any]] = [{"seed": 1}, {"batch_size": 31}, {"shards": 4}, {"order": "shuffled"}]
    assert len({make(**{"workers": 2, "shards": 8, **change}).fingerprint() for change in changes}) == len(changes)
    assert all(
        make(**{"workers": 2, "shards": 8, **changed}).fingerprint() != job.fingerprint() for changed in changes
    )


def test_a_name_that_is_null_is_none() -> None:
    assert make(name=None).run_name == "job"
    assert job_from(None, {**GOOD, "name": None}).run_name.startswith("run-20")


def test_a_job_from_python_takes_objects() -> None:
    data = [1, 2, 3]
    job = Job.make({"model": len, "dataset": data, "batch_size": 2}, "x")
    assert job.dataset is data
    assert job.describe()["model"] == {"target": "builtins:len", "args": {}}
    assert job.describe()["dataset"] == "<builtins:list>"


def test_secrets_are_not_shown() -> None:
    job = Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1, "env": {"TOKEN": "hush"}}, "job")
    assert "hush" not in f"{job!r} {job}"


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "/abs", ".hidden", "-flag", "", "a\nb"])
def test_a_name_cannot_leave_the_storage(name: str) -> None:
    with pytest.raises(JobError, match="name"):
        Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 1, "name": name}, "job")


TRAIN = {"task": "train", "loss": "a:l", "optimizer": "a:o", "eval": {"dataset": "a:e"}}


@pytest.mark.parametrize("name", ["step", "rows", "gradient_norm", "epoch_loss", "eval_loss", "eval_right"])
def test_a_metric_that_has_the_name_of_a_column_is_refused(name: str) -> None:
    with pytest.raises(JobError, match=rf"metrics\.{name}: .*learning_rate, gradient_norm, rows, rows_per_second"):
        make(**TRAIN, metrics={name: "a:m"})
    assert make(**{**TRAIN, "task": "evaluate"}, metrics={name: "a:m"}).metrics


@pytest.mark.parametrize("name", ["/iou", "val/", "val//iou", "../iou", "val/../iou", "val iou", "loss", "val/-x"])
def test_a_metric_has_a_name_or_several_joined_by_slashes(name: str) -> None:
    with pytest.raises(JobError, match=r"must be a name of letters, .* joined by '/', like val/iou; and other than"):
        make(**TRAIN, metrics={name: "a:m"})
    assert make(**TRAIN, metrics={"val/iou": "a:m", "a/b-1/c.d": "a:m"}).eval_names[1:] == (
        "eval_val/iou",
        "eval_a/b-1/c.d",
    )


def test_the_names_that_are_refused_are_the_historys() -> None:
    assert set(history_schema(["loss"], ["epoch_loss"]).names) == set(COLUMNS)


def test_a_watched_metric_is_measured_or_an_element_of_one() -> None:
    metrics = {"recall": "a:m"}
    for name in ("eval_loss", "eval_recall", "eval_recall_0", "eval_recall_x_y"):
        job = make(**TRAIN, metrics=metrics, checkpoint={"best": name}, scheduler={"target": "a:s", "metric": name})
        assert set(job.watched.values()) == {name}
    for name in ("eval_f1", "recall_0", "eval_loss_0", "loss"):
        with pytest.raises(JobError, match=r"checkpoint\.best\.metric: must be one that eval measures \(eval_loss"):
            make(**TRAIN, metrics=metrics, checkpoint={"best": name})


@pytest.mark.parametrize("given", [{"task": "predict"}, 5, ["job.yaml"]])
def test_what_is_no_job_is_told(given: Any) -> None:
    with pytest.raises(JobError, match=rf"got an? {type(given).__name__}; the keys of a job are keywords"):
        job_from(given, {})


@pytest.mark.parametrize(
    ("keys", "reads"),
    [
        ({}, ""),
        ({"task": "evaluate", "loss": "torch.nn:CrossEntropyLoss"}, ""),
        ({"task": "train", "loop": "tests.support.loops:plain"}, "loop"),
        ({"task": "predict", "loop": "tests.support.loops:plain"}, ""),
        ({"strategy": "fsdp"}, "strategy: fsdp"),
    ],
)
def test_survivors_go_on_from_memory_if_it_holds_the_state(keys: dict[str, Any], reads: str) -> None:
    assert make(**keys).why_reads == reads
