"""Run a page of the docs from its top to its end: each of its files, commands and snippets."""

import ast
import logging
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.__main__
import benchmarks.gpu
import benchmarks.many
from dp_ray.cli import main
from dp_ray.cli.options import KeyOptions
from dp_ray.cluster.internals.variables import AUTH_MODE
from dp_ray.job.files import load_job
from dp_ray.job.job import Job
from tests.support.cluster import ROOT
from tests.support.pages import Block, blocks_of

VERIFIED = "needs Ray: tests/driver/test_training_runs.py verifies a job on Ray"
STAYS = "starts processes that stay: tests/support/hosts.py starts such nodes"
OTHER_MACHINES = "needs a cluster of other machines"
RAYS_OWN = "needs a cluster: tests/cluster/test_submitted.py runs the block on one"
DASHBOARD, PREDICTS = "http://10.0.0.1:8265", "jobs/digits_predict.yaml"
PLAN_OF_8 = "dp-ray plan jobs/characters.yaml --memory --workers 8 --gpu-memory 80"
NEEDS_A_GPU = "is for a machine with a GPU, or prepares one"
DOWNLOAD = "pip download --only-binary=:all: --python-version 3.12"
ON_THE_GPU = "dp-ray run jobs/digits.yaml --workers 1"
ON_TWO_GPUS = "dp-ray run jobs/hugging_face.yaml --workers 2"
ON_HOSTS = "tests/places/test_node.py runs such hosts"
TWO_HOSTS = "-- run jobs/digits.yaml --workers 2 --storage"
ON_SLURM = "needs Slurm: tests/places/test_slurm.py has one"
TO_SLURM = "dp-ray slurm jobs/digits.yaml --nodes 2 --gpus-per-node 8 --time 2:00:00 --workers 8"
NOT_RUN = {
    "pip install .": "tests/test_wheel.py builds the wheel and installs it",
    "dp-ray verify train.yaml --workers 1,2,4": VERIFIED,
    "dp-ray verify jobs/digits.yaml --workers 1,2,3,8": VERIFIED,
    'dp-ray run jobs/digits.yaml --workers 3 --inject "kill worker 1 at step 20; pause worker 0 for 5s at step 40"': (
        "needs workers to kill: tests/driver/test_faults.py does it"
    ),
    "dp-ray run sums.yaml --address 10.0.0.1:6379 --name on-the-cluster": OTHER_MACHINES,
    "dp-ray run jobs/tutorial.yaml --workers 8 --address 10.0.0.1:6379": OTHER_MACHINES,
    "dp-ray submit jobs/digits.yaml --address http://10.0.0.1:8265 --storage s3://bucket/runs": OTHER_MACHINES,
    "dp-ray status --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray logs digits -f --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray stop digits --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray stop s3://bucket/runs/digits": OTHER_MACHINES,
    f"export {AUTH_MODE}=token": RAYS_OWN,
    "ray status --address 10.0.0.1:6379": RAYS_OWN,
    f"ray job submit --address {DASHBOARD} --working-dir . -- python -m dp_ray run {PREDICTS}": RAYS_OWN,
    f"dp-ray status digits_predict --address {DASHBOARD}": RAYS_OWN,
    f"{DOWNLOAD} --platform manylinux2014_x86_64 -d wheels pydantic": NEEDS_A_GPU,
    f"{DOWNLOAD} --no-deps -d wheels tensorboardX pytest-xdist execnet": NEEDS_A_GPU,
    "python -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl": NEEDS_A_GPU,
    "PYTHONPATH=/tmp/site python -m pytest tests/gpu": NEEDS_A_GPU,
    "PYTHONPATH=/tmp/site python -m benchmarks.gpu small": NEEDS_A_GPU,
    "numactl --cpunodebind=0 --membind=0 .venv/bin/python -m benchmarks.gpu resnet": NEEDS_A_GPU,
    f"{ON_THE_GPU} --profile 10-14:0 --name traced": NEEDS_A_GPU,
    "dp-ray plan jobs/hugging_face.yaml --memory --workers 2": NEEDS_A_GPU,
    f"{ON_TWO_GPUS} --name peaks": NEEDS_A_GPU,
    f"{ON_TWO_GPUS} --set strategy=fsdp --set bitwise=true --name sharded-bits": NEEDS_A_GPU,
    f"{ON_TWO_GPUS} --set strategy=fsdp --set bitwise=false --name sharded": NEEDS_A_GPU,
    f"{PLAN_OF_8} --set model.args.width=4096 --set model.args.depth=24": "takes nine seconds of a core",
    "ray start --head --port=6379": STAYS,
    "ray start --address=10.0.0.1:6379": OTHER_MACHINES,
    "python parallel.py": "needs Ray: tests/driver/test_notebook.py runs the same loop",
    f"dp-ray node --hosts 2 --rank 0 --meet /shared/meet {TWO_HOSTS} /shared/runs": ON_HOSTS,
    f"dp-ray node --hosts 2 --rank 1 --meet /shared/meet {TWO_HOSTS} /shared/runs": ON_HOSTS,
    f"dp-ray node --hosts 2 --rank 0 --meet 10.0.0.1:7000 {TWO_HOSTS} s3://bucket/runs": ON_HOSTS,
    "dp-ray report /shared/runs/digits": ON_HOSTS,
    TO_SLURM: ON_SLURM,
    "dp-ray stop runs/digits": ON_SLURM,
    **dict.fromkeys(
        (
            "dp-ray fetch digits --address http://10.0.0.1:8265",
            "dp-ray fetch digits models --weights --address http://10.0.0.1:8265",
            "dp-ray fetch digits --storage s3://bucket/runs",
        ),
        OTHER_MACHINES,
    ),
    **dict.fromkeys(
        (
            "dp-ray kuberay jobs/digits.yaml --image registry.example/team/dp-ray:1 --code-in /app "
            "--storage s3://bucket/runs --nodes 2 --gpus-per-node 1 --out rayjob.yaml",
            "kubectl apply -f rayjob.yaml",
            "kubectl logs -f job/digits",
        ),
        "needs Kubernetes: tests/places/test_kuberay.py runs the manifest on a Ray",
    ),
    **dict.fromkeys(
        (
            "ray get-auth-token --generate",
            "ray up -y jobs/places/machines.yaml",
            "dp-ray run jobs/tutorial.yaml --workers 3 --address 10.0.0.1:6379 --storage /shared/runs",
            "ray down -y jobs/places/machines.yaml",
        ),
        "needs machines: tests/places/test_ssh.py has them",
    ),
    **dict.fromkeys(
        (
            "pip install 'ray[default]' boto3",
            "ray dashboard cluster.yaml",
            "dp-ray submit jobs/digits.yaml --address http://127.0.0.1:8265 --storage s3://bucket/runs",
            "ray down cluster.yaml",
        ),
        "needs machines on AWS",
    ),
    "ray up cluster.yaml": "starts machines on AWS: tests/cluster/test_placement.py checks the file",
}


@contextmanager
def standing_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in an empty folder, but for the repository's jobs; its imports and log handlers are undone."""
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    for file in (folder / "jobs").glob("*.yaml"):
        file.write_text(made_short(file.read_text()))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = False
    for handler in list(logging.getLogger("dp_ray").handlers):
        logging.getLogger("dp_ray").removeHandler(handler)
        handler.close()
    logging.getLogger("dp_ray").setLevel(logging.NOTSET)
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def run_page(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a page from its top to its end: its files, commands and snippets. What its commands print is returned."""
    printed: list[str] = []
    names: dict[str, Any] = {"__name__": "page"}
    said: str | None = None
    for block in blocks_of(page):
        match block.language:
            case "python" | "yaml" if block.file_name:
                (folder / block.file_name).write_text(made_short(block.text))
            case "python":
                exec(compile(made_short(block.text), block.place, "exec"), names)
            case "diff":
                ast.parse(side(block, "-"), block.place)
                exec(compile(made_short(side(block, "+")), block.place, "exec"), names)
            case "sh":
                said = said_by(block, capsys)
                printed.append(said or "")
            case "text":
                missing = set(block.text.splitlines()) - set((said or block.text).splitlines())
                assert not missing, f"{block.place}: is not what the command says: {said}"
            case "console":
                lines = [without_numbers(line) for line in (said or block.text).splitlines()]
                missing = {line for line in block.text.splitlines() if not any(shows(line, told) for told in lines)}
                assert not missing, f"{block.place}: is not what the command says, numbers aside: {said}"
            case "none":
                pass  # a drawing, or an error that the page explains
            case "yaml":
                raise AssertionError(f"{block.place}: a YAML block begins with its file's name: # NAME.yaml")
            case other:
                raise AssertionError(f"{block.place}: no test knows what a block of {other or 'nothing'} is")
    return "".join(printed)


def shows(line: str, told: str) -> bool:
    """Whether a line of a page shows the told one: `...` stands for any text, and for lines that are left out."""
    parts = re.split(r" ?\.\.\. ?", without_numbers(line))
    return re.fullmatch(".*".join(map(re.escape, parts)), told) is not None


def without_numbers(line: str) -> str:
    """A line of a console, so that two runs print the same: spaces of a column as one, numbers as 0, units as s."""
    return re.sub(r"(?<!\w)-?\d(?:[\d.,:e+-]*\d)?( (ms|s|min|h)\b)?", "0", " ".join(line.split()))


def made_short(code: str) -> str:
    """The code of a page without Ray, and with one epoch."""
    code = re.sub(r"\bworkers=\d+", "workers=0", code)
    return re.sub(r"\bepochs(: |=)\d+", r"epochs\g<1>1", code)


def side(block: Block, sign: str) -> str:
    """The code before (-) or after (+) a diff."""
    return "".join(line[1:] for line in block.text.splitlines(keepends=True) if line[0] in (" ", sign))


def said_by(block: Block, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What the commands of a block print; None where one of them is not run."""
    capsys.readouterr()
    done = [was_run(line) for line in block.text.splitlines()]
    printed = capsys.readouterr()
    return printed.out + printed.err if all(done) else None


def was_run(line: str) -> bool:
    """Run a command, or check what it names; whether it was run."""
    if line.startswith("#"):
        return False
    match shlex.split(line):
        case _ if line in NOT_RUN:
            return False
        case ["make", target, *_]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), line
            return False
        case [".venv/bin/python", "-m", "pytest", path, *chosen]:
            files = [ROOT / path] if path.endswith(".py") else (ROOT / path).glob("test_*.py")
            named = [name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)]
            chosen = chosen[chosen.index("-k") + 1 :] if "-k" in chosen else [""]
            words = set(re.findall(r"\w+", chosen[0])) - {"and", "or", "not", "True"}
            assert all(any(word in name for name in named) for word in words), line
            return False
        case [".venv/bin/python", "-m", "benchmarks.gpu", *names]:
            assert set(names) <= set(benchmarks.gpu.NAMES), line
            return False
        case [".venv/bin/python", "-m", "benchmarks.many", _, *names]:
            assert set(names) <= set(benchmarks.many.HOW), line
            return False
        case [".venv/bin/python", "-m", "benchmarks", *names]:
            assert {name.partition(":")[0] for name in names} <= set(benchmarks.__main__.NAMES), line
            return False
        case ["python", script]:
            runpy.run_path(script, run_name="__main__")
            return True
        case ["dp-ray", name, *args]:
            main.cli([name, *args, *here(["dp-ray", name, *args])], standalone_mode=False)
            return True
    raise AssertionError(f"no test knows how to run {line!r}")


def here(command: list[str]) -> list[str]:
    """Options with which a command runs in this process, on the same shards."""
    job = check(command)
    if command[1] in ("run", "sweep"):
        assert job is not None
        return ["--workers", "0", "--set", f"shards={job.num_shards}"]
    return ["--workers", "0"] if command[1] in ("evaluate", "predict") else []


def check(command: list[str]) -> Job | None:
    """The job that a command line would run; raises where its arguments or the job are wrong."""
    if command[0] != "dp-ray":
        return None
    _, name, *args = command
    given = main.cli.commands[name].make_context(name, args).params
    if "job_file" not in given and "job_files" not in given:
        return None
    workers, settings = given["workers"], given["settings"]
    counts = workers.split(",") if name == "verify" else [workers]
    files = given.get("job_files", (given.get("job_file"),))
    return [load_job(file, KeyOptions(count, settings).overrides()) for count in counts for file in files][-1]
