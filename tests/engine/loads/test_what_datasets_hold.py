"""What a dataset holds that loader processes cannot share, or that cannot be seeded, is told before they start."""

import random
import sqlite3
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset

from dp_ray.engine.loads.loader import remarks_on
from dp_ray.job.job import Job


class Holding(Dataset[Any]):
    """A dataset that holds something in a list of its."""

    def __init__(self, *held: Any) -> None:
        self.held = [*held]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


def remarks(dataset: Any, processes: int = 0, context: str = "fork") -> list[str]:
    job = Job.make({"model": "a:b", "dataset": Holding, "batch_size": 2, "loader": {"processes": processes}}, "job")
    dataset.loader_context = context
    return remarks_on(job, "dataset", dataset)


def test_open_files_and_archives_are_told_before_a_fork(tmp_path: Path) -> None:
    archive = tmp_path / "rows.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("a", "1")
    (tmp_path / "rows.txt").write_text("1\n2\n")
    with (
        zipfile.ZipFile(archive) as opened,
        (tmp_path / "rows.txt").open() as text,
        (tmp_path / "log.txt").open("w") as log,
        sqlite3.connect(tmp_path / "rows.db") as connection,
    ):
        held: list[Any] = [Holding(opened, log), Holding({"text": text}), Holding(connection)]
        dataset: Any = ConcatDataset(held)
        (line,) = remarks(dataset, 2)
        assert remarks(dataset) == remarks(dataset, 2, "spawn") == []
    connection.close()
    assert f"datasets[0].held[0].fp ({archive})" in line
    assert f"datasets[1].held[0]['text'] ({tmp_path / 'rows.txt'})" in line
    assert "datasets[2].held[0] (Connection)" in line
    assert "log.txt" not in line
    assert "as in __getitem__" in line
    assert len(remarks(dataset, 2)) == 1, "a connection is not seen to be closed"
    assert remarks(Holding(opened, text), 2) == [], "they are closed by now"


@pytest.mark.parametrize(("module", "name"), [("h5py._hl.files", "File"), ("builtins", "Environment")])
def test_what_h5py_and_lmdb_have_open_is_told_by_the_names_of_their_classes(module: str, name: str) -> None:
    """As h5py 3.16 and lmdb 3.0 name them."""
    opened = type(name, (), {"__module__": module})()
    (line,) = remarks(Holding(opened), 2)
    assert f"held[0] ({name})" in line


@pytest.mark.parametrize("many", [1, 70])
def test_generators_that_cannot_be_seeded_are_told_by_their_paths(many: int) -> None:
    system = [random.SystemRandom()] if many == 1 else []
    found = remarks(Holding(*system, *(np.random.default_rng(number) for number in range(many))))
    assert len(found) == 1
    assert ("held[0]" if many == 1 else "held[64]") in found[0]
    assert "cannot be seeded" in found[0]
    assert remarks(Holding(np.random.default_rng(0))) == []
