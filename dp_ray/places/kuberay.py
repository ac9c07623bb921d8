"""What a RayJob of KubeRay needs beside its manifest: names that Kubernetes takes, and a note of its end.

A RayJob has no policy by exit status: with `backoffLimit` it runs every failed job again, each time on a new cluster.
So the job's entrypoint (`cli/in_kubernetes.py`) notes its last exit status in the run directory, with an id that the
manifest's printing draws. A later cluster of the same manifest that finds the job done, or a failure that no new try
would mend, ends with that status at once.
"""

import hashlib
import re
from dataclasses import dataclass

from dp_ray.errors import BAD_JOB, DONE, FAILED
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import LAST_END
from dp_ray.storage import Storage

ID = "DP_RAY_MANIFEST"  # the variable of a job that holds its manifest's id
# Rules of Kubernetes for names, each with what it says.
CLAIM = (
    re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"),
    "small letters, digits, '-' and '.', with a letter or digit at both ends, as of objects",
)
IMAGE = (
    re.compile(
        r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9._-]+(?:/[a-z0-9._-]+)*(?::\w[\w.-]{0,127})?(?:@\w+:[0-9a-f]{32,})?"
    ),
    "an image, as registry.example/team/name:tag, whose name has small letters",
)
LONGEST, HASH = 47, 6  # characters of a RayJob's name, KubeRay's limit; and of the hash that tells long ones apart


@dataclass(frozen=True)
class LastEnd:
    """The last end of a job in Kubernetes: the id of its manifest, and its exit status."""

    manifest: str
    exit_status: int


LAST_END_JSON = Record[LastEnd | None](LastEnd, LAST_END, missing=None, damaged=IGNORE, unreachable=IGNORE)


def final_status(run: Storage, manifest: str) -> int | None:
    """Return the exit status with which a job of this manifest has ended for good; None if it is to run."""
    note = LAST_END_JSON.read(run)
    is_final = note is not None and note.manifest == manifest and note.exit_status in (DONE, FAILED, BAD_JOB)
    return note.exit_status if note is not None and is_final else None


def kubernetes_name(run_name: str) -> str:
    """Return the name of a run as KubeRay takes it: it begins with a letter, and a long one ends in a hash.

    >>> kubernetes_name("Digits_v1.2"), kubernetes_name("7b-sft")
    ('digits-v1-2', 'job-7b-sft')
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"job-{name}".rstrip("-")
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - HASH - 1].rstrip('-')}-{hashlib.sha256(run_name.encode()).hexdigest()[:HASH]}"
