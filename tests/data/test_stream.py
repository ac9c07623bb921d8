"""Streams: what can only be read forward gives the bits of rows in memory, whoever reads it and how often."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import dp_ray
from dp_ray.data import Stream
from dp_ray.data.stream import Lanes
from dp_ray.errors import DataError, JobError
from dp_ray.plan.split import chunk_bounds
from tests.support.feeds import KEYS, MEMORY, ROWS, InMemory, predicted, rows, trained
from tests.support.group import ProcessExit

HERE = "tests.data.test_stream"
IN_ORDER = {"shuffle": False, "order": "dataset"}
FILES = [17, 0, 5, ROWS - 22]

PREDICTED: dict[str, Any] = {"task": "predict", "inputs": "first", "shuffle": False, "workers": 0}


def pairs() -> Iterator[Any]:
    """The rows, one after another."""
    yield from zip(*rows(), strict=True)


class Sharding(IterableDataset[Any]):
    """The rows, of which each loader process would give only its own, as torch's pages advise."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for number, pair in enumerate(pairs()):
            if worker is None or number % worker.num_workers == worker.id:
                yield pair


def of_file(name: str) -> Iterator[Any]:
    """The rows of one of four files."""
    number = int(name)
    whole = list(pairs())
    yield from whole[sum(FILES[:number]) : sum(FILES[: number + 1])]


def stream(**args: Any) -> dict[str, Any]:
    return {**IN_ORDER, "dataset": {"target": "dp_ray.data:Stream", "args": {"rows": ROWS, **args}}}


@pytest.mark.slow
def test_any_workers_and_loaders_give_the_bits_of_memory(tmp_path: Path) -> None:
    memory = {**MEMORY, **IN_ORDER}
    weights = trained(tmp_path / "memory-train", memory, workers=1)
    outputs = predicted(tmp_path / "memory", {**memory, "inputs": "first"}, workers=1)
    files = {"files": ["0", "1", "2", "3"], "rows": FILES}
    sources: list[tuple[dict[str, Any], int, int]] = [
        ({"iterable": f"{HERE}:pairs"}, 1, 0),
        ({"iterable": f"{HERE}:pairs"}, 3, 2),
        ({"iterable": f"{HERE}:Sharding"}, 2, 2),
        ({"iterable": f"{HERE}:of_file", **files}, 2, 0),
    ]
    for number, (args, workers, processes) in enumerate(sources):
        keys = {"workers": workers, "loader": {"processes": processes}}
        assert trained(tmp_path / f"train-{number}", stream(**args), **keys) == weights
        assert predicted(tmp_path / f"{number}", {**stream(**args), "inputs": "first"}, **keys) == outputs


class Dealt(InMemory):
    """The rows in memory, dealt to three shards of batches of 9: each has 15 or 16 rows of its own."""

    def __getitem__(self, index: int) -> Any:
        step, place = divmod(index, 9)
        shard, within = divmod(place, 3 if step < 5 else 1)
        return tuple(column[[0, 16, 31][shard] + 3 * step + within] for column in self.tensors)


@pytest.mark.slow
def test_dealt_files_train_and_predict_on_any_workers(tmp_path: Path) -> None:
    args = {"iterable": f"{HERE}:of_file", "files": [*"0123"], "rows": FILES, "batch_size": 9, "shards": 3}
    memory = {**IN_ORDER, "dataset": f"{HERE}:Dealt"}
    assert trained(tmp_path / "train", stream(**args), workers=3) == trained(tmp_path / "1", memory, workers=1)
    outputs = predicted(tmp_path / "predict", {**stream(**args), "inputs": "first"}, workers=2)
    assert outputs == predicted(tmp_path / "2", {**memory, "inputs": "first"}, workers=1)


def test_a_prediction_is_that_of_plain_iteration(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    keys: dict[str, Any] = {**KEYS, **PREDICTED, "model": model}
    outputs = dp_ray.run(**keys, dataset=Stream(pairs, ROWS), storage=str(tmp_path), quiet=True).outputs
    with torch.inference_mode():
        assert torch.allclose(outputs, torch.stack([model(x) for x, _ in pairs()]), atol=1e-6)


class Mortal(Stream):
    """Kills its process where it needs the 31st row, once: before the file `died` is there."""

    def __init__(self, died: str, **args: Any) -> None:
        super().__init__(**args)
        self._died = Path(died)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        with suppress(FileExistsError):
            if 30 in indices:
                self._died.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


@pytest.mark.slow
def test_after_a_kill_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", {**MEMORY, **IN_ORDER}, workers=1)
    args = {"died": str(tmp_path / "died"), "iterable": f"{HERE}:pairs", "rows": ROWS}
    keys = {**IN_ORDER, "dataset": {"target": f"{HERE}:Mortal", "args": args}, "checkpoint": {"every_steps": 1}}
    with pytest.raises(ProcessExit, match="another worker was lost"):
        trained(tmp_path / "killed", keys, workers=2)
    assert (tmp_path / "died").exists()
    assert trained(tmp_path / "killed", keys, workers=3) == whole


@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 9))
def test_lanes_deal_each_row_once_and_each_shard_reads_on(length: int, batch_size: int, shards: int) -> None:
    lanes = Lanes(length, batch_size, shards)
    places = [lanes.place(index) for index in range(length)]
    assert sorted(row for _, row in places) == list(range(length))
    for shard in range(shards):
        mine = [row for lane, row in places if lane == shard]
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True
    for step in range(0, length, batch_size):
        size = min(batch_size, length - step)
        for shard in range(shards):
            start, stop = chunk_bounds(size, shards, shard)
            assert {lane for lane, _ in places[step + start : step + stop]} <= {shard}


def test_a_shard_opens_only_the_files_of_its_stretch() -> None:
    opened: list[str] = []

    def of(name: str) -> Iterator[int]:
        opened.append(name)
        yield from range(int(name), int(name) + 10)

    files = [str(start) for start in range(0, 80, 10)]
    plain = Stream(of, [10] * 8, files=files)
    assert [plain[index] for index in range(80)] == list(range(80))
    assert opened == files
    assert plain.__getitems__([75, 5, 4]) == [75, 5, 4]
    opened.clear()
    dealt = Stream(of, [10] * 8, files=files, batch_size=8, shards=4)
    second = [index for index in range(80) if index % 8 // 2 == 1]
    assert [dealt[index] for index in second] == list(range(20, 40))
    assert opened == ["20", "30"]


def test_each_process_decodes_only_what_it_needs() -> None:
    decoded: list[int] = []

    def double(item: int) -> int:
        decoded.append(item)
        return 2 * item

    found = Stream(range(100), decode=double)
    assert (len(found), found.__getitems__([3, 4, 90]), found[-1]) == (100, [6, 8, 180], 198)
    assert decoded == [3, 4, 90, 99]


def drawing() -> Iterator[float]:
    while True:
        yield random.random()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"iterable": pairs()}, "a generator can be iterated only once; give the function that returns it"),
        ({"iterable": pairs}, "rows must be a whole number, got None: give the number of items"),
        ({"iterable": f"{HERE}:nothing", "rows": 1}, "iterable: cannot import '.*nothing'"),
        ({"iterable": of_file, "rows": 3, "files": ["0"]}, "files need an iterable that is a function of a file"),
        ({"iterable": pairs, "rows": 3, "batch_size": 1}, "without files it is of no use"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(args: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        Stream(**args)


@pytest.mark.parametrize(
    ("made", "index", "says"),
    [
        (lambda: Stream(pairs, ROWS + 3), ROWS, f"the stream ended after {ROWS} items, and rows says {ROWS + 3}"),
        (lambda: Stream(of_file, [17, 4], files=["0", "2"]), 20, "2 has more than the 4 items that rows says"),
        (lambda: Stream(of_file, [18, 5], files=["0", "2"]), 17, "0 ended after 17 items, and rows says 18"),
        (lambda: Stream(drawing, 9), 5, "the iterable of a Stream draws random numbers"),
    ],
)
def test_a_stream_that_is_not_what_it_was_said_to_be_is_told(made: Any, index: int, says: str) -> None:
    with pytest.raises(DataError, match=says):
        made()[index]


def test_a_stream_that_raised_begins_anew() -> None:
    fails = [True]

    def shaky() -> Iterator[int]:
        yield 0
        if fails.pop() if fails else False:
            raise OSError("once")
        yield 1

    found = Stream(shaky, 2)
    with pytest.raises(OSError, match="once"):
        found[1]
    assert found[1] == 1


BAD = (0, 7, 8, 21, ROWS - 1)


class Opened:
    """The rows; the reading of some raises, and those after them can be read. It counts how often it is begun."""

    def __init__(self, bad: Sequence[int] = BAD) -> None:
        self.bad = bad
        self.times = 0

    def __call__(self) -> Iterator[Any]:
        self.times += 1
        return map(self.row, enumerate(pairs()))

    def row(self, numbered: tuple[int, Any]) -> Any:
        if numbered[0] in self.bad:
            raise OSError(f"row {numbered[0]} is rotten")
        return numbered[1]


@pytest.mark.parametrize("where", ["source", "decode"])
def test_bad_records_do_not_make_a_stream_begin_anew(tmp_path: Path, where: str) -> None:
    """It is begun for the reference, and for the prediction; the good rows are those of the plain loop."""
    source = Opened(BAD if where == "source" else ())
    seen = []

    def decode(pair: Any) -> Any:
        seen.append(pair[0])
        if where == "decode" and any(torch.equal(pair[0], rows()[0][at]) for at in BAD):
            raise ValueError("cannot be decoded")
        return pair

    keys: dict[str, Any] = {**KEYS, **PREDICTED, "model": torch.nn.Identity()}
    found = Stream(source, ROWS, decode)
    result = dp_ray.run(
        **keys, dataset=found, on_error={"quarantine": 9}, storage=str(tmp_path), name="run", quiet=True
    )
    good = [at for at in range(ROWS) if at not in BAD]
    assert result.sample_index.tolist() == good
    assert torch.equal(result.outputs, rows()[0][good])
    assert source.times == 2
    assert len(seen) <= (ROWS if where == "decode" else len(good)) + 7, "each is decoded once, but for the reference"


def test_what_is_passed_over_may_raise_and_is_raised_when_asked_for() -> None:
    source = Opened()
    found = Stream(source, ROWS)
    assert torch.equal(found[9][0], rows()[0][9])
    with pytest.raises(OSError, match="row 21 is rotten"):
        found.__getitems__([20, 21, 22])
    assert torch.equal(found[20][0], rows()[0][20])
    with pytest.raises(OSError, match="row 21 is rotten"):
        found[21]
    assert torch.equal(found[22][0], rows()[0][22])
    assert source.times == 1
    with pytest.raises(OSError, match="row 21 is rotten"):
        found[21]
    assert source.times == 2, "what was told once is read anew"


def test_an_iterator_that_ends_where_it_raised_is_told() -> None:
    def broken() -> Iterator[Any]:
        yield 0
        raise OSError("once")

    found = Stream(lambda: map(str, broken()), 4)
    with pytest.raises(OSError, match="once"):
        found.__getitems__([0, 1, 2, 3])
    with pytest.raises(OSError, match="once"):
        found[1]
    with pytest.raises(DataError, match=r"the stream gave no more items after one raised OSError\('once'\)"):
        found[2]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"task": "train", "shuffle": True}, "shuffle: a Stream"),
        ({"task": "predict", "order": "shuffled"}, "order: a Stream"),
    ],
)
def test_a_shuffle_is_refused(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        dp_ray.run(
            **{**KEYS, "shuffle": False, "workers": 0, **keys}, dataset=Stream(pairs, ROWS), storage=str(tmp_path)
        )
