"""A training's steps with all by which faults are found, for the benchmark `faults`."""

from typing import Any

from benchmarks.training import ours
from dp_ray.cluster.channel import WorkerConfig
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.engine.world import World
from dp_ray.messages import StepControl
from dp_ray.storage import Storage

PULSED_BLOCK = 32  # steps in a turn: about a second, in which a worker sends two beats


class Pulses(StepControl):
    """In each turn of a loop a heartbeat of its own, so that none beats while the other side runs."""

    def __init__(self, channel: Any, turns: StepControl) -> None:
        self._channel = channel
        self._turns = turns
        self._heartbeat: Heartbeat | None = None

    def before(self, step: int) -> None:
        """Let the other side run if a turn has ended, without a heartbeat."""
        if step % PULSED_BLOCK == 0:
            self.end()
            self._turns.before(step)
            worker = WorkerConfig(self._channel, keep_prints=False)
            self._heartbeat = Heartbeat(worker, "benchmark", World(), Storage("nowhere"), 600.0).__enter__()
        assert self._heartbeat is not None
        self._heartbeat.before(step)

    def end(self) -> None:
        """Stop the heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.__exit__()


def pulsed(control: StepControl) -> None:
    """Train the MLP with a step control."""
    ours("mlp", {"max_steps": PULSED_BLOCK * 13 + 1, "epochs": 11}, World(), control)
