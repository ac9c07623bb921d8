"""A job as a RayJob for KubeRay: begin at `Manifest`.

A RayJob has no policy by exit status: with `backoffLimit` it runs every failed job again, each time on a new cluster.
So the job's entrypoint (`cli/in_kubernetes.py`) notes its last exit status in the run directory, with an id that the
manifest's printing draws. A later cluster of the same manifest that finds the job done, or a failure that no new try
would mend, ends with that status at once.

The pods of a manifest end by hooks: the head's stops the run, to be run again, and a worker's drains its node, so
that the run leaves it (`pod.py`).
"""

import hashlib
import io
import re
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dp_ray.cluster.internals.variables import JOB_STOP_WAIT
from dp_ray.errors import BAD_JOB, DONE, FAILED, JobError
from dp_ray.records import IGNORE, Record
from dp_ray.rundir.files import LAST_END
from dp_ray.storage import Storage

ID = "DP_RAY_MANIFEST"  # the variable of a job that holds its manifest's id
MOUNT = "/storage"  # where pods find the claim
QUEUE = "kueue.x-k8s.io/queue-name"
# Rules of Kubernetes for names, each with what it says.
_LABEL, _VALUE = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
LABEL = re.compile(_LABEL), "1 to 63 small letters, digits and '-', with a letter or digit at both ends"
OBJECT = (
    re.compile(rf"(?=.{{1,253}}$){_DOMAIN}"),
    "small letters, digits, '-' and '.', with a letter or digit at both ends, as of objects",
)
VALUE = (
    re.compile(f"(?:{_VALUE})?"),
    "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
)
KEY = re.compile(f"(?:{_DOMAIN}/)?{_VALUE}"), "NAME or DOMAIN/NAME, as keys of labels are"
IMAGE = (
    re.compile(
        r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9._-]+(?:/[a-z0-9._-]+)*(?::\w[\w.-]{0,127})?(?:@\w+:[0-9a-f]{32,})?"
    ),
    "an image, as registry.example/team/name:tag, whose name has small letters",
)
OWN_SECONDS = 30  # of a pod's grace, in which Ray ends after the run has
GPU = "nvidia.com/gpu"
LONGEST, HASH = 47, 6  # characters of a RayJob's name, KubeRay's limit; and of the hash that tells long ones apart
TIME = (1980, 1, 1, 0, 0, 0)  # of each file in a package, so that the same files make the same bytes


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


def note_end(run: Storage, manifest: str, exit_status: int) -> None:
    """Note how a job of this manifest has ended."""
    run.create()
    LAST_END_JSON.write(run, LastEnd(manifest, exit_status))


@dataclass(frozen=True)
class Pods:
    """What the pods of one kind ask for: CPUs, memory and /dev/shm as Kubernetes writes them, and GPUs."""

    cpus: str
    memory: str
    shm: str
    gpus: int = 0


@dataclass(frozen=True)
class Manifest:
    """A RayJob that runs `command`, the words after `python -m dp_ray.cli.in_kubernetes`, on `nodes` worker pods.

    `run_dir` is the run's directory as the pods see it. `code` is the URL of the package that holds the code, or the
    folder of the image that does. `nodes` is the fewest and the most. `grace` is how many seconds a pod has to end:
    more than a step and a checkpoint last. `secrets` are Kubernetes secrets whose values become variables.
    """

    name: str
    image: str
    command: tuple[str, ...]
    run_dir: str
    code: str
    nodes: tuple[int, int]
    head: Pods
    workers: Pods
    ray_version: str
    claim: str | None = None
    namespace: str | None = None
    queue: str | None = None
    grace: int = 600
    max_retries: int = 20
    secrets: tuple[str, ...] = ()
    service_account: str | None = None
    tolerations: tuple[dict[str, str], ...] = ()
    selectors: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def text(self) -> str:
        """Return the manifest's YAML."""
        return yaml.dump(self.to_json(), Dumper=_Dumper, sort_keys=False, width=118)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest."""
        variables = {ID: self.id, JOB_STOP_WAIT: str(self.grace)}
        environment: dict[str, Any] = {"env_vars": variables}
        if "://" in self.code:
            environment["working_dir"] = self.code
        else:
            variables["PYTHONPATH"] = self.code
        at_least, at_most = self.nodes
        stop = ["python", "-m", "dp_ray", "stop", "--run-again", self.run_dir]
        leave = ["python", "-m", "dp_ray.places.pod", str(self.grace)]
        metadata = {"name": self.name, "namespace": self.namespace, "labels": self.queue and {QUEUE: self.queue}}
        return {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {key: value for key, value in metadata.items() if value},
            "spec": {
                "entrypoint": " ".join(map(_word, ["python", "-m", "dp_ray.cli.in_kubernetes", *self.command])),
                "runtimeEnvYAML": _Block(yaml.safe_dump(environment, sort_keys=False, width=10_000)),
                "shutdownAfterJobFinishes": True,
                "backoffLimit": self.max_retries,
                "rayClusterSpec": {
                    "rayVersion": self.ray_version,
                    "authOptions": {"mode": "token"},
                    **({"enableInTreeAutoscaling": True} if at_least < at_most else {}),
                    "headGroupSpec": {
                        "rayStartParams": {"num-cpus": "0"},  # it has the driver; the worker pods have the workers
                        "template": self._template("ray-head", self.head, stop),
                    },
                    "workerGroupSpecs": [
                        {
                            "groupName": "workers",
                            "replicas": at_least,
                            "minReplicas": at_least,
                            "maxReplicas": at_most,
                            "rayStartParams": {},
                            "template": self._template("ray-worker", self.workers, leave),
                        }
                    ],
                },
            },
        }

    def _template(self, name: str, pods: Pods, at_end: list[str]) -> dict[str, Any]:
        """Return the template of the pods of one kind; each runs `at_end` before it ends, and waits for it."""
        limits: dict[str, Any] = {"cpu": pods.cpus, "memory": pods.memory, **({GPU: pods.gpus} if pods.gpus else {})}
        shared = {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shm}}
        volumes: list[dict[str, Any]] = [shared]
        mounts = [{"name": "shared-mem", "mountPath": "/dev/shm"}]
        if self.claim is not None:
            volumes.append({"name": "storage", "persistentVolumeClaim": {"claimName": self.claim}})
            mounts.append({"name": "storage", "mountPath": MOUNT})
        container = {
            "name": name,
            "image": self.image,
            **({"envFrom": [{"secretRef": {"name": secret}} for secret in self.secrets]} if self.secrets else {}),
            "resources": {"limits": limits, "requests": limits.copy()},
            "volumeMounts": mounts,
            "lifecycle": {"preStop": {"exec": {"command": at_end}}},
        }
        spec: dict[str, Any] = {
            "terminationGracePeriodSeconds": self.grace + OWN_SECONDS,
            "serviceAccountName": self.service_account,
            # Not for the head: it needs no GPU, and is not to be taken away with the machines that are cheap.
            "nodeSelector": dict(self.selectors) if name == "ray-worker" else None,
            "tolerations": [dict(each) for each in self.tolerations] if name == "ray-worker" else None,
            "containers": [container],
            "volumes": volumes,
        }
        return {"spec": {key: value for key, value in spec.items() if value}}


class _Block(str):
    """A text of several lines, as it is."""


class _Dumper(yaml.SafeDumper):
    """Writes such texts as blocks."""


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def _word(word: str) -> str:
    """Quote a word of the entrypoint, which the submitter's shell reads."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\"'\"'") + "'"


def parse_toleration(text: str) -> dict[str, str]:
    """Parse a toleration: KEY, KEY=VALUE, and :EFFECT behind it.

    >>> parse_toleration("nvidia.com/gpu=present:NoSchedule")
    {'key': 'nvidia.com/gpu', 'operator': 'Equal', 'value': 'present', 'effect': 'NoSchedule'}
    >>> parse_toleration("spot")
    {'key': 'spot', 'operator': 'Exists'}
    """
    rest, _, effect = text.partition(":")
    key, equals, value = rest.partition("=")
    if not all((key, KEY[0].fullmatch(key), VALUE[0].fullmatch(value))) or effect not in (
        "",
        "NoSchedule",
        "PreferNoSchedule",
        "NoExecute",
    ):
        raise JobError(f"--toleration {text}: must be KEY[=VALUE][:NoSchedule|PreferNoSchedule|NoExecute]")
    how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **how, **({"effect": effect} if effect else {})}


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


def check_name(option: str, name: str, rule: tuple[re.Pattern[str], str]) -> None:
    """Raise JobError if a name that an option gives does not follow a rule of Kubernetes."""
    if not rule[0].fullmatch(name):
        raise JobError(f"{option} {name}: must be {rule[1]}")


def zipped(folders: Mapping[str, Path], files: Iterable[tuple[str, Path]]) -> tuple[str, bytes]:
    """Pack files into a zip; return its name, by the hash of its bytes, and the bytes.

    `files` are a folder's name in `folders` ("" for the root), and a path below that. As Ray wants it, all is in one
    folder of the zip.
    """
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as package:
        for name, path in sorted((str(Path("code", of, path.relative_to(folders[of]))), path) for of, path in files):
            info = zipfile.ZipInfo(name, TIME)
            info.external_attr = (0o755 if path.stat().st_mode & 0o100 else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            package.writestr(info, path.read_bytes())
    data = whole.getvalue()
    return f"code-{hashlib.sha256(data).hexdigest()[:16]}.zip", data
