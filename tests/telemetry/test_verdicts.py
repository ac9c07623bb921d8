"""The rules that say what limits a run, as tables of what they are given and what they say."""

import re
from typing import Any

import pyarrow as pa
import pytest

from dp_ray.telemetry.times import STEP_PARTS, WorkerSplit, judge, shares_of, steady, verdict_of
from tests.support.cluster import ROOT


def split(rank: int, rows: int = 400, node: str = "", **seconds: Any) -> WorkerSplit:
    return WorkerSplit(rank, node or f"10.0.0.{rank}", 100, rows, {**dict.fromkeys(STEP_PARTS, 0.0), **seconds})


def alike(num: int = 4, **seconds: Any) -> list[WorkerSplit]:
    return [split(rank, **seconds) for rank in range(num)]


WORK: dict[str, Any] = {"forward": 4.0, "backward": 5.0, "other": 1.0}
LONGER = {**WORK, "backward": 10.0}
CASES: dict[str, tuple[list[WorkerSplit], int, str, str]] = {
    "a slow node": (
        [*(split(rank, **WORK, waiting=3.2) for rank in range(3)), split(3, **{**WORK, "forward": 7.2})],
        0,
        "slow worker",
        "worker 3 on 10.0.0.3 is 1.8 times slower in forward than the others for each row: look at its node",
    ),
    "a slow worker beside another": (
        [split(0, node="a", **WORK), split(1, node="a", **LONGER)],
        0,
        "slow worker",
        "worker 1 on a is 2.0 times slower in backward than the others for each row: look at its node, and what else",
    ),
    "slow a row": (
        [split(0, rows=400, **WORK), split(1, rows=200, forward=4.0, backward=2.5, other=1.0, waiting=2.5)],
        0,
        "slow worker",
        "worker 1 on 10.0.0.1 is 2.0 times slower in forward than the others for each row",
    ),
    "slow data of one": (
        [split(0, **WORK, waiting=5.0), split(1, **WORK, data_wait=5.0)],
        0,
        "slow worker",
        "worker 1 on 10.0.0.1 is much slower in data wait than the others for each row: look at what its node reads",
    ),
    "slow data": (
        alike(data_wait=6.2, forward=2.0, backward=1.8),
        0,
        "loaders",
        "loaders are the limit: 62 % of the step is waiting for data, try loader.processes: 2",
    ),
    "slower data": (alike(data_wait=7.7, forward=1.3, backward=1.0), 0, "loaders", "try loader.processes: 4"),
    "more processes": (alike(data_wait=5.0, forward=5.0), 3, "loaders", "try loader.processes: 6"),
    "most processes": (alike(data_wait=9.99, forward=0.01), 0, "loaders", "try loader.processes: 16"),
    "no more processes": (alike(data_wait=9.9, forward=0.1), 16, "loaders", "data, store the samples"),
    "exchange": (
        alike(exchange=5.0, **WORK),
        0,
        "exchange",
        "33 % of the step is summing gradients over the workers; a larger batch_size",
    ),
    "slow storage": (
        [split(0, **WORK, checkpoint=5.0), split(1, **WORK, waiting=5.0)],
        0,
        "checkpoint",
        "33 % of the time is waiting for checkpoints; raise checkpoint.every_steps",
    ),
    "evaluations": (
        alike(evaluation=16.0, **WORK),
        0,
        "parts",
        "the largest parts: evaluation 62 %, backward 19 %, forward 15 %",
    ),
    "outputs": (alike(outputs=6.0, forward=4.0), 0, "parts", "the largest parts: outputs 60 %, forward 40 %"),
    "uneven rows": (
        [
            split(0, rows=300, forward=6.0, backward=6.0),
            *(split(rank, rows=150, forward=3.0, backward=3.0, waiting=6.0) for rank in (1, 2)),
        ],
        0,
        "parts",
        "the largest parts: forward 33 %, backward 33 %, waiting 33 %",
    ),
    "no rows": (
        [split(0, rows=0, waiting=10.0), split(1, **WORK)],
        0,
        "parts",
        "the largest parts: waiting 50 %, backward 25 %, forward 20 %",
    ),
    "balanced": (alike(**WORK), 0, "balanced", "no part stands out: 90 % is forward and backward"),
    "a prediction": (alike(1, forward=9.0, other=1.0), 0, "balanced", "no part stands out: 90 % is forward"),
    "little computing": (
        alike(forward=4.0, other=3.5, update=2.5),
        0,
        "parts",
        "the largest parts: forward 40 %, other 35 %, update 25 %",
    ),
    "few seconds of steps": (
        alike(2, data_wait=3.9, forward=1.0),
        0,
        "short",
        "too short to judge: the steps behind these shares took 4.9 s, a verdict takes 5 s",
    ),
    "just enough": (alike(2, data_wait=4.0, forward=1.0), 0, "loaders", "80 % of the step"),
}


@pytest.mark.parametrize(("workers", "processes", "kind", "says"), CASES.values(), ids=CASES)
def test_verdicts(workers: list[WorkerSplit], processes: int, kind: str, says: str) -> None:
    verdict = judge(workers, processes)
    assert verdict.kind == kind
    assert says in verdict.text


def test_only_keys_that_exist_are_advised() -> None:
    described = set(
        re.findall(r"^\| <a .*></a>`([\w.\[\]]+)` \|", (ROOT / "docs/job-file.md").read_text(), re.MULTILINE)
    )
    said = " ".join(judge(workers, processes).text for workers, processes, *_ in CASES.values())
    named = set(re.findall(r"\b(?:loader|checkpoint|eval|outputs)\.\w+|batch_size", said))
    assert named == {"loader.processes", "batch_size", "checkpoint.every_steps", "checkpoint.every_seconds"}
    assert named <= described


def test_the_processes_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.telemetry.times.JUDGED_FROM", 0.0)
    table = steps_of({}, {})
    slow = table.set_column(table.column_names.index("data_wait"), "data_wait", pa.array([1.0] * len(table)))
    for job in ({}, {"loader": None}, {"loader": {"processes": 0}}, {"loader": {"processes": 16}}):
        verdict = verdict_of(slow, job)
        assert verdict is not None and ("try loader.processes" in verdict.text) == ("16" not in str(job))


def test_shares_add_up() -> None:
    shares = shares_of(CASES["a slow node"][0])
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
    assert shares["forward"] == pytest.approx(19.2 / 52.8, abs=1e-4)
    assert sum(shares_of([split(0)]).values()) == 0


def steps_of(checkpoints: dict[int, float], evaluations: dict[int, float]) -> pa.Table:
    """Twenty steps of two workers, of which the first takes a second; and some, on rank 0, with these parts."""
    steps = [step for step in range(20) for _ in range(2)]
    ranks = [0, 1] * 20
    columns: dict[str, Any] = {
        "step": steps,
        "attempt": [0] * 40,
        "rank": ranks,
        "node": pa.array(["a"] * 40).dictionary_encode(),
        "rows": [4] * 40,
    }
    columns |= {part: [0.0] * 40 for part in STEP_PARTS}
    columns["forward"] = [0.01 if step else 1.0 for step in steps]
    for part, found in (("checkpoint", checkpoints), ("evaluation", evaluations)):
        columns[part] = [found.get(step, 1e-6) if rank == 0 else 0.0 for step, rank in zip(steps, ranks, strict=True)]
    return pa.table(columns)


@pytest.mark.parametrize(
    ("checkpoints", "evaluations", "left_out"),
    [
        ({}, {}, {0}),
        ({4: 0.9, 9: 0.01, 14: 0.01}, {}, {0, 4}),
        ({4: 0.9}, {}, {0}),
        ({9: 0.5, 19: 0.01}, {4: 0.7, 9: 0.01}, {0, 4, 9}),
        (dict.fromkeys(range(20), 0.01), {}, {0}),
    ],
)
def test_what_is_done_once_is_left_out(
    checkpoints: dict[int, float], evaluations: dict[int, float], left_out: set[int]
) -> None:
    shown = steady(steps_of(checkpoints, evaluations))
    assert set(range(20)) - set(shown["step"].to_pylist()) == left_out


def test_one_slow_checkpoint_is_not_the_storages_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dp_ray.telemetry.times.JUDGED_FROM", 0.0)
    verdict = verdict_of(steps_of({4: 0.9, 9: 0.001, 14: 0.001}, {}), {})
    assert verdict is not None and verdict.kind == "balanced"
    verdict = verdict_of(steps_of({4: 0.9, 9: 0.2, 14: 0.2}, {}), {})
    assert verdict is not None and verdict.kind == "checkpoint"
