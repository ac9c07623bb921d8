"""Find out what a job will do, for `dp-ray plan` and for a run alike."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dp_ray.driver.checks import check_targets, lacking_here
from dp_ray.engine.loads.loading import seeded_dataset
from dp_ray.engine.loads.packing import packings
from dp_ray.errors import JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.job.keys import gpu_number
from dp_ray.job.plan import evaluations_in, plan_of
from dp_ray.job.samples import mixture_of, order_of
from dp_ray.monitor.console import Console
from dp_ray.monitor.faults import Fault, faults_for
from dp_ray.monitor.in_process import ONE_AT_A_TIME
from dp_ray.plan.costs import GIB, MemoryPlan, PackedRows, Plan, planned_sources
from dp_ray.rundir.claim import Resume, Wanted, check_claim
from dp_ray.rundir.settled import run_of, settled, taken_over
from dp_ray.rundir.start import trained_classes
from dp_ray.rundir.unfinished import resumption
from dp_ray.system.process import environment
from dp_ray.text import listed


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The settled job of a run, its plan, and the faults to inject.

    From here on there is this one job. It changes twice at most: its workers may `accept` it with objects of their
    own, and `shards: auto` finds its number.
    """

    job: Job
    plan: Plan
    faults: tuple[Fault, ...]
    told: Sequence[str] = ()  # lines on what it takes over, and on its datasets
    classes: Sequence[str] = ()  # by their labels, as far as the dataset tells

    def cut_as(self, job: Job) -> "Prepared":
        """Return the same, with this job's number of shards."""
        plan = dataclasses.replace(plan_of(job, self.plan.rows, self.told), packed=self.plan.packed)
        return dataclasses.replace(self, job=job, plan=plan)


def prepare(job: Job, console: Console, overwrite: bool = False, inject: str = "") -> Prepared:
    """Work out what will run, before anything is started or written; raises an Error if the job cannot run."""
    faults, asked = faults_for(job, inject), job
    job = settled(job, is_new=overwrite)
    building = console.if_slow("building the dataset")
    with ONE_AT_A_TIME, contextlib.redirect_stdout(sys.stderr), environment(job.env), building:
        check_targets(job)  # stdout is kept free of what user code prints
        for error in lacking_here(job):
            raise error
        datasets = _datasets(job)
    told = *taken_over(asked, job), *_remarks(job, datasets)
    plan = dataclasses.replace(plan_of(job, _rows_of(datasets), told), packed=_packed(job, datasets))
    return Prepared(job, plan, faults, told, _classes_of(datasets["dataset"]))


def plan_job(job: Job) -> Plan:
    """Return the plan of a job that is not started: that of its run, with the blocks of a model over several devices.

    It checks what a run checks before it starts. Raises an Error of dp_ray.errors if the job cannot run anywhere. A
    remark says why it cannot run here: what this machine lacks, and what the storage holds.
    """
    job = job.for_task()
    with contextlib.redirect_stdout(sys.stderr), environment(job.env):
        check_targets(job)
        datasets = _datasets(job)
        plan = _plan_to_claim(job, _rows_of(datasets))
        plan = dataclasses.replace(plan, packed=_packed(job, datasets))
        if (mixture := mixture_of(datasets["dataset"])) is not None:
            plan = dataclasses.replace(plan, sources=planned_sources(mixture, plan.split))
        if job.device_map is not None:
            from dp_ray.engine.forward.model import plan_blocks

            plan = dataclasses.replace(plan, blocks=plan_blocks(job))
        lacking = [f"a run would not start: {error}" for error in lacking_here(job)]
        return dataclasses.replace(plan, remarks=(*plan.remarks, *_remarks(job, datasets), *lacking))


def _plan_to_claim(asked: Job, rows: Mapping[str, int]) -> Plan:
    """Return the plan of a job that may resume the run in STORAGE/NAME; a remark says whether it does, or why not."""
    try:
        job, run = settled(asked), run_of(asked)
        plan = plan_of(job, rows, taken_over(asked, job))
        if not isinstance(check_claim(run, Wanted(job, rows, plan.split.total_steps)), Resume):
            return plan
        return dataclasses.replace(plan, remarks=(*plan.remarks, resumption(run, job.task, plan.split)))
    except StorageError as error:
        return plan_of(asked, rows, [f"whether an earlier run would be resumed is not known: {error}"])
    except JobError as error:
        return plan_of(asked, rows, [f"a run would not start: {error}"])


def plan_memory_of(job: Job, gpu_gib: float | None) -> MemoryPlan:
    """Return the memory of the job's workers, whose GPUs have so much; by default, as a GPU of this machine, if any.

    Raises JobError if the model cannot be built without memory.
    """
    if job.loop is not None and job.task == "train":
        raise JobError(
            "--memory: is not possible with loop yet, whose passes the plan does not know; leave --memory out"
        )
    with contextlib.redirect_stdout(sys.stderr), environment(job.env):
        import torch

        from dp_ray.driver.memory import plan_memory

        takes_gpus = job.gpus_per_worker != 0 if job.devices is None else gpu_number(job.devices[0]) is not None
        gpu_bytes = None
        if gpu_gib is not None:
            gpu_bytes = round(gpu_gib * GIB)
        elif takes_gpus and torch.cuda.is_available():
            gpu_bytes = int(torch.cuda.get_device_properties(0).total_memory)
        return plan_memory(job.for_task(), gpu_bytes)


def _datasets(job: Job) -> dict[str, Any]:
    """Return the job's datasets: its task's own as `dataset`, and those of its evaluations.

    Raises JobError if the job shuffles blocks of a dataset, but nothing says what they are.
    """
    runs_over = {"dataset": (job, job.dataset_key)}
    for evaluation in evaluations_in(job):
        runs_over[evaluation.dataset_key] = (job.over_eval(evaluation), evaluation.dataset_key)
    built = {}
    for name, (over, key) in runs_over.items():
        dataset = seeded_dataset(over, key)
        order_of(over, dataset)
        built[name] = dataset
    return built


def _remarks(job: Job, datasets: Mapping[str, Any]) -> list[str]:
    """Return what the datasets, and those within them, tell of how they are read; and whose classes differ.

    The classes of an evaluation are compared with those of the training, which its run keeps.
    """
    lines = [
        line for dataset in datasets.values() for own in _within(dataset) for line in _told(own, "reads_as") or ()
    ]
    classes = {key: _classes_of(dataset) for key, dataset in datasets.items()}
    trained, of = classes["dataset"], "dataset"
    if trained and job.task == "evaluate" and job.init_from is not None:
        classes = {job.dataset_key: trained}
        trained, of = trained_classes(job.init_from), f"the training of {job.init_from}"
    for key, names in classes.items():
        if trained and names and names != trained:
            odd = sorted({*names} ^ {*trained})
            says = f"the classes {listed(odd)} are in one alone" if odd else "the classes have another order"
            lines.append(f"{key} and {of}: {says}, so their labels differ; give both the same class_names")
    return list(dict.fromkeys(lines))


def _classes_of(dataset: Any) -> list[str]:
    """Return the names of the classes of a dataset, or of the first one within it that tells them; else none."""
    return next(filter(None, map(_told_classes, _within(dataset))), [])


def _told_classes(dataset: Any) -> list[str] | None:
    """Return the names of a dataset's classes by their labels, as `Images` and torchvision's folders tell them."""
    for names in (_told(dataset, "class_names"), _told(dataset, "classes")):
        if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
            return names
    return None


def _within(dataset: Any, depth: int = 4) -> Iterator[Any]:
    """Yield a dataset and those within it: of a Mix, of `pack`, and of torch's Subset and ConcatDataset."""
    yield dataset
    if depth and dataset is not None:
        sources, several = _told(dataset, "sources"), _told(dataset, "datasets")
        inner = [*sources.values()] if isinstance(sources, Mapping) else several if isinstance(several, list) else []
        for own in (*inner[:1000], _told(dataset, "dataset")):
            yield from _within(own, depth - 1)


def _told(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset; None if it has none, or raises what it likes."""
    with contextlib.suppress(Exception):
        return getattr(dataset, name, None)
    return None


def _rows_of(datasets: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(dataset) for name, dataset in datasets.items()}


def _packed(job: Job, datasets: Mapping[str, Any]) -> tuple[PackedRows, ...]:
    """Return how the rows of the datasets are packed, of those whose rows are."""
    over = {evaluation.dataset_key: job.over_eval(evaluation) for evaluation in evaluations_in(job)}
    return tuple(
        packed.described(over.get(name, job)) for name, dataset in datasets.items() for packed in packings(dataset)
    )
