"""Names the files of a run directory that several modules read, and reads and writes its JSON files.

Each other file is named in the module that writes it.
"""

import json
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.storage import Storage

RUN = "run.json"  # the job, and which driver runs it
RESULT = "result.json"
SHAPES = "shapes.parquet"


def read_json(run: Storage, name: str) -> dict[str, Any]:
    """The mapping in a JSON file; raises StorageError if the file is damaged."""
    try:
        return dict(json.loads(run.read_text(name)))
    except (ValueError, TypeError) as error:
        raise StorageError(f"{run}/{name}: is damaged: {error}") from None


def write_json(run: Storage, name: str, values: dict[str, Any]) -> None:
    """Write a mapping as a JSON file, in lines that people can read."""
    run.write_text(name, json.dumps(values, indent=2) + "\n")
