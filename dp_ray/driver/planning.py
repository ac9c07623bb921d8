"""Find out what a job will do, for `dp-ray plan` and for a run alike."""

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterable, Mapping

from dp_ray.driver.checks import check_targets, lacking_here
from dp_ray.errors import JobError, StorageError
from dp_ray.job.job import Job
from dp_ray.job.keys import Target, gpu_number
from dp_ray.job.plan import has_evaluations, plan_of
from dp_ray.job.samples import block_rows_of
from dp_ray.job.targets import build_dataset, dataset_seed, resolve, unmeasured
from dp_ray.plan.costs import GIB, MemoryPlan, Plan
from dp_ray.rundir.claim import check_claim, located, resumption, with_full_init_from, with_shards_of_run
from dp_ray.system.process import environment


def plan_job(job: Job) -> Plan:
    """Return the plan of a job that is not started: that of its run, with the blocks of a model over several devices.

    It checks what a run checks before it starts. Raises an Error of dp_ray.errors if the job cannot run anywhere. A
    remark says why it cannot run here: what this machine lacks, and what the storage holds.
    """
    job = job.for_task()
    with contextlib.redirect_stdout(sys.stderr), environment(job.env):
        check_targets(job)
        plan = _plan_to_claim(job, dataset_rows(job))
        if job.device_map is not None:
            from dp_ray.engine.model import plan_blocks

            plan = dataclasses.replace(plan, blocks=plan_blocks(job))
        lacking = [f"a run would not start: {error}" for error in lacking_here(job)]
        return dataclasses.replace(plan, remarks=(*plan.remarks, *lacking))


def _plan_to_claim(asked: Job, rows: Mapping[str, int]) -> Plan:
    """Return the plan of a job that may resume the run in STORAGE/NAME; a remark says whether it does, or why not."""
    try:
        base = located(asked.storage)
        job = with_shards_of_run(with_full_init_from(asked), base)
        plan, run = make_plan(job, rows, taken_over(asked, job)), base.child(job.run_name)
        if not check_claim(job, run, rows, plan.split.total_steps):
            return plan
        return dataclasses.replace(plan, remarks=(*plan.remarks, resumption(run, job.task, plan.split)))
    except StorageError as error:
        return make_plan(asked, rows, [f"whether an earlier run would be resumed is not known: {error}"])
    except JobError as error:
        return make_plan(asked, rows, [f"a run would not start: {error}"])


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

        from dp_ray.engine.memory import plan_memory

        takes_gpus = job.gpus_per_worker != 0 if job.devices is None else gpu_number(job.devices[0]) is not None
        gpu_bytes = None
        if gpu_gib is not None:
            gpu_bytes = round(gpu_gib * GIB)
        elif takes_gpus and torch.cuda.is_available():
            gpu_bytes = int(torch.cuda.get_device_properties(0).total_memory)
        return plan_memory(job.for_task(), gpu_bytes)


def make_plan(job: Job, rows: Mapping[str, int], more_remarks: Iterable[str] = ()) -> Plan:
    """Return the plan of a job over datasets of these lengths; raises the errors of `plan_of`."""
    return plan_of(job, rows, (*unmeasured(job), *more_remarks))


def dataset_rows(job: Job) -> dict[str, int]:
    """Return the lengths of the job's datasets: its task's own as `dataset`, and a training's `eval.dataset`."""
    rows = {"dataset": _num_rows(job, job.dataset_key)}
    return {**rows, "eval.dataset": _num_rows(job.over_eval(), "eval.dataset")} if has_evaluations(job) else rows


def _num_rows(job: Job, key: str) -> int:
    """Return the length of a dataset, built after seeding: it may be random.

    Raises JobError if the job shuffles its blocks, but nothing says what they are.
    """
    if isinstance(job.dataset, Target):
        resolve(key, job.dataset)  # its module may import torch, which is to be seeded then
    if "torch" in sys.modules:
        from dp_ray.engine.loading import seeded_dataset

        dataset = seeded_dataset(job, key)
    else:
        seed = dataset_seed(job, key)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        dataset = build_dataset(job, key)
    block_rows_of(job, dataset)
    return len(dataset)


def taken_over(asked: Job, job: Job) -> list[str]:
    """Return a line on the shards that a resumed run keeps, if the job that was `asked` for would change them."""
    if job.finds_shards or (asked.num_shards == job.num_shards and not asked.finds_shards):
        return []
    line = f"shards: {job.num_shards}, as when this run began"
    if asked.max_workers > job.num_shards:
        line += f"; so at most {job.num_shards} workers run, not {asked.max_workers}"
    return [line]
