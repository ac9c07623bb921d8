"""Damaged files of data: whatever byte is wrong, they give an error, or the rows that another reader finds."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dp_ray.data import WebDataset
from dp_ray.errors import DataError
from tests.support.tables import shard

BLOCK = tarfile.BLOCKSIZE
SAMPLES = [(f"{number:04}", {"txt": f"caption {number}".encode(), "cls": b"%d" % number}) for number in range(4)]


def written(path: Path, encoded: bytes) -> Path:
    path.write_bytes(encoded)
    (path.parent / f".{path.name}.samples.json").unlink(missing_ok=True)  # what was found before
    return path


def archive(folder: Path, samples: Any = SAMPLES) -> bytes:
    """A tar file whose members each have a header and one block."""
    shard(folder / "whole", list(samples))
    return (folder / "whole").read_bytes()


def members(encoded: bytes) -> int:
    with tarfile.open(fileobj=io.BytesIO(encoded)) as tar:
        return len(tar.getmembers())


@pytest.mark.parametrize("at", [0, 2 * BLOCK, 8 * BLOCK, 14 * BLOCK])
def test_a_shard_that_lost_a_header_is_damaged(tmp_path: Path, at: int) -> None:
    encoded = archive(tmp_path)
    end = 2 * BLOCK * members(encoded)
    for damaged in (
        encoded[: at + 5] + b"\xff" + encoded[at + 6 :],
        encoded[:at] + bytes(BLOCK) + encoded[at + BLOCK :],
        encoded[:at],
        encoded[: at + 100],
    ):
        with pytest.raises(DataError, match=r"0.tar: is damaged, or is no tar file"):
            WebDataset(written(tmp_path / "0.tar", damaged))
    for damaged in (encoded[:end], encoded[: end + BLOCK], encoded[:-1] + b"x"):
        with pytest.raises(DataError, match=r"0.tar: is damaged, or is no tar file"):
            WebDataset(written(tmp_path / "0.tar", damaged))
    assert [item["cls"] for item in WebDataset(written(tmp_path / "0.tar", encoded[: end + 2 * BLOCK]))] == [
        0,
        1,
        2,
        3,
    ]


def test_two_archives_in_one_file_are_told(tmp_path: Path) -> None:
    two = archive(tmp_path) + archive(tmp_path, [("more", {"cls": b"4"})])
    with pytest.raises(DataError, match=r"there is more behind its end at byte 8192: .*several archives in one file"):
        WebDataset(written(tmp_path / "0.tar", two))


def test_a_sample_name_belongs_to_one_sample_whose_files_lie_together(tmp_path: Path) -> None:
    alike = (
        [("a", {"cls": b"1"}), ("a", {"cls": b"2"})],
        [("a", {"cls": b"1"}), ("b", {"cls": b"1"}), ("a", {"txt": b""})],
    )
    for samples in alike:
        with pytest.raises(DataError, match=r"0.tar: has the sample 'a' twice; give each sample a name of its own"):
            WebDataset(written(tmp_path / "0.tar", archive(tmp_path, samples)))
    hidden = [
        ("._a", {"jpg": b"of another system"}),
        ("a", {"cls": b"1"}),
        ("._b", {"jpg": b""}),
        ("b", {"cls": b"2"}),
    ]
    dataset = WebDataset(written(tmp_path / "0.tar", archive(tmp_path, hidden)))
    assert list(dataset) == [{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": 2}]


def test_a_link_in_a_shard_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    os.link(tmp_path / "a.txt", tmp_path / "b.txt")
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for name in ("a.txt", "b.txt"):
            tar.add(tmp_path / name, name)
    with pytest.raises(DataError, match=r"0.tar: 'b.txt' is no file; pack the file that a link points to"):
        WebDataset(tmp_path / "0.tar")


def test_a_shard_that_is_damaged_behind_its_index_is_told(tmp_path: Path) -> None:
    """The header of the last file: without it, the last sample would lack a key."""
    encoded = archive(tmp_path)
    path = written(tmp_path / "0.tar", encoded)
    dataset = WebDataset(path)
    path.write_bytes(encoded[: 14 * BLOCK] + bytes(BLOCK) + encoded[15 * BLOCK :])
    with pytest.raises(DataError, match=r"0.tar, bytes 0 to 8192: is damaged"):
        dataset[0]
