"""What workers are given and asked: their channel, requests between two steps, and the terms of their job.

It imports nothing of dp_ray, so that the processes of the channel and of Ray Train's controller stay small.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

GROUP = "DP_RAY_WORKER_GROUP"  # the environment variable with the id that all workers have that were started together


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver hands to every worker when it starts; `number` is that of the job that runs."""

    channel: Any
    keep_prints: bool
    driver_node: str = ""
    number: int = 0


class Ask(StrEnum):
    """What workers are asked to do between two steps."""

    NOTHING = ""
    SAVE = "save"
    RESTART = "restart"  # stop, to be started again with more or fewer workers
    STOP = "stop"  # for good: no later request replaces it while the job lasts


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
STOP = Request(Ask.STOP, Why.USER, Why.USER.value)


@dataclass(frozen=True)
class Terms:
    """What is known of a job without unpickling it; `number` counts a session's jobs from 1, 0: none runs.

    `can_stop` says whether the job keeps work to resume from, `is_last` whether the session ends with it.
    """

    number: int = 0
    workers: int = 0
    retries: int = 3
    can_stop: bool = True
    is_last: bool = False


IDLE = Terms()
