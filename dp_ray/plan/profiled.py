"""Which steps of which worker a job's `profile` asks to trace."""

import re
from typing import NamedTuple

SLOWEST = "slowest"
FIRST, NUM = 10, 5  # the steps of `profile: slowest`: from FIRST on, or the last NUM of a shorter job
_FORM = re.compile(rf"(?P<first>\d+)(?:-(?P<last>\d+))?(?::(?P<rank>\d+|{SLOWEST}))?")
_SAYS = "must be STEPS or STEPS:RANK, like 10-20 or 10-20:3, or a rank of 'slowest', or 'slowest' alone"


class Profiled(NamedTuple):
    """The steps from `first` to `last`, both included, of one rank; None: of the one that is slowest so far."""

    first: int
    last: int
    rank: int | None

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step <= self.last


def profiled_of(text: str, total_steps: int | None = None) -> Profiled:
    """What a job's `profile` asks for; raises ValueError if it is malformed, or not within `total_steps`."""
    if text == SLOWEST:
        first = FIRST if total_steps is None else max(0, min(FIRST, total_steps - NUM))
        last = first + NUM - 1 if total_steps is None else min(first + NUM, total_steps) - 1
        return Profiled(first, last, None)
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{_SAYS}; got {text!r}")
    first, last = int(match["first"]), int(match["last"] or match["first"])
    if last < first:
        raise ValueError(f"the last step must not be before the first; got {text!r}")
    if total_steps is not None and last >= total_steps:
        raise ValueError(f"the job has {total_steps} steps, numbered from 0 to {total_steps - 1}; got {text!r}")
    return Profiled(first, last, None if match["rank"] == SLOWEST else int(match["rank"] or 0))
