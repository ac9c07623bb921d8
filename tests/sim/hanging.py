"""A training on two simulated GPUs of which one hangs: what the heartbeats would tell of both."""

import json
import os
import threading
import time
from pathlib import Path

import torch

from dp_ray.engine.clock import DevicePlace, Part, StepClock
from dp_ray.messages import StepControl
from dp_ray.system.threads import waits_for
from tests.sim.jobs import Wide
from tests.support import simgpu

HUNG = 1  # the rank
STEP = 5  # after the early ones, in which the host waits for the GPU
SECONDS = 3.0  # without a step
LIMIT = 120.0


class Hanging(Wide):
    """A model whose forward never ends in one step, on one rank; the collectives of the other rank then never end."""

    rank = 0
    step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.step == STEP and self.rank == HUNG:
            simgpu.hang(inputs.device.index)
        elif self.step == STEP:
            simgpu.lose_peers()
        outputs: torch.Tensor = super().forward(inputs)  # type: ignore[no-untyped-call]
        return outputs


class Watched(StepControl):
    """Ends the process once its loop stands still, and leaves what a beat would tell in a file."""

    def __init__(self, rank: int, file: Path) -> None:
        Hanging.rank = rank
        self._file = file
        self._clock = StepClock()
        self._since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def runs_on(self, clock: StepClock) -> None:
        self._clock = clock

    def before(self, step: int) -> None:
        Hanging.step = step
        self._since = time.monotonic()

    def _watch(self) -> None:
        end = time.monotonic() + LIMIT
        while (Hanging.step <= STEP or time.monotonic() - self._since < SECONDS) and time.monotonic() < end:
            time.sleep(0.1)
        place = self._clock.place()
        self._file.write_text(json.dumps({"step": Hanging.step, "place": place, "waits": waits_for()}))
        os._exit(0)


def told(file: Path) -> tuple[DevicePlace, str, int]:
    """What a process has left: how far its GPU has come, what its loop waits for, and in which step."""
    found = json.loads(file.read_text())
    step, part, error = found["place"]
    return DevicePlace(step, Part(part), error), found["waits"], found["step"]
