"""Which files a folder, a glob, a list and a URL take, by which names."""

import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from dp_ray.data import Arrow, Csv, JsonLines, Parquet
from dp_ray.errors import DataError
from dp_ray.rundir.listing import listed_runs
from dp_ray.storage import Storage
from tests.support.chance import examples
from tests.support.names import Way, found_at, trees, ways


def csvs(folder: Path, *names: str | bytes) -> None:
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"name\n" + os.fsencode(name) + b"\n")


def names_in(paths: Any) -> list[str]:
    return [item["name"] for item in Csv(paths)]


def test_folders_and_globs_take_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    csvs(tmp_path, "a.csv", "b/c.Csv", "b/d/e.CSV", ".f.csv", "_g/h.csv", "b/.i/j.csv")
    monkeypatch.chdir(tmp_path)
    everything = ["a.csv", "b/c.Csv", "b/d/e.CSV"]
    assert (
        names_in(".")
        == names_in("**")
        == names_in(f"{tmp_path}/**")
        == names_in(f"file://{tmp_path}/**")
        == everything
    )
    assert names_in("**/*") == names_in("**/**") == everything, "also after the indices were written"
    assert names_in("*/*.[cC]sv") == names_in("b/*.?sv") == ["b/c.Csv"]
    assert names_in("b/**") == names_in("b") == everything[1:]
    assert names_in("_*/*") == names_in("_g/*.csv") == names_in("_g") == ["_g/h.csv"], (
        "what is named is no more hidden"
    )
    assert names_in(["_g/h.csv", ".f.csv", "b/.i"]) == ["_g/h.csv", ".f.csv", "b/.i/j.csv"]
    assert names_in("[ab].*") == names_in("[!b][.]*") == ["a.csv"]


def test_a_glob_of_json_takes_no_index_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"n": 1}\n')
    for _ in range(2):
        assert [item["n"] for item in JsonLines(f"{tmp_path}/*.json")] == [1]
    assert list(tmp_path.glob(".a.json.*"))


@pytest.mark.parametrize(
    "name", ["with space.csv", "ünï.csv", "100%.csv", "a%20b.csv", "a+b.csv", "what?.csv", "#.csv"]
)
def test_a_file_of_any_name_is_found_by_path_and_by_url(tmp_path: Path, name: str) -> None:
    csvs(tmp_path, f"deep {name}/{name}", "deep/other.csv")
    url = f"file://{quote(str(tmp_path))}/{quote(f'deep {name}')}"
    for paths in (f"{tmp_path}/deep {name}/{name}", f"{url}/{quote(name)}", url, f"{url}/*{quote(name)}"):
        assert names_in(paths) == names_in([paths]) == [f"deep {name}/{name}"]
        assert list(Csv(paths).pins) == [f"{tmp_path}/deep {name}/{name}"]
    if not set(name) & set("%?#"):
        plain = f"file://{tmp_path}/deep {name}"
        assert names_in([f"{plain}/{name}", f"{plain}/*.csv"]) == [f"deep {name}/{name}"] * 2


def test_a_name_that_begins_with_a_tilde_is_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    csvs(tmp_path, "~nobody-has-this-name/a.csv", "~/b.csv", "~/c/~")
    for paths in ("~nobody-has-this-name", "./~nobody-has-this-name", "~nobody-has-this-name/*"):
        assert names_in(paths) == ["~nobody-has-this-name/a.csv"]
    for folder in ("./~", tmp_path / "~"):
        assert names_in(folder) == ["~/b.csv"]
    assert names_in("./~/c/~") == names_in(tmp_path / "~" / "c" / "~") == ["~/c/~"]


def test_a_name_that_is_no_utf_8_is_told_where_it_counts(tmp_path: Path) -> None:
    csvs(tmp_path, "a.csv", b"\xff.txt", b"sub/\xff.csv", b"\xff/a.txt")
    assert names_in(tmp_path / "a.csv") == names_in(f"{tmp_path}/*.csv") == ["a.csv"]
    for paths in (tmp_path, f"{tmp_path}/**/*.csv", os.fsdecode(os.fsencode(tmp_path) + b"/sub/\xff.csv")):
        with pytest.raises(DataError, match=r"sub/\\udcff.csv': the name is no UTF-8; rename the file"):
            Csv(paths)


def test_a_link_to_nothing_is_told_and_a_loop_of_links_is_gone_through_once(tmp_path: Path) -> None:
    csvs(tmp_path, "a.csv", "other/b.csv")
    (tmp_path / "other" / "back").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe.csv")
    assert names_in(tmp_path) == ["a.csv", "other/b.csv", "other/b.csv"], "also by the link"
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match=r"gone\.csv: is a link to a file that is not there"):
        Csv(tmp_path)


def test_a_list_of_files_does_not_list_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        parquet_of(tmp_path / f"{number}.parquet", number)

    def refused(*_: Any) -> Any:
        pytest.fail("a folder was listed")

    monkeypatch.setattr("dp_ray.data.files._listed", refused)
    paths = [tmp_path / f"{number}.parquet" for number in (2, 0, 1)]
    dataset = Parquet(paths)
    assert [item["n"] for item in dataset] == [2, 0, 1]
    assert len({id(file.folder) for file in dataset.files}) == 1, "nor is it opened for each"


def parquet_of(path: Path, number: int) -> None:
    pq.write_table(pa.table({"n": [number]}), path)


def test_runs_beside_a_name_that_is_no_utf_8_are_listed(tmp_path: Path) -> None:
    for folder in (b"run", b"run/sub", b"\xff", b"run/\xff"):
        os.makedirs(os.path.join(os.fsencode(tmp_path), folder), exist_ok=True)
    assert [(row.name, row.status) for row in listed_runs(Storage(str(tmp_path)))] == [("run", "no run")]
    csvs(tmp_path, b"run/\xfe.json", "run/a.json")
    assert Storage(str(tmp_path / "run")).names() == ["a.json"]
    Storage(str(tmp_path / "run")).remove_unfinished(recursive=True)


NOT_TEXT = os.fsdecode(b"\xff")


def check_names(folder: str, names: list[str], data: st.DataObject) -> None:
    for name in names:
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        open(f"{folder}/{name}", "wb").close()

    def expected(way: Way, given: str) -> list[str]:
        taken = way.takes(names, given)
        is_text = not any(NOT_TEXT in text for text in [way.pattern, *taken])
        return [f"{folder}/{name}" for name in taken] if is_text else [NOT_TEXT]

    several = data.draw(st.lists(ways(names), min_size=1, max_size=3))
    by_way = []
    for way in several:
        wanted = expected(way, way.pattern)
        assert found_at(f"{folder}/{way.pattern}") == wanted, way.pattern
        with contextlib.chdir(folder):
            assert found_at(f"./{way.pattern}") == wanted, way.pattern
        if NOT_TEXT not in way.plain and ("?", True) not in itertools.chain(*way.parts):
            for plain in (True, False):
                assert found_at(f"file://{folder}/{way.url(plain)}") == expected(way, way.plain), way.url(plain)
        by_way.append(wanted)
    if all(by_way) and [NOT_TEXT] not in by_way:
        assert found_at([f"{folder}/{way.pattern}" for way in several]) == [*itertools.chain(*by_way)]


@given(names=trees(["\n", "\x01", NOT_TEXT]), data=st.data())
@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
def test_all_ways_of_naming_files_take_what_one_rule_says(names: list[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_names(folder, names, data)


def write_table(kind: Any, path: Path, x: list[float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": x})
    if kind is Parquet:
        pq.write_table(table, path.with_suffix(".parquet"))
    elif kind is Arrow:
        feather.write_feather(table, path.with_suffix(".arrow"), compression="uncompressed")
    elif kind is Csv:
        table.to_pandas().to_csv(path.with_suffix(".csv"), index=False)
    else:
        table.to_pandas().to_json(path.with_suffix(".jsonl"), orient="records", lines=True)


@pytest.mark.parametrize("kind", [Parquet, Arrow, Csv, JsonLines])
def test_folders_that_name_a_column_give_it(tmp_path: Path, kind: Any) -> None:
    """As Spark, pandas and pyarrow read them; pandas is asked."""
    for number, folder in enumerate(["kind=0/day=a", "kind=0/day=b%20%3D", "kind=12/day=07", "kind=-1/day=1"]):
        for each in {Parquet, kind}:
            root = tmp_path / ("wanted" if each is Parquet else "found")
            write_table(each, root / folder / "part-0", [number + 0.5, number + 0.25])
    root = tmp_path / ("wanted" if kind is Parquet else "found")
    wanted = pd.read_parquet(tmp_path / "wanted").astype({"kind": "int64", "day": "str"})
    dataset = kind(root)
    assert list(dataset) == wanted.to_dict("records")
    assert {item["kind"].dtype.name for item in dataset} == {"int64"}
    assert [item["day"] for item in kind(root, columns=["day"])] == wanted["day"].tolist()
    assert list(kind(root, columns=["x"])[0]) == ["x"]
    batch = kind(root, columns=["x", "kind"]).read_columns([0, 7], None)
    assert batch["kind"].tolist() == [wanted["kind"].iloc[0], wanted["kind"].iloc[7]]
    assert dataset.read_values(3, ["day", "kind"]) == wanted[["day", "kind"]].iloc[3].to_dict()
    assert "kind" not in kind(root / "kind=12")[0], "what is above the folder that was given names nothing"

    write_table(kind, root / "loose", [9.0])
    with pytest.raises(DataError, match=r"loose\.\w+: has no column 'kind', which "):
        kind(root)
    assert len(kind(root, columns=["x"])) == 9


@pytest.mark.parametrize("kind", [Parquet, Arrow, Csv, JsonLines])
def test_a_folder_without_a_value_has_it_missing(tmp_path: Path, kind: Any) -> None:
    write_table(kind, tmp_path / "kind=__HIVE_DEFAULT_PARTITION__" / "a", [1.0])
    write_table(kind, tmp_path / "kind=3" / "a", [2.0])
    assert kind(tmp_path)[0] == {"x": 2.0, "kind": 3}
    with pytest.raises(DataError, match="column 'kind' has no value"):
        kind(tmp_path)[1]


def test_a_column_of_the_file_goes_before_that_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x=7").mkdir()
    pq.write_table(pa.table({"x": [1.5]}), tmp_path / "x=7" / "a.parquet")
    assert list(Parquet(tmp_path)) == [{"x": 1.5}]
