"""The file in which the driver notes a run's progress while it runs, for `dp-ray watch` and `dp-ray list`."""

import json
from typing import Any

from dp_ray.errors import StorageError
from dp_ray.storage import Storage

PROGRESS = "progress.json"


def read_progress(run: Storage) -> dict[str, Any]:
    """The progress that the driver noted last; empty if the file is missing or damaged, for it only informs."""
    try:
        values = json.loads(run.read_text(PROGRESS))
    except (StorageError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
