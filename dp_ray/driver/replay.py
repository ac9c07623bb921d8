"""Replay a step of a training in this process: its loss, its rows, and the first module that is not finite."""

import bdb
import contextlib
import functools
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dp_ray.engine.devices import devices_here
from dp_ray.engine.world import World
from dp_ray.errors import Error, JobError, StorageError, cause_of
from dp_ray.job.args import object_in
from dp_ray.job.files import job_of
from dp_ray.job.job import Job
from dp_ray.messages import Note
from dp_ray.process.numerics import numerics_of
from dp_ray.replay.inspect_step import Findings, InspectedPass, StepInspection
from dp_ray.replay.replay import LoopAgain, StepChoice, run_again
from dp_ray.results.replayed import Replayed, ReplayedLoop, ReplayedStep
from dp_ray.rundir.claim import kept_modes
from dp_ray.rundir.files import ABOUT_JSON, RESULT_JSON, kept_job
from dp_ray.rundir.history import StepRows, history_of
from dp_ray.rundir.numerics import change_between, kinds_of
from dp_ray.storage import Storage, located
from dp_ray.tasks.setup import Context
from dp_ray.tasks.task import settings_of

# Keys that a replay sets: it runs the steps alone, in this process.
WITHOUT: dict[str, Any] = {"workers": 0, "env": {}, "stop_on_nan": False}
WITHOUT |= {"audit": None, "flops": False, "profile": None}


def replay(
    run_dir: str, choice: StepChoice, say: Callable[[str], None], debugs: bool = False
) -> Iterator[ReplayedStep]:
    """Run a step of the training in `run_dir` again and yield what it gave; the run directory stays as it is.

    `say` gets lines on what happens meanwhile. If it `debugs`, a debugger then stops in the forward of the first
    module whose output or gradient is not finite, else in the model's; or where the step raised.
    Raises JobError if the run is no training or cannot be replayed, or has no such step.
    """
    run = located(run_dir).guarded(_refuse)
    job = _job_kept(run, say)
    with contextlib.redirect_stdout(sys.stderr):
        job, devices = _placed(job)
        world = World(device=devices[0], all_devices=devices)
        workers = RESULT_JSON.read(run).get("workers", [])
        types = {str(worker["device"]).partition(":")[0] for worker in workers}
        if types and types != {world.device.type}:
            say(
                f"the run was on {', '.join(sorted(types))}, and this is on {world.device.type}: the last bits differ"
            )
        elif job.bitwise and (differs := _change_since(run, devices)):
            say(f"other bits are computed here than in the run: {differs}")
        try:
            # Of what the task sends, its lines for the user alone.
            context = Context(job, world, run, lambda sent: say(sent.text) if isinstance(sent, Note) else None)
            with settings_of(job, world, kept_modes(run)):
                yield from (_step_of if job.loop is None else _step_of_loop)(
                    context, StepRows(history_of(run)), choice, debugs
                )
        except Error as error:
            if debugs and (cause := cause_of(error)) is not None and not isinstance(cause, bdb.BdbQuit):
                say(str(error))
                pdb.post_mortem(cause.__traceback__)
            raise


def _step_of(context: Context, history: StepRows, choice: StepChoice, debugs: bool) -> Iterator[Replayed]:
    with run_again(context, history, choice) as rerun:
        yield rerun.replayed
        if debugs:
            _debug(rerun.look, rerun.findings, context.say)


def _step_of_loop(context: Context, history: StepRows, choice: StepChoice, debugs: bool) -> Iterator[ReplayedLoop]:
    replayed = LoopAgain(context, history, choice).run()
    yield replayed
    if not debugs:
        return
    # Only now it is known which pass to debug, and the weights have changed since: the steps run once more.
    passes = [found for found in replayed.passes if found.call == "backward"]
    if not passes:
        context.say("the step has no pass, so there is nothing to debug")
        return
    spoilt = next((found for found in passes if found.output or found.gradient), passes[0])
    context.say(f"once more, up to {spoilt.title}")
    LoopAgain(context, history, choice).debug(
        spoilt.place, lambda look, findings, of_loop: _debug(look, findings, context.say, of_loop)
    )


def _change_since(run: Storage, devices: Sequence[torch.device]) -> str:
    """Return in what this process computes differently from the run's last attempt; empty if in nothing."""
    attempts = ABOUT_JSON.read(run).attempts
    here = kinds_of([(0, "", numerics_of(devices))])
    return change_between(attempts[-1].kinds, here) if attempts else ""


def _refuse() -> None:
    raise StorageError("a replay writes nothing into the run's directory, and this run lacks what its start writes")


def _job_kept(run: Storage, say: Callable[[str], None]) -> Job:
    """Return the job of a training's run.json, to be run in this process."""
    kept = kept_job(run, "a training")
    if kept["task"] != "train":
        raise JobError(f"replay: {run} is a run of task {kept['task']}; only a training has steps to replay")
    _check_objects(run, kept)
    _check_can_run(kept)
    if lost := list(kept["env"]):
        say(f"its env is not kept: set {', '.join(lost)} in the environment where the step needs it")
    loader = {**kept["loader"], "processes": 0}
    return job_of({**kept, **WITHOUT, "loader": loader, "storage": run.parent.location}, {}, kept["name"])


def _check_objects(run: Storage, kept: dict[str, Any]) -> None:
    """Raise JobError if the run was given Python objects, of which it keeps the names alone."""
    given = {key: kept.get(key) for key in Job.TARGETED}
    given |= {f"metrics.{name}": metric for name, metric in (kept.get("metrics") or {}).items()}
    for key, value in given.items():
        named = value["target"] if isinstance(value, dict) else value
        if isinstance(named, str) and named.startswith("<"):
            raise JobError(f"replay: {run}: {key} was given as a Python object ({named}), which no file holds")
        inner = {name: value[name] for name in value if name != "target"} if isinstance(value, dict) else value
        if isinstance(value, dict | list) and (path := object_in(inner, key)):
            raise JobError(f"replay: {run}: {path} was given as a Python object, which no file holds")


def _check_can_run(kept: dict[str, Any]) -> None:
    """Raise JobError for trainings whose steps one process alone cannot repeat."""
    if not isinstance(kept["shards"], int):
        raise JobError("replay: the run has not found its number of shards yet, so it has no step to replay")
    if kept["sync_batchnorm"] and kept["shards"] > 1:
        raise JobError(
            "replay: sync_batchnorm takes its statistics from all workers' shards at once, and one process runs them "
            "one after another; its steps cannot be replayed"
        )
    if kept.get("strategy") == "fsdp" and (kept.get("fsdp") or {}).get("mixed_precision"):
        raise JobError(
            "replay: fsdp.mixed_precision gathers parameters in other dtypes, as only FSDP on its workers does; its "
            "steps cannot be replayed"
        )


def _placed(job: Job) -> tuple[Job, tuple[torch.device, ...]]:
    """Return the job and its devices; if this machine lacks its single GPU, it runs on what is here instead."""
    try:
        return job, devices_here(job)
    except JobError:
        if job.num_devices > 1:
            raise
    job = job.model_copy(update={"devices": None, "gpus_per_worker": "auto", "input_device": None})
    return job, devices_here(job)


def _debug(
    look: StepInspection, findings: Findings, say: Callable[[str], None], of_loop: InspectedPass | None = None
) -> None:
    """Run a shard once more, with a debugger that stops in the forward of the module to look at.

    If all is finite, it stops in the function of a pass `of_loop`, which may call any part of the model.
    """
    found = findings.output or findings.gradient
    shards = [each.loaded for each in findings.shards if found is None or each.loaded.shard.shard == found.shard]
    if not shards:
        say("no rows, so there is nothing to debug")
        return
    name, stepped = found.module if found is not None else "", functools.partial(_stepped, pdb.Pdb())
    module = look.model.get_submodule(name)
    if found is None and of_loop is not None:
        say(f"in the function of the pass, shard {shards[0].shard.shard}:")
        of_loop.call_by(stepped)
    else:
        say(f"in the forward of {name or 'the model'} ({type(module).__name__}), shard {shards[0].shard.shard}:")
        module.forward = functools.partial(stepped, module.forward)
    try:
        look.forward(shards[0])
    except Error as error:
        if not isinstance(cause_of(error), bdb.BdbQuit):
            raise
    finally:
        module.__dict__.pop("forward", None)


def _stepped(debugger: pdb.Pdb, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in the debugger, which stops in its first line; raises BdbQuit if the user quits there."""
    result = debugger.runcall(function, *args, **kwargs)
    if debugger.quitting:
        raise bdb.BdbQuit
    return result
