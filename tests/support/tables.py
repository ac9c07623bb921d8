"""Files of data in several forms, with contents that tests know."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dp_ray.data import Parquet

ROWS = 23


def columns(start: int = 0, stop: int = ROWS) -> dict[str, Any]:
    numbers = range(start, stop)
    return {
        "id": list(numbers),
        "text": [f'line "{n}"\nof, {n}' for n in numbers],
        "price": [n / 4 for n in numbers],
        "vector": [[float(n), n + 0.5] for n in numbers],
        "ragged": [list(range(n % 3)) for n in numbers],
        "flag": [n % 2 == 0 for n in numbers],
    }


TYPES = pa.schema(
    [
        ("id", pa.int32()),
        ("text", pa.string()),
        ("price", pa.float32()),
        ("vector", pa.list_(pa.float32(), 2)),
        ("ragged", pa.list_(pa.int64())),
        ("flag", pa.bool_()),
    ]
)


def parquet(folder: Path) -> Parquet:
    """Three files of several row groups, as a dataset."""
    for number, (start, stop) in enumerate([(0, 10), (10, 11), (11, ROWS)]):
        table = pa.table(columns(start, stop), schema=TYPES)
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=4)
    return Parquet(folder)


def json_lines(folder: Path, names: tuple[str, ...] = ("id", "text", "price", "vector", "ragged", "flag")) -> None:
    for number, (start, stop) in enumerate([(0, 9), (9, ROWS)]):
        rows = [dict(zip(columns(), row, strict=True)) for row in zip(*columns(start, stop).values(), strict=True)]
        text = "\n".join(json.dumps({name: row[name] for name in names}) for row in rows)
        (folder / f"{number}.jsonl").write_text(text + "\n" * number)


def shard(path: Path, samples: list[tuple[str, dict[str, bytes]]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in samples:
            for extension, contents in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(contents)
                tar.addfile(info, io.BytesIO(contents))


def jpeg(number: int, form: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), number, np.uint8)).save(stream, form)
    return stream.getvalue()


def sample(number: int) -> tuple[str, dict[str, bytes]]:
    array = io.BytesIO()
    np.save(array, np.arange(number % 5))
    key = f"{'long-' * 30 * (number % 2)}folder/{number:04}"
    return key, {
        "png": jpeg(number),
        "cls": str(number).encode(),
        "txt": f"caption {number}".encode(),
        "meta.json": json.dumps({"n": number}).encode(),
        "npy": array.getvalue(),
        "bin": bytes([number]),
    }
