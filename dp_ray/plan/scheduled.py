"""How often a training steps its scheduler, and what to say of one that ends before it."""

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
        f"times, once each {per}; set its total_steps for the whole training, or train no longer than it lasts"
    )
