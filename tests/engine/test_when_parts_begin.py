"""What is to be done as a part of a step begins, in real workers: told by what the user's code has seen by then."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dp_ray.engine.clock import Part, StepClock
from dp_ray.engine.world import own_rank
from dp_ray.messages import StepControl
from dp_ray.monitor.faults import PARTS
from tests.support.group import run_group
from tests.support.trainings import job_of

SEEN = {"forwards": 0, "updates": 0}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        SEEN["forwards"] += self.training
        SEEN["evaluated"] = SEEN["updates"] if not self.training else SEEN.get("evaluated", 0)
        result: torch.Tensor = self.layer(inputs)
        return result


class Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        SEEN["updates"] += 1
        return super().step(closure)


class Notes(StepControl):
    """Notes, in a step, what was seen when each part of it began."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder, self._step = folder, step
        self._clock = StepClock()
        self._noted: dict[str, dict[str, int]] = {}

    def runs_on(self, clock: StepClock) -> None:
        self._clock = clock

    def before(self, step: int) -> None:
        if step == self._step:
            for part in PARTS:
                self._clock.when(Part[part.upper()], partial(self._note, part))

    def _note(self, part: str) -> None:
        assert part not in self._noted
        self._noted[part] = dict(SEEN)

    def through(self) -> None:
        own = own_rank()
        Path(self._folder, f"{own}.json").write_text(json.dumps(self._noted))


def test_each_part_that_a_fault_may_be_in_begins_where_it_says(tmp_path: Path) -> None:
    job = job_of(
        "mlp",
        workers=2,
        shards=2,
        epochs=2,
        model={"target": "tests.engine.test_when_parts_begin:Model"},
        optimizer={"target": "tests.engine.test_when_parts_begin:Sgd", "args": {"lr": 0.1}},
        eval={"dataset": {"target": "tests.support.training:Pairs", "args": {"length": 20}}, "every_steps": 2},
        checkpoint={"every_steps": 2},
    )
    run_group(job, tmp_path / "run", Notes(str(tmp_path), 2))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first.keys() == set(PARTS) and second.keys() == {*PARTS} - {"checkpoint"}
    expected = {"forward": (2, 2, 2), "exchange": (3, 2, 2), "update": (3, 2, 2), "evaluation": (4, 4, 2)}
    for noted in (first, second):
        assert {part: tuple(noted[part].values()) for part in expected} == expected
    assert tuple(first["checkpoint"].values()) == (4, 4, 4)


def test_what_is_to_be_done_is_done_once_and_the_times_go_on() -> None:
    clock, done = StepClock(), list[str]()
    clock.when(Part.UPDATE, lambda: done.append("update"))
    clock.when(Part.UPDATE, lambda: done.append("update again"))
    clock.when(Part.FORWARD, lambda: done.append("forward"))
    clock.enter(Part.FORWARD)
    assert done == ["forward"]
    for _ in range(2):
        clock.enter(Part.UPDATE)
        clock.enter(Part.FORWARD)
    assert sorted(done) == ["forward", "update", "update again"]
    for timed in clock.end_step(0, 1):
        assert timed.seconds[Part.UPDATE] > 0
