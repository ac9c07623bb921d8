"""How often a training steps its scheduler, and what to say of one that ends elsewhere."""

from collections.abc import Mapping
from typing import Any

from dp_ray.plan.split import Split
from dp_ray.text import counted


def num_scheduled(split: Split, per: str, done: int = 0) -> int:
    """How often a scheduler is stepped, each `step` or each `epoch`, in a training of which `done` steps are done."""
    each = 1 if per == "step" else split.steps
    return split.total_steps // each - done // each


def too_short(most: int, needed: int, per: str) -> str:
    """The error of a OneCycleLR that can be stepped `most` times more, where the training needs more."""
    return (
        f"scheduler: this OneCycleLR lasts for {counted(most, 'step')} from here, and the training steps it {needed} "
        f"times, once each {per}; set total_steps: auto for the whole training, or train no longer than it lasts"
    )


# What torch's schedulers do after the length that their arg states, if that is below the training's; "" if nothing.
_AFTER = {
    ("CosineAnnealingLR", "T_max"): "the learning rate goes up again after that",
    ("PolynomialLR", "total_iters"): "the learning rate is 0 after that",
    ("LinearLR", "total_iters"): "",
    ("ConstantLR", "total_iters"): "",
    ("OneCycleLR", "total_steps"): "",
    ("MultiStepLR", "milestones"): "",
}


def ends_elsewhere(name: str, args: Mapping[str, Any], num: int, per: str, epochs: int) -> str:
    """A line on a scheduler that states another length than the `num` times that the training steps it; or nothing.

    `name` is its class, if it is torch's own; `num_training_steps` states a length in any. A length of one less is no
    mistake: then the last update has the last value of the schedule.
    """
    for key, value in args.items():
        if key == "num_training_steps":
            after = "the schedule has ended by then"
        elif (name, key) in _AFTER:
            after = _AFTER[name, key]
        else:
            continue
        states = max(value, default=None) if isinstance(value, list) else value
        if not isinstance(states, int) or isinstance(states, bool):
            continue
        if states < num - 1 and after:
            what = after
        elif states > num + (key == "total_steps"):
            what = "the training ends before that"
        else:
            continue
        advice = "" if key == "milestones" else f"; {key}: auto is the whole training"
        advice += ", and per: epoch counts epochs" if per == "step" and states == epochs else ""
        stated = f"{name} has {key} {value}" if name else f"its {key} is {value}"
        return f"scheduler: {stated}, and the training steps it {num} times, once each {per}: {what}{advice}"
    return ""
