"""What becomes of what a run directory holds, decided from a snapshot of it: New, Resume, Replace or Refused.

A table says it case by case; what no run may ever lose holds for all combinations.
"""

import json
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_ray.job.job import Job
from dp_ray.rundir.claim import Decision, DirectoryState, New, Refused, Replace, Resume, Wanted, decide

ROWS = {"dataset": 100}
STATUSES = (None, "failed", "interrupted", "done")


def job_of(**keys: Any) -> Job:
    return Job.make({"model": "a:b", "dataset": "a:c", "batch_size": 10, **keys}, "job")


def training(**keys: Any) -> Job:
    optimizer = {"target": "torch.optim:SGD", "args": {"lr": 0.1}}
    return job_of(task="train", loss="torch.nn:MSELoss", optimizer=optimizer, epochs=2, **keys)


def run_of(job: Job, status: str | None = None, **holds: Any) -> DirectoryState:
    """A run of the job over 100 rows, as its driver has left it: without a result if it was killed."""
    described = json.loads(json.dumps(job.describe(), default=str))
    claimed = {"token": "of before", "rows": ROWS, "fingerprint": job.fingerprint(), "job": described}
    return DirectoryState(
        "runs/job", has_run=True, claimed=claimed, result={"status": status} if status else {}, **holds
    )


def wanted(job: Job, steps: int = 10, rows: dict[str, int] = ROWS, **asked: Any) -> Wanted:
    return Wanted(job, rows, steps, **asked)


PREDICTION, TRAINING, OBJECTS = job_of(), training(), job_of(dataset=[1, 2])
LONGER = TRAINING.model_copy(update={"epochs": 4})
DONE = run_of(TRAINING, "done", checkpoints=(10, 20), has_history=True)
STOPPED = {"metric": "eval_loss", "mode": "min", "min_delta": 0.0, "times": 3, "step": 20, "text": "stopped early"}
STOPPED_EARLY = replace(DONE, result={"status": "done", "stopped_early": STOPPED})


def patient(times: int, epochs: int = 4) -> Job:
    stopping = {"metric": "eval_loss", "patience": times}
    return training(early_stopping=stopping, eval={"dataset": "a:d"}).model_copy(update={"epochs": epochs})


CASES: dict[str, tuple[DirectoryState, Wanted, Decision | str]] = {
    "nothing is there": (DirectoryState("runs/job"), wanted(PREDICTION), New()),
    "nothing is there to replace": (DirectoryState("runs/job"), wanted(PREDICTION, overwrite=True), New()),
    "files of the user": (DirectoryState("runs/job", is_foreign=True), wanted(PREDICTION), "files that are no run"),
    "files of the user, asked": (
        DirectoryState("runs/job", is_foreign=True),
        wanted(PREDICTION, overwrite=True),
        "files that are no run",
    ),
    "killed": (run_of(PREDICTION), wanted(PREDICTION), Resume()),
    "failed": (run_of(PREDICTION, "failed"), wanted(PREDICTION), Resume()),
    "failed at once": (run_of(PREDICTION, "failed", has_kept_nothing=True), wanted(PREDICTION), Resume()),
    "interrupted, on more workers": (run_of(PREDICTION), wanted(job_of(shards=1, retries=0)), Resume()),
    "asked to be replaced": (run_of(PREDICTION), wanted(PREDICTION, overwrite=True), Replace(is_asked=True)),
    "a damaged run, asked": (
        DirectoryState("runs/job", has_run=True),
        wanted(PREDICTION, overwrite=True),
        Replace(is_asked=True),
    ),
    "another job": (run_of(PREDICTION), wanted(job_of(seed=1)), "a different job (seed: 0 there, 1 here); "),
    "another job, which failed": (run_of(PREDICTION, "failed"), wanted(job_of(seed=1)), "a different job (seed"),
    "another job, which kept nothing": (
        run_of(PREDICTION, "failed", has_kept_nothing=True),
        wanted(job_of(seed=1)),
        Replace(is_asked=False),
    ),
    "another dataset": (
        run_of(PREDICTION),
        wanted(PREDICTION, rows={"dataset": 99}),
        "a different job (dataset: 100 rows there, 99 rows here); ",
    ),
    "another dataset, nothing kept": (
        run_of(PREDICTION, "interrupted", has_kept_nothing=True),
        wanted(PREDICTION, rows={"dataset": 99}),
        Replace(is_asked=False),
    ),
    "rows that an earlier version did not keep": (
        run_of(PREDICTION),
        wanted(PREDICTION, rows={**ROWS, "eval.dataset": 5}),
        Resume(),
    ),
    "Python objects": (run_of(OBJECTS), wanted(OBJECTS), "Python objects (dataset); whether these are the same"),
    "Python objects that are the same": (run_of(OBJECTS), wanted(OBJECTS, resume=True), Resume()),
    "Python objects, nothing kept": (
        run_of(OBJECTS, "failed", has_kept_nothing=True),
        wanted(OBJECTS),
        Replace(is_asked=False),
    ),
    "the same objects, nothing kept": (
        run_of(OBJECTS, "failed", has_kept_nothing=True),
        wanted(OBJECTS, resume=True),
        Resume(),
    ),
    "a finished prediction": (run_of(PREDICTION, "done"), wanted(PREDICTION), "this run, finished; load its result"),
    "a finished prediction, reopened": (
        run_of(PREDICTION, "done"),
        wanted(PREDICTION, is_reopened=True),
        Resume(was_finished=True),
    ),
    "a training goes on": (run_of(TRAINING, checkpoints=(10,)), wanted(TRAINING, 20), Resume()),
    "a finished training": (DONE, wanted(TRAINING, 20), "this run, finished; load its result"),
    "a finished training, longer": (DONE, wanted(LONGER, 40), Resume("epochs: 2 before, 4 now", was_finished=True)),
    "an unfinished training, longer": (
        run_of(TRAINING, checkpoints=(10,)),
        wanted(LONGER, 40),
        Resume("epochs: 2 before, 4 now"),
    ),
    "shorter than what is done": (
        run_of(TRAINING, checkpoints=(10, 20)),
        wanted(TRAINING.model_copy(update={"epochs": 1}), 10),
        "this run, which has done 20 steps, and this job has 10 (epochs: 2 before, 1 now); ",
    ),
    "another length with as many steps": (DONE, wanted(LONGER, 20), "this run, finished; load its result"),
    "longer, without its checkpoints": (
        run_of(TRAINING, "done", has_history=True),
        wanted(LONGER, 40),
        "this run, finished, without the checkpoints and the history",
    ),
    "longer, without its history": (
        run_of(TRAINING, "done", checkpoints=(20,)),
        wanted(LONGER, 40),
        "this run, finished, without the checkpoints and the history",
    ),
    "it would stop early again": (
        replace(STOPPED_EARLY, claimed=run_of(patient(3, 2)).claimed),
        wanted(patient(3), 40),
        "this run, which stopped early; load its result",
    ),
    "it has more patience": (
        replace(STOPPED_EARLY, claimed=run_of(patient(3, 2)).claimed),
        wanted(patient(4, 2), 40),
        Resume("early_stopping: ", was_finished=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_decided_case_by_case(case: str) -> None:
    found, asks, expected = CASES[case]
    decision = decide(found, asks)
    if isinstance(expected, str):
        assert isinstance(decision, Refused) and decision.why.startswith("holds ") and expected in decision.why
        assert decision.is_run == found.has_run, "of a run, the error says how to replace it"
    elif isinstance(expected, Resume) and isinstance(decision, Resume):
        assert decision.lengths.startswith(expected.lengths) and bool(decision.lengths) == bool(expected.lengths)
        assert decision.was_finished == expected.was_finished
    else:
        assert decision == expected


@dataclass(frozen=True)
class Combination:
    """What a directory holds, and what is wanted there; each apart from the others."""

    status: str | None
    has_kept_nothing: bool
    checkpoints: tuple[int, ...]
    has_history: bool
    is_same_job: bool
    has_same_rows: bool
    of_objects: bool
    epochs: int
    overwrite: bool
    resume: bool
    is_reopened: bool

    def decision(self) -> Decision | Refused:
        there = training(**({"dataset": [1, 2]} if self.of_objects else {}))
        here = there.model_copy(update={"epochs": self.epochs, "seed": 0 if self.is_same_job else 1})
        found = run_of(
            there,
            self.status,
            # The snapshot reads it so: a run is known to have kept nothing only if it failed or was interrupted.
            has_kept_nothing=self.has_kept_nothing and self.status in ("failed", "interrupted"),
            checkpoints=self.checkpoints,
            has_history=self.has_history,
        )
        rows = ROWS if self.has_same_rows else {"dataset": 99}
        asked: dict[str, Any] = {"overwrite": self.overwrite, "resume": self.resume, "is_reopened": self.is_reopened}
        return decide(found, Wanted(here, rows, 10 * self.epochs, **asked))


YES = st.booleans()
COMBINATIONS = st.builds(
    Combination,
    status=st.sampled_from(STATUSES),
    has_kept_nothing=YES,
    checkpoints=st.sampled_from([(), (10,), (10, 20)]),
    has_history=YES,
    is_same_job=YES,
    has_same_rows=YES,
    of_objects=YES,
    epochs=st.integers(1, 4),
    overwrite=YES,
    resume=YES,
    is_reopened=YES,
)


@given(COMBINATIONS)
def test_no_run_that_kept_anything_is_replaced_unasked(combination: Combination) -> None:
    decision = combination.decision()
    assert decision != New(), "there is a run"
    assert isinstance(decision, Replace | Resume | Refused)
    assert (decision == Replace(is_asked=True)) == combination.overwrite
    if decision == Replace(is_asked=False):
        assert combination.has_kept_nothing and combination.status in ("failed", "interrupted")
        assert not (combination.is_same_job and combination.has_same_rows) or combination.of_objects


@given(COMBINATIONS)
def test_only_the_run_of_the_same_job_is_resumed_and_never_for_fewer_steps(combination: Combination) -> None:
    decision = replace(combination, overwrite=False).decision()
    if isinstance(decision, Resume):
        assert combination.is_same_job and combination.has_same_rows
        assert combination.resume or not combination.of_objects
        assert decision.was_finished == (combination.status == "done")
        assert bool(decision.lengths) == (combination.epochs != 2)
    if isinstance(decision, Resume) and not combination.is_reopened:
        assert 10 * combination.epochs >= max(combination.checkpoints, default=0)
        assert combination.status != "done" or (combination.checkpoints and combination.has_history)


@given(COMBINATIONS)
def test_the_unfinished_run_of_a_job_that_is_known_always_goes_on(combination: Combination) -> None:
    same = replace(combination, is_same_job=True, has_same_rows=True, resume=True, overwrite=False)
    for status, epochs in product((None, "failed", "interrupted"), (2, 3, 4)):
        assert isinstance(replace(same, status=status, epochs=epochs).decision(), Resume)
