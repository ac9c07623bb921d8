"""The history of a training: its columns, and the row of a step. `rundir/history.py` has its files.

Begin at `history_columns` and `history_row`: what is to stand in the history is made and named here alone.
"""

import math
import re
from collections.abc import Mapping, Sequence

COUNTS = ("step", "epoch", "rows")  # whole numbers
RATE, NORM = "learning_rate", "gradient_norm"
CLOCKED = ("rows_per_second", "data_wait_seconds")  # what the clock says: never the same twice
NOT_MEASURED = {*COUNTS, RATE, NORM, *CLOCKED}
# Those that every history has. Each metric adds one of its own name, after `loss`.
COLUMNS = ("step", "epoch", "loss", RATE, NORM, "rows", *CLOCKED, "epoch_loss")
ROWS_OF, LOSS_OF = "rows_of_", "loss_of_"  # before a source's name: of a mixture each source has these two
DIGEST = "outputs_digest"  # the metric that `verify` adds
_OF_FURTHER = re.compile(rf"({RATE}|{NORM})_\d+")


def history_columns(names: Sequence[str], extra: Sequence[str], sources: Sequence[str] = ()) -> dict[str, type]:
    """Return the columns, each int or float, in order: those of every step, then `extra`, which only some have."""
    counts = {*COUNTS, *(f"{ROWS_OF}{name}" for name in sources)}
    rows = ["rows", *(f"{ROWS_OF}{name}" for name in sources)]
    every = ["step", "epoch", *names, RATE, NORM, *rows, *CLOCKED, *extra]
    return {name: int if name in counts else float for name in every}


def history_row(
    step: int,
    epoch: int,
    means: Mapping[str, float | None],
    update: tuple[float, float],
    rows: int,
    clocked: tuple[float, float],
    rows_of: Mapping[str, int] | None,
) -> dict[str, float | None]:
    """Return the row of a step.

    `means` are those of the loss and the metrics, None if there was no row; `update` is its learning rate and its
    gradient norm; `clocked` the seconds that it took, and those that it waited for data. `rows_of` has the rows of
    each source of a mixture, also those that are set aside.
    """
    row: dict[str, float | None] = {"step": step, "epoch": epoch}
    for name, mean in means.items():
        if mean is not None or rows_of is None or not name.startswith(LOSS_OF):  # a batch may lack a source
            row[name] = math.nan if mean is None else mean
    seconds, waited = clocked
    row |= {RATE: update[0], NORM: update[1], "rows": rows}
    row |= zip(CLOCKED, (rows / seconds if seconds > 0 else 0.0, waited), strict=True)
    return row | {f"{ROWS_OF}{name}": count for name, count in (rows_of or {}).items()}


def of_further(number: int) -> tuple[str, str]:
    """Return the columns of an optimizer after the first, which is number 0: of its rate and, in a loop, its norm."""
    return f"{RATE}_{number}", f"{NORM}_{number}"


def is_taken(name: str) -> bool:
    """Return whether each history has a column of this name, or one with an evaluation may have it."""
    return name in COLUMNS or name.startswith("eval_")


def is_measured(name: str) -> bool:
    """Return whether a column is a loss or a metric, and no place, rate, norm or time."""
    return name not in NOT_MEASURED and not name.startswith(ROWS_OF) and not is_of_further(name)


def is_of_further(name: str) -> bool:
    """Return whether a column is a rate or a norm of an optimizer after the first."""
    return _OF_FURTHER.fullmatch(name) is not None


def is_of_many(name: str) -> bool:
    """Return whether a training's metric is of an epoch or an evaluation, and not of one batch."""
    return name.startswith(("eval_", "epoch_"))


def is_inner(name: str) -> bool:
    """Return whether a metric was added by `verify` for its own use, and not by the user."""
    return name == DIGEST or (name.startswith("eval_") and name.endswith(f"_{DIGEST}"))
