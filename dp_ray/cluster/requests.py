"""What workers are asked to do between two steps, and why.

It imports nothing of dp_ray, so that the channel's process, which holds the request, stays small.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Ask(StrEnum):
    """What workers are asked to do between two steps."""

    NOTHING = ""
    SAVE = "save"
    STOP = "stop"  # to be started again, with more or fewer workers
    END = "end"  # for good: no later request replaces it


class Why(Enum):
    """Why workers are asked for something."""

    NOTHING = "nothing is asked"
    DRAIN = "nodes are about to be taken away"
    GROWTH = "there is room for more workers"
    USER = "the user stops the run"


@dataclass(frozen=True)
class Request:
    """What workers are asked to do; `text` gives the reason with its numbers, for people."""

    ask: Ask
    why: Why
    text: str


NOTHING = Request(Ask.NOTHING, Why.NOTHING, "")
END = Request(Ask.END, Why.USER, Why.USER.value)
