"""What it costs to be ready for the loss of a worker: in a step without a fault, no call of dp_ray's own."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dp_ray.job.job import Job
from dp_ray.messages import Note, StepControl
from dp_ray.tasks.held import Held
from dp_ray.tasks.own_loop import train_by_loop
from dp_ray.tasks.setup import Context
from dp_ray.tasks.train import train
from tests.support.cluster import ROOT
from tests.support.group import run_group
from tests.support.loops import keys_of
from tests.support.trainings import job_of

OWN = str(ROOT / "dp_ray")


class Counts(StepControl):
    """Counts the calls of dp_ray's own functions in the loop's thread from step to step."""

    def __init__(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._calls: list[str] = []
        self._steps: list[list[str]] = []

    def before(self, step: int) -> None:
        sys.setprofile(None)
        self._steps.append(sorted(self._calls))
        self._calls.clear()
        sys.setprofile(self._count)

    def through(self) -> None:
        sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            self._calls.append(frame.f_code.co_qualname)

    def task(self, context: Context) -> None:
        task = train if context.job.loop is None else train_by_loop
        task(replace(context, held=Held() if self._is_ready else None))
        context.send(Note(repr(self._steps)))


def steps_of(folder: Path, is_ready: bool, workers: int, kind: str) -> list[list[str]]:
    keys: dict[str, Any] = {"batch_size": 12, "shards": 4, "bitwise": True, "checkpoint": {"every_steps": 1000}}
    job = job_of("mlp", workers=workers, **keys, **({"strategy": "fsdp"} if kind == "fsdp" else {}))
    if kind == "loop":
        job = Job.make({**keys_of("gan", **{**keys, "batch_size": 4}), "workers": workers}, "job")
    messages = run_group(job, folder, Counts(is_ready))
    (told,) = (message.text for message in messages if isinstance(message, Note) and message.text.startswith("[["))
    steps: list[list[str]] = eval(told)
    return steps


@pytest.mark.full(but=["ddp"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "loop"])
def test_a_step_without_a_fault_makes_no_call_more(tmp_path: Path, kind: str) -> None:
    for workers in (1, 2):
        steps_of(tmp_path / f"caches-{workers}", False, workers, kind)  # fills those of the processes
        ready = steps_of(tmp_path / f"ready-{workers}", True, workers, kind)
        plain = steps_of(tmp_path / f"plain-{workers}", False, workers, kind)
        assert len(ready) == len(plain) == 18
        # Not those of the first steps, which fill caches, and at whose begin the clock has the history read.
        pairs = [
            pair for pair in zip(ready[4:], plain[4:], strict=True) if "History._read" not in {*pair[0], *pair[1]}
        ]
        assert len(pairs) > 6
        assert all(one == other for one, other in pairs)
        assert any("backward" in name for name in plain[8])
