"""Keys as other libraries name them are answered with the key that does it here."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from dp_ray.errors import JobError
from dp_ray.job.errors import OTHER_NAMES
from dp_ray.job.job import Job
from dp_ray.job.keys import Target

GOOD: dict[str, Any] = {"model": "a:b", "dataset": "a:c", "batch_size": 30}


def told(**keys: Any) -> str:
    with pytest.raises(JobError) as caught:
        Job.make({**GOOD, **keys}, "job")
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("gradient_accumulation_steps", "shards"),
        ("accumulate", "shards"),
        ("accumulate_grad_batches", "shards"),
        ("num_workers", "workers"),
        ("device", "gpus_per_worker"),
        ("accelerator", "gpus_per_worker"),
        ("gpus", "workers"),
        ("nodes", "workers"),
        ("num_nodes", "workers"),
        ("lr", "optimizer.args.lr"),
        ("learning_rate", "optimizer.args.lr"),
        ("weight_decay", "optimizer.args.weight_decay"),
        ("amp", "precision"),
        ("fp16", "precision"),
        ("bf16", "precision"),
        ("mixed_precision", "precision"),
        ("val", "eval.dataset"),
        ("val_dataset", "eval.dataset"),
        ("test", "eval.dataset"),
        ("resume", "init_from"),
        ("resume_from_checkpoint", "init_from"),
        ("num_epochs", "epochs"),
        ("max_epochs", "epochs"),
        ("Max-Epochs", "epochs"),
        ("total_steps", "max_steps"),
        ("gradient_clip_val", "grad_clip"),
        ("criterion", "loss"),
        ("lr_scheduler", "scheduler"),
        ("per_device_train_batch_size", "batch_size"),
        ("output_dir", "storage"),
        ("deterministic", "bitwise"),
        ("terminate_on_nan", "stop_on_nan"),
        ("skip_samples", "skip: samples of the dataset by their indices"),
        ("collate_fn", "collate"),
        ("pin_memory", "loader.pin_memory"),
        ("sampler", "dataset: the job orders its samples by shuffle and seed; to draw some more often"),
        ("datasets", "dataset: a job has one; mix several by weights with dp_ray.data:Mix"),
        ("mixture", "dataset: a job has one; mix several by weights with dp_ray.data:Mix"),
        ("optimizers", "optimizer: one, with optimizer.groups for parts of the model, or a list of several"),
        ("peft_config", "model: a function that builds the model with its adapters, by peft or by hand"),
        ("ignore_mismatched_sizes", "strict: false loads what fits"),
        ("class_weights", "loss.args.weight"),
        ("save_steps", "checkpoint.every_steps"),
    ],
)
def test_a_key_of_elsewhere_is_answered_with_the_key_here(name: str, key: str) -> None:
    assert f"{name}: is no key of a job; here it is {key}" in told(**{name: 1})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"loader": {"num_workers": 2}}, "loader.num_workers: is no key of a job; here it is loader.processes"),
        (
            {"loader": {"prefetch_factor": 2}},
            "loader.prefetch_factor: is no key of a job; here it is loader.prefetch",
        ),
        (
            {"loader": {"sampler": "a:b"}},
            "loader.sampler: is no key of a job; here it is dataset: the job orders its",
        ),
        ({"optimizer": {"g": "a:b", "d": {"target": "a:b"}}}, "optimizer: must be one target, got a dict of g, d"),
        ({"loader": {"shuffle": True}}, "loader.shuffle: is no key of a job; here it is shuffle"),
        (
            {"scatter": "batch"},
            "scatter: is no key of a job; here it is collate: it gets a shard's samples; pad them to",
        ),
        ({"call": "one"}, "call: 'one' is no value of it; here it is collate: one that returns (inputs,) gives"),
        ({"call": "all"}, "call: must be 'auto', 'args' or 'kwargs', got 'all'"),
        (
            {"loader": {"context": "spawn"}},
            "loader.context: is no key of a job; here it is dataset: how loader processes start is its attribute",
        ),
        ({"optimizer": {"target": "a:b", "lr": 1}}, "optimizer.lr: is no key of a job; here it is optimizer.args.lr"),
        ({"model": {"target": "a:b", "width": 1}}, "model.width: is no key of a job; here it is model.args.width"),
        ({"dataset": {"path": "data/a.csv"}}, "dataset.path: is no key of a job; here it is dataset.args.path"),
        ({"dataset": {"path": "s3://b/a.csv"}}, "dataset.path: is no key of a job; here it is dataset.args.path"),
        ({"dataset": {"path": "a:b"}}, "dataset.path: is no key of a job; here it is dataset.target"),
        ({"model": {"_target_": "a:b"}}, "model._target_: is no key of a job; did you mean model.target?"),
        ({"model": {"target": "a:b", "kwargs": {}}}, "model.kwargs: is no key of a job; did you mean model.args?"),
        (
            {"metrics": {"f1": {"target": "a:b", "task": 1}}},
            "metrics.f1.task: is no key of a job; here it is metrics.f1.args.task",
        ),
        (
            {"eval": {"dataset": {"target": "a:b", "split": 1}}},
            "eval.dataset.split: is no key of a job; here it is eval.dataset.args.split",
        ),
        ({"eval": {"data": "a:b"}}, "eval.data: is no key of a job; did you mean eval.dataset?"),
        ({"checkpoint": {"save_top_k": 1}}, "checkpoint.save_top_k: is no key of a job; here it is checkpoint.keep"),
        ({"checkpoint": {"best": {"metric": "a", "monitor": "b"}}}, "here it is checkpoint.best.metric"),
        ({"model": {"target": "a:b", "params": {}}}, "model.params: is no key of a job; here it is model.args"),
        ({"workers": {"min_workers": 1}}, "workers.min_workers: is no key of a job; here it is workers.min"),
        ({"fsdp": {"block": "auto"}}, "fsdp.block: is no key of a job; did you mean fsdp.blocks?"),
        (
            {"fsdp": {"mixed_precision": {"grads": "fp32"}}},
            "fsdp.mixed_precision.grads: is no key of a job; its keys are param, reduce",
        ),
        (
            {"optimizer": {"target": "a:b", "groups": [{"match": "a", "args": {}, "lr": 1}]}},
            "optimizer.groups.0.lr: is no key of a job; here it is optimizer.groups.0.args.lr",
        ),
    ],
)
def test_a_nested_key_of_elsewhere_is_answered_too(keys: dict[str, Any], says: str) -> None:
    assert says in told(**keys)


def owner_of(path: str) -> Any:
    """The field of the job that a dotted key names; raises KeyError where there is none."""
    model: Any = Job
    for part in path.split("."):
        if model is Target or (
            isinstance(model, type) and issubclass(model, Target) and part not in model.model_fields
        ):
            return model
        model = inner(model.model_fields[part].annotation)
    return model


def inner(annotation: Any) -> Any:
    """The model that a field holds, maybe; a target where it holds none."""

    def parts(of: Any) -> Iterator[Any]:
        yield of
        for part in get_args(of):
            yield from parts(part)

    found = parts(annotation)
    return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)), Target)


def test_every_answer_is_a_key_of_a_job_and_no_question_is() -> None:
    for answer in OTHER_NAMES.values():
        owner_of(re.split(r"[ :]", answer)[0])
    assert not OTHER_NAMES.keys() & Job.model_fields.keys()
    in_some_form = ("scheduler.", "optimizer.match", "optimizer.scheduler")  # a key where the value has another form
    for name in (name for name in OTHER_NAMES if "." in name and not name.startswith(in_some_form)):
        with pytest.raises(KeyError):
            owner_of(name)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"gradient_accumulation_steps": 4, "workers": 2}, "shards: 8, 4 for each of 2 workers, which runs them one"),
        ({"accumulate": 4, "workers": {"min": 1, "max": 3}}, "shards: 12, 4 for each of 3 workers"),
        ({"accumulate-grad-batches": 2}, "shards: 2, 2 for one worker"),
        ({"accumulate": 2, "workers": 0}, "shards: 2, 2 for one worker"),
        ({"accumulate": 2, "workers": "many"}, "shards: 2, 2 for one worker"),
        ({"accumulate": "4"}, "shards: a worker runs its shards"),
        ({"accumulate": True}, "shards: a worker runs its shards"),
    ],
)
def test_a_number_of_accumulated_batches_is_answered_with_the_number_of_shards(
    keys: dict[str, Any], says: str
) -> None:
    assert f": is no key of a job; here it is {says}" in told(**keys)


def test_the_shards_of_the_answer_are_a_job() -> None:
    assert Job.make({**GOOD, "workers": 2, "shards": 8}, "job").num_shards == 8
