"""What a task tells while it runs, beside its reports of shapes."""

from collections.abc import Callable
from typing import Any, NamedTuple

Send = Callable[[Any], None]


class Note(NamedTuple):
    """Something that the user should know."""

    text: str


class Measured(NamedTuple):
    """What an evaluation measured, over the whole dataset."""

    metrics: dict[str, float]
