"""Bad samples are set aside: training and evaluation are those of one process on the good ones, on any workers."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from dp_ray.engine.loads.bad_samples import (
    Quarantine,
    Reference,
    Screen,
    bad_sample,
    choose_reference,
    item_form,
    not_finite,
)
from dp_ray.engine.loads.items import SampleReader
from dp_ray.engine.loads.loader import Collate, Read
from dp_ray.engine.world import World
from dp_ray.errors import DataError, JobError
from dp_ray.job.job import Job
from dp_ray.job.samples import ReadRequest
from dp_ray.outputs.files import prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.rundir.quarantine import merge_quarantine, positions_set_aside
from dp_ray.storage import Storage
from dp_ray.tasks.setup import Context
from dp_ray.tasks.setup import set_aside as begin_to_set_aside
from dp_ray.text import hide
from tests.support import training
from tests.support.bad_data import Broken, good_loop, quarantined
from tests.support.builders import loader_of
from tests.support.chance import examples
from tests.support.group import ProcessExit, StopsBefore, history_of, measured, run_group, weights_of
from tests.support.trainings import assert_as_good_loop, job_of

ORDER = Order(101, 0, 0, shuffle=True)
# Of 7 rows in 5 shards: all of step 1's shard 0, one row of its shard 1, a whole last shard, and all of step 3.
BAD = [ORDER[at] for at in (7, 8, 9, 13, *range(21, 28), 100)]
KINDS = {"raises": BAD[:4], "misshapen": BAD[4:6], "nan": BAD[6:]}
ON_ERROR = {"quarantine": len(BAD), "finite": True}


def job(model: str = "mlp", workers: int = 1, image: bool = False, **keys: Any) -> Job:
    data = {"target": "tests.support.bad_data:Broken", "args": {**KINDS, "image": image}}
    given = {"workers": workers, "shards": 5, "bitwise": True, "on_error": ON_ERROR}
    return job_of(model, data, **{**given, **keys})


@pytest.mark.full(but=["3-True"])
@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_training_is_that_of_one_process_on_the_good_rows(tmp_path: Path, workers: int, bitwise: bool) -> None:
    run_group(job(workers=workers, bitwise=bitwise), tmp_path)
    assert_as_good_loop(tmp_path, BAD)


def everything(job: Job, folder: Path) -> tuple[Any, ...]:
    """All that a training leaves, with the samples that it set aside."""
    run_group(job, folder)
    merge_quarantine(Storage(str(folder)))
    weights = {name: tensor.numpy().tobytes() for name, tensor in weights_of(folder).items()}
    return weights, repr(history_of(folder)), quarantined(folder)


@pytest.mark.full
@pytest.mark.slow
def test_bits_and_quarantine_do_not_depend_on_workers_or_loaders(tmp_path: Path) -> None:
    """With BatchNorm, whose statistics are shard 0's, and a decay, which a step without rows must not do."""
    decays: dict[str, Any] = {"target": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}}
    ways: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {"loader": {"processes": 2}})]
    found = [
        everything(job("conv", workers, True, optimizer=decays, **keys), tmp_path / str(workers))
        for workers, keys in ways
    ]
    assert found[0] == found[1] == found[2]
    torch.manual_seed(0)
    model = training.conv()
    good_loop(model, Broken(image=True), BAD, torch.optim.SGD(model.parameters(), **decays["args"]), 5)
    for name, expected in model.state_dict().items():
        assert torch.allclose(weights_of(tmp_path / "3")[name], expected, rtol=1e-4, atol=1e-6), name
    rows = found[0][2]
    named = {"raises": "ValueError", "misshapen": "Misshapen", "nan": "NotFinite"}
    kinds = {sample: named[kind] for kind, samples in KINDS.items() for sample in samples}
    assert {row["sample_index"]: row["type"] for row in rows} == kinds
    assert [(row["epoch"], row["position"]) for row in rows] == sorted(
        (row["epoch"], row["position"]) for row in rows
    )
    for epoch in (0, 1):
        order = Order(101, 0, epoch, shuffle=True)
        here = [row for row in rows if row["epoch"] == epoch]
        assert {order[row["position"]] for row in here} == set(BAD) == {row["sample_index"] for row in here}
        assert all(row["step"] == epoch * 15 + row["position"] // 7 for row in here)


def prediction(bad: dict[str, list[int]], dataset: str = "Broken", **keys: Any) -> Job:
    """A prediction over 23 samples in batches of 6."""
    data = {"target": f"tests.support.bad_data:{dataset}", "args": {"length": 23, **bad}}
    given = {"task": "predict", "batch_size": 6, "shards": 3, "inputs": "first", "shuffle": False}
    return job_of("mlp", data, **{**given, "on_error": ON_ERROR, **keys})


def predicted(folder: Path, **keys: Any) -> torch.Tensor:
    """The merged outputs of a prediction, and those that it lacks are the ones that were set aside."""
    run_group(prediction(**keys), folder)
    run = Storage(str(folder))
    prove_outputs(run, 23, positions_set_aside(run))
    merge_quarantine(run)
    assert Merged.of(run).sample_index().tolist() == [index for index in range(23) if index not in set_aside(folder)]
    outputs: torch.Tensor = Merged.of(run).read()
    return outputs


def set_aside(folder: Path) -> dict[int, str]:
    return {row["sample_index"]: row["type"] for row in quarantined(folder)}


def outputs_of(samples: list[int]) -> torch.Tensor:
    """What the model gives for these samples, each in the shard that it has of the whole dataset."""
    torch.manual_seed(0)
    with torch.no_grad():
        outputs: torch.Tensor = training.mlp().eval()(training.Pairs(23).inputs[samples])
    return outputs


def test_one_more_than_the_limit_ends_the_job_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(
        ProcessExit, match=r"(?s)3 samples cannot be used, and on_error.quarantine is 2.*sample 9 of"
    ) as told:
        predicted(tmp_path, bad={"raises": [4, 5, 9]}, on_error={"quarantine": 2})
    assert "sample 4 of dataset, step 0: ValueError: no such image: 4" in str(told.value)
    outputs = predicted(tmp_path, bad={"raises": [4, 5, 9]}, on_error={"quarantine": 3})
    assert len(outputs) == 20


@pytest.mark.full
@pytest.mark.slow
def test_a_resumed_training_forgets_what_it_runs_again(tmp_path: Path) -> None:
    """Killed at step 9, after its checkpoint at step 6: the same weights, history and quarantine as at once."""
    keys: dict[str, Any] = {"checkpoint": {"every_steps": 6}, "eval": None}
    whole = everything(job(workers=2, **keys), tmp_path / "whole")
    run_group(job(workers=2, **keys), tmp_path / "killed", StopsBefore(9))
    passing = job(workers=3, **{**keys, "dataset": {"target": "tests.support.bad_data:Broken"}})
    run_group(passing, tmp_path / "passing", StopsBefore(1))
    assert everything(job(workers=1, **keys), tmp_path / "killed") == whole
    assert everything(job(workers=3, **keys), tmp_path / "passing") == whole


def test_a_sample_that_is_good_again_is_not_set_aside(tmp_path: Path) -> None:
    """The first attempt had not committed its steps when it was killed."""
    run_group(prediction({"raises": [4, 9]}, workers=2), tmp_path, StopsBefore(3))
    assert len(predicted(tmp_path, bad={"raises": [9]})) == 22


def test_what_was_bad_in_one_evaluation_may_be_good_in_the_next() -> None:
    dataset, kept = Broken(23, raises=[11]), list[list[int]]()
    quarantine = Quarantine(Reference(0, item_form(dataset[0])), lambda shard, bad: kept.append(list(bad)))
    made = prediction({}, workers=1, order="dataset")
    before = [index for indices, _ in loader_of(made, dataset, quarantine=quarantine) for index in indices.tolist()]
    assert before == [index for index in range(23) if index != 11]
    dataset.raises = set()
    after = [index for indices, _ in loader_of(made, dataset, quarantine=quarantine) for index in indices.tolist()]
    assert after == list(range(23)) and kept == [[11]]


@pytest.mark.full
@pytest.mark.slow
def test_an_evaluation_is_over_the_good_rows_and_says_how_many(tmp_path: Path) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"length": 20, "raises": [0, 1, 2], "nan": [7]}}
    evaluated = {"dataset": data, "batch_size": 6}
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        run_group(job(workers=workers, eval=evaluated, on_error={"quarantine": len(BAD) + 4, "finite": True}), folder)
        merge_quarantine(Storage(str(folder)))
        last = history_of(folder)[-1]
        good = [index for index in range(20) if index not in (0, 1, 2, 7)]
        model, pairs = training.mlp().eval(), training.Pairs(20)
        model.load_state_dict(weights_of(folder))
        expected = cross_entropy(model(pairs.inputs[good]), pairs.targets[good]).item()
        assert (last["eval_rows"], last["eval_loss"]) == (16, pytest.approx(expected, rel=1e-5))
        told = [row for row in quarantined(folder) if row["dataset"] == "eval.dataset"]
        assert [(row["step"], row["sample_index"]) for row in told] == [
            (at, index) for at in (14, 29) for index in (0, 1, 2, 7)
        ]


def test_a_task_evaluate_measures_the_good_rows(tmp_path: Path) -> None:
    told = measured(run_group(job(workers=2, task="evaluate", batch_size=9, shards=4), tmp_path))
    torch.manual_seed(0)
    model, pairs = training.mlp().eval(), training.Pairs()
    good = [index for index in range(101) if index not in BAD]
    assert told["loss"] == pytest.approx(cross_entropy(model(pairs.inputs[good]), pairs.targets[good]).item())


def test_what_a_users_collate_cannot_collate_is_set_aside(tmp_path: Path) -> None:
    """It is bad if it cannot be collated with the reference, also alone in its shard, as sample 22 is."""
    bad = {"misshapen": [4], "raises": [0, 12, 13], "matrix": [6, 11, 22]}
    collate = "tests.support.bad_data:padded"
    outputs = predicted(tmp_path, workers=2, bad=bad, collate=collate, shards=4)
    assert set_aside(tmp_path) == {
        0: "ValueError",
        12: "ValueError",
        13: "ValueError",
        **dict.fromkeys([6, 11, 22], "RuntimeError"),
    }
    good = [index for index in range(23) if index not in (0, 4, 6, 11, 12, 13, 22)]
    kept = [index for index in range(23) if index in {*good, 4}]
    assert torch.allclose(outputs[[kept.index(index) for index in good]], outputs_of(good), atol=1e-6)


@pytest.mark.full
@pytest.mark.slow
def test_with_no_bad_sample_nothing_changes(tmp_path: Path) -> None:
    data = {"target": "tests.support.bad_data:Broken", "args": {"image": True}}
    on, off = (
        job("conv", 2, dataset=data, on_error=on_error) for on_error in ({"quarantine": 1, "finite": True}, None)
    )
    assert everything(on, tmp_path / "on") == everything(off, tmp_path / "off")


def test_the_keys(tmp_path: Path) -> None:
    plain = job(on_error=None)
    assert job(on_error={"quarantine": 3}).fingerprint() == plain.fingerprint()
    assert job(on_error={"quarantine": 3, "finite": True}).fingerprint() != plain.fingerprint()
    with pytest.raises(JobError, match=r"on_error\.timeout: is no key of a job; here it is dataset: a read that may"):
        job(on_error={"quarantine": 3, "timeout": 600})
    with pytest.raises(JobError, match=r"on_error\.quarantine: is missing"):
        job(on_error={"finite": True})
    with pytest.raises(JobError, match="on_error: sync_batchnorm would wait"):
        job(workers=5, bitwise=False, sync_batchnorm=True)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ((torch.tensor([1.0, float("nan")]), 1), "[0] holds nan"),
        ({"x": [np.array([1.0, -np.inf])]}, "['x'][0] holds -inf"),
        (float("inf"), "it holds inf"),
        (torch.full((70_000,), 1.0, dtype=torch.float16), ""),
        (torch.full((3,), 3e38), ""),
        ((torch.tensor([1, 2]), "nan", None), ""),
    ],
)
def test_what_is_not_finite(item: Any, says: str) -> None:
    assert not_finite(item) == says


def test_the_reference_is_of_the_most_common_form() -> None:
    odd, usual = torch.zeros(2), torch.zeros(3)
    chosen = choose_reference([(7, odd), (8, usual), (9, usual)], None)
    assert chosen == Reference(8, "tensor [3]")
    assert choose_reference([], None) is None


def verdicts(items: list[Any], size: int, collate: Any = None) -> set[int]:
    """The samples that are bad if so many are read at once; the first one is the reference."""
    screen = Screen(SampleReader(items), True, collate is not None, reference=Reference(0, item_form(items[0])))
    bad: set[int] = set()
    for start in range(0, len(items), size):
        indices = list(range(len(items)))[start : start + size]
        read = Read(ReadRequest(0, 0, 0, indices), [items[index] for index in indices], 0.0)
        _, (_, screened) = Collate(collate or default_collate, None, screen, screen.reader)(read)
        bad |= {found.sample for found in screened.bad.values()}
    return bad


def together(items: list[Any]) -> Any:
    """The first one says what is taken of the others."""
    return [[item[key] for key in items[0]] for item in items]


KEYS = [{"x": 1, "y": 2}, {"x": 3}, {"x": 4, "y": 5, "z": 6}, {"x": 7, "y": 8}]
ODD: list[list[Any]] = [
    ["a", "b", 3, "c", ["d"], None, "e", np.str_("f"), np.float32(1)],
    [{"x": 1}, {"x": 2, "y": 3}, {"x": 4}, {"y": 5}, {"x": "6"}],
    [(1, 2), "ab", [3, 4], (5, 6, 7), torch.zeros(2)],
    [torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(3), torch.full((2,), float("nan"))],
]


@pytest.mark.parametrize(("items", "collate"), [*((items, None) for items in ODD), (KEYS, together)])
def test_whether_a_sample_is_bad_depends_on_no_neighbour(items: list[Any], collate: Any) -> None:
    alone = verdicts(items, 1, collate)
    assert 0 < len(alone) < len(items)
    for size in range(2, len(items) + 1):
        assert verdicts(items, size, collate) == alone, size


@pytest.mark.full(but=["3"])
@pytest.mark.parametrize("workers", [1, 3])
def test_outputs_of_steps_without_rows_are_whole(tmp_path: Path, workers: int) -> None:
    """Each step is a file of its own: the second one has no rows, and rank 0 none of the first."""
    bad = [0, 1, *range(6, 12), 22]
    outputs = predicted(tmp_path, bad={"raises": bad}, workers=workers, outputs={"file_bytes": 1})
    good = [index for index in range(23) if index not in bad]
    assert torch.allclose(outputs, outputs_of(good), atol=1e-6)
    assert len(list((tmp_path / "outputs").glob("*.parquet"))) == 3


@pytest.mark.slow
def test_a_killed_prediction_ends_with_the_same_outputs_and_quarantine(tmp_path: Path) -> None:
    bad = {"raises": [1, 6, 7, 13], "misshapen": [9, 20]}
    keys: dict[str, Any] = {"bad": bad, "outputs": {"file_bytes": 1}}
    whole = predicted(tmp_path / "whole", workers=2, **keys)
    for step in range(4):
        folder = tmp_path / str(step)
        run_group(prediction(**keys, workers=2), folder, StopsBefore(step))
        assert torch.equal(predicted(folder, workers=3, **keys), whole)
        assert quarantined(folder) == quarantined(tmp_path / "whole")


def test_with_all_samples_bad_a_prediction_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessExit, match="none of the first 23 samples is good"):
        predicted(tmp_path, bad={"raises": list(range(23))}, on_error={"quarantine": 30})


@pytest.mark.full(but=["1"])
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_bad_samples_at_random_places_with_kills_change_nothing_else(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    places = random.sample(range(101), 12)
    bad = {"raises": places[:4], "misshapen": places[4:8], "nan": places[8:]}
    data = {"target": "tests.support.bad_data:Broken", "args": bad}
    keys: dict[str, Any] = {"dataset": data, "on_error": {"quarantine": 12, "finite": True}, "epochs": 1}
    keys |= {"batch_size": random.randint(3, 20), "checkpoint": {"every_steps": random.randint(1, 4)}}
    alone = everything(job(**keys), tmp_path / "alone")
    for workers in (2, 3):
        folder = tmp_path / str(workers)
        for _ in range(2):
            killed = job(workers=random.randint(1, 3), **keys)
            run_group(killed, folder, StopsBefore(random.randrange(101 // killed.batch_size)))
        assert everything(job(workers=workers, **keys), folder) == alone
    assert {row["sample_index"] for row in alone[2]} == set(places)


HUSH = "hush0hush"
SECRETS = [f"s3://key:{HUSH}@bucket/a.png", f"password='{HUSH}'", f"https://host/a?X-Amz-Signature={HUSH}"]
ANY_TEXT = st.text(st.characters(exclude_categories=()))
PIECES = ANY_TEXT | st.sampled_from(["x", "\udcff", "\n\x00é\u2028"])
MESSAGES = st.tuples(PIECES, st.integers(0, 3) | st.integers(9900, 10_000), st.sampled_from(["", *SECRETS]))


class WithSecretKeys(Broken):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)[0], "api_key": 1, f"s3://key:{HUSH}@bucket": "text"}


def test_the_reference_of_a_resumed_run_is_the_same_whatever_the_keys_are_called(tmp_path: Path) -> None:
    run, forms = Storage(str(tmp_path)), []
    for _ in range(2):
        quarantine, _ = begin_to_set_aside(
            Context(prediction({}), World(), run, lambda note: None), "dataset", WithSecretKeys(5)
        )
        assert quarantine is not None
        forms.append(quarantine.reference)
    assert forms[0] == forms[1] == Reference(0, item_form(WithSecretKeys(5)[0]))
    assert HUSH not in "".join(path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_that_the_limit_of_a_text_cuts_is_hidden(secret: str) -> None:
    for size in range(9_940, 10_000, 5):
        for text in (f"{'x' * size} {secret}", f"{secret} {'x' * size}"):
            bad = bad_sample(0, ValueError(text))
            assert HUSH[:4] not in hide(bad.message) + hide(bad.traceback) and len(bad.message) > 9_000


class Speechless(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


ERRORS: list[Callable[[str], Exception]] = [
    ValueError,
    KeyError,
    DataError,
    Speechless,
    StopIteration,
    lambda text: OSError(2, "no such file", os.fsencode(text[:1]) + b"\xff"),
    lambda text: UnicodeDecodeError("utf-8", b"\xff", 0, 1, text),
    lambda text: ExceptionGroup(text, [ValueError(text)]),
]


class Failing(Broken):
    """Some samples raise an error each; each sample has a name of its own."""

    def __init__(self, errors: dict[int, Exception], names: list[Any]) -> None:
        super().__init__(len(names))
        self.errors, self.names = errors, names

    def __getitem__(self, index: int) -> Any:
        if index in self.errors:
            raise self.errors[index]
        return {"x": super().__getitem__(index)[0], "name": self.names[index]}


def kept_of(errors: dict[int, Exception], names: list[Any], folder: Path) -> tuple[list[int], list[Any], list[str]]:
    """The samples that a prediction uses, its quarantine, and what it says of it."""
    job = prediction({}, on_error={"quarantine": 15}, inputs=["x"], outputs={"carry": ["name"]})
    dataset, run = Failing(errors, names), Storage(str(folder))
    run.child("quarantine").create()
    notes: list[Any] = []
    quarantine, _ = begin_to_set_aside(Context(job, World(), run, notes.append), "dataset", dataset)
    loaded = loader_of(job, dataset, quarantine=quarantine)
    used = [index for indices, _ in loaded for index in indices.tolist()]
    merge_quarantine(run, ["name"])
    return used, pq.read_table(folder / "quarantine.parquet").to_pylist(), [note.text for note in notes]


@given(
    errors=st.dictionaries(st.integers(1, 14), st.tuples(st.sampled_from(ERRORS), MESSAGES), min_size=1, max_size=8),
    names=st.lists(ANY_TEXT | st.integers() | st.floats() | st.none(), min_size=15, max_size=15),
)
@settings(max_examples=examples(5), suppress_health_check=list(HealthCheck))
def test_samples_are_set_aside_whatever_their_errors_say(
    errors: dict[int, tuple[Callable[[str], Exception], tuple[str, int, str]]], names: list[Any]
) -> None:
    """A message is a text, so many times, and a secret."""
    raised = {sample: kind(f"{text * times} {secret}") for sample, (kind, (text, times, secret)) in errors.items()}
    with tempfile.TemporaryDirectory() as folder:
        used, rows, said = kept_of(raised, names, Path(folder))
    assert used == [index for index in range(15) if index not in raised]
    assert [row["sample_index"] for row in rows] == sorted(raised)
    assert len(said) == len(rows)
    assert HUSH[:6] not in str(rows) + str(said)
    for row in rows:
        kind, (text, times, secret) = errors[row["sample_index"]]
        if kind is Speechless:  # its text raises in its turn
            assert (row["type"], "Speechless" in row["traceback"]) == ("ValueError", True)
        else:
            assert row["type"] == type(raised[row["sample_index"]]).__name__
        if kind is ValueError and text and times and not secret:
            whole = f"{text * times} "[:10_000].encode(errors="backslashreplace").decode()
            assert row["message"] == hide(whole)
