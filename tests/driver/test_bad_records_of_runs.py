"""What a whole run tells of its bad samples: its result, its files, its errors, on the console and on Ray."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dp_ray
from dp_ray.cli import main
from dp_ray.driver.from_run import reopened, retried
from dp_ray.errors import DataError, JobError
from dp_ray.job.plan import split_of
from dp_ray.storage import Storage
from tests.support import training
from tests.support.bad_data import Broken, quarantined
from tests.support.cluster import Run
from tests.support.trainings import keys_of

pytestmark = pytest.mark.usefixtures("in_project")


def keys(folder: Path, **others: Any) -> dict[str, Any]:
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": 20, "raises": [3], "misshapen": [11]}}
    given = {"dataset": data, "storage": str(folder), "name": "run", "on_error": {"quarantine": 2}, "shards": 2}
    return {**keys_of(), **given, "inputs": "first", **others}


def samples(result: dp_ray.Result) -> list[tuple[int, int]]:
    return [(row["epoch"], row["sample_index"]) for row in quarantined(Path(result.run_dir))]


def test_a_prediction_proves_outputs_and_quarantine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = dp_ray.run(**keys(tmp_path, task="predict", quiet=False))
    assert (result.rows, result.quarantined, dp_ray.load(result.run_dir).quarantined) == (20, 2, 2)
    good = [number for number in range(20) if number not in (3, 11)]
    assert result.sample_index.tolist() == good
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.allclose(result.outputs, training.mlp().eval()(training.Pairs(20).inputs[good]), atol=1e-6)
    assert samples(result) == [(0, 3), (0, 11)]
    said = capfd.readouterr().err
    assert "set aside: sample 3 of dataset, step 0: ValueError: no such image: 3" in said
    assert "set aside: sample 11 of dataset, step 2: Misshapen: it is [tensor [4], tensor []], unlike" in said
    assert "done, 20 rows (2 set aside) in" in said
    assert not (Path(result.run_dir) / "quarantine").exists()


class NamedByBytes(Broken):
    """Sample 3 raises, and each has a name that is not UTF-8, as files may have."""

    def __getitem__(self, index: int) -> Any:
        inputs, _ = super().__getitem__(index)
        name = f"{index}\udcff.png"
        if index == 3:
            raise OSError(f"{name}: no such image")
        return {"x": inputs, "name": name}


def test_batches_are_the_global_ones_without_what_was_set_aside(tmp_path: Path) -> None:
    """All of the second and the last of the last batch are set aside, and some of others."""
    bad = [3, *range(5, 10), 11, 22]
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": 23, "raises": bad}}
    result = dp_ray.run(**keys(tmp_path, task="predict", dataset=data, batch_size=5, on_error={"quarantine": 9}))
    wanted = [[number for number in range(at, min(at + 5, 23)) if number not in bad] for at in range(0, 23, 5)]
    assert [len(batch) for batch in result.batches()] == [len(samples) for samples in wanted] == [4, 0, 4, 5, 2]
    assert torch.equal(torch.cat(list(result.batches())), result.outputs)
    torch.manual_seed(0)
    model = training.mlp().eval()
    with torch.no_grad():
        for samples, batch in zip(wanted, dp_ray.load(result.run_dir).batches(), strict=True):
            assert torch.allclose(batch, model(training.Pairs(23).inputs[samples]), atol=1e-6)


def test_names_that_are_not_utf_8_cost_no_run(tmp_path: Path) -> None:
    data = {"target": "tests.driver.test_bad_records_of_runs:NamedByBytes", "args": {"length": 20}}
    result = dp_ray.run(**keys(tmp_path, task="predict", dataset=data, inputs=["x"], outputs={"carry": ["name"]}))
    assert result.carried["name"] == [f"{number}\\udcff.png" for number in range(20) if number != 3]
    (row,) = quarantined(Path(result.run_dir))
    assert (row["sample_index"], row["message"]) == (3, "3\\udcff.png: no such image")


def test_beyond_the_limit_a_run_fails_and_goes_on_with_a_higher_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 samples cannot be used") as told:
        dp_ray.run(**keys(tmp_path, on_error={"quarantine": 1}))
    assert told.value.exit_status == 1
    failed = dp_ray.load(tmp_path / "run")
    assert (failed.status, failed.quarantined, len(samples(failed))) == ("failed", 2, 2)
    assert dp_ray.run(**keys(tmp_path)).quarantined == 2


def test_a_training_that_goes_on_longer_keeps_what_it_set_aside(tmp_path: Path) -> None:
    once = dp_ray.run(**keys(tmp_path, epochs=1))
    assert samples(once) == [(0, 3), (0, 11)]
    longer = dp_ray.run(**keys(tmp_path, epochs=2))
    assert samples(longer) == [(0, 3), (0, 11), (1, 3), (1, 11)]
    assert longer.quarantined == 2  # a sample counts once
    at_once = dp_ray.run(**keys(tmp_path, epochs=2, name="other"))
    assert at_once.weights_sha256 == longer.weights_sha256


def retry(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dp_ray.Result:
    monkeypatch.setattr("sys.argv", ["dp-ray", "retry", str(folder / "run"), "--quiet", *options])
    main.main()
    return dp_ray.load(folder / "run")


def reopen_run(folder: Path) -> None:
    reopened(split_of(retried(str(folder), {}), 23), Storage(str(folder)))


def broken(folder: Path, raises: list[int]) -> dict[str, Any]:
    args = {"length": 23, "raises": raises, "mended": str(folder / "mended")}
    return {"target": "tests.support.bad_data:Broken", "args": args}


@pytest.mark.full(but=["1"])
@pytest.mark.slow
@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_what_succeeds_again_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    """The outputs are to the bit those of a run without bad samples."""
    raises = [0, 5, 8, 9, 10, 11, 22]
    common = {"outputs": {"file_bytes": file_bytes}, "on_error": {"quarantine": 7}, "shards": 3}
    given = keys(tmp_path, task="predict", dataset=broken(tmp_path, raises), **common)
    clean = dp_ray.run(**{**given, "dataset": broken(tmp_path, []), "name": "clean"})
    first = dp_ray.run(**given)
    assert (first.quarantined, len(first.outputs)) == (7, 16)
    (tmp_path / "mended").write_text("5 9 10 11")
    second = retry(tmp_path, monkeypatch)
    assert [sample for _, sample in samples(second)] == [0, 8, 22]
    assert second.sample_index.tolist() == [number for number in range(23) if number not in (0, 8, 22)]
    (tmp_path / "mended").write_text(" ".join(map(str, raises)))
    third = retry(tmp_path, monkeypatch)
    assert (third.quarantined, samples(third), third.outputs_sha256) == (0, [], clean.outputs_sha256)
    assert torch.equal(third.outputs, clean.outputs)
    assert not {"files", "parts", "attempt.json"} & {path.name for path in (tmp_path / "run").iterdir()}
    assert len(third.shapes) == len(clean.shapes)
    with pytest.raises(SystemExit, match="2"):
        retry(tmp_path, monkeypatch)


def test_a_retry_of_a_copy_leaves_the_run_that_was_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = keys(tmp_path, task="predict", dataset=broken(tmp_path, [3, 11]), on_error={"quarantine": 3})
    dp_ray.run(**{**given, "name": "first"})
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    before = {path: path.read_bytes() for path in sorted((tmp_path / "first").rglob("*")) if path.is_file()}
    (tmp_path / "mended").write_text("3 11")
    with pytest.raises(SystemExit, match="2"):
        retry(tmp_path, monkeypatch, "--set", "name=first")
    assert retry(tmp_path, monkeypatch).quarantined == 0
    assert {path: path.read_bytes() for path in sorted((tmp_path / "first").rglob("*")) if path.is_file()} == before


def test_a_retry_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = keys(tmp_path, task="predict", dataset=broken(tmp_path, [3, 11, 12]), on_error={"quarantine": 3})
    clean = dp_ray.run(**{**given, "dataset": broken(tmp_path, []), "name": "clean"})
    dp_ray.run(**given)
    (tmp_path / "mended").write_text("3 11 12")
    reopen_run(tmp_path / "run")  # what is done before the job runs; the retry finds the run unfinished
    assert retry(tmp_path, monkeypatch).outputs_sha256 == clean.outputs_sha256


def test_a_retry_that_fails_keeps_what_is_known_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it fails at the limit, with the third sample; the fifth is not read again by then."""
    raises, outputs = [0, 5, 8, 13, 22], {"keep": ["output"], "carry": ["label"]}
    labelled = {"target": "tests.driver.test_bad_records_of_runs:Labelled", "args": broken(tmp_path, raises)["args"]}
    given = keys(tmp_path, task="predict", dataset=labelled, on_error={"quarantine": 5}, outputs=outputs)
    clean_data = {**labelled, "args": {"length": 23}}
    clean = dp_ray.run(**{**given, "dataset": clean_data, "name": "clean", "inputs": ["inputs"]})
    given["inputs"] = ["inputs"]
    dp_ray.run(**given)
    before = quarantined(tmp_path / "run")
    assert [row["sample_index"] for row in before] == raises
    (tmp_path / "mended").write_text("5")
    for _ in range(2):
        with pytest.raises(SystemExit, match="1"):
            retry(tmp_path, monkeypatch, "--set", "on_error.quarantine=1")
        left = quarantined(tmp_path / "run")
        assert {0, 8, 13, 22} <= {row["sample_index"] for row in left}
        assert sorted(left, key=lambda row: row["sample_index"]) == [row for row in before if row in left]
    (tmp_path / "mended").write_text(" ".join(map(str, raises)))
    last = retry(tmp_path, monkeypatch)
    assert (last.quarantined, samples(last), last.outputs_sha256) == (0, [], clean.outputs_sha256)
    assert not (tmp_path / "run" / "before-retry.json").exists()


def test_a_retry_that_fails_keeps_each_place_of_a_row_of_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at row 4 of source `a`; by then row 1 of `b` has been read again in one of its six places."""
    sources = {
        name: {"target": "tests.support.bad_data:Broken", "args": {"length": length, "raises": [bad]}}
        for name, length, bad in (("a", 18, 4), ("b", 3, 1))
    }
    args = {"sources": sources, "weights": {"a": "1/2", "b": "1/2"}, "stop": "all"}
    dp_ray.run(**keys(tmp_path, task="predict", dataset={"target": "dp_ray.data:Mix", "args": args}))
    before = quarantined(tmp_path / "run")
    assert [row["source"] for row in before].count("b") == 6
    with pytest.raises(SystemExit, match="1"):
        retry(tmp_path, monkeypatch, "--set", "on_error.quarantine=1")
    assert sorted(quarantined(tmp_path / "run"), key=lambda row: row["position"]) == before


class Labelled(Broken):
    """Items with a label, to carry."""

    def __getitem__(self, index: int) -> Any:
        return {"inputs": super().__getitem__(index)[0], "label": index}


@pytest.mark.parametrize("is_new", [False, True])
def test_a_file_that_was_mended_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    """But its files may have no other names, for then the samples would be others."""
    (tmp_path / "images").mkdir()
    images = [np.full((4, 5, 3), number * 20, np.uint8) for number in range(5)]
    for number, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "3.png").write_bytes(b"junk")
    data = {"target": "dp_ray.data:Images", "args": {"paths": str(tmp_path / "images")}}
    given = keys(
        tmp_path, task="predict", dataset=data, model="tests.driver.test_bad_records_of_runs:Mean", batch_size=2
    )
    given |= {"inputs": ["image"], "outputs": {"carry": ["path"]}}
    assert dp_ray.run(**given).sample_index.tolist() == [0, 1, 2, 4]
    (bad,) = quarantined(tmp_path / "run")
    assert bad["carried.path"] == "3.png"
    assert "images/3.png: is no image, or is damaged: cannot identify" in bad["message"]
    Image.fromarray(images[3]).save(tmp_path / "images" / "3.png")
    if is_new:
        (tmp_path / "images" / "0.png").rename(tmp_path / "images" / "00.png")
        with pytest.raises(SystemExit, match="1"):
            retry(tmp_path, monkeypatch)
        assert [row["sample_index"] for row in quarantined(tmp_path / "run")] == [3]
        (tmp_path / "images" / "00.png").rename(tmp_path / "images" / "0.png")
    assert retry(tmp_path, monkeypatch).outputs.tolist() == [number * 20.0 for number in range(5)]


class Mean(torch.nn.Module):
    """The mean of each image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().flatten(1).mean(1)


def test_a_retry_that_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = keys(tmp_path, task="predict", dataset=broken(tmp_path, [3, 11]), on_error={"quarantine": 3})
    clean = dp_ray.run(**{**given, "dataset": broken(tmp_path, []), "name": "clean"})
    before = dp_ray.run(**given)
    (tmp_path / "mended").write_text("3 11")
    for _ in range(2):
        with pytest.raises(SystemExit, match="2"):
            retry(tmp_path, monkeypatch, "--set", "batch_size=3")
        assert not (tmp_path / "run" / "before-retry.json").exists()
        after = dp_ray.load(tmp_path / "run")
        assert (after.status, after.outputs_sha256) == ("done", before.outputs_sha256)
        assert torch.equal(after.outputs, before.outputs)
        assert [sample for _, sample in samples(after)] == [3, 11]
    assert retry(tmp_path, monkeypatch).outputs_sha256 == clean.outputs_sha256


def test_only_a_prediction_is_retried(tmp_path: Path) -> None:
    dp_ray.run(**keys(tmp_path, epochs=1))
    with pytest.raises(JobError, match="is a run of task train; a training reads its bad samples again"):
        retried(str(tmp_path / "run"), {})
    with pytest.raises(JobError, match=r"holds no run\.json"):
        retried(str(tmp_path), {})


@pytest.mark.ray
def test_on_ray_a_killed_worker_changes_nothing(run_in_session: Run, tmp_path: Path) -> None:
    alone = dp_ray.run(**keys(tmp_path, task="predict", name="alone", shards=3))
    given = {"workers": 2, "inject": "kill worker 1 at step 3", "shards": 3}
    result = run_in_session(**{**keys(tmp_path, task="predict"), **given, "quiet": True})
    assert (result.restarts, result.outputs_sha256) == (1, alone.outputs_sha256)
    assert samples(result) == samples(alone)
    with pytest.raises(DataError, match="2 samples cannot be used"):
        run_in_session(**keys(tmp_path, name="full", workers=2, on_error={"quarantine": 1}))
    assert dp_ray.load(tmp_path / "full").restarts == 0


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_what_is_kept_and_carried_is_whole_after_a_retry(run_in_session: Run, tmp_path: Path) -> None:
    """Two of three bad samples are mended; the third one is in the quarantine, with nothing carried."""
    args = {"length": 23, "raises": [3, 9, 20], "mended": str(tmp_path / "mended")}
    given = keys(tmp_path, task="predict", dataset={"target": "tests.support.bad_data:Named", "args": args})
    given |= {
        "inputs": ["x"],
        "model": "tests.driver.test_bad_records_of_runs:Doubled",
        "on_error": {"quarantine": 3},
    }
    given |= {"outputs": {"keep": ["twice"], "carry": ["id"], "file_bytes": 200}, "workers": 2, "order": "shuffled"}
    first = run_in_session(**given)
    assert first.quarantined == 3 and not {"row 3", "row 9", "row 20"} & {*first.carried["id"]}
    (tmp_path / "mended").write_text("3 9")
    reopen_run(tmp_path / "run")
    second = run_in_session(**given)
    (bad,) = quarantined(Path(second.run_dir))
    assert (bad["sample_index"], bad["carried.id"]) == (20, None)
    assert sorted(second.sample_index.tolist()) == [number for number in range(23) if number != 20]
    there = second.sample_index.tolist()
    assert second.carried["id"] == [f"row {index}" for index in there]
    assert second.outputs.keys() == {"twice"}
    assert torch.equal(second.outputs["twice"], training.Pairs(23).inputs[there] * 2)


class Doubled(torch.nn.Module):
    """Twice and thrice its inputs."""

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"twice": inputs * 2, "thrice": inputs * 3}


@pytest.mark.full
@pytest.mark.ray
def test_on_ray_a_stream_with_bad_records_is_that_of_one_process(run_in_session: Run, tmp_path: Path) -> None:
    args = {"iterable": "tests.support.bad_data:lines", "rows": 23, "decode": "tests.support.bad_data:inputs_of"}
    given = keys(tmp_path, task="predict", dataset={"target": "dp_ray.data:Stream", "args": args}, shards=3)
    alone = dp_ray.run(**{**given, "name": "alone", "workers": 0})
    result = run_in_session(**{**given, "workers": 2})
    assert samples(result) == samples(alone) == [(0, 5), (0, 17)]
    assert result.outputs_sha256 == alone.outputs_sha256
