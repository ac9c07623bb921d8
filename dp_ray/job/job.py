"""The job: its keys (`JobKeys`), what must hold among them, and what follows from them. Begin at `Job`."""

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import ValidationError, model_validator

from dp_ray.errors import JobError
from dp_ray.job.errors import explain
from dp_ray.job.keys import (
    FORMS,
    Form,
    JobKeys,
    NamedEval,
    Scheduler,
    ShuffleBlocks,
    Target,
    describe_target,
    is_over_batch,
    measured_by,
    named_evals,
)
from dp_ray.plan.costs import profiled_of
from dp_ray.plan.history import COLUMNS, is_of_further, is_taken
from dp_ray.text import counted, hide, hide_in

LONGEST_NAME = 200  # of a run: systems of files have 255, and other files have the run's name and more
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")
METRIC = re.compile(rf"{NAME.pattern}(/{NAME.pattern})*")
# What does in a loop of the user's what these keys do.
IN_A_LOOP = {
    "loss": "give the function to step.backward(loss, of)",
    "step": "give the function to step.backward(loss, of)",
    "optimizer": "make it in the loop: update = run.optimizer(...)",
    "scheduler": "give it to run.optimizer(optimizer, scheduler)",
    "grad_clip": "clip in the update: update.step(clip=...)",
}
# What a training measures without an evaluation: the epoch's mean loss.
_OF_EPOCHS = {"scheduler.metric": ("loss",), "early_stopping.metric": ("loss", "epoch_loss")}


def _of_epochs(key: str) -> tuple[str, ...]:
    """Return what the key of a metric may name without an evaluation, in an optimizer's own scheduler too."""
    return _OF_EPOCHS.get(re.sub(r"^optimizer\.\d+\.", "", key), ())


class MeasuringKeys(JobKeys):
    """The keys of a job, with what follows from its metrics and its evaluations."""

    @property
    def evaluations(self) -> tuple[NamedEval, ...]:
        """The evaluations of a training: one without a name, or several with names."""
        return named_evals(self.eval)

    def metrics_of(self, evaluation: NamedEval) -> dict[str, Any]:
        """Return the metrics that an evaluation measures, by name."""
        wanted = evaluation.keys.metrics
        return {name: metric for name, metric in self.metrics.items() if wanted is None or name in wanted}

    @property
    def eval_names(self) -> tuple[str, ...]:
        """What a training's evaluations measure, like `eval_loss`, or `eval_test_loss` of the one named test."""
        has_loss = self.loss is not None or self.step is not None
        return tuple(
            f"{evaluation.prefix}{name}"
            for evaluation in self.evaluations
            for name in [*(["loss"] if has_loss else []), *self.metrics_of(evaluation)]
        )

    @property
    def takes_batches(self) -> bool:
        """Whether a function of the user's gets a shard's batch as it is, in any form."""
        return self.step is not None or (self.loop is not None and self.task == "train")

    @property
    def loss_over_batch(self) -> bool:
        """Whether the loss sees the outputs of the whole batch at once."""
        return is_over_batch(self.loss)

    @property
    def loss_of_shards(self) -> bool:
        """Whether each shard has a loss of its own."""
        return (self.loss is not None or self.step is not None) and not self.loss_over_batch

    @property
    def loss_is_sum(self) -> bool:
        """Whether the loss of a batch is the sum over its rows: by the key, or by an object of torch's."""
        return any(getattr(each, "reduction", "mean") == "sum" for each in (self.loss, self.step))

    @property
    def optimizers(self) -> tuple[tuple[str, Any], ...]:
        """The optimizers, each with its dotted key; a single one, which may be None, is `optimizer` itself."""
        if not isinstance(self.optimizer, tuple):
            return (("optimizer", self.optimizer),)
        return tuple((f"optimizer.{number}", each) for number, each in enumerate(self.optimizer))

    @property
    def schedulers(self) -> tuple[tuple[str, Any], ...]:
        """The scheduler of each optimizer, None if it has none, with its dotted key: its own, or the job's."""
        own = [(f"{key}.scheduler", getattr(each, "scheduler", None)) for key, each in self.optimizers]
        has_own = any(scheduler is not None for _, scheduler in own)
        return tuple(own) if has_own else (("scheduler", self.scheduler),) * len(own)

    @property
    def watched(self) -> dict[str, str]:
        """The metrics of evaluations by which a training decides, by the keys that name them."""
        best, stopping = self.checkpoint.best, self.early_stopping
        named = {
            "checkpoint.best.metric": best and best.metric,
            **{f"{key}.metric": getattr(scheduler, "metric", None) for key, scheduler in self.schedulers},
            "early_stopping.metric": stopping and stopping.metric,
        }
        is_train = self.task == "train"
        return {key: name for key, name in named.items() if is_train and name and name not in _of_epochs(key)}

    def owners(self, name: str) -> list[str]:
        """Return the metrics of which `name` may be an element: `eval_recall_0` of recall, if that gives a vector."""
        by = measured_by(self.evaluations, name)
        if by is None:
            return []
        return [metric for metric in self.metrics_of(by) if name.startswith(f"{by.prefix}{metric}_")]

    def _of_metrics(self) -> Iterator[str]:
        """Yield metrics whose name is taken, and names of metrics that nothing measures."""
        for name in self.metrics:
            if not METRIC.fullmatch(name) or name == "loss":
                letters = "letters, digits, '.', '_' and '-', or several joined by '/', like val/iou"
                yield f"metrics.{name}: must be a name of {letters}; and other than 'loss'"
            elif self.task == "train" and (is_taken(name) or (len(self.optimizers) > 1 and is_of_further(name))):
                yield f"metrics.{name}: is a column of the history, like {', '.join(COLUMNS)} and eval_...; rename it"
        for evaluation in self.evaluations:
            if lacking := [name for name in evaluation.keys.metrics or () if name not in self.metrics]:
                there = ", ".join(self.metrics) or "none"
                yield f"{evaluation.key}.metrics: must be names of the job's metrics ({there}), got {lacking[0]!r}"
        yield from self._of_eval_names()
        measured = ", ".join(self.eval_names) or "nothing: there is no eval"
        for key, name in self.watched.items():
            if name not in self.eval_names and not self.owners(name):
                others = "".join(f"{other} or " for other in _of_epochs(key)[-1:])
                yield f"{key}: must be {others}one that eval measures ({measured}), got {name!r}"

    def _of_eval_names(self) -> Iterator[str]:
        """Yield evaluations by whose names a column would not tell which of them measured it, or no task can go."""
        evaluations = self.evaluations
        for evaluation, other in itertools.permutations(evaluations, 2):
            rest = other.name.removeprefix(f"{evaluation.name}_")
            for name in ("loss", "rows", *self.metrics) if rest != other.name else ():
                if f"{name}_".startswith(f"{rest}_") or f"{rest}_".startswith(f"{name}_"):
                    column, mine, theirs = f"{evaluation.prefix}{name}", evaluation.name, other.name
                    yield f"eval: a column like {column} may be of {mine!r} or of {theirs!r}; rename one of them"
        if self.task != "evaluate":
            return
        has = ", ".join(evaluation.name for evaluation in evaluations if evaluation.name)
        if has and self.evaluation is None:
            yield f"evaluation: is missing; task evaluate runs one of those that eval names: {has}"
        elif self.evaluation is not None and self._evaluated is None:
            yield f"evaluation: must be one that eval names ({has or 'none'}), got {self.evaluation!r}"

    @property
    def _evaluated(self) -> NamedEval | None:
        """The evaluation that task evaluate runs; None if it runs over the job's own dataset."""
        named = {evaluation.name: evaluation for evaluation in self.evaluations}
        return named.get(self.evaluation or "") if self.task == "evaluate" else None


class Job(MeasuringKeys):
    """One job: a model over a dataset, in global batches of `batch_size` rows that are cut into `shards` shards.

    A target is `module:attribute` with args or, from Python, a class, a function, a partial or an object. The args
    may also stand in a key of their own: `model_args`, `dataset_args` and so on. Keys of other tasks are ignored.
    `Job.make` raises JobError, which names each wrong key, what it got and what it may be.

    >>> import dp_ray
    >>> job = dp_ray.Job.make({"model": "torch.nn:Identity", "dataset": "mine:Rows", "batch_size": 32}, "job")
    >>> job.task, job.workers, job.seed
    ('predict', 1, 0)
    """

    TARGETED: ClassVar = ("model", "dataset", "collate", "loss", "step", "loop", "optimizer", "scheduler")

    # A job that differs in these keys only resumes the same run.
    CANNOT_CHANGE_THE_RESULT: ClassVar[frozenset[str]] = frozenset(
        (
            *("name", "workers", "gpus_per_worker", "cpus_per_worker", "resources_per_worker", "accelerator_type"),
            *("placement", "devices", "input_device", "device_map", "loader", "checkpoint", "retries"),
            "on_lost_worker",
            *("timeouts", "trackers", "storage", "env", "outputs.file_bytes", "profile", "flops", "strategy", "fsdp"),
            *("activation_checkpointing", "stop_on_nan", "hooks", "bucket_cap_mb", "audit"),
            "evaluation",  # whose dataset and metrics stand in the job that runs
        )
    )

    # A training that differs in one of these only is the same one, for longer or shorter.
    LENGTHS: ClassVar = ("epochs", "max_steps", "early_stopping")

    @property
    def why_trains(self) -> str:
        """The key by which a job that says no task is a training; "" if it says one, or has no such key."""
        trains = (key for key in ("optimizer", "loop") if getattr(self, key) is not None)
        return "" if "task" in self.model_fields_set else next(trains, "")

    @model_validator(mode="after")
    def _fits_together(self) -> "Job":
        if self.why_trains:
            self.__dict__["task"] = "train"  # and yet no key that was given
        if self.name is not None and not NAME.fullmatch(self.name):
            raise ValueError(
                f"name: must be one folder's name of at most {LONGEST_NAME} letters, digits, '.', '_' and '-', got "
                f"{self.name!r}"
            )
        if self.max_workers > self.num_shards:
            raise ValueError(
                f"workers: {self.max_workers} workers cannot share {self.num_shards} shards; "
                f"set shards to at least {self.max_workers}, or workers to at most {self.num_shards}"
            )
        problems = itertools.chain(
            *(self._of_loop(), self._of_data(), self._of_devices(), self._of_training(), self._of_sharding()),
            *(self._of_metrics(), self._of_profile(), self._of_audit()),
        )
        problem = next(problems, None)  # the first alone: the others may follow from it
        if problem is not None:
            asked = f"; task is left out, and is train because of {self.why_trains}" if self.why_trains else ""
            raise ValueError(problem + asked)
        return self

    def _of_loop(self) -> Iterator[str]:
        """Yield keys that a loop of the user's takes the place of, or cannot have."""
        if self.loop is None or self.task != "train":
            return
        for key, instead in IN_A_LOOP.items():
            if getattr(self, key) is not None:
                yield f"{key}: is not used, because loop trains in its own way; leave {key} out, and {instead}"
        cannot = {
            "strategy": self.is_sharded and "fsdp",
            "precision": self.precision == "fp16" and "fp16",
            "compile": self.compile and "true",
            "sync_batchnorm": self.sync_batchnorm and "true",
            "shards": self.finds_shards and "auto",
        }
        for key, value in cannot.items():
            if value:
                yield f"{key}: {value} is not possible with loop yet; leave {key} out"

    def _of_data(self) -> Iterator[str]:
        """Yield keys that the task needs and the job lacks, and keys of items and of bad samples in contradiction."""
        declares = self.task == "train" and self.loop is None
        if declares and self.optimizer is None:
            yield "optimizer: is missing; task train needs one, like {target: 'torch.optim:AdamW', args: {lr: 0.001}}"
        if declares and self.loss is None and self.step is None:
            yield "loss: is missing; task train needs a loss, like 'torch.nn:CrossEntropyLoss', or a step"
        if self.task == "evaluate" and self.loss is None and self.step is None and not self.metrics:
            yield "loss: is missing; task evaluate needs a loss, metrics or a step"
        by_keys = isinstance(self.inputs, list)
        if self.target is not None and not by_keys:
            yield f"target: needs inputs to be a list of keys, like [image]; got inputs: {self.inputs}"
        if by_keys and self.target is None and self.task != "predict" and not self.takes_batches:
            yield f"target: is missing; task {self.task} with inputs: {self.inputs} needs the key of its target"
        if self.sync_batchnorm and self.may_lose_rows:
            key = "skip" if self.skipped else "on_error"
            yield f"{key}: sync_batchnorm would wait for a shard without samples; leave one of them out"
        if self.on_error is not None and "rows" in self.metrics and self.eval is not None:
            yield "metrics.rows: with on_error, eval_rows counts the samples of an evaluation; rename the metric"

    @property
    def why_reads(self) -> str:
        """The key with which survivors of a lost worker hold no model, but read the newest checkpoint; "" without.

        Of a sharded model each has a part alone. The body of a loop may have changed anything before its step's sums
        are lost, and nobody sees what.
        """
        keys = {"strategy: fsdp": self.is_sharded, "loop": self.task == "train" and self.loop is not None}
        return next((key for key, is_set in keys.items() if is_set), "")

    def why_restarts(self, gpus_per_worker: float) -> str:
        """Say why all workers restart where one is lost, of workers of so many GPUs each; "" if the others go on."""
        reasons = {
            "on_lost_worker: restart": self.on_lost_worker == "restart",
            "one worker": self.max_workers < 2,
            "shards: auto": self.finds_shards,
            "GPUs": self.takes_gpus(gpus_per_worker),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _of_devices(self) -> Iterator[str]:
        """Yield keys of devices that contradict each other."""
        if self.on_lost_worker == "go_on" and self.asks_for_gpus:
            yield "on_lost_worker: go_on is not built for GPUs yet; take restart, which is the default there"
        gpus = self.gpus_per_worker
        if gpus != "auto" and gpus > 1 and gpus != int(gpus):
            yield f"gpus_per_worker: must be 'auto', at most 1, or a whole number, got {gpus:g}"
        if gpus != "auto" and gpus > 1 and self.devices is not None and len(self.devices) != gpus:
            yield f"devices: {len(self.devices)} are named, and gpus_per_worker is {gpus:g}; leave one of them out"
        if gpus != "auto" and self.own_gpus > math.ceil(gpus):
            yield (
                f"devices: {', '.join(self.devices or ())} are of each worker's own GPUs, {self.own_gpus} each, and "
                f"gpus_per_worker is {gpus:g}; leave one of them out"
            )
        if self.device_map is not None and self.num_devices == 1:
            yield "device_map: a worker has one device; set gpus_per_worker to 2 or more, or devices: [cpu, cpu]"

    def _of_training(self) -> Iterator[str]:
        """Yield keys of the model, the loss and the step that contradict each other."""
        if self.sync_batchnorm and self.num_shards > max(1, self.min_workers):
            yield (
                f"sync_batchnorm: needs a worker for each shard, since a worker runs its shards one after another; "
                f"got {self.num_shards} shards on {self.min_workers} workers"
            )
        if self.sync_batchnorm and self.finds_shards:
            yield "sync_batchnorm: needs a worker for each shard, and shards: auto may find more; set shards"
        if self.sync_batchnorm and self.bitwise:
            yield "sync_batchnorm: its sums depend on the workers, so it cannot be bitwise"
        for key in ("compile", "sync_batchnorm"):
            if getattr(self, key) and self.activation_checkpointing is not False:
                yield f"activation_checkpointing: is not possible with {key}; leave one of them out"
        yield from self._of_optimizers()
        if self.step is not None and self.loss is not None and not self.loss_over_batch:
            yield (
                "loss: is not used, because step computes the loss; leave loss or step out, or let the loss see the "
                "whole batch (over: batch) and step return {'outputs': ..., 'target': ...}"
            )
        if self.loss_over_batch and self.loss_is_sum:
            yield "step.reduction: is of a step that returns the loss, and here the loss sees the batch; leave it out"
        stopping = self.early_stopping if self.task == "train" else None
        if stopping is not None and stopping.patience is None and stopping.below is None:
            yield "early_stopping.patience: is missing; give patience, or below, or both"
        if stopping is not None and stopping.every is not None and stopping.metric != "loss":
            yield (
                f"early_stopping.every: step is for metric: loss, got metric: {stopping.metric}; leave every out, or "
                "set eval.every_steps"
            )
        if stopping is not None and stopping.below is not None and stopping.mode == "max":
            yield "early_stopping.below: is not for mode: max, where larger is better; leave one of them out"

    def _of_optimizers(self) -> Iterator[str]:
        """Yield what is wrong with a list of optimizers, and with schedulers."""
        several = self.optimizers if isinstance(self.optimizer, tuple) else ()
        for key, each in several:
            if not isinstance(each, Target):
                yield (
                    f"{key}: must be a target, or a class or function of its parameters, like "
                    f"functools.partial(torch.optim.AdamW, lr=0.001); got a {type(each).__qualname__}"
                )
            elif getattr(each, "match", None) is None and each is not several[-1][1]:
                yield f"{key}.match: is missing, so no parameter is left to those that follow; only the last has none"
        for key, scheduler in self.schedulers:
            if self.scheduler is not None and scheduler is not None and key != "scheduler":
                yield f"scheduler: {key} is set too; set one for all optimizers, or leave it out"
            if isinstance(scheduler, Scheduler) and scheduler.label == Scheduler.PLATEAU and scheduler.per != "epoch":
                yield f"{key}.per: a ReduceLROnPlateau watches a metric of each epoch; set per: epoch"

    def _of_sharding(self) -> Iterator[str]:
        """Yield keys that `strategy: fsdp` contradicts."""
        if not self.is_sharded:
            return
        if self.num_devices > 1:
            yield f"strategy: fsdp shards over the workers, each with one device; got {self.num_devices} devices each"
        if self.task == "predict" and self.on_error is not None:
            yield "on_error: task predict with strategy: fsdp sets no samples aside; leave one of them out"
        if self.bitwise and self.precision == "fp16":
            yield "precision: fp16 cannot be bitwise with strategy: fsdp; take bf16, or leave bitwise out"
        if self.bitwise and self.fsdp.offload:
            yield "fsdp.offload: cannot be bitwise: a host's update rounds otherwise than a GPU's; leave one out"
        if self.bitwise and self.compile:
            yield (
                "compile: cannot be bitwise with strategy: fsdp, since one worker alone compiles the model as a "
                "whole; leave one of them out"
            )
        if self.sync_batchnorm:
            yield "sync_batchnorm: is not possible with strategy: fsdp; leave one of them out"

    def _of_audit(self) -> Iterator[str]:
        """Yield what an audit needs, and what is not audited yet."""
        if self.audit is None or self.task != "train":
            return
        if not self.bitwise:
            yield "audit: needs bitwise: true, so that workers have the same bits to compare"
        cannot = {
            "strategy: fsdp": self.is_sharded,
            "loop": self.loop is not None,
            "compile": self.compile,
            "on_error": self.on_error is not None,
            "skip": self.skip is not None,
            "loss.over: batch": self.loss_over_batch,
            "several devices a worker": self.num_devices > 1,
        }
        for key, is_set in cannot.items():
            if is_set:
                yield f"audit: is not possible with {key} yet; leave one of them out"

    @property
    def is_sharded(self) -> bool:
        """Whether each worker holds only a part of each parameter."""
        return self.strategy == "fsdp"

    def _of_profile(self) -> Iterator[str]:
        """Yield what is wrong with `profile`."""
        if self.profile is None:
            return
        try:
            wanted = profiled_of(self.profile)
        except ValueError as error:
            yield f"profile: {error}"
            return
        if wanted.rank is None and self.task != "train":
            yield f"profile: only the workers of a training know which is slowest; name a rank, got {self.profile!r}"
        elif (wanted.rank or 0) >= max(1, self.max_workers):
            has = f"the job has {counted(max(1, self.max_workers), 'worker')}, ranks from 0"
            yield f"profile: {has}; got {self.profile!r}"

    @property
    def gives_first(self) -> bool:
        """Whether items must be pairs (inputs, target): the model gets the first."""
        if isinstance(self.inputs, list):
            return self.target is not None and self.task != "predict"
        return self.inputs == "first" or (self.inputs == "auto" and self.task != "predict")

    @property
    def is_shuffled(self) -> bool:
        """Whether the samples are taken in a random order: `shuffle` says so in a training, else `order`."""
        return self.shuffle is not False if self.task == "train" else self.order == "shuffled"

    @property
    def block_shuffle(self) -> ShuffleBlocks | None:
        """How a training shuffles by blocks; None if it does not."""
        return self.shuffle if self.task == "train" and isinstance(self.shuffle, ShuffleBlocks) else None

    @property
    def dataset_key(self) -> str:
        """The key that holds the task's own dataset."""
        return "dataset" if self._evaluated is None else self._evaluated.dataset_key

    def for_task(self) -> "Job":
        """Return the job over the dataset of its task: evaluate uses that of `eval` if there is one."""
        return self if self._evaluated is None else self.over_eval(self._evaluated)

    def over_eval(self, evaluation: NamedEval) -> "Job":
        """Return the job over all samples of an evaluation's dataset, in their order, in batches of its size."""
        keys, metrics = evaluation.keys, self.metrics_of(evaluation)
        size = keys.batch_size or self.batch_size
        changed = {"dataset": keys.dataset, "batch_size": size, "shuffle": False, "drop_last": False}
        changed |= {"order": "dataset", "skip": None, "loop": None, "metrics": metrics}
        return self.model_copy(update=changed)

    @property
    def num_shards(self) -> int:
        """Shards of each global batch: `shards`, or else the largest number of workers, where auto begins."""
        return self.shards if isinstance(self.shards, int) else max(1, self.max_workers)

    @property
    def finds_shards(self) -> bool:
        """Whether the number of shards is still to be found, by `shards: auto`."""
        return self.shards == "auto"

    @property
    def run_name(self) -> str:
        """Name of the run's directory in `storage`."""
        assert self.name is not None, "Job.make names every job"
        return self.name

    @property
    def targets(self) -> dict[str, Any]:
        """All targets and objects, by their dotted keys; None where a key is not set."""
        targets = {key: getattr(self, key) for key in self.TARGETED if key not in ("optimizer", "scheduler")}
        targets |= {**dict(self.optimizers), **dict(self.schedulers)}
        targets.update({f"metrics.{name}": metric for name, metric in self.metrics.items()})
        targets["outputs.after"] = self.outputs.after
        targets.update({f"hooks.{name}": target for name, target in self.hooks.given.items()})
        return {**targets, **{each.dataset_key: each.keys.dataset for each in self.evaluations}}

    @property
    def dataset_keys(self) -> tuple[str, ...]:
        """The keys that hold datasets."""
        return ("dataset", *(evaluation.dataset_key for evaluation in self.evaluations))

    @property
    def is_all_targets(self) -> bool:
        """Whether all targets are names with args that a file can tell, so that the keys alone identify the job."""
        return not self.untold

    @property
    def untold(self) -> list[str]:
        """The keys that hold Python objects of which a file cannot tell whether they are the same."""
        paths: list[str] = []
        for key, target in self.targets.items():
            if target is None or key.startswith("hooks."):
                continue
            if isinstance(target, Target) and target.is_told:
                paths += [f"{key}.{path}" for path in target.untold]
            else:
                paths.append(key)
        return paths

    @classmethod
    def make(cls, values: Mapping[str, Any], default_name: str) -> "Job":
        """Return the job with these keys and values. Raises JobError, which lists every wrong key."""
        named = {**values, "name": default_name if values.get("name") is None else values["name"]}
        for key in cls.TARGETED:
            if (args := named.pop(f"{key}_args", None)) is not None:
                target = named.get(key)
                if key == "optimizer" and isinstance(target, list | tuple):
                    raise JobError("optimizer_args: optimizer is a list; give each of its entries args of its own")
                if isinstance(target, Target):
                    target = dict(target)
                others = target if isinstance(target, Mapping) else {"target": target}
                named[key] = {**others, "args": args}
        try:
            return cls.model_validate(named)
        except ValidationError as error:
            raise JobError("\n".join(explain(error, named.get("workers")))) from None

    def describe(self, form: Form = "now") -> dict[str, Any]:
        """Return the job as plain JSON values, without secrets, as this version or 0.2 does.

        An object from Python that no import finds is shown as its type.
        """
        described = functools.partial(describe_target, form=form)
        values = self.model_dump(exclude={*self.TARGETED, "metrics", "eval", "outputs", "hooks"})
        values["hooks"] = {name: described(target) for name, target in self.hooks}
        if self.early_stopping is not None:  # 0.2 did not know some of its keys
            values["early_stopping"] = self.early_stopping.model_dump(exclude_none=True)
        evals = {name: keys.model_dump(exclude={"dataset"}) for name, keys in self.evaluations}
        for name, keys in self.evaluations:
            evals[name]["dataset"] = described(keys.dataset)
            if keys.metrics is None:  # version 0.2 did not know them
                del evals[name]["metrics"]
        values["eval"] = evals.get("", evals) or None
        values["outputs"] = {**self.outputs.model_dump(exclude={"after"}), "after": described(self.outputs.after)}
        values |= {key: described(getattr(self, key)) for key in self.TARGETED}
        if isinstance(self.optimizer, tuple):
            values["optimizer"] = list(map(described, self.optimizer))
        if self.metrics:
            values["metrics"] = {name: described(metric) for name, metric in self.metrics.items()}
        hidden: dict[str, Any] = hide_in({**values, "shards": "auto" if self.finds_shards else self.num_shards})
        return hidden

    def __repr__(self) -> str:
        return hide(super().__repr__())

    def __str__(self) -> str:
        return hide(super().__str__())

    def fingerprint(self, form: Form = "now", with_lengths: bool = False, call: str | None = None) -> str:
        """Return a hash of every key that can change a step's result, as this version or 0.2 makes it.

        `call` stands in the place of the job's own.
        """
        left_out = () if with_lengths else self.LENGTHS
        kept = {key: value for key, value in that_count(self.describe(form)).items() if key not in left_out}
        kept["call"] = call or self.call
        kept["inputs"] = "first" if self.gives_first else self.inputs
        kept["shuffle"] = self.is_shuffled if self.block_shuffle is None else self.block_shuffle.model_dump()
        kept["skip"] = self.skipped or None
        del kept["order"]  # which is_shuffled tells
        kept = {key: value for key, value in kept.items() if (key, value) not in AS_BEFORE}
        del kept["on_error"]  # a run may be resumed with another limit, or with the first one
        if self.on_error is not None and self.on_error.finite:
            kept["finite"] = True
        if self.is_sharded and self.fsdp.mixed_precision is not None:
            kept["mixed_precision"] = self.fsdp.mixed_precision.model_dump()
        try:
            return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
        except (TypeError, ValueError, RecursionError) as error:
            raise JobError(f"args: must be plain YAML values with keys of one kind: {error}") from None

    def has_fingerprint(self, fingerprint: str | None, with_lengths: bool = False) -> bool:
        """Return whether a run or checkpoint with this fingerprint is of this job.

        Version 0.2 hashed the types of all Python objects, and had `call: one`, for which a collate does now.
        """
        ways = itertools.product(FORMS, (self.call, "one"))
        return any(fingerprint == self.fingerprint(form, with_lengths, call) for form, call in ways)


def that_count(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a described job that can change its result; `outputs` without what is not set.

    Version 0.2 had one more: a job of this version is its job with `scatter: samples`.
    """
    inner, left_out = job.get("outputs") or {}, Job.CANNOT_CHANGE_THE_RESULT
    counting = {key: value for key, value in job.items() if key not in left_out}
    outputs = {key: value for key, value in inner.items() if value not in (None, False)}
    outputs = {key: value for key, value in outputs.items() if f"outputs.{key}" not in left_out}
    return {"scatter": "samples", **counting, "outputs": outputs if job.get("task") == "predict" else {}}


# Keys that version 0.2 did not have, or did not hash where they had these values; its runs have these.
AS_BEFORE: tuple[tuple[str, Any], ...] = (
    *(("target", None), ("skip", None), ("outputs", {}), ("loop", None)),
    *(("early_stopping", None), ("ema", None), ("strict", True), ("pack", None)),
)
