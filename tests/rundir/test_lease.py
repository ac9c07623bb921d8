"""Two drivers of one run: the second is told that the first is alive, and a dead one holds nobody up."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import dp_ray
from dp_ray.errors import JobError, StorageError
from dp_ray.rundir import lease
from dp_ray.rundir.lease import EXPIRE_SECONDS, LEASE, wait_until_free
from dp_ray.storage import Storage
from dp_ray.system.process import OWNER, Process, is_dead, own_folder, remove_orphans, this_process
from tests.support import forked, models
from tests.support.builders import held_by, run_dir_of

pytestmark = pytest.mark.usefixtures("in_project")


def hold(folder: str) -> None:
    """Be a driver that holds the run in `folder` until it is killed, and says what its temporary folder is."""
    with held_by(run_dir_of(Path(folder))), own_folder(folder) as own:
        (Path(folder) / "own.new").write_text(own)
        (Path(folder) / "own.new").rename(Path(folder) / "own")
        time.sleep(600)


def killed_driver(folder: Path) -> str:
    """A driver that held the run in `folder` and was killed; its temporary folder."""
    with forked.started(hold, str(folder)) as program:
        wait_for(folder / "own")
        with pytest.raises(JobError, match=rf"is being run by process {program.process.pid} on .*, which is alive"):
            wait_until_free(Storage(str(folder / "run")), print)
    return (folder / "own").read_text()


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.01)


def test_a_killed_driver_of_this_host_holds_nobody_up(tmp_path: Path) -> None:
    own = killed_driver(tmp_path)
    said: list[str] = []
    began = time.monotonic()
    wait_until_free(Storage(str(tmp_path / "run")), said.append)
    assert (said, time.monotonic() - began < EXPIRE_SECONDS) == ([], True)
    assert Path(own).exists()
    with own_folder(str(tmp_path)) as mine:
        assert not Path(own).exists() and Path(mine).exists()
        remove_orphans(tmp_path)
        assert Path(mine).exists()
    assert not Path(mine).exists()


def test_folders_whose_owner_is_unknown_stay(tmp_path: Path) -> None:
    elsewhere = json.dumps({"host": "other", "machine": "other", "pid": 1, "started": "1"})
    for name, owner in {"dp_ray-1": None, "dp_ray-2": "{", "dp_ray-3": elsewhere}.items():
        (tmp_path / name).mkdir()
        if owner:
            (tmp_path / name / OWNER).write_text(owner)
    remove_orphans(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_number_that_was_given_again_is_another_process() -> None:
    mine = this_process()
    assert not is_dead(mine)
    assert is_dead(Process(mine.host, mine.machine, mine.pid, "0"))
    assert not is_dead(Process(mine.host, "another", 1 << 22, "0")), "nobody here can know"


def to_another_host(run: Path) -> None:
    values = json.loads((run / LEASE).read_text())
    values["driver"]["machine"] = "another"
    (run / LEASE).write_text(json.dumps(values))


@pytest.mark.slow
def test_the_lease_of_another_host_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 1.0)
    said: list[str] = []
    with held_by(run_dir_of(tmp_path)):
        to_another_host(tmp_path / "run")
        wait_until_free(Storage(str(tmp_path / "run")), said.append)
    (line,) = said
    assert line.startswith("waiting up to 1 s for the lease of process ")


def test_a_driver_on_another_host_that_renews_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.3)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.1)
    with held_by(run_dir_of(tmp_path)):
        to_another_host(tmp_path / "run")
        with pytest.raises(JobError, match="which is alive"):
            wait_until_free(Storage(str(tmp_path / "run")), print)


def test_a_lease_is_gone_with_its_driver_and_never_written_over_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    with held_by(run_dir_of(tmp_path)):
        assert (tmp_path / "run" / LEASE).exists()
    assert not (tmp_path / "run" / LEASE).exists()
    with held_by(run_dir_of(tmp_path)), held_by(run_dir_of(tmp_path)):
        token = json.loads((tmp_path / "run" / "run.json").read_text())["token"]
        until, seen = time.monotonic() + 0.5, set()
        while time.monotonic() < until:
            seen.add(json.loads((tmp_path / "run" / LEASE).read_text())["token"])
            time.sleep(0.01)
        assert seen == {token}
        assert "lease" in {thread.name for thread in threading.enumerate()}
    assert "lease" not in {thread.name for thread in threading.enumerate()}


class RunsAgain(models.Rows):
    """Reading sample 3 runs the same job once more."""

    def __init__(self, folder: str) -> None:
        super().__init__(9)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            with pytest.raises(JobError, match=f"is being run by process {os.getpid()} on"):
                dp_ray.run(**keys(self.folder))
            (Path(self.folder) / "told").touch()
        return super().__getitem__(index)


def keys(folder: Path | str) -> dict[str, Any]:
    dataset = {"target": "tests.rundir.test_lease:RunsAgain", "args": {"folder": str(folder)}}
    values = {
        "model": "tests.support.models:Linear",
        "dataset": dataset,
        "batch_size": 4,
        "workers": 0,
        "quiet": True,
    }
    return {**values, "storage": str(folder), "name": "run"}


def test_running_twice_by_mistake_costs_nothing(tmp_path: Path) -> None:
    result = dp_ray.run(**keys(tmp_path))
    assert (result.status, result.world_sizes) == ("done", [1])
    assert (tmp_path / "told").exists()


class TakesOver(models.Rows):
    """Reading sample 3 lets another driver claim the run directory."""

    def __init__(self, folder: str) -> None:
        super().__init__(9)
        self.folder = Path(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            (self.folder / "run.json").write_text('{"token": "of another"}')
            (self.folder / "shapes.parquet").write_text("another's")
        return super().__getitem__(index)


def test_a_driver_that_is_late_writes_nothing_over_anothers(tmp_path: Path) -> None:
    dataset = {"target": "tests.rundir.test_lease:TakesOver", "args": {"folder": str(tmp_path / "run")}}
    with pytest.raises(StorageError, match="was taken over by another driver"):
        dp_ray.run(**{**keys(tmp_path), "dataset": dataset})
    assert (tmp_path / "run" / "shapes.parquet").read_text() == "another's"
    assert not {path.name for path in (tmp_path / "run").iterdir()} & {"result.json"}
    assert list((tmp_path / "run" / "outputs").iterdir()) == []
    assert list((tmp_path / "run" / "parts").iterdir()) == []


def test_a_lease_that_is_given_back_while_it_is_looked_at_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Storage(str(tmp_path / "run"))
    run.create()
    lease.LEASE_JSON.write(run, lease.Lease(this_process(), "a"))
    look, times = Storage.modified, iter([False, True])

    def modified(storage: Storage, path: str) -> Any:
        if path == LEASE and next(times):
            storage.delete(path)
        return look(storage, path)

    monkeypatch.setattr(Storage, "modified", modified)
    assert lease.stop_run(run.location, True, print).startswith("there is no run")
