"""A loop that outruns its merging waits for it, and no two workers ever wait for each other."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dp_ray
from dp_ray.engine.votes import StepControl
from dp_ray.engine.world import World
from dp_ray.errors import StorageError
from dp_ray.outputs import merging
from dp_ray.outputs.files import OUTPUTS, FileMerge, forget_lost, prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import Done, FilePlan, Split, Work
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, PARTS, Ledger
from dp_ray.storage import Storage
from tests.support.builders import merger_of, writer_of

SPLIT, ORDER = Split(240, 4, 4), Order(240, 5, 0, True)  # 60 steps


class Control(StepControl):
    """Counts what keeps a watchdog quiet."""

    touches = 0

    def touch(self) -> None:
        self.touches += 1


class Worker(threading.Thread):
    """One worker of an attempt in a thread: its loop, with the thread that merges."""

    def __init__(self, run: Storage, begun: Ledger, world: World, before: Callable[[int, int], None]) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.is_whole = False
        self.control = Control()
        self.most_ahead = 0.0
        self._run, self._begun, self._world, self._before = run, begun, world, before

    def run(self) -> None:
        try:
            self._predict()
        except BaseException as error:
            self.error = error

    def _predict(self) -> None:
        run, world = self._run, self._world
        work = Work(SPLIT, world.world_size, world.rank, Done(ledger.done_ranges(self._begun.parts)))
        plan, merger = merger_of(run, self._begun, SPLIT, ORDER, world, lambda: self.control.wants_stop)
        parts, attempt, size = run.child(PARTS), self._begun.attempt, world.world_size
        with merger:
            with writer_of(parts, work.shards, plan.agree, attempt=attempt, num_workers=size) as writer:
                for step, shards in work:
                    if shards:
                        merger.make_room(writer.commit, self.control)
                        if self.control.wants_stop:
                            return
                        self.most_ahead = max(self.most_ahead, merger._ahead)
                        self._before(world.rank, step)
                    for shard in shards:
                        samples = ORDER.indices(shard.start, shard.stop)
                        writer.on_shard(shard, samples, torch.from_numpy(samples)[:, None] * 3)
                    writer.on_step(step)
                    merger.on_step(step)
            self.is_whole = merger.finish(self.control)


def attempt(run: Storage, size: int, before: Callable[[int, int], None] = lambda rank, step: None) -> list[Worker]:
    """Run an attempt; once one of its workers has failed, the others are asked to stop, as Ray ends them."""
    forget_lost(run)
    begun = ledger.begin(run, f"{time.monotonic_ns():032x}")
    workers = [Worker(run, begun, World(rank, size), before) for rank in range(size)]
    for worker in workers:
        worker.start()
    until = time.monotonic() + 30
    while any(worker.is_alive() for worker in workers):
        assert time.monotonic() < until, "the workers wait for each other"
        if any(worker.error for worker in workers):
            for worker in workers:
                worker.control.wants_stop = True
        time.sleep(0.001)
    return workers


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A run directory of outputs in 12 files of 5 steps; the workers know of each other."""
    monkeypatch.setattr(merging, "has_peers", lambda: True)
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(merging, "END_SECONDS", 0.001)
    found = Storage(str(tmp_path / "run"))
    for folder in (PARTS, FILES, OUTPUTS):
        found.child(folder).create()
    ledger.note_files(found, "", 12)
    return found


def check_whole(run: Storage) -> None:
    prove_outputs(run, SPLIT.rows_kept)
    read = Merged.of(run)
    expected = ORDER.indices(0, 240)
    assert np.array_equal(read.sample_index().numpy(), expected)
    assert torch.equal(read.read()[:, 0], torch.from_numpy(expected) * 3)


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[], float]) -> None:
    """Make each file's merging take longer."""
    advance = FileMerge.advance

    def slowly(merge: FileMerge) -> bool:
        time.sleep(seconds())
        return advance(merge)

    monkeypatch.setattr(FileMerge, "advance", slowly)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loop_is_never_further_ahead_of_its_merging_than_a_file_for_each_worker(
    run: Storage, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    slow(monkeypatch, lambda: 0.02)
    workers = attempt(run, size)
    check_whole(run)
    for worker in workers:
        assert worker.error is None and worker.is_whole
        assert worker.most_ahead <= size * 5 + 1
    assert sum(worker.control.touches for worker in workers) > 3, "a watchdog would take it for a hang"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_workers_that_are_slow_die_or_stop_come_to_the_end(
    run: Storage, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Attempts on several numbers of workers; one is slow, one dies at some step; the last attempt ends."""
    random = Random(seed)
    slow(monkeypatch, lambda: random.choice([0, 0.01]))

    def before(rank: int, step: int) -> None:
        time.sleep(0.004 if rank == slow_one else 0)
        if (rank, step) == dies:
            raise InterruptedError("killed")

    for last in (False, False, True):
        size = random.randint(1, 4)
        slow_one = random.randrange(size)
        dies = (-1, -1) if last else (random.randrange(size), random.randrange(60))
        workers = attempt(run, size, before)
        assert all(isinstance(worker.error, InterruptedError | None) for worker in workers)
    assert all(worker.is_whole for worker in workers)
    check_whole(run)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_that_waits_wakes_its_merging(run: Storage, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """With a file for each step the loop waits often; it does not wait for the next look that is due."""
    monkeypatch.setattr(merging, "LOOK_SECONDS", 2.0)
    run.child(FILES).delete("cut-12")
    ledger.note_files(run, "", 60)
    began = time.monotonic()
    assert all(worker.is_whole for worker in attempt(run, size))
    assert time.monotonic() - began < 8, "60 looks take a second each"
    check_whole(run)


def test_an_error_of_the_merging_reaches_a_loop_that_waits(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(Control, "touch", lambda control: waits.set())

    def fails(merge: FileMerge) -> bool:
        assert waits.wait(20)
        raise StorageError("the disk is full")

    monkeypatch.setattr(FileMerge, "advance", fails)
    (worker,) = attempt(run, 1)
    assert isinstance(worker.error, StorageError) and "the disk is full" in str(worker.error)


def test_a_loop_that_waits_stops_when_it_is_asked_to(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has kept its steps: the next attempt goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(Control, "touch", lambda control: setattr(control, "wants_stop", True))
        slow(patch, lambda: 0.05)
        (worker,) = attempt(run, 1)
    assert worker.error is None and not worker.is_whole
    ran: list[int] = []
    attempt(run, 1, lambda rank, step: ran.append(step))
    assert ran[0] >= 5 and ran == list(range(ran[0], 60))
    check_whole(run)


def test_workers_that_run_one_after_another_do_not_wait(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that the merging needs are those of workers that run later."""
    monkeypatch.setattr(merging, "has_peers", lambda: False)
    begun = ledger.begin(run, "a" * 32)
    for rank in range(2):
        worker = Worker(run, begun, World(rank, 2), lambda *_: None)
        worker.run()
        assert worker.error is None and worker.control.touches == 0


class Model:
    """The rule alone, without files: who may run a step, and how far each worker's merging can go."""

    def __init__(self, cut: FilePlan, size: int) -> None:
        self.cut = cut
        self.size = size
        mergers = min(size, cut.files)
        self.most, self.enough = cut.most_ahead(mergers), cut.enough_room(mergers)
        self.ran, self.kept = [0] * size, [0] * size
        self.left = [list(range(rank, cut.files, size)) for rank in range(size)]
        self.through: list[float] = [cut.steps_of(one[0]).start if one else math.inf for one in self.left]
        self.waits = [False] * size

    def step(self, rank: int, keeps: bool) -> bool:
        """Whether the worker's loop moves."""
        ahead = self.ran[rank] - self.through[rank]
        self.waits[rank] = ahead > (self.enough if self.waits[rank] else self.most)
        moves = not self.waits[rank] and self.ran[rank] < self.cut.steps
        self.ran[rank] += moves
        if self.waits[rank] or keeps or self.ran[rank] == self.cut.steps:
            self.kept[rank] = self.ran[rank]
        return moves

    def merge(self, rank: int) -> bool:
        """Whether the worker's merging moves."""
        if not self.left[rank]:
            return False
        before, steps = self.through[rank], self.cut.steps_of(self.left[rank][0])
        self.through[rank] = max(before, min(steps.stop, *self.kept, math.inf))
        if self.through[rank] == steps.stop:
            del self.left[rank][0]
            rest = self.left[rank]
            self.through[rank] = self.cut.steps_of(rest[0]).start if rest else math.inf
        return self.through[rank] != before


@given(steps=st.integers(1, 60), size=st.integers(1, 6), data=st.data())
def test_somebody_can_always_go_on(steps: int, size: int, data: st.DataObject) -> None:
    """After any schedule; and if nobody keeps anything but what the rule asks for, all come to the end."""
    model = Model(FilePlan(data.draw(st.integers(1, steps)), steps), size)
    assert 0 <= model.enough <= model.most
    moves = st.tuples(st.integers(0, size - 1), st.sampled_from(["step", "step", "merge"]), st.booleans())
    for rank, act, keeps in data.draw(st.lists(moves, max_size=60)):
        model.merge(rank) if act == "merge" else model.step(rank, keeps)
    while any(model.left):
        assert any([*(model.step(rank, False) for rank in range(size)), *map(model.merge, range(size))])
    assert model.ran == [steps] * size


@pytest.mark.slow
def test_the_wait_for_the_merging_is_time_of_the_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time split of a whole prediction, whose merging takes most of its time."""
    monkeypatch.setattr(merging, "LOOK_SECONDS", 0.001)
    slow(monkeypatch, lambda: 0.05)
    keys = {"model": "torch.nn:Identity", "dataset": torch.arange(60.0)[:, None], "batch_size": 2, "workers": 0}
    result = dp_ray.run(**keys, outputs={"file_bytes": 64}, storage=str(tmp_path), name="run", quiet=True)
    assert torch.equal(result.outputs, torch.arange(60.0)[:, None])
    assert result.time_split is not None
    assert result.time_split["all"]["outputs"] > 0.2
