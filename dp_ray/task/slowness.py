"""Slow a worker's forward, as a fault of `--inject` asks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dp_ray.replica.world import World
from dp_ray.task.step_control import StepControl


@contextmanager
def slowed(model: nn.Module, control: StepControl, world: World) -> Iterator[None]:
    """Within the block, the model's first forward of a step sleeps for as long as `control` says."""
    if not control.slows:
        yield
        return
    handle = model.register_forward_pre_hook(lambda *_: time.sleep(control.take_delay(world.rank)))
    try:
        yield
    finally:
        handle.remove()
