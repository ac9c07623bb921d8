"""Submits a command as a Ray job and follows it to its end."""

import asyncio
import json
import logging
import shlex
import sys
from typing import Any

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from dp_ray.cluster.connect import address_of, authenticate, code_to_ship
from dp_ray.cluster.ray_internals.core import find_users_token, leave_on_head, take_from_head
from dp_ray.errors import ClusterError


def submit_and_follow(address: str, program: list[str], secrets: list[str]) -> int:
    """Run `program` on the cluster behind a dashboard, with the working directory shipped; return its exit status.

    `secrets` are settings whose values must stay hidden. Ray logs a job's entrypoint and its runtime_env, and the
    dashboard shows both. So the secrets wait in the memory of the head node under a random name. The program gets the
    name as `--env-from`, takes the secrets and removes them. Raises ClusterError if no dashboard answers.
    """
    logging.getLogger("ray").setLevel("ERROR")
    find_users_token()
    try:
        client = JobSubmissionClient(address)
        if secrets:
            program = [*program, "--env-from", leave_on_head(client, json.dumps(secrets).encode())]
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


def take_settings(place: str) -> list[str]:
    """Take and remove the settings that `submit` left for this job; raises ClusterError if they are gone."""
    address = address_of(None) or ""
    try:
        authenticate(address)
        left = take_from_head(address, place)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ClusterError(f"the values of env cannot be fetched from Ray at {address!r}: {error}") from error
    if left is None:
        raise ClusterError(
            "the values of env are gone: Ray keeps them for ten minutes, and one job takes them; submit the job again"
        )
    return list(json.loads(left))


async def _follow(client: Any, submission: str) -> None:
    async for text in client.tail_job_logs(submission):
        print(text, end="", flush=True)
