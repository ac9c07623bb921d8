"""README, CONTRIBUTING and docs/: every link leads somewhere, every command and snippet does what the page says.

Pages run below Ray, and trainings for one epoch: where a page shows more workers, `--workers 0` runs the same shards
in this process. What needs a cluster stands in NOT_RUN with the reason; its arguments and its job are checked.
"""

import ast
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import benchmarks.__main__
from dp_ray.cli import main
from dp_ray.cli.options import load
from dp_ray.job.job import Job
from tests.support.cluster import ROOT
from tests.support.pages import PAGES, Block, anchors_of, blocks_of, inline_of, links_of, name_of, prose_of
from tests.support.sources import ORDER

PACKAGE = ROOT / "dp_ray"
VERIFIED = "needs Ray: tests/test_training_runs.py verifies a job on Ray"
OTHER_MACHINES = "needs a cluster of other machines"
NEEDS_A_GPU = "is for a machine with a GPU, or prepares one"
DOWNLOAD = "pip download --only-binary=:all: --python-version 3.12"
SUBMIT = "dp-ray submit jobs/digits_predict.yaml --address http://10.0.0.1:8265 --storage s3://bucket/runs"
NOT_RUN = {
    "pip install .": "tests/test_wheel.py builds the wheel and installs it",
    "dp-ray verify train.yaml --workers 1,2,4": VERIFIED,
    "dp-ray verify jobs/digits.yaml --workers 1,2,3,8": VERIFIED,
    'dp-ray run jobs/digits.yaml --workers 3 --inject "kill worker 1 at step 20; pause worker 0 for 5s at step 40"': (
        "needs workers to kill: tests/test_faults.py does it"
    ),
    "dp-ray run sums.yaml --address 10.0.0.1:6379 --name on-the-cluster": OTHER_MACHINES,
    "dp-ray run jobs/tutorial.yaml --workers 8 --address 10.0.0.1:6379": OTHER_MACHINES,
    SUBMIT: OTHER_MACHINES,
    "dp-ray submit jobs/digits.yaml --address http://10.0.0.1:8265 --storage s3://bucket/runs": OTHER_MACHINES,
    "dp-ray status --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray logs digits -f --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray stop digits --address http://10.0.0.1:8265": OTHER_MACHINES,
    "dp-ray stop s3://bucket/runs/digits": OTHER_MACHINES,
    "ray job submit --working-dir . -- python -m dp_ray run jobs/digits_predict.yaml": OTHER_MACHINES,
    ".venv/bin/python -m benchmarks.gpu": NEEDS_A_GPU,
    f"{DOWNLOAD} --platform manylinux2014_x86_64 -d wheels pydantic": NEEDS_A_GPU,
    f"{DOWNLOAD} --no-deps -d wheels tensorboardX": NEEDS_A_GPU,
    "python -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl": NEEDS_A_GPU,
    "PYTHONPATH=/tmp/site python -m pytest tests/gpu": NEEDS_A_GPU,
    "PYTHONPATH=/tmp/site python -m benchmarks.gpu": NEEDS_A_GPU,
    "ray up cluster.yaml": "starts machines on AWS: tests/test_cluster.py checks the file",
}
RUN_ELSEWHERE = {"docs/first-day.md", "docs/sessions.md"}  # by tests/test_first_day.py and test_sessions.py
# With what each key of a job, shown alone within a sentence, makes a job.
ANY_JOB: dict[str, Any] = {
    "task": "train",
    "model": "module:attribute",
    "dataset": "module:attribute",
    "batch_size": 30,
    "loss": "torch.nn:CrossEntropyLoss",
    "optimizer": "torch.optim:SGD",
    "eval": {"dataset": "module:attribute"},
    "shards": 16,
    "devices": ["cpu", "cpu"],
    "device_map": "auto",
}

page_by_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_the_figures_of_the_front_page_are_those_of_the_benchmarks() -> None:
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = re.findall(
        r"^\| .* \| ([\d,.]+ \S+) \| ([\d,.]+ \S+ .*) \| ([\d.]+) \|$", prose_of(ROOT / "README.md"), re.M
    )
    assert len(rows) == 5
    for ours, against, ratio in rows:
        assert f"| {ours} | {against} | {ratio} " in table  # there, quartiles follow


@page_by_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name_of(page)} links to {link}"


@page_by_page
def test_every_page_is_linked(page: Path) -> None:
    linked = {(one.parent / link.partition("#")[0]).resolve() for one in PAGES for link in links_of(one)}
    assert page in linked or page == ROOT / "README.md"


@page_by_page
def test_every_file_and_test_that_is_named_is_there(page: Path) -> None:
    for path, test in re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", prose_of(page)):
        found = [one for one in (ROOT / path, PACKAGE / path) if one.exists()]
        assert found, f"{name_of(page)} names {path}"
        assert not test or f"\ndef {test}(" in found[0].read_text(), f"{name_of(page)} names {path}::{test}"


@page_by_page
def test_every_key_within_a_sentence_is_one_of_a_job(page: Path) -> None:
    for code in inline_of(page):
        if re.match(r"[a-z_]+: \S", code):
            (given,) = [yaml.safe_load(code.replace("...", "'module:attribute'"))]
            one_device = {"devices": None, "device_map": None} if "strategy" in given else {}
            workers = given["shards"] if isinstance(given.get("shards"), int) else 16
            job = Job.make({**ANY_JOB, "workers": workers, **one_device, **given}, "job")
            assert job.model_fields_set >= given.keys()


@page_by_page
def test_every_command_within_a_sentence_is_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for code in inline_of(page):
        if code.startswith("dp-ray ") and "jobs/" in code:
            check(shlex.split(code))
        if extras := re.search(r"pip install '\.\[(.*)\]'", code):
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()


def test_the_pages_have_what_the_tests_above_look_for() -> None:
    """A pattern that finds nothing any more would let them all pass."""
    codes = [code for page in PAGES for code in inline_of(page)]
    assert sum(len(list(links_of(page))) for page in PAGES) > 50
    assert sum(re.match(r"[a-z_]+: \S", code) is not None for code in codes) > 20
    assert any(code.startswith("dp-ray ") and "jobs/" in code for code in codes)
    assert any("pip install '.[" in code for code in codes)
    named = [re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", prose_of(page)) for page in PAGES]
    assert sum(map(len, named)) > 20 and any(test for found in named for _, test in found)


def test_the_house_names_every_package_in_the_order_of_imports() -> None:
    (house,) = [one.text for one in blocks_of(ROOT / "CONTRIBUTING.md") if one.text.startswith("dp_ray/\n")]
    loose, *lines = house.splitlines()[1:]
    assert set(re.findall(r"\w+\.py", loose)) == {path.name for path in PACKAGE.glob("[!_]*.py")}
    drawn = [path for line in lines for path in re.findall(r"^  (?:  )?(\w+)/ +\S", line)]
    assert sorted(drawn) == sorted(path.parent.name for path in PACKAGE.glob("*/**/__init__.py"))
    top = [re.findall(r"^  (\w+)/", line) for line in lines]
    assert [name for found in top for name in found] == [name for name in ORDER if name in drawn]


def test_the_reference_has_every_key_of_a_job_once() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "job-file.md").read_text(), re.M)
    keys = [key for row in rows for key in row.strip("`").split(", ") if "." not in key]
    assert sorted(keys) == sorted(Job.model_fields)


def test_the_synopsis_has_every_option_of_a_command() -> None:
    (synopsis,) = [one.text for one in blocks_of(ROOT / "docs" / "commands.md") if "[the options of run]" in one.text]
    told = {line.split()[1]: line for line in re.split(r"\n(?=dp-ray)", synopsis)}
    assert told.keys() == main.cli.commands.keys()
    for name, command in main.cli.commands.items():
        if "[the options of" in told[name]:
            continue
        shown = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
        assert set(re.findall(r"--[a-z-]+", told[name])) == {one.opts[0] for one in shown}, name


def test_what_is_not_run_is_shown_and_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [one for page in PAGES for one in blocks_of(page)]
    for block in blocks:
        if block.file_name:
            (folder / block.file_name).write_text(block.text)
    shown = {line for block in blocks if block.language == "sh" for line in block.text.splitlines()}
    assert NOT_RUN.keys() <= shown
    for line in NOT_RUN:
        check(shlex.split(line.rpartition(" -- ")[2].replace("python -m dp_ray", "dp-ray")))


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
    return [load(file, count, settings) for count in counts for file in files][-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to stand in, but for the repository's jobs; what is imported from there is forgotten."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    for file in (tmp_path / "jobs").glob("*.yaml"):
        file.write_text(made_short(file.read_text()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in RUN_ELSEWHERE], ids=name_of)
def test_every_command_and_snippet_works(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
            case "text":
                missing = set(block.text.splitlines()) - set((said or block.text).splitlines())
                assert not missing, f"{block.place}: is not what the command says: {said}"
            case "yaml":
                raise AssertionError(f"{block.place}: a YAML block begins with its file's name: # NAME.yaml")
            case other:
                raise AssertionError(f"{block.place}: no test knows what a block of {other or 'nothing'} is")


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
    match shlex.split(line):
        case _ if line in NOT_RUN:
            return False
        case ["make", target, *_]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), line
            return False
        case [".venv/bin/python", "-m", "pytest", path, *chosen]:
            named = re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.M)
            assert not chosen or any(chosen[1] in name for name in named), line
            return False
        case [".venv/bin/python", "-m", "benchmarks", *names]:
            assert set(names) <= set(benchmarks.__main__.NAMES), line
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
