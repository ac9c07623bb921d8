"""The prediction loop of one worker: shard in, outputs out. It uses neither Ray nor files."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dp_ray.job import Job
from dp_ray.plan.split import Shard
from dp_ray.plan.work import Work
from dp_ray.replica.buffers import UnchangedBuffers
from dp_ray.replica.carry import Plain, unloaded
from dp_ray.replica.devices import mixed_devices
from dp_ray.replica.flops import Flops, counted_flops
from dp_ray.replica.kept import Kept
from dp_ray.replica.model import autocast, call_model, evaluating
from dp_ray.replica.out_of_memory import ShardSize, advised
from dp_ray.replica.passes import Passes
from dp_ray.replica.quarantine import Real, as_planned
from dp_ray.replica.read_requests import Indices
from dp_ray.replica.rng import ForwardSeeds
from dp_ray.replica.step_clock import Part, SilentClock, StepClock
from dp_ray.replica.user_code import at, it_got, loaded, place, raising
from dp_ray.tensors.nested import copied


def predict(
    model: nn.Module,
    job: Job,
    device: torch.device,
    work: Work,
    batches: Iterator[tuple[Indices, Any]],
    on_shard: Callable[[Shard, Indices, Any, dict[str, list[Plain]]], None],
    on_step: Callable[[int], None],
    goes_on: Callable[[int], bool] = lambda step: True,
    real: Real = as_planned,
    tell: Callable[[str], None] = lambda text: None,
    clock: StepClock | None = None,
    on_inputs: Callable[[Shard, Indices, Any], None] = lambda shard, indices, inputs: None,
    on_flops: Callable[[Flops], None] | None = None,
    passes: Passes | None = None,
) -> bool:
    """Run the model over each shard of `work`, in eval and inference mode.

    `batches` gives the shards' sample indices and inputs, in the order of `work`. `on_shard` gets each shard with
    its indices, what is kept of its outputs, and what is carried. `on_step` gets each finished step, even if this
    worker has no rows in it. The loop ends, with False, before the first step for which `goes_on` is false. `real`
    gives a shard without the samples set aside. `tell` gets lines for the user. `clock` splits the steps' time.
    `on_inputs` gets each shard's inputs before they run. `on_flops` gets a row's operations, counted over the first
    shard, which runs once more. `passes` run a model that is sharded.
    Raises ModelError, naming step and shard, if the model raises.
    """
    kept, clock, passes = Kept(job, device, tell), clock or SilentClock(), passes or Passes()
    seeds, cut = ForwardSeeds(job.seed, model, device, kept.after), (work.split.largest_batch, work.split.shards)
    with evaluating(model) as buffers, torch.inference_mode(), autocast(job.precision, device):
        for step, shards in work:
            if not passes.agree(not shards or goes_on(step)):
                return False
            ran, batches = 0, passes.before(shards, batches, real)
            for shard in shards:
                with advised(job, place(shard), ShardSize(shard.rows, *cut)):
                    indices, batch = loaded(batches, place(shard))
                    if (shard := real(shard)).rows:
                        inputs, carried = unloaded(batch, indices)
                        on_inputs(shard, indices, inputs)
                        if on_flops is not None:
                            on_flops(_flops_of(model, inputs, job, shard, device, buffers, seeds))
                            on_flops = None
                        ran += 1
                        run = functools.partial(_run, passes, seeds, buffers, model, inputs, job.call, shard, clock)
                        on_shard(shard, indices, kept(run(), inputs=inputs, shard=shard), carried)
                        clock.enter(Part.OTHER)
                with at(place(shard)):
                    buffers.restore()
            _stand_in(model, job.call, buffers, passes, passes.missing(work, step, ran))
            on_step(step)
    return passes.end()


def _run(
    passes: Passes,
    seeds: ForwardSeeds,
    buffers: UnchangedBuffers,
    model: nn.Module,
    inputs: Any,
    call: str,
    shard: Shard,
    clock: StepClock,
) -> Any:
    """A shard's outputs. The caller gives them no name: what is not kept of them is free before the next shard."""
    clock.enter(Part.FORWARD)
    seeds.begin(shard)
    with buffers.forward():
        return passes.run(_forward, model, inputs, call, shard, clock)


def _stand_in(model: nn.Module, call: str, buffers: UnchangedBuffers, passes: Passes, batches: Iterator[Any]) -> None:
    """Run the rounds in which this worker has no rows, and others need it to gather parameters."""
    for batch in batches:
        passes.run(call_model, model, batch, call)
        buffers.restore()


def _flops_of(
    model: nn.Module,
    inputs: Any,
    job: Job,
    shard: Shard,
    device: torch.device,
    buffers: UnchangedBuffers,
    seeds: ForwardSeeds,
) -> Flops:
    seeds.begin(shard)
    run = functools.partial(_forward, model, copied(inputs), job.call, shard, SilentClock())
    with buffers.forward():
        found = counted_flops(run, shard.rows, job, device)
    buffers.restore()
    return found


def _forward(model: nn.Module, inputs: Any, call: str, shard: Shard, clock: StepClock) -> Any:
    """The model's outputs; what follows in the step is about them."""

    def hint(error: BaseException) -> str:
        mistaken = isinstance(error, TypeError) and isinstance(inputs, Mapping) and call in ("auto", "one")
        one_dict = "; the model got one dict: to pass its keys as keywords, set call: kwargs"
        return one_dict * mistaken + (mixed_devices(model, error) or it_got(inputs))

    with raising(f"{place(shard)}: model", hint):
        outputs = call_model(model, inputs, call)
    clock.enter(Part.OUTPUTS)
    return outputs
