"""The command that writes a job as a RayJob for Kubernetes: kuberay."""

import logging
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import click

from dp_ray.cli import options
from dp_ray.cli.options import KeyOptions, say, take
from dp_ray.errors import JobError
from dp_ray.job.files import load_job
from dp_ray.text import hide

QUANTITY = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[mkMGTPE]|[eE]\d+)?")
GRACE = click.option(
    "--grace",
    type=click.IntRange(1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="How long a pod has to end: longer than a step and a checkpoint last.",
)


@click.command()
@options.JOB
@options.WORKERS
@options.SETTINGS
@options.NAME
@options.STORAGE
@click.option("--image", required=True, help="The pods' image: Python, Ray, torch and dp_ray, as here.")
@click.option("--claim", help="A PersistentVolumeClaim that all pods mount at /storage; STORAGE is below that then.")
@click.option("--code-in", metavar="DIR", help="Where the image has your code; then none is sent.")
@click.option("--nodes", metavar="N|MIN:MAX", default="1", show_default=True, help="Number of worker pods.")
@click.option("--gpus-per-node", type=click.IntRange(0), default=0, help="GPUs of a worker pod.")
@click.option("--cpus-per-node", default="4", show_default=True, help="CPUs of a worker pod.")
@click.option("--memory-per-node", default="16Gi", show_default=True, help="Memory of a worker pod.")
@click.option("--shm", default="8Gi", show_default=True, help="/dev/shm of a pod, which is part of its memory.")
@click.option("--head-cpus", default="2", show_default=True, help="CPUs of the head pod, which has the driver.")
@click.option("--head-memory", default="16Gi", show_default=True, help="Memory of the head pod.")
@click.option("--toleration", "tolerations", multiple=True, metavar="KEY[=VALUE][:EFFECT]", help="Of worker pods.")
@click.option("--selector", "selectors", multiple=True, metavar="KEY=VALUE", help="A label of the workers' nodes.")
@click.option(
    "--env-from", "secrets", multiple=True, metavar="SECRET", help="A secret whose values become variables."
)
@click.option("--service-account", help="The pods' service account.")
@click.option("--namespace", help="The RayJob's namespace.")
@click.option("--queue", help="The queue of Kueue.")
@click.option("--max-retries", type=click.IntRange(0), default=20, show_default=True, help="New clusters at most.")
@GRACE
@click.option(
    "--out", metavar="FILE", type=click.File("w", atomic=True), default="-", help="File to write; default stdout."
)
def kuberay(job_file: str, out: TextIO, **flags: Any) -> None:
    """Print a job as a RayJob for KubeRay, for `kubectl apply -f`; its code goes to the storage as a zip."""
    from dp_ray.places.kuberay import Manifest, Pods, kubernetes_name, parse_toleration

    keys = take(KeyOptions, flags)
    _check_quantities(flags)
    _check_names(flags)
    storage, code, claim = _storage(job_file, keys, flags["claim"]), flags["code_in"], flags["claim"]
    job = load_job(job_file, {**keys.overrides(), "storage": storage})
    path = Path(job_file)
    if path.is_absolute() or not path.resolve().is_relative_to(Path.cwd()):
        raise JobError(f"{job_file}: name it as it stands below {Path.cwd()}, the folder that holds the code")
    given = ["--workers", keys.workers] if keys.workers else []
    given += [part for setting in keys.settings for part in ("--set", setting)]
    command = (job_file if code is None else f"{code.rstrip('/')}/{job_file}", *given)
    command += ("--name", job.run_name, "--storage", storage)
    _check_no_secrets(command)
    manifest = Manifest(
        name=kubernetes_name(job.run_name),
        image=flags["image"],
        command=command,
        run_dir=f"{storage.rstrip('/')}/{job.run_name}",
        code=_code(storage, claim) if code is None else code,
        nodes=_nodes(flags["nodes"]),
        head=Pods(flags["head_cpus"], flags["head_memory"], flags["shm"]),
        workers=Pods(flags["cpus_per_node"], flags["memory_per_node"], flags["shm"], flags["gpus_per_node"]),
        ray_version=version("ray"),
        tolerations=tuple(map(parse_toleration, flags["tolerations"])),
        selectors=_selectors(flags["selectors"]),
        **{key: flags[key] for key in ("claim", "namespace", "queue", "grace", "max_retries", "secrets")},
        service_account=flags["service_account"],
    )
    click.echo(hide(manifest.text()), nl=False, file=out)


def _storage(job_file: str, keys: KeyOptions, claim: str | None) -> str:
    """Return the storage as the pods see it: a URL, or a folder of the claim."""
    from dp_ray.places.kuberay import MOUNT

    storage = load_job(job_file, keys.overrides()).storage
    if "://" in storage and claim is not None:
        raise JobError(
            f"--claim {claim}: the storage is {hide(storage)}, so no claim is needed; leave one of them out"
        )
    if "://" in storage or (claim is not None and Path(storage).is_relative_to(MOUNT)):
        return storage
    if claim is None:
        raise JobError(
            f"storage: {storage} is a folder of this machine, and pods share none; give --storage s3://bucket/runs, "
            "or --claim NAME, a PersistentVolumeClaim that several pods can mount (ReadWriteMany)"
        )
    if Path(storage).is_absolute():
        raise JobError(f"storage: {storage} is not below {MOUNT}, where the pods mount the claim {claim}")
    return f"{MOUNT}/{storage}"


def _code(storage: str, claim: str | None) -> str:
    """Send the folder and dp_ray to the storage as a zip; return its URL. For a claim, write it here, and say so."""
    from dp_ray.cluster.connect import code_to_ship
    from dp_ray.cluster.internals.core import packed_files
    from dp_ray.places.kuberay import MOUNT, zipped
    from dp_ray.storage import Storage

    logging.getLogger("ray").setLevel("ERROR")  # it tells of ignore files
    code = code_to_ship()
    here, package = Path(code["working_dir"]), Path(code["py_modules"][0])
    files = [("", path) for path in packed_files(str(here), [*code["excludes"], "/code-*.zip"])]
    if not package.is_relative_to(here):
        files += [("dp_ray", path) for path in packed_files(str(package), ())]
    name, data = zipped({"": here, "dp_ray": package}, files)
    if claim is None:
        if "?" in storage:
            raise JobError(f"{hide(storage)}: Ray reads no code from a URL with options; give --code-in")
        target = Storage(storage)
        if target.size(name) != len(data):
            if not target.is_atomic:
                target.create()
            with target.writing(name) as stream:
                stream.write(data)
        say(f"the code is in {target.shown(name)}")
        return f"{storage.rstrip('/')}/{name}"
    Path(name).write_bytes(data)
    say(f"wrote {name}: copy it to the root of the claim {claim} before you apply the manifest, as with `kubectl cp`")
    return f"file://{MOUNT}/{name}"


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = text.partition(":")
    counts = [int(each) for each in (fewest, most or fewest) if each.isdigit()]
    if len(counts) != 2 or not 1 <= counts[0] <= counts[1]:
        raise JobError(f"--nodes {text}: must be a number from 1 on, or MIN:MAX")
    return counts[0], counts[1]


def _check_quantities(flags: dict[str, Any]) -> None:
    for key in ("cpus_per_node", "memory_per_node", "shm", "head_cpus", "head_memory"):
        if not QUANTITY.fullmatch(flags[key]):
            option = f"--{key.replace('_', '-')} {flags[key]}"
            raise JobError(f"{option}: must be a quantity of Kubernetes, as 4, 500m or 16Gi")


def _check_names(flags: dict[str, Any]) -> None:
    from dp_ray.places.kuberay import IMAGE, LABEL, OBJECT, check_name

    rules = {"image": IMAGE, "namespace": LABEL, "queue": LABEL, "claim": OBJECT, "service_account": OBJECT}
    given = [(f"--{key.replace('_', '-')}", flags[key], rule) for key, rule in rules.items() if flags[key]]
    for option, name, rule in (*given, *(("--env-from", secret, OBJECT) for secret in flags["secrets"])):
        check_name(option, name, rule)


def _selectors(texts: tuple[str, ...]) -> dict[str, str]:
    from dp_ray.places.kuberay import KEY, VALUE, check_name

    pairs = [text.partition("=") for text in texts]
    if bad := next((text for text, pair in zip(texts, pairs, strict=True) if not pair[0] or not pair[1]), None):
        raise JobError(f"--selector {bad}: must be KEY=VALUE, a label of nodes")
    for key, _, value in pairs:
        check_name("--selector", key, KEY)
        check_name(f"--selector {key}, value", value, VALUE)
    return {key: value for key, _, value in pairs}


def _check_no_secrets(command: tuple[str, ...]) -> None:
    from dp_ray.system.process import is_env, without_values

    if hide(shlex.join(command)) != shlex.join(command) or any(map(is_env, command)):
        raise JobError(
            f"{hide(shlex.join(without_values(command)))}: a secret would stand in the manifest; "
            "put it into a secret of Kubernetes, and give --env-from SECRET"
        )
