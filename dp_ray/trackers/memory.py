"""What the run directory remembers of a tracker: its own run, and which steps it has."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.storage import Storage
from dp_ray.text import json_text

TRACKERS = "trackers"


@dataclass(frozen=True)
class Memory:
    """The tracker's run, the first step that it lacks, and the status with which it was ended, if it was."""

    run_id: str | None = None
    next_step: int = 0
    status: str | None = None


def read_memory(run: Storage, name: str) -> Memory:
    """What is remembered of a tracker; nothing if the file is missing or damaged."""
    try:
        values: dict[str, Any] = json.loads(run.child(TRACKERS).read_text(f"{name}.json"))
        return Memory(values["run_id"], int(values["next_step"]), values["status"])
    except (StorageError, ValueError, KeyError, TypeError):
        return Memory()


def write_memory(run: Storage, name: str, memory: Memory) -> None:
    """Remember it. What cannot be written is asked of the tracker again."""
    with suppress(StorageError):
        folder = run.child(TRACKERS)
        folder.create()
        folder.write_text(f"{name}.json", json_text(asdict(memory)) + "\n")
