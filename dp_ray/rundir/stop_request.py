"""A request to stop a run, left in its directory for its driver."""

import json
from contextlib import suppress

from dp_ray.errors import StorageError
from dp_ray.storage import Storage
from dp_ray.system.process import this_process

REQUEST = "stop.json"


def leave_request(run: Storage, token: str) -> None:
    """Ask the driver whose claim has this token to stop; another driver of the run does not heed it.

    Raises StorageError if the directory cannot be written to.
    """
    run.write_text(REQUEST, json.dumps({"token": token, "by": str(this_process())}) + "\n")


def take_request(run: Storage, token: str) -> str | None:
    """Who asks the driver of this token to stop, None if nobody does; the request is removed."""
    with suppress(StorageError, ValueError, KeyError, TypeError):
        if run.exists(REQUEST):
            request = json.loads(run.read_text(REQUEST))
            run.delete(REQUEST)
            if request["token"] == token:
                return str(request["by"])
    return None
