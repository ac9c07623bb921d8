"""README, CONTRIBUTING and docs/: every link leads somewhere, every command and snippet does what the page says.

Pages run below Ray, and trainings for one epoch: where a page shows more workers, `--workers 0` runs the same shards
in this process. What needs a cluster stands in NOT_RUN with the reason; its arguments and its job are checked.
"""

import csv
import re
import runpy
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dp_ray.cli import main
from dp_ray.job.job import IN_A_LOOP, Job
from tests.support.cluster import ROOT
from tests.support.page_runs import NOT_RUN, check, run_page, standing_in
from tests.support.pages import PAGES, anchors_of, blocks_of, inline_of, links_of, name_of, num_words, prose_of
from tests.support.sources import ORDER

PACKAGE = ROOT / "dp_ray"
# By tests/cli/test_first_day.py, test_recipes.py and test_sessions.py.
RUN_ELSEWHERE = {"docs/first-day.md", "docs/recipes.md", "docs/data.md", "docs/sessions.md"}
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

# The site's pages that are not in docs/.
AT_THE_TOP = {"CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "SECURITY.md"}
MOST_WORDS = 1800
REFERENCE = {"docs/job-file.md", "docs/commands.md", "docs/api.md", "docs/errors.md", "docs/glossary.md"}
# Pages that are still longer, with their words: these numbers only shrink.
TOO_LONG: dict[str, int] = {}

page_by_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
menu = runpy.run_path(str(ROOT / "docs" / "menu.py"))


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


@pytest.mark.parametrize(("page", "count"), [("README.md", 3), ("docs/benchmarks.md", 10)])
def test_the_figures_that_users_see_are_those_of_all_benchmarks(page: str, count: int) -> None:
    with (ROOT / "docs" / "contributing" / "benchmarks.csv").open() as file:
        table = [row[1:4] for row in csv.reader(file)]
    rows = re.findall(r"^\| .* \| (\d[^|]*) \| (\d[^|]* [^|]*) \| ([\d./]+) \|$", prose_of(ROOT / page), re.M)
    assert len(rows) == count
    for ours, theirs, ratio in rows:
        there = [row for row in table if row[:2] == [ours, theirs] and re.split("[ ,]", row[2])[0] == ratio]
        assert there, f"{page}: {ours}, {theirs}"


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


def test_every_page_is_in_the_menu_once() -> None:
    groups = menu["groups"]((ROOT / "docs" / "index.md").read_text())
    do = ["Train", "Data and outputs", "Runs", "GPUs and clusters"]
    assert list(groups) == ["Learn", *do, "Look up", "Understand", "Contributing"]
    entries = [entry for entries in groups.values() for entry in entries]
    listed = [name_of((ROOT / "docs" / page.path).resolve()) for entry in entries for page in (entry, *entry.below)]
    own = {name_of(page) for page in PAGES if page.is_relative_to(ROOT / "docs")} - {"docs/index.md"}
    missing, more = own - set(listed), Counter(listed) - Counter(own | AT_THE_TOP)
    assert not missing, f"docs/index.md needs a line for each: - [Title]({missing}): a sentence."
    assert not more, f"docs/index.md lists twice, or without a page: {list(more)}"


def test_old_addresses_lead_to_pages() -> None:
    for old, new in menu["MOVED"].items():
        assert not (ROOT / "docs" / old).exists() and (ROOT / "docs" / new).is_file(), old


def test_the_list_for_language_models_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    told = menu["llms_txt"](index, "dp_ray", "What it is.")
    assert told.startswith("# dp_ray\n\n> What it is.\n\n## Learn\n")
    addresses = re.findall(r"^- \[[^\]]+\]\((\S+)\): [^\[\]]+$", told, re.M)
    assert len(addresses) == len(re.findall(r"^ *- \[.*\.md\): ", index, re.M)) > 40
    assert all((ROOT / address.removeprefix("_sources/")).is_file() for address in addresses)


def test_menus_are_hidden_tables_of_contents() -> None:
    index = (
        "## Do\n\n- [A](a.md): is a.\n- [Places](places/README.md): where.\n  - [B](places/b.md): is b.\n\n## None\n"
    )
    assert menu["menu"](index) == (
        "\n```{toctree}\n:hidden:\n:caption: Do\n\nA <a.md>\nPlaces <places/README.md>\n```\n"
    )
    assert menu["menus_below"](index) == {"places/README.md": "\n```{toctree}\n:hidden:\n\nB <b.md>\n```\n"}


@page_by_page
def test_an_anchor_stands_for_one_place(page: Path) -> None:
    assert not [anchor for anchor, times in Counter(anchors_of(page)).items() if times > 1]


@pytest.mark.parametrize("page", [page for page in PAGES if "contributing" not in name_of(page).lower()], ids=name_of)
def test_pages_are_short(page: Path) -> None:
    if name_of(page) not in REFERENCE and page.parent.name != "contributing":
        most = TOO_LONG.get(name_of(page), MOST_WORDS)
        assert num_words(page) <= most, "make it shorter, or two pages of it"
        assert name_of(page) not in TOO_LONG or num_words(page) > MOST_WORDS, "it is short now: not in TOO_LONG"


def test_each_cell_of_the_comparison_has_its_source() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    head, _, *rows = re.findall(r"^\|(.*)\|$", page[page.index("\n## A comparison\n") :], re.M)
    assert head.split(" | ")[1:] == ["dp_ray", "Ray Train", "accelerate", "Lightning", "torchtitan "]
    assert len(rows) > 5
    for row in rows:
        name, ours, *others = row.split(" | ")
        assert "](" in ours and len(others) == 4, name
        assert all("](https://" in cell for cell in others), name


def test_the_gallery_has_every_training_of_the_jobs() -> None:
    gallery = ROOT / "docs" / "gallery.md"
    jobs = {path for path in (ROOT / "jobs").rglob("*.yaml") if "task: train" in path.read_text()}
    assert len(jobs) > 8
    assert jobs - {(gallery.parent / link).resolve() for link in links_of(gallery)} == set()


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_shown_and_loads_nothing(picture: Path) -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    assert picture in shown
    assert not re.search(r"(?:href|src|url)\W+https?:", picture.read_text())


def test_every_command_has_an_anchor() -> None:
    anchors = "\n".join(anchors_of(ROOT / "docs" / "commands.md"))
    assert {name for name in main.cli.commands if not re.search(rf"\b{name}\b", anchors)} == set()


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
            one_device = {"devices": None, "device_map": None} if {"strategy", "audit"} & given.keys() else {}
            bits = {"bitwise": True} if "audit" in given else {}
            workers = given["shards"] if isinstance(given.get("shards"), int) else 16
            around = {key: value for key, value in ANY_JOB.items() if "loop" not in given or key not in IN_A_LOOP}
            job = Job.make({**around, "workers": workers, **one_device, **bits, **given}, "job")
            assert job.model_fields_set >= given.keys()


@page_by_page
def test_every_command_within_a_sentence_is_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for code in inline_of(page):
        assert "pip install '.[" not in code, "it works in a checkout alone; the other form does anywhere"
        if code.startswith("dp-ray ") and "jobs/" in code:
            check(shlex.split(code))
        if extras := re.search(r"pip install 'dp-ray\[(.*)\]'", code):
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()


def test_the_pages_have_what_the_tests_above_look_for() -> None:
    """A pattern that finds nothing any more would let them all pass."""
    codes = [code for page in PAGES for code in inline_of(page)]
    assert sum(len(list(links_of(page))) for page in PAGES) > 50
    assert sum(re.match(r"[a-z_]+: \S", code) is not None for code in codes) > 20
    assert any(code.startswith("dp-ray ") and "jobs/" in code for code in codes)
    assert any("pip install 'dp-ray[" in code for code in codes)
    named = [re.findall(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`", prose_of(page)) for page in PAGES]
    assert sum(map(len, named)) > 20 and any(test for found in named for _, test in found)


def test_the_house_names_every_package_in_the_order_of_imports() -> None:
    (house,) = [block.text for block in blocks_of(ROOT / "CONTRIBUTING.md") if block.text.startswith("dp_ray/\n")]
    loose, *lines = house.splitlines()[1:]
    assert set(re.findall(r"\w+\.py", loose)) == {path.name for path in PACKAGE.glob("[!_]*.py")}
    drawn = [path for line in lines for path in re.findall(r"^  (?:  )?(\w+)/ +\S", line)]
    assert sorted(drawn) == sorted(path.parent.name for path in PACKAGE.glob("*/**/__init__.py"))
    top = [re.findall(r"^  (\w+)/", line) for line in lines]
    assert [name for found in top for name in found] == [name for name in ORDER if name in drawn]


def test_the_reference_has_every_key_of_a_job_once() -> None:
    rows = re.findall(r"^\| <a id=\"\w+\"></a>`(\w+)` \|", (ROOT / "docs" / "job-file.md").read_text(), re.M)
    assert sorted(rows) == sorted(Job.model_fields)


def test_the_synopsis_has_every_option_of_a_command() -> None:
    (synopsis,) = [
        block.text for block in blocks_of(ROOT / "docs" / "commands.md") if "[the options of run]" in block.text
    ]
    told: dict[str, str] = {}
    for line in re.split(r"\n(?=dp-ray)", synopsis):
        told[line.split()[1]] = told.get(line.split()[1], "") + line
    assert told.keys() == main.cli.commands.keys()
    for name, command in main.cli.commands.items():
        if "[the options of" in told[name]:
            continue
        shown = [
            parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
        ]
        assert set(re.findall(r"--[a-z-]+", told[name])) == {one.opts[0] for one in shown}, name


def test_what_is_not_run_is_shown_and_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for page in PAGES for block in blocks_of(page)]
    for block in blocks:
        if block.file_name:
            (folder / block.file_name).write_text(block.text)
    shown = {line for block in blocks if block.language == "sh" for line in block.text.splitlines()}
    assert NOT_RUN.keys() <= shown
    for line in NOT_RUN:
        check(shlex.split(line.rpartition(" -- ")[2].replace("python -m dp_ray", "dp-ray")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with standing_in(tmp_path, monkeypatch):
        yield tmp_path


@pytest.mark.full(but=["README.md", "docs/tutorial.md"])
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in RUN_ELSEWHERE], ids=name_of)
def test_every_command_and_snippet_works(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, folder, capsys)
