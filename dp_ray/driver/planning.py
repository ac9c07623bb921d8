"""Finds out what a job will do, for `dp-ray plan` and for a run alike.

It imports neither torch nor pyarrow, unless the job's own code or an earlier run of the job needs them.
"""

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dp_ray.errors import JobError, StorageError
from dp_ray.job.files import located_at
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, gpu_number
from dp_ray.job.plan import has_evaluations, plan_of
from dp_ray.job.samples import block_rows_of
from dp_ray.job.targets import build_dataset, dataset_seed, resolve, unmeasured
from dp_ray.plan.costs import GIB, MemoryPlan, PlacedBlock, Plan
from dp_ray.system.process import environment


def plan_job(job: Job) -> Plan:
    """The plan of a job that is not started: that of its run, with the blocks of a model over several devices.

    Raises an Error of dp_ray.errors if the job cannot run.
    """
    job = job.for_task()
    with contextlib.redirect_stdout(sys.stderr), environment(job.env):
        rows = dataset_rows(job)
        plan = _plan_of_resumed(job, rows) if _may_hold_run(job) else make_plan(job, rows)
        return dataclasses.replace(plan, blocks=_blocks(job), remarks=(*plan.remarks, *_lacking(job)))


def plan_memory_of(job: Job, gpu_gib: float | None) -> MemoryPlan:
    """The memory of the job's workers, whose GPUs have so much; without it, that of a GPU of this machine, if any.

    Raises JobError if the model cannot be built without memory.
    """
    with contextlib.redirect_stdout(sys.stderr), environment(job.env):
        from dp_ray.engine.memory import plan_memory  # imports torch

        return plan_memory(job.for_task(), _gpu_bytes(job, gpu_gib))


def _gpu_bytes(job: Job, gpu_gib: float | None) -> int | None:
    if gpu_gib is not None:
        return round(gpu_gib * GIB)
    import torch

    takes_gpus = job.gpus_per_worker != 0 if job.devices is None else gpu_number(job.devices[0]) is not None
    is_for_gpus = takes_gpus and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(0).total_memory) if is_for_gpus else None


def make_plan(job: Job, rows: Mapping[str, int], more_remarks: Iterable[str] = ()) -> Plan:
    """The plan of a job over datasets of these lengths; raises what `plan_of` raises."""
    return plan_of(job, rows, (*unmeasured(job), *more_remarks))


def dataset_rows(job: Job) -> dict[str, int]:
    """The lengths of the job's datasets: of its task's own as `dataset`, and of a training's `eval.dataset`."""
    rows = {"dataset": _num_rows(job, job.dataset_key)}
    return {**rows, "eval.dataset": _num_rows(job.over_eval(), "eval.dataset")} if has_evaluations(job) else rows


def _num_rows(job: Job, key: str) -> int:
    """The length of a dataset; raises JobError if the job shuffles its blocks, but nothing says what they are."""
    dataset = _dataset(job, key)
    block_rows_of(job, dataset)
    return len(dataset)


def _dataset(job: Job, key: str) -> Any:
    """A dataset of the job, built after seeding: its length may be random."""
    if isinstance(job.dataset, Target):
        resolve(key, job.dataset)
    if "torch" in sys.modules:
        from dp_ray.engine.loading import seeded_dataset

        return seeded_dataset(job, key)
    number = dataset_seed(job, key)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
    return build_dataset(job, key)


def taken_over(asked: Job, job: Job) -> list[str]:
    """A line on the shards that a resumed run keeps, if the job that was `asked` for would change them."""
    if job.finds_shards or (asked.num_shards == job.num_shards and not asked.finds_shards):
        return []
    fewer = f"; so at most {job.num_shards} workers run, not {asked.max_workers}"
    return [f"shards: {job.num_shards}, as when this run began" + fewer * (asked.max_workers > job.num_shards)]


def _may_hold_run(job: Job) -> bool:
    """Whether STORAGE/NAME may hold a run; of a URL this is not known."""
    where = located_at(job.storage)
    return "://" in where or Path(where, job.run_name).exists()


def _plan_of_resumed(asked: Job, rows: Mapping[str, int]) -> Plan:
    """The plan of a job that may resume the run in STORAGE/NAME; a remark says whether it does, or why it cannot."""
    from dp_ray.rundir.claim import base_storage, check_resumable, resumption, with_full_init_from, with_shards_of_run

    try:
        base = base_storage(asked)
        job = with_shards_of_run(with_full_init_from(asked), base)
        plan, run = make_plan(job, rows, taken_over(asked, job)), base.child(job.run_name)
        if not check_resumable(job, run, rows, plan.split.total_steps):
            return plan
        return dataclasses.replace(plan, remarks=(*plan.remarks, resumption(run, job.task, plan.split)))
    except StorageError as error:
        return make_plan(asked, rows, [f"whether an earlier run would be resumed is not known: {error}"])
    except JobError as error:
        return make_plan(asked, rows, [f"a run would not start: {error}"])


def _lacking(job: Job) -> Iterator[str]:
    """A remark if the job is to run in this process, and asks for a GPU that this machine lacks."""
    if job.max_workers > 0 or not (job.asks_for_gpus or gpu_number(job.input_device or "") is not None):
        return
    from dp_ray.engine.model import devices_here  # imports torch

    try:
        devices_here(job)
    except JobError as error:
        yield f"a run would not start: {error}"


def _blocks(job: Job) -> tuple[PlacedBlock, ...]:
    if job.device_map is None:
        return ()
    from dp_ray.engine.model import plan_blocks

    return plan_blocks(job)
