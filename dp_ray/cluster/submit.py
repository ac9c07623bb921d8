"""Submit a command as a Ray job and follow it to its end."""

import asyncio
import json
import logging
import os
import shlex
import sys
import uuid
from typing import Any

from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.job_submission import JobStatus, JobSubmissionClient

from dp_ray.cluster.connect import authenticate, code_to_ship
from dp_ray.errors import ClusterError


def submit_and_follow(address: str, program: list[str], secrets: list[str]) -> int:
    """Run `program` on the cluster behind a dashboard, with the working directory shipped; its exit status.

    `secrets` are settings whose values nobody shall see: Ray logs a job's entrypoint and its runtime_env, and the
    dashboard shows both. They are left in the memory of the head node, under a random name, which the program gets as
    `--env-from`, takes and removes. Raises ClusterError where no dashboard answers.
    """
    logging.getLogger("ray").setLevel("ERROR")
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        client = JobSubmissionClient(address)
        program = [*program, "--env-from", _leave(client, secrets)] if secrets else program
        submission = client.submit_job(entrypoint=shlex.join(program), runtime_env=code_to_ship())
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"no Ray dashboard takes the job at {address}: {error}") from error
    print(f"submitted as {submission}", file=sys.stderr, flush=True)
    asyncio.run(_follow(client, submission))
    status = client.get_job_status(submission)
    info = client.get_job_info(submission)
    if status == JobStatus.SUCCEEDED:
        return 0
    return info.driver_exit_code or 1


def _leave(client: Any, secrets: list[str]) -> str:
    """Leave settings as Ray's client leaves packages of code; Ray removes what nobody has used for ten minutes."""
    name = f"_ray_pkg_{uuid.uuid4().hex}.zip"
    answer = client._do_request("PUT", f"/api/packages/gcs/{name}", data=json.dumps(secrets).encode())
    if answer.status_code != 200 or not client._package_exists(f"gcs://{name}"):
        raise RuntimeError(f"it does not take the values of env: status {answer.status_code}")
    return f"gcs://{name}"


def take_settings(place: str) -> list[str]:
    """The settings that `submit` left for this job, which are removed; ClusterError where they are gone."""
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        authenticate(address)
        head = GcsClient(address=address)
        left = head.internal_kv_get(place.encode(), None)
        head.internal_kv_del(place.encode(), False, None)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"the values of env cannot be fetched from Ray at {address!r}: {error}") from error
    if left is None:
        raise ClusterError("the values of env are kept for one job, ten minutes long, and are gone: submit it again")
    return list(json.loads(left))


async def _follow(client: Any, submission: str) -> None:
    async for text in client.tail_job_logs(submission):
        print(text, end="", flush=True)
