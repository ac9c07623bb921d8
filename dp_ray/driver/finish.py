"""Make the result of a run, which is kept whether the run is done, failed or was interrupted; and its last lines."""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dp_ray.engine.loads.items import passthrough_keys
from dp_ray.errors import RunInterrupted, StorageError, frames_of
from dp_ray.job.job import Job
from dp_ray.messages import WorkerReady
from dp_ray.monitor.console import Progress
from dp_ray.monitor.monitor import Monitor
from dp_ray.outputs.files import outputs_sha256, prove_outputs
from dp_ray.plan.history import is_of_many
from dp_ray.plan.split import Split
from dp_ray.results.result import Result, with_best_weights
from dp_ray.results.text import measured
from dp_ray.rundir.claim import RunDir
from dp_ray.rundir.files import BEFORE_RETRY, CHECKPOINTS, FACTS, steps_of
from dp_ray.rundir.history import HISTORY, RECENT, best_of, merge_history, summary
from dp_ray.rundir.incidents import INCIDENTS, INCIDENTS_JSON, IncidentKind, IncidentLog, Interruption
from dp_ray.rundir.ledger import FILES, LEDGER, OUTPUTS, PARTS
from dp_ray.rundir.listing import PROGRESS
from dp_ray.rundir.quarantine import (
    QUARANTINE,
    count_quarantined,
    has_set_aside,
    merge_quarantine,
    positions_set_aside,
    still_missing,
)
from dp_ray.rundir.start import LINKS, first_step
from dp_ray.rundir.unfinished import kept_steps
from dp_ray.rundir.weights import EMA, open_weights, weights_path
from dp_ray.storage import Storage
from dp_ray.telemetry import times as step_times
from dp_ray.telemetry.utilization import utilization
from dp_ray.tensors.files import TensorFile, sha256_of
from dp_ray.text import counted, hide, percent, relative

NEWEST_TIMES = 64  # files of steps' times that a result is about, 4 million rows: it must fit the driver's memory


def share_of_wait(times: list[dict[str, float]]) -> float | None:
    """Return the share of the workers' loops spent waiting for data; None if no worker reported its times."""
    whole = sum(row["loop_seconds"] for row in times)
    return round(sum(row["data_wait_seconds"] for row in times) / whole, 4) if whole else None


def result_of(
    job: Job,
    split: Split,
    claimed: RunDir,
    monitor: Monitor | None,
    started: float,
    error: BaseException | None,
) -> Result:
    """Build the result of a run from its directory and its monitor; `started` is a time.monotonic().

    `error` is what the run failed with, RunInterrupted if it was stopped, or None if it is done.
    """
    status = "done" if error is None else "interrupted" if isinstance(error, RunInterrupted) else "failed"
    attempts = monitor.attempts.begun if monitor else []
    incidents = monitor.incidents.log if monitor else IncidentLog()
    storage = claimed.storage
    times = monitor.times if monitor else {}
    merged = error is None and job.task == "predict"
    trained = error is None and job.task == "train"
    seconds = round(time.monotonic() - started, 3)
    return Result(
        run_dir=str(storage),
        location=storage.location,
        name=job.run_name,
        task=job.task,
        status=status,
        rows=split.rows_kept,
        steps=split.epoch_steps,
        epochs=split.epochs_begun,
        total_steps=split.total_steps,
        batch_size=job.batch_size,
        shards=job.num_shards,
        batch_dim=job.batch_dim,
        world_sizes=list(incidents.world_sizes),
        workers=[_worker_values(worker, times) for worker in attempts[-1]] if attempts else [],
        data_wait_share=share_of_wait(list(times.values())),
        restarts=len(incidents.interruptions),
        interruptions=[interruption.to_json() for interruption in incidents.interruptions],
        metrics=summary(storage) if trained else monitor.metrics if monitor else {},
        quarantined=count_quarantined(storage),
        seconds=seconds,
        **(_outside(started, seconds, monitor.progress) if monitor and error is None else {}),
        **_time_values(job, claimed, monitor),
        outputs_path=str(storage.child(OUTPUTS)) if merged else None,
        outputs_sha256=outputs_sha256(storage) if merged else None,
        weights_path=weights_path(storage) if trained else None,
        weights_sha256=sha256_of(open_weights(storage)) if trained else None,
        **(_training_values(job, storage, monitor) if trained else {}),
        error=None if error is None else hide(f"{type(error).__name__}: {error}"),
        failure=None if error is None else where_raised(error),
    )


def _training_values(job: Job, storage: Storage, monitor: Monitor | None) -> dict[str, Any]:
    """Return the values of a finished training alone: its best weights, their average, why it stopped early."""
    wanted = job.checkpoint.best
    kept = steps_of(storage.child(CHECKPOINTS))
    best = best_of(storage, wanted.metric, wanted.mode, kept) if wanted else None
    early = monitor.stopped_early if monitor else None
    ema = None
    if job.ema:
        average = TensorFile(storage, EMA, storage.read_bytes(EMA))
        sha256 = sha256_of(average.tensors())
        ema = {"decay": job.ema.decay, "weights": str(storage.child(EMA)), "sha256": sha256}
    return {"best": with_best_weights(best, storage), "ema": ema, "stopped_early": early and early.to_json()}


def where_raised(error: BaseException) -> dict[str, Any]:
    """Return where an error was raised, as far as its text tells, and the frames of the user's code."""
    text = str(error)
    worker = re.search(r"\brank (\d+) on ([^\s:,]+)", text)
    found = {name: re.search(rf"\b{name} (\d+)", text) for name in ("step", "sample")}
    return {
        "rank": int(worker[1]) if worker else None,
        "node": worker[2] if worker else None,
        **{name: int(match[1]) if match else None for name, match in found.items()},
        "frames": hide(frames_of(error)),
    }


def _outside(started: float, seconds: float, progress: Progress) -> dict[str, Any]:
    """Return the seconds before a finished run's first step and after its last; nothing if it had no step to run."""
    if progress.first_step_at is None or progress.last_step_at is None:
        return {}
    before, after = progress.first_step_at - started, started + seconds - progress.last_step_at
    return {"seconds_before_steps": round(before, 3), "seconds_after_steps": round(max(0.0, after), 3)}


def _time_values(job: Job, claimed: RunDir, monitor: Monitor | None) -> dict[str, Any]:
    """Return the values of the steps' times; none of files that cannot be read, since they only inform."""
    values: dict[str, Any] = {}
    with contextlib.suppress(StorageError):
        table = step_times.read_step_times(claimed.storage, NEWEST_TIMES)
        verdict = step_times.verdict_of(table, job.describe())
        after_start = step_times.steady(table)
        # The split is of the same steps as the verdict.
        values |= {"time_split": step_times.time_split(after_start), "verdict": verdict and verdict.text}
        flops = monitor.flops if monitor else None
        if flops is not None:
            devices = max(1, job.num_devices * len(step_times.worker_splits(after_start)))
            mfu = utilization(flops, step_times.rows_per_second(after_start), devices)
            values |= {"flops_per_row": flops.per_row, "mfu": mfu}
    return values


def _worker_values(worker: WorkerReady, times: Mapping[int, dict[str, float]]) -> dict[str, Any]:
    world = worker.world
    place = {name: getattr(world, name) for name in ("rank", "node", "node_rank", "local_rank")}
    process = {"device": str(world.device), "gpu_ids": list(worker.gpu_ids), "pid": worker.pid}
    return {**place, **process, **times.get(world.rank, {})}


def merge(job: Job, split: Split, run: Storage, monitor: Monitor | None) -> None:
    """Prove that a run's outputs are whole, or merge the pieces of its history; and merge what it has set aside."""
    if job.task == "predict":
        prove_outputs(run, split.rows_kept, positions_set_aside(run))
    elif job.task == "train":
        early = monitor.stopped_early if monitor else None
        merge_history(run.child(HISTORY), run, early.step if early else split.total_steps, first_step(run))
    if job.on_error is not None or has_set_aside(run):
        merge_quarantine(run, passthrough_keys(job))


def clear(run: Storage, keeps_ledger: bool) -> None:
    """Remove the files that only an unfinished run needs; `dp-ray retry` needs the ledger and its files."""
    for folder in (PARTS, HISTORY, QUARANTINE, LINKS, *(() if keeps_ledger else (FILES,))):
        run.child(folder).remove()
    for name in (INCIDENTS, RECENT, PROGRESS, BEFORE_RETRY, *(() if keeps_ledger else (LEDGER, FACTS))):
        run.delete(name)
    run.remove_unfinished(recursive=True)


def save_unfinished(result: Result, run: Storage, split: Split, monitor: Monitor | None, job: Job) -> None:
    """Save the result of an unfinished run and, if it had workers, how its driver ended."""
    # The storage may be what failed: the first error is the one to raise. On a full disk what is unfinished takes the
    # room of what is to be told, of which the end of the driver is the shortest and the most needed.
    with contextlib.suppress(StorageError):
        run.remove_unfinished(recursive=True)
        if monitor is not None and monitor.attempts.begun:
            # How this driver ends; a killed driver cannot record its end.
            kept = kept_steps(run, result.task, split)
            step = max(monitor.progress.step, kept)
            if result.status == "failed":
                text = f"ended after {counted(step, 'step')} by {str(result.error).splitlines()[0]}"
            else:
                if monitor.planned_stop.is_asked:  # which keeps the step after which it stops
                    step = kept
                text = f"stopped by {(monitor.planned_stop.by or ['an interrupt'])[-1]} after {counted(step, 'step')}"
            log = monitor.incidents.log.interrupted(Interruption(IncidentKind.DRIVER, text, step))
            if not INCIDENTS_JSON.write(run, log):
                run.delete(RECENT)  # these only inform: the resumed run has them again
                run.delete(PROGRESS)
                INCIDENTS_JSON.write(run, log)
        result.save(run)
        if has_set_aside(run):
            missing = still_missing(run, split) if run.exists(BEFORE_RETRY) else ()
            merge_quarantine(run, passthrough_keys(job), missing)
        run.remove_unfinished(recursive=True)


def last_line(result: Result, is_resumed: bool, is_cut_short: bool = False) -> str:
    """Return the last line of a run: `done, 1797 rows in 3.2 s, loss 0.1: runs/digits/weights.safetensors`.

    A training that `max_steps` cuts short has run steps, not its last epoch.
    """
    rows = f"{result.rows} rows" if result.epochs == 1 else f"{result.epochs} epochs of {result.rows} rows"
    if is_cut_short:
        rows = counted(result.total_steps, "step")
    where = result.outputs_path or result.weights_path
    if result.stopped_early is not None:
        rows = f"stopped early after {result.stopped_early['step']} of {result.total_steps} steps"
    if result.quarantined > 0:
        rows += f" ({result.quarantined} set aside)"
    since = " since it was resumed" if is_resumed else ""
    path = f": {relative(where)}" if where else ""
    values = measured(result.metrics)  # of a training those of an epoch and of the evaluation come first
    is_whole = {name: result.task != "train" or is_of_many(name) for name in values}
    metrics = "".join(f", {name} {value}" for name, value in values.items() if is_whole[name])
    of_batch = ", ".join(f"{name} {value}" for name, value in values.items() if not is_whole[name])
    if of_batch:
        metrics += f", last batch: {of_batch}"
    return f"done, {rows} in {result.seconds:.1f} s{since}{metrics}{path}"


def time_lines(result: Result) -> Iterator[str]:
    """Yield lines on where the time of the steps went, and what limits the run; a short one has nothing to gain."""
    is_long = result.seconds >= step_times.JUDGED_FROM
    if is_long and result.time_split is not None:
        line = f"time of the steps: {step_times.split_line(result.time_split)}"
        before, after = result.seconds_before_steps, result.seconds_after_steps
        if before is not None:
            line += f"; {before:.1f} s before the first step, {after or 0.0:.1f} s after the last"
        yield line
    if is_long and result.verdict is not None:
        yield result.verdict
    if result.flops_per_row is not None:
        share = "" if result.mfu is None else f", {percent(result.mfu)} of the devices' peak (MFU)"
        yield f"{result.flops_per_row:,.0f} floating-point operations a row{share}"
