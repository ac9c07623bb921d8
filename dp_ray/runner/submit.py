"""Submit a command as a Ray job and follow it to its end."""

import asyncio
import sys
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from dp_ray.errors import ClusterError
from dp_ray.runner.cluster import code_to_ship


def submit_and_follow(address: str, entrypoint: str) -> int:
    """Run `entrypoint` on the cluster behind a dashboard, with the working directory shipped; its exit status.

    Raises ClusterError where no dashboard answers.
    """
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
