"""Submit a command as a Ray job and follow it to its end."""

import asyncio
import logging
import sys
from typing import Any

from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.job_submission import JobStatus, JobSubmissionClient

from dp_ray.errors import ClusterError
from dp_ray.runner.cluster import code_to_ship


def submit_and_follow(address: str, entrypoint: str) -> int:
    """Run `entrypoint` on the cluster behind a dashboard, with the working directory shipped; its exit status.

    Raises ClusterError where no dashboard answers.
    """
    logging.getLogger("ray").setLevel("ERROR")
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        client = JobSubmissionClient(address)
        submission = client.submit_job(entrypoint=entrypoint, runtime_env=code_to_ship())
    except (ConnectionError, RuntimeError) as error:
        raise ClusterError(f"no Ray dashboard takes the job at {address}: {error}") from error
    print(f"submitted as {submission}", file=sys.stderr, flush=True)
    asyncio.run(_follow(client, submission))
    status = client.get_job_status(submission)
    info = client.get_job_info(submission)
    if status == JobStatus.SUCCEEDED:
        return 0
    return info.driver_exit_code or 1


async def _follow(client: Any, submission: str) -> None:
    async for text in client.tail_job_logs(submission):
        print(text, end="", flush=True)
