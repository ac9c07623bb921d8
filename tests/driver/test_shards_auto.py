"""`shards: auto`: the run finds once how many shards fit on all workers, keeps the number, and trains as with it."""

import json
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dp_ray
from dp_ray.driver.planning import plan_job
from dp_ray.driver.verify import verify
from dp_ray.errors import JobError, ModelError, RunInterrupted
from dp_ray.job.job import Job
from dp_ray.messages import ShardsFound
from dp_ray.plan.costs import Plan, shard_counts
from dp_ray.rundir.unfinished import unfinished
from dp_ray.storage import Storage
from tests.support import training
from tests.support.bad_data import Broken
from tests.support.builders import run_dir_of
from tests.support.cards import ROWS, Card, card
from tests.support.cluster import ROOT, Run
from tests.support.group import ProcessExit, run_group
from tests.support.trainings import ADAMW, job_of

PAIRS = "tests.support.training:Pairs"


def training_of(folder: Path, **keys: Any) -> dict[str, Any]:
    """A training in this process, in batches of 7 rows; the card holds 3."""
    common = {"model": card(most=3), "task": "train", "dataset": PAIRS, "batch_size": 7, "shuffle": True}
    rest = {"loss": "torch.nn:CrossEntropyLoss", "optimizer": ADAMW, "max_steps": 6, "workers": 0}
    return {**common, **rest, "shards": "auto", "storage": str(folder), "name": "run", "quiet": True, **keys}


def kept(folder: Path, name: str = "run") -> dict[str, Any]:
    return dict(json.loads((folder / name / "run.json").read_text()))


def numpys_state() -> list[int]:
    state: Any = np.random.get_state()
    return list(state[1])


def planned(keys: dict[str, Any]) -> Plan:
    return plan_job(Job.make({key: one for key, one in keys.items() if key != "quiet"}, "run"))


def losses(result: dp_ray.Result) -> list[float]:
    return [float(row["loss"]) for row in result.history]


def found(messages: list[Any]) -> int:
    (number,) = (message.shards for message in messages if isinstance(message, ShardsFound))
    return int(number)


@given(st.integers(1, 3000), st.integers(0, 40))
def test_the_numbers_tried_go_from_the_workers_to_single_rows(rows: int, workers: int) -> None:
    counts = shard_counts(rows, workers)
    largest = [len(torch.chunk(torch.empty(rows), count)[0]) for count in counts]
    assert counts[0] == max(1, workers) and largest[-1] == 1
    assert counts == sorted(set(counts)) and all(two <= 2 * one for one, two in pairwise(counts))


def test_a_run_that_finds_its_shards_has_the_bits_of_one_that_is_given_them(tmp_path: Path) -> None:
    result = dp_ray.run(**training_of(tmp_path))
    assert result.shards == 4, "7 rows are 7, 4 or 2 a shard with 1, 2 or 4 of them"
    given_them = dp_ray.run(**training_of(tmp_path, shards=4, name="given"))
    assert result.weights_sha256 == given_them.weights_sha256
    assert losses(result) == losses(given_them)
    for key in ("fingerprint", "rows"):
        assert kept(tmp_path)[key] == kept(tmp_path, "given")[key]
    assert kept(tmp_path)["job"]["shards"] == 4
    (driver,) = json.loads((tmp_path / "run" / "about.json").read_text())["drivers"]
    assert "4 shards" in driver["plan"]


def test_the_number_is_found_once(tmp_path: Path) -> None:
    """A later command takes the run's number, though the device holds more rows now; another number is refused."""
    keys = training_of(tmp_path, model=card(), env={ROWS: "3"})
    assert dp_ray.run(**keys).shards == 4
    more = {**keys, "env": {ROWS: "7"}, "max_steps": 9}
    assert planned(more).split.shards == 4
    longer = dp_ray.run(**more)
    assert (longer.shards, longer.total_steps) == (4, 9)
    with pytest.raises(JobError, match=r"a different job \(shards: 4 there, 2 here"):
        dp_ray.run(**{**more, "shards": 2, "max_steps": 12})
    straight = dp_ray.run(**{**more, "shards": 4, "name": "straight"})
    assert longer.weights_sha256 == straight.weights_sha256


def test_a_run_that_was_given_its_shards_keeps_them(tmp_path: Path) -> None:
    dp_ray.run(**training_of(tmp_path, shards=7))
    assert dp_ray.run(**training_of(tmp_path, max_steps=9)).shards == 7


def test_a_new_run_of_the_name_finds_anew(tmp_path: Path) -> None:
    dp_ray.run(**training_of(tmp_path))
    assert dp_ray.run(**training_of(tmp_path, model=card(most=7)), overwrite=True).shards == 1


def test_objects_and_random_numbers_are_left_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, loss = Card(3), nn.CrossEntropyLoss()
    given_keys = training_of(tmp_path, model=model, loss=loss, dataset=training.Pairs())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), numpys_state()
    result = dp_ray.run(**given_keys)
    assert result.shards == 4
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpys_state()) == states[1:]
    by_hand = dp_ray.run(**{**given_keys, "shards": 4, "name": "given"})
    assert result.weights_sha256 == by_hand.weights_sha256


def plain_fit(most: int, shards: int) -> bool:
    """Whether two steps of plain torch on a batch of 14 rows fit a card that counts."""
    model = Card(most, counts=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    inputs, targets = zip(*(training.Pairs()[at] for at in range(14)), strict=True)
    try:
        for _ in range(2):
            pieces = zip(torch.stack(inputs).chunk(shards), torch.stack(targets).chunk(shards), strict=True)
            for some, theirs in pieces:
                loss = nn.functional.cross_entropy(model(some), theirs) * len(some) / 14
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.full(but=["6", "5"])
@pytest.mark.parametrize("most", [3, 4, 5, 6, 8, 9, 14, 15])
def test_gradients_and_the_optimizers_state_count(tmp_path: Path, most: int) -> None:
    expected = next(count for count in (1, 2, 4, 8, 14) if plain_fit(most, count))
    keys = {"model": card(most=most, counts=True), "batch_size": 14, "shuffle": False, "optimizer": ADAMW}
    assert dp_ray.run(**training_of(tmp_path, **keys, max_steps=2)).shards == expected


@pytest.mark.parametrize("bitwise", [False, True])
def test_the_number_fits_on_all_workers(tmp_path: Path, bitwise: bool) -> None:
    """Rank 1 holds fewer rows: no worker waits for it, and all take its number."""
    keys = {"shards": "auto", "workers": 2, "batch_size": 16, "bitwise": bitwise}
    assert found(run_group(job_of(card(most=8, most_on_1=2), **keys), tmp_path)) == 8
    with_3 = {**keys, "workers": 3, "strategy": "ddp"}
    assert found(run_group(job_of(card(most=16), **with_3), tmp_path / "three")) == 3


@pytest.mark.full(but=["False"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
def test_it_does_so_where_each_worker_holds_a_part_of_the_model(tmp_path: Path, bitwise: bool) -> None:
    """Rank 1 finds no memory between two blocks that all workers gather; then the job trains with the number."""
    keys = {"workers": 2, "batch_size": 14, "strategy": "fsdp", "bitwise": bitwise, "max_steps": 2}
    keys |= {"loss": "tests.support.training:token_loss", "optimizer": ADAMW, "eval": None}
    model = card("CardOfBlocks", most=7, most_on_1=3)
    number = found(run_group(job_of(model, "Sentences", shards="auto", **keys), tmp_path))
    assert number == 8, "14 rows are 7, 4 or 2 a shard with 2, 4 or 8 of them"
    run_group(job_of(model, "Sentences", shards=number, **keys), tmp_path)
    with pytest.raises(ProcessExit, match="out of memory"):
        run_group(job_of(model, "Sentences", shards=number // 2, **keys), tmp_path / "half")


def test_it_counts_from_the_most_workers_there_may_be(tmp_path: Path) -> None:
    """An elastic job that begins on one worker finds a number that four can share."""
    job = job_of(card(most=7), shards="auto", workers={"min": 1, "max": 4}, batch_size=28)
    assert job.num_shards == 4
    from dp_ray.engine.world import World
    from dp_ray.tasks.task import run_task

    told: list[Any] = []
    (tmp_path / "parts").mkdir()
    run_task(job, World(), Storage(str(tmp_path)), told.append)
    assert found(told) == 4


@pytest.mark.full(but=["a step"])
@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"task": "predict", "optimizer": None, "loss": None}, 4),
        ({"task": "evaluate", "optimizer": None}, 4),
        ({"eval": {"dataset": PAIRS, "batch_size": 14}}, 7),
        ({"eval": {"dataset": PAIRS, "batch_size": 12}, "task": "evaluate"}, 4),
        ({"precision": "bf16", "on_error": {"quarantine": 20}, "dataset": Broken}, 4),
        ({"step": "tests.driver.test_shards_auto:own_step", "loss": None}, 4),
        ({"loader": {"processes": 1}, "shuffle": "blocks", "dataset": training.Pairs}, 4),
    ],
    ids=["predict", "evaluate", "evaluations", "evaluate eval's", "bad samples", "a step", "blocks"],
)
def test_each_kind_of_job_finds_its_number(tmp_path: Path, keys: dict[str, Any], number: int) -> None:
    if keys.get("shuffle") == "blocks":
        keys = {**keys, "shuffle": {"window_blocks": 2, "block_rows": 10}}
    assert dp_ray.run(**training_of(tmp_path, **{"max_steps": 4, **keys})).shards == number


def own_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_a_row_that_does_not_fit_is_told(tmp_path: Path) -> None:
    says = r"shards: auto: a shard of a single row does not fit: rank 0: step 0, shard 0: model raised OutOfMemory"
    with pytest.raises(
        JobError,
        match=says + r"Error: CUDA out of memory.*float32 \[1, 6\].*; set one of: precision: bf16, more GPUs",
    ):
        dp_ray.run(**training_of(tmp_path, model=card(most=0)))
    assert kept(tmp_path)["job"]["shards"] == "auto"
    told = unfinished(str(tmp_path / "run"))
    assert told is not None and (told.step, told.steps) == (0, 6)


def test_other_errors_end_the_run_as_ever(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="RuntimeError: no such thing"):
        dp_ray.run(**training_of(tmp_path, model={"target": "tests.driver.test_shards_auto:Broke"}))


class Broke(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such thing")


def test_a_run_that_was_stopped_before_it_found_its_number_finds_it(tmp_path: Path) -> None:
    keys = training_of(tmp_path)
    job = Job.make({key: one for key, one in keys.items() if key != "quiet"}, "run")
    run_dir_of(tmp_path, job, rows={"dataset": 101})
    assert "shards: auto: before the first step" in "; ".join(plan_job(job).remarks)
    assert dp_ray.run(**keys).shards == 4


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_it_may_be_interrupted_meanwhile(tmp_path: Path, which: signal.Signals) -> None:
    keys = training_of(tmp_path, model=card("Stopped", file=str(tmp_path / "was"), signal=int(which)))
    with pytest.raises(RunInterrupted, match="interrupted before a step was kept"):
        dp_ray.run(**keys)
    assert kept(tmp_path)["job"]["shards"] == "auto" and (tmp_path / "was").exists()
    resumed = dp_ray.run(**keys)
    assert resumed.shards == 4
    by_hand = dp_ray.run(**{**keys, "shards": 4, "name": "given"})
    assert resumed.weights_sha256 == by_hand.weights_sha256


def test_the_plan_says_what_will_be_tried(tmp_path: Path) -> None:
    keys = training_of(tmp_path, workers={"min": 1, "max": 2}, batch_size=30)
    plan = planned(keys)
    assert plan.to_json()["shards"] == 2
    (remark,) = plan.remarks
    tried = "2 (15), 4 (8), 8 (4), 16 (2), 30 (1)"
    assert remark.startswith("shards: auto: before the first step the workers try") and tried in remark


def test_what_auto_cannot_be_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"sync_batchnorm: needs a worker for each shard, and shards: auto may"):
        job_of("mlp", shards="auto", sync_batchnorm=True)
    with pytest.raises(JobError, match=r"shards: must be .*'automatic'|shards: .*automatic"):
        job_of("mlp", shards="automatic")
    with pytest.raises(JobError, match="verify compares runs with one number of shards"):
        verify(job_of("mlp", shards="auto"), [1, 2], dp_ray.driver.run.Options())


def test_a_given_number_has_the_fingerprint_that_it_had() -> None:
    """So has none; auto is a job of its own until its number is found."""
    prints = {one: job_of("mlp", workers=2, shards=one).fingerprint() for one in (None, 2, 4, "auto")}
    assert prints[None] == prints[2] and len(set(prints.values())) == 3


LIMITED = """
import resource, psutil, dp_ray
from tests.driver.test_shards_auto import training_of
from tests.support.cards import card
from pathlib import Path
here = Path({folder!r})
dp_ray.run(**training_of(here, model=card("Wide"), shards=7, name="warm", max_steps=1))
limit = psutil.Process().memory_info().vms + int(6.5 * 2**28)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(dp_ray.run(**training_of(here, model=card("Wide"), batch_size=14, max_steps=2)).shards)
"""


@pytest.mark.full
@pytest.mark.slow
def test_memory_that_the_system_refuses_counts(tmp_path: Path) -> None:
    """A process that may take the room of six rows and a half: 14 rows and 7 do not fit, and 4 do."""
    code = LIMITED.format(folder=str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "4"


@pytest.mark.full
@pytest.mark.ray
def test_workers_on_ray_find_the_number_and_run_the_job(run: Run) -> None:
    """Both on the same two workers, of which the second holds fewer rows."""
    keys = {"model": card(most=8, most_on_1=4), "batch_size": 16, "task": "train", "dataset": PAIRS, "max_steps": 4}
    keys |= {"loss": "torch.nn:CrossEntropyLoss", "optimizer": ADAMW, "bitwise": True}
    result = run(**keys, workers=2, shards="auto")
    assert result.shards == 4 and result.world_sizes == [2] and result.restarts == 0
    alone = run(**{**keys, "model": card(most=8)}, workers=0, shards=4, name="alone")
    assert result.weights_sha256 == alone.weights_sha256
