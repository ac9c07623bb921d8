"""Containers of nested inputs and outputs, besides those of Python."""

import dataclasses
from typing import Any, NamedTuple


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Data:
    x: Any
    y: Any = None
