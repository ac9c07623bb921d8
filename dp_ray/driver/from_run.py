"""Build a job from an earlier run: evaluate a training, predict with it, or retry a prediction's bad samples.

An evaluation or prediction gets a run directory beside the training's. A retry runs in the prediction's own: the
shards run again in which samples were set aside, and what succeeds takes its place in the order.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from dp_ray.errors import JobError
from dp_ray.job.args import object_in
from dp_ray.job.files import dotted, job_of
from dp_ray.job.job import Job
from dp_ray.job.keys import named_evals
from dp_ray.outputs.reopen import reopen
from dp_ray.plan.split import Split
from dp_ray.rundir.content import check_fetched
from dp_ray.rundir.files import BEFORE_RETRY, RUN, RUN_JSON, is_finished, kept_job
from dp_ray.rundir.quarantine import merged_positions
from dp_ray.rundir.start import goes_on
from dp_ray.rundir.weights import BEST, EMA, weights_name
from dp_ray.storage import Storage, located
from dp_ray.tasks.setup import let_files_change
from dp_ray.text import HIDDEN

Weights = Literal["best", "last", "ema"]
# Keys that only a training uses, and keys that the new run sets for itself.
LEFT_OUT = (
    *("optimizer", "scheduler", "checkpoint", "grad_clip", "epochs", "max_steps", "shuffle", "drop_last"),
    *("early_stopping", "ema", "hooks"),
    *("init_from", "strict", "storage", "env", "profile"),
)


class FollowUp(NamedTuple):
    """The job to run, and lines about it for the user."""

    job: Job
    lines: tuple[str, ...]


def follow_up(
    task: Literal["evaluate", "predict"], run_dir: str, weights: Weights | None, overrides: Mapping[str, Any]
) -> FollowUp:
    """Build the job that evaluates the training in `run_dir`, or predicts with it.

    `overrides` are keys of the job; `dataset` replaces eval's dataset too. Raises JobError if `run_dir` holds no
    training, lacks these weights, or if a key that the task needs was a Python object.
    """
    run = located(run_dir)
    kept = kept_job(run, "a training")
    if kept["task"] != "train":
        raise JobError(f"{run} is a run of task {kept['task']}, not of a training")
    check_fetched(run, "weights")
    values = {key: value for key, value in kept.items() if key not in LEFT_OUT}
    if task == "evaluate":
        values.pop("outputs", None)
    if "dataset" in overrides:  # then `eval` is not used, but for its batch size
        single = {evaluation.name: evaluation.keys for evaluation in named_evals(values["eval"])}
        size = single.get("", {}).get("batch_size") or values["batch_size"]
        values |= {"eval": None, "batch_size": size}
    check_no_objects(run, task, values, overrides)
    which = weights or _evaluated(run, kept)
    values |= {"task": task, "storage": run.parent.location, "init_from": _init_from(run, which)}
    default = f"{run.name}-{task}"  # a copy's run.json has the name of the run that was copied
    job = job_of({**values, "name": default}, overrides, default)
    if "name" not in overrides:
        job = job.model_copy(update={"name": _free_name(job, default)})
    return FollowUp(job, tuple(_lines(job, run, which, kept, overrides)))


def check_no_objects(run: Storage, task: str, values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise JobError if a key that the task needs was a Python object or held a secret: run.json keeps neither."""
    check_no_secrets(run, values, overrides)
    needed = {"model": values["model"], "dataset": values["dataset"], "collate": values["collate"]}
    if task == "evaluate":
        inner = {f"metrics.{name}": metric for name, metric in values.get("metrics", {}).items()}
        needed |= {"loss": values["loss"], "step": values["step"], **inner}
    elif (outputs := values.get("outputs")) and "outputs" not in overrides:
        needed["outputs.after"] = outputs.get("after")
    needed |= {evaluation.dataset_key: evaluation.keys["dataset"] for evaluation in named_evals(values["eval"])}
    for key, value in needed.items():
        held = value.get("args") if isinstance(value, Mapping) and f"{key}_args" not in overrides else None
        path = object_in(held, f"{key}.args")
        if path is not None and not any(path == key or path.startswith(f"{key}.") for key in overrides):
            raise JobError(
                f"{run}: {path} was given as a Python object, which no file holds; set it (--set {path}=...), or "
                f"call dp_ray.run(task={task!r}, init_from=..., {key}=...)"
            )
        name = value["target"] if isinstance(value, Mapping) else value
        if isinstance(name, str) and name.startswith("<") and key not in overrides:
            raise JobError(
                f"{run}: {key} was given as a Python object ({name}), which no file holds; name a target "
                f"(--set {key}=module:attribute), or call dp_ray.run(task={task!r}, init_from=..., {key}=...)"
            )


def check_no_secrets(run: Storage, values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise JobError, which names the key, if a value is hidden in run.json that the job needs."""
    for key, value in dotted(values):
        parents = {key.rsplit(".", number)[0] for number in range(key.count(".") + 1)}
        if HIDDEN in str(value) and not parents & overrides.keys():
            raise JobError(
                f"{run}: {key} held a secret, which no file of the run holds ({value!r:.80}); give it again "
                f"(--set {key}=...)"
            )


def _evaluated(run: Storage, kept: Mapping[str, Any]) -> Weights:
    """Return which weights a training has left: the best, else those that it evaluated at its end.

    One that goes on has left only its last checkpoint.
    """
    if goes_on(run):
        return "last"
    if run.exists(BEST):
        return "best"
    return "ema" if (kept.get("ema") or {}).get("evaluate") and run.exists(EMA) else "last"


def _init_from(run: Storage, which: Weights) -> str:
    """Return where these weights of a run are. Raises JobError if the run lacks them, and says how it gets them."""
    if goes_on(run):
        if which != "last":
            file = BEST if which == "best" else EMA
            older = f"its {file} is that of an earlier, shorter training" if run.exists(file) else f"it has no {file}"
            raise JobError(
                f"--weights {which}: {run} is unfinished, and {older}: train to the end; or use --weights last, its "
                "newest checkpoint"
            )
        return run.location
    if which == "best" and not run.exists(BEST):
        raise JobError(
            f"--weights best: {run} holds no {BEST}: set checkpoint.best, and train to the end; or use --weights last"
        )
    if which == "ema" and not run.exists(EMA):
        raise JobError(
            f"--weights ema: {run} holds no {EMA}: set ema, like {{decay: 0.999}}, and train to the end; or use "
            "--weights last"
        )
    name = {"best": BEST, "ema": EMA}.get(which) or weights_name(run)
    return run.child(name).location if name is not None else run.location


def _free_name(job: Job, default: str) -> str:
    """Return the first of NAME, NAME-2, NAME-3 ... that is unused, or that holds this job's unfinished run."""
    base, asked = Storage(job.storage), job.for_task()
    for name in itertools.chain([default], (f"{default}-{number}" for number in itertools.count(2))):
        run = base.child(name)
        if not run.exists(RUN):
            is_free = run.is_empty()
        else:
            is_free = not is_finished(run) and asked.has_fingerprint(RUN_JSON.read(run).get("fingerprint"))
        if is_free:
            return name
    raise AssertionError("the names have no end")


def _lines(job: Job, run: Storage, which: Weights, kept: dict[str, Any], overrides: Mapping[str, Any]) -> list[str]:
    does = "evaluates" if job.task == "evaluate" else "predicts with"
    ran = job.for_task()
    whose = "" if "dataset" in overrides else f"its {ran.dataset_key} "
    lines = [f"{job.run_name}: {does} the {which} weights of {run} on {whose}{ran.dataset.target}"]
    if job.task == "evaluate" and ran.dataset_key != "dataset":
        unused = [key for key in overrides if key.startswith("dataset.")]
        lines += [f"{job.run_name}: {key} is not used: evaluate uses {ran.dataset_key}" for key in unused]
    if lost := [key for key in kept["env"] if f"env.{key}" not in overrides]:
        again = ", ".join(f"--set env.{key}=..." for key in lost)
        lines.append(f"{job.run_name}: its env is not kept: set it again where it is needed ({again})")
    return lines


NOT_A_PREDICTION = {
    "train": "a training reads its bad samples again in each epoch: train longer with more epochs",
    "evaluate": "an evaluation keeps nothing: run it again with --overwrite",
}


def retried(run_dir: str, overrides: Mapping[str, Any]) -> Job:
    """Return the job of a prediction that is to run again where samples were set aside.

    Raises JobError if `run_dir` holds no prediction, if it has set nothing aside, or if its job had Python objects.
    """
    run = located(run_dir)
    kept = kept_job(run, "a prediction")
    if kept["task"] != "predict":
        raise JobError(f"retry: {run} is a run of task {kept['task']}; {NOT_A_PREDICTION[kept['task']]}")
    check_no_objects(run, "predict", {**kept, "eval": None}, {})
    # Where the run is, not where it was: a copy's run.json names the run that was copied.
    values = {**kept, "storage": run.parent.location, "name": run.name, "env": {}}
    job = job_of(values, overrides, run.name)
    if located(job.storage).child(job.run_name).path != run.path:
        raise JobError(f"retry: runs in {run} itself; leave name and storage as they are")
    if is_finished(run) and not merged_positions(run):
        raise JobError(f"{run} has set no sample aside, so there is nothing to retry")
    return job


def reopened(split: Split, run: Storage) -> None:
    """Have the shards of a finished prediction run again in which samples were set aside.

    Of an unfinished run these are still to run. Either way files of its dataset may have been mended.
    """
    if is_finished(run):
        reopen(run, split, merged_positions(run))
    if run.exists(BEFORE_RETRY):
        let_files_change(run, "dataset")
