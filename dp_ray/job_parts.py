"""The parts of a job: mappings with keys of their own, as strict frozen models."""

import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from dp_ray.job_target import Strict, Target, Targeted


class Group(Strict):
    """Parameters whose names the regular expression `match` finds, with optimizer args of their own."""

    match: str
    args: dict[str, Any]

    @model_validator(mode="after")
    def _is_a_pattern(self) -> "Group":
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match must be a regular expression, got {self.match!r}: {error}") from None
        return self


class Optimizer(Target):
    """A target that is called with the trainable parameters and `args`; the first group that matches counts."""

    groups: list[Group] = Field(default_factory=list)


class Scheduler(Target):
    """A target that is called with the optimizer and `args`, and stepped each `per`.

    `metric` is what a ReduceLROnPlateau watches: `loss` (the epoch's mean), or what `eval` measures.
    """

    per: Literal["step", "epoch"] = "step"
    metric: str | None = None


def _metric(value: Any) -> Any:
    """`best: eval_loss` is the least of it."""
    return {"metric": value} if isinstance(value, str) else value


def location(value: Any) -> Any:
    """A path, or the run directory of a Result, as text."""
    if hasattr(value, "run_dir"):
        return getattr(value, "location", "") or value.run_dir
    return os.fspath(value) if isinstance(value, os.PathLike) else value


class Best(Strict):
    """The checkpoint to keep beside the newest: the one with the least, or the greatest, of a metric."""

    metric: str
    mode: Literal["min", "max"] = "min"


class Checkpoint(Strict):
    """When the state of a training is kept, beside at its end, and how many of them.

    `every_seconds: auto` without `every_steps`: as often as costs at most 1 % of the time measured, at the latest
    every 300 s, and at each epoch's end; with `every_steps`: every 300 s.
    """

    every_steps: PositiveInt | None = None
    every_seconds: Literal["auto"] | NonNegativeFloat | None = "auto"
    keep: PositiveInt = 2
    best: Annotated[Best, BeforeValidator(_metric)] | None = None


class Timeouts(Strict):
    """Seconds: in one step before it counts as a hang, and for capacity after workers were lost; null is for ever."""

    step: PositiveFloat | None = 600
    capacity: PositiveFloat | None = 600


class Eval(Strict):
    """A dataset on which a training's model is evaluated every so often, and at the end."""

    dataset: Targeted
    every_steps: PositiveInt | None = None
    every_epochs: PositiveInt | None = None
    batch_size: PositiveInt | None = None


class Elastic(Strict):
    """As many workers as the cluster has room for, between `min` and `max`."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _in_order(self) -> "Elastic":
        if self.min > self.max:
            raise ValueError(f"min must not be above max, got min {self.min} and max {self.max}")
        return self


class Loader(Strict):
    """The torch DataLoader of each worker."""

    processes: NonNegativeInt = 0
    prefetch: PositiveInt = 2
    pin_memory: Literal["auto"] | bool = "auto"
    persistent: bool = True
    context: Literal["fork", "spawn", "forkserver"] | None = None
