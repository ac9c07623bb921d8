"""Names the files of a run directory that several modules read, and reads and writes its JSON files.

Each other file is named in the module that writes it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dp_ray.errors import Error, StorageError
from dp_ray.storage import Storage
from dp_ray.text import json_text

RUN = "run.json"  # the job, and which driver runs it
RESULT = "result.json"
BEFORE_RETRY = "before-retry.json"  # the result of a prediction that is retried; gone once the retry has ended well
SHAPES = "shapes.parquet"
SWEEP = "sweep.json"  # in the directory of a sweep: its definition and its trials


def read_json(run: Storage, name: str) -> dict[str, Any]:
    """The mapping in a JSON file; raises StorageError if the file is damaged."""
    try:
        return dict(json.loads(run.read_text(name)))
    except (ValueError, TypeError, RecursionError) as error:
        raise StorageError(f"{run}/{name}: is damaged: {error}") from None


def is_finished(run: Storage) -> bool:
    """Whether a run directory holds a finished run."""
    return run.exists(RESULT) and read_json(run, RESULT).get("status") == "done"


@contextmanager
def damage_told(run: object) -> Iterator[None]:
    """Raise StorageError for whatever a foreign or damaged file of a run makes the block raise."""
    try:
        yield
    except Error:
        raise
    except Exception as error:  # files of any content: each raises what it likes
        first = next(iter(str(error).splitlines()), "")
        raise StorageError(f"{run}: is damaged: {type(error).__name__}: {first}") from error


def write_json(run: Storage, name: str, values: dict[str, Any]) -> None:
    """Write a mapping as a JSON file without secrets, in lines that people can read."""
    run.write_text(name, json_text(values, indent=2) + "\n")
