"""The entrypoint of a job in Kubernetes: `dp-ray run`, which notes how it ended for a later cluster of the manifest.

The program `python -m dp_ray.cli.in_kubernetes JOB.yaml [options of run]`, as `dp-ray kuberay` writes it.
"""

import os
import sys

from dp_ray.cli.main import main, run
from dp_ray.cli.options import KeyOptions, say, take
from dp_ray.errors import BAD_JOB, DONE, Error, exit_status_of
from dp_ray.job.files import load_job
from dp_ray.places.kuberay import ID, LAST_END_JSON, LastEnd, final_status
from dp_ray.rundir.lease import last_alive
from dp_ray.storage import Storage, located


def run_unless_ended(arguments: list[str]) -> int:
    """Run the job, unless a cluster of the same manifest has ended it for good; return its exit status."""
    manifest, run_dir = os.environ[ID], _run_dir(arguments)
    status = None if run_dir is None else final_status(run_dir, manifest)
    if status == DONE:
        say("a cluster of this manifest has done the job")
    elif status is not None:
        say(
            f"a cluster of this manifest has ended the job with exit status {status}, which a new try does not mend; "
            "its log has the error; to run the job again, print the manifest again"
        )
    if status is not None:
        return status
    sys.argv = ["dp-ray", "run", *arguments]
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if run_dir is not None:
        try:
            if status != BAD_JOB or not last_alive(run_dir)[0]:  # a pod of an earlier try may still run the job
                run_dir.create()
                LAST_END_JSON.write(run_dir, LastEnd(manifest, status))
        except Error as error:  # then a later cluster runs it again
            say(f"{error}: how the job ended is not noted")
            return status or exit_status_of(error)
    return status


def _run_dir(arguments: list[str]) -> Storage | None:
    """Return the run's directory; None if the job is wrong: then the run says so."""
    try:
        with run.make_context("dp-ray run", list(arguments)) as given:
            flags = dict(given.params)
        job = load_job(flags["job_files"][0], take(KeyOptions, flags).overrides())
        return located(job.storage).child(job.run_name)
    except Exception:  # of a job file of any content
        return None


if __name__ == "__main__":
    sys.exit(run_unless_ended(sys.argv[1:]))
