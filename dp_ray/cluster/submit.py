"""Submit a command as a Ray job; find, follow and stop submitted ones.

`submit_and_follow` is what `dp-ray submit` does, with a `Dashboard` as the connection to the cluster.
"""

import asyncio
import json
import logging
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from dp_ray.cluster.connect import RUN_NAME, address_of, authenticate, code_to_ship
from dp_ray.cluster.internals.core import find_users_token, leave_on_head, log_file, packed_files, take_from_head
from dp_ray.cluster.internals.variables import AUTH_TOKEN, JOB_STOP_WAIT
from dp_ray.errors import DONE, FAILED, INTERRUPTED, ClusterError, JobError
from dp_ray.text import counted, harmless, hide, listed

# How long Ray waits for a job that it has asked to stop before it kills it: as long as a step and a checkpoint last.
STOP_SECONDS = 600
AWAY_SECONDS = 30.0  # so long a dashboard may not answer
LOOK_SECONDS = 0.5
OWN = "dp_ray-own-"  # before the ids of jobs that are no user's

STATUSES = {
    JobStatus.PENDING: "waiting",
    JobStatus.RUNNING: "running",
    JobStatus.SUCCEEDED: "done",
    JobStatus.FAILED: "failed",
    JobStatus.STOPPED: "stopped",
}
Say = Callable[[str], None]


class Dashboard:
    """The jobs that a cluster's dashboard knows. Its methods raise ClusterError if the dashboard does not answer."""

    def __init__(self, address: str) -> None:
        for name in ("ray", *(kind.__module__ for kind in JobSubmissionClient.__mro__)):
            logging.getLogger(name).setLevel("ERROR")  # the client's modules have levels of their own
        find_users_token()
        self.address = address
        try:
            with self._answering():
                self.client = JobSubmissionClient(address)
        except ValueError:
            raise JobError(f"--address {address!r}: must be a dashboard's, like http://HEAD:8265") from None

    def submit(self, program: list[str], secrets: list[str], name: str, code: dict[str, Any]) -> str:
        """Submit `program` with the runtime_env `code`, as a run called `name`; return the job's id.

        `secrets` are settings whose values must stay hidden. Ray logs a job's entrypoint and its runtime_env, and
        the dashboard shows both. So the secrets wait in the memory of the head node under a random name. The program
        gets the name as `--env-from`, takes the secrets and removes them.
        """
        with self._answering():
            if secrets:
                program = [*program, "--env-from", leave_on_head(self.client, json.dumps(secrets).encode())]
            submitted: str = self.client.submit_job(
                entrypoint=shlex.join(program),
                runtime_env={**code, "env_vars": {JOB_STOP_WAIT: str(STOP_SECONDS)}},
                metadata={RUN_NAME: name},
                submission_id=f"{name}-{uuid.uuid4().hex[:8]}",
            )
        return submitted

    def start(self, program: list[str]) -> str:
        """Start a program of dp_ray's own as a job, without the working directory; return its id, which it also gets.

        It is not among the `jobs`. The caller ends it by `ask_to_stop`.
        """
        submission = f"{OWN}{uuid.uuid4().hex[:12]}"
        with self._answering():
            self.client.submit_job(
                entrypoint=shlex.join([*program, submission]),
                runtime_env={"py_modules": code_to_ship()["py_modules"]},
                submission_id=submission,
            )
        return submission

    @contextmanager
    def reading(self, node_id: str, name: str) -> Iterator[Iterator[bytes]]:
        """Within the block, read a file in the log folder of a node, in pieces; raises FileNotFoundError."""
        with self._answering(), log_file(self.client, node_id, name, AWAY_SECONDS) as pieces:
            yield pieces

    def jobs(self) -> list[JobDetails]:
        """Return the submitted jobs, the newest first."""
        with self._answering():
            jobs = [job for job in self.client.list_jobs() if not (job.submission_id or OWN).startswith(OWN)]
        return sorted(jobs, key=lambda job: -(job.start_time or 0))

    def find(self, name: str) -> JobDetails:
        """Return the job with this id, or the newest run of this name; raises JobError if there is none."""
        jobs = self.jobs()
        for job in jobs:
            if name in (job.submission_id, run_name_of(job)):
                return job
        known = listed(dict.fromkeys(run_name_of(job) or job.submission_id for job in jobs)) or "no submitted job"
        raise JobError(f"{self.address} has no job {name!r}; it has {known}")

    def details(self, submission: str) -> JobDetails:
        """Return the job with this id."""
        with self._answering():
            return self.client.get_job_info(submission)

    def logs(self, submission: str) -> str:
        """Return all that a job has printed so far."""
        with self._answering():
            text: str = self.client.get_job_logs(submission)
        return text

    def ask_to_stop(self, submission: str) -> None:
        """Have Ray ask a job to stop: dp_ray stops the run after its current step, and keeps it."""
        with self._answering():
            self.client.stop_job(submission)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise ClusterError(
                f"the Ray at {self.address} refuses the token, which is that of {AUTH_TOKEN} or ~/.ray/auth_token: "
                f"{error.message.splitlines()[0]}"
            ) from None
        except (ConnectionError, RuntimeError, requests.RequestException) as error:
            raise ClusterError(f"no Ray dashboard answers at {self.address}: {error}") from None  # frames say no more


@dataclass
class Follower:
    """A printer of all that a job prints, each word once, over interruptions of the connection."""

    dashboard: Dashboard
    submission: str
    printed: int = 0  # characters

    def follow(self) -> int:
        """Print all that the job prints until it ends, and return its exit status.

        Raises ClusterError if the dashboard is away for long, or if the job failed before it ran.
        """
        until = time.monotonic() + AWAY_SECONDS
        while True:
            with suppress(aiohttp.ClientError, OSError, RuntimeError):  # the connection broke
                asyncio.run(self._tail())
            try:
                job = self.dashboard.details(self.submission)
                if job.status.is_terminal():
                    break
                until = time.monotonic() + AWAY_SECONDS
            except ClusterError as error:
                if time.monotonic() > until:
                    at = self.dashboard.address
                    raise ClusterError(
                        f"the cluster at {at} went away, and whether the job goes on is not known ({error}); "
                        f"dp-ray logs -f {self.submission} --address {at} follows it again"
                    ) from error
            time.sleep(LOOK_SECONDS)
        self._print(self.dashboard.logs(self.submission)[self.printed :])  # what came after the last look
        if job.status == JobStatus.FAILED and job.driver_exit_code is None:
            raise ClusterError(f"the job did not run to its end: {job.message}")
        return job_exit_status(job)

    async def _tail(self) -> None:
        skipped = 0
        async for text in self.dashboard.client.tail_job_logs(self.submission):  # from the job's first word on
            new = text[max(0, self.printed - skipped) :]
            skipped += len(text)
            self._print(new)

    def _print(self, text: str) -> None:
        print(hide(text), end="", flush=True)
        self.printed += len(text)


def job_exit_status(job: JobDetails) -> int:
    """Return the exit status of a job that has ended: its driver's; 130 of one that was stopped."""
    if job.status == JobStatus.SUCCEEDED:
        return DONE
    return job.driver_exit_code or (INTERRUPTED if job.status == JobStatus.STOPPED else FAILED)


def run_name_of(job: JobDetails) -> str | None:
    """Return the name of the run that a job runs; None if it runs, or has begun, none."""
    return (job.metadata or {}).get(RUN_NAME)


def submit_and_follow(address: str, program: list[str], secrets: list[str], name: str, storage: str) -> int:
    """Run `program` on the cluster behind a dashboard as the run `name`, follow it, and return its exit status.

    Raises ClusterError if no dashboard answers.
    """
    dashboard, code = Dashboard(address), code_to_ship()
    _say(sent(code))
    submission = dashboard.submit(program, secrets, name, code)
    _say(f"submitted as {submission}")
    is_below_home = "://" not in storage and not storage.startswith(("/", "~"))
    where = f"{storage.rstrip('/')}/{name}{' in the home of the head node' if is_below_home else ''}"
    _say(f"the run will lie in {hide(where)}; dp-ray fetch {name} --address {dashboard.address} brings it here")
    return follow(dashboard, submission)


def follow(dashboard: Dashboard, submission: str) -> int:
    """Follow a job to its end, and return its exit status; after Ctrl-C the job goes on."""
    try:
        return Follower(dashboard, submission).follow()
    except KeyboardInterrupt:
        at = f"{submission} --address {dashboard.address}"
        _say(f"the job goes on; dp-ray logs -f {at} follows it, dp-ray stop {at} stops it")
        return INTERRUPTED


def stop_job(dashboard: Dashboard, name: str, waits: bool, say: Say) -> str:
    """Stop the submitted run of a name or id, and wait for its end if `waits`; return what became of it.

    Raises JobError if it is not running.
    """
    job = dashboard.find(name)
    if job.status.is_terminal():
        raise JobError(f"{job.submission_id} is not running: it is {STATUSES[job.status]}")
    dashboard.ask_to_stop(job.submission_id)
    say(f"asked {job.submission_id} to stop after its current step")
    if not waits:
        return "it was asked to stop"
    while not job.status.is_terminal():
        time.sleep(LOOK_SECONDS)
        job = dashboard.details(job.submission_id)
    last = dashboard.logs(job.submission_id).strip().splitlines()[-1:]
    return f"it is {STATUSES[job.status]}{''.join(f': {line}' for line in last)}"


def sent(code: dict[str, Any]) -> str:
    """Return a line on what the runtime_env `code` sends: files, bytes, and the largest one."""
    folder = Path(code["working_dir"])
    sizes = {path: path.stat().st_size for path in packed_files(str(folder), code["excludes"])}
    largest = max(sizes, key=lambda path: sizes[path], default=folder)
    return (
        f"sends {counted(len(sizes), 'file')} of {folder} ({in_megabytes(sum(sizes.values()))}, the largest is "
        f"{largest.relative_to(folder)}) and dp_ray, unless the cluster has them; what a .gitignore names is not sent"
    )


def in_megabytes(size: float) -> str:
    """Return bytes as text: `3.2 MB`."""
    return f"{size / 1e6:,.1f} MB"


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


def _say(text: str) -> None:
    print(harmless(text), file=sys.stderr, flush=True)
