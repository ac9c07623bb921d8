"""Jobs on simulated GPUs: the CPU's bits, no races, no needless waits and kernels, no context on another's GPU."""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.engine.clock import DevicePlace, Part
from dp_ray.engine.forward.state import EARLY
from dp_ray.engine.world import World
from dp_ray.messages import Beat, WorkerReady
from dp_ray.monitor.watchdog import Watchdog
from dp_ray.plan.split import worker_pieces
from tests.sim.conftest import Set, begin
from tests.sim.hanging import HUNG, STEP, told
from tests.sim.jobs import JOBS, NOT_BITWISE, OTHER_KERNELS, RESUMED, num_devices
from tests.sim.jobs import job as job_of_jobs
from tests.sim.mutants import FUNCTIONS, METHODS, MUTANTS, NO_ORDER
from tests.support.cluster import ROOT
from tests.support.group import history_of, weights_of

SIZES = [1, 2, 3]  # two sum as a pair
Sets = Callable[[int], Set]
on_each_number = pytest.mark.parametrize("size", SIZES)
with_each_job = pytest.mark.parametrize("name", JOBS)
is_training = {"loader": True} | {name: keys.get("task", "train") == "train" for name, keys in JOBS.items()}
TRAININGS = [name for name in JOBS if is_training[name]]
# Host waits of a step: "unused" asks the other workers; fp16's scaler reads whether there were infinities.
# For the vote of three steps before, which a GPU has computed long since if it keeps up; for fp16's scaler instead.
WAITS = 1
# A weight of the user's is read once a shard with rows, of which there are four.
MOST_WAITS = {"unused": 2, "unused bitwise": 2, "no labels": WAITS + 4, "fsdp no labels": WAITS + 4}
MOST_WAITS |= {"loop": WAITS + 1}  # for what it gathers
MOST_WAITS |= {"odd rows": WAITS + 6}  # its collate copies inputs and labels of each of three shards itself
# What a step of one shard launches more than plain torch, which waits for its two copies to the GPU.
MORE = {"kernels": 11, "copies": 0, "host waits": -2}
# What a shard of a prediction launches.
SHARDS = {
    "one predicted shard": {"kernels": 7, "copies": 2, "host waits": 0},
    "one narrowed shard": {"kernels": 13, "copies": 2, "host waits": 0},
}
# Between the GPU and the host in an early step, more than in a later one: the digests of each shard, and outputs.
EARLY_COPIES = {"one shard": 8, "bitwise": 14, "one predicted shard": 8, "one narrowed shard": 8}


class Limit(NamedTuple):
    """How many calls more than a plain loop's a step makes at most: with one shard, and for more."""

    one: int
    further: int  # shard, each
    layers: int  # ten more, of any function: a call a layer would add ten


# A busy machine adds some: what has come from the GPU by then is taken in sooner or later.
LIMITS = {
    "train resnet": Limit(300, 170, 9),
    "train Gpt": Limit(300, 170, 9),
    "predict resnet": Limit(140, 55, 9),
    "predict Gpt": Limit(140, 55, 9),
}


def results(folder: Path, name: str) -> dict[str, Any]:
    """The bits that a job has left: the digests of its weights and its history, or its outputs in order."""
    if is_training[name]:
        digests = {key: sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in weights_of(folder).items()}
        rows = history_of(folder)
        # Each device's norm is computed there: their sum rounds otherwise. So does a misaligned gradient's.
        if num_devices(name) > 1 or name in NOT_BITWISE:
            rows = [{**row, "gradient_norm": None} for row in rows]
        return {**digests, "history": repr(rows)}
    files = sorted((folder / "outputs").glob("*.parquet"))
    return dict(pa.concat_tables(map(pq.read_table, files)).to_pydict())


@on_each_number
@pytest.mark.parametrize("name", [name for name in JOBS if name not in OTHER_KERNELS and name != "evaluate"])
def test_a_job_ends_with_the_bits_of_the_cpu(set_of: Sets, size: int, name: str) -> None:
    found = set_of(size)
    found.reports("gpu", name)
    assert results(found.folder / "gpu" / name, name) == results(found.folder / "cpu" / name, name)


def test_a_loaders_processes_know_nothing_of_the_gpu(set_of: Sets) -> None:
    found = set_of(1)
    (report,) = found.reports("gpu", "loader")
    assert report["races"] == []
    assert results(found.folder / "gpu/loader", "loader") == results(found.folder / "cpu/loader", "loader")


@on_each_number
@pytest.mark.parametrize("name", sorted(OTHER_KERNELS))
def test_half_precision_ends_near_the_cpus(set_of: Sets, size: int, name: str) -> None:
    found = set_of(size)
    found.reports("gpu", name)
    on_gpu, on_cpu = (weights_of(found.folder / kind / name) for kind in ("gpu", "cpu"))
    for key, tensor in on_cpu.items():
        assert (on_gpu[key] - tensor).norm() < 0.05 * tensor.norm(), key


@on_each_number
def test_an_evaluation_measures_what_the_cpu_measures(set_of: Sets, size: int) -> None:
    gpu, cpu = (set_of(size).reports(kind, "evaluate")[0]["measured"] for kind in ("gpu", "cpu"))
    assert gpu == cpu
    assert gpu.keys() == {"loss", "right"}


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", [name for name in JOBS if name not in NOT_BITWISE and name != "evaluate"])
def test_a_job_has_the_same_bits_on_any_number_of_gpus(set_of: Sets, size: int, name: str) -> None:
    alone, together = (results(set_of(number).folder / "gpu" / name, name) for number in (1, size))
    assert alone == together


@on_each_number
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_job_has_the_bits_of_one_that_runs_to_its_end(set_of: Sets, size: int, name: str) -> None:
    found = set_of(size)
    for one in (name, RESUMED[name]):
        found.reports("gpu", one)
    assert results(found.folder / "gpu" / name, name) == results(found.folder / "gpu" / RESUMED[name], name)


@on_each_number
@with_each_job
def test_no_kernel_races_another(set_of: Sets, size: int, name: str) -> None:
    assert [report["races"] for report in set_of(size).reports("gpu", name)] == [[]] * size


@on_each_number
@with_each_job
def test_a_worker_opens_no_context_on_anothers_gpu(set_of: Sets, size: int, name: str) -> None:
    for rank, report in enumerate(set_of(size).reports("gpu", name)):
        own = {str(rank * 2 + number) for number in range(num_devices(name))}
        assert report["contexts"].keys() == own, report["contexts"]


@on_each_number
@pytest.mark.parametrize("name", TRAININGS)
def test_the_host_waits_for_no_step(set_of: Sets, size: int, name: str) -> None:
    keys = job_of_jobs(name, size, ["cpu"] * num_devices(name))
    for rank, report in enumerate(set_of(size).reports("gpu", name)):
        most = MOST_WAITS.get(name, WAITS)
        if not worker_pieces(keys.batch_size, keys.num_shards, size, rank):
            # For each pass a worker without rows asks what the others used; fp16's scaler reads of that, too.
            most += 2 if name in ("loop", "fp16") else 1
        assert usual_step(report)["host waits"] <= most


def test_a_step_launches_what_plain_torch_launches_and_little_more(set_of: Sets) -> None:
    found = set_of(1)
    ours, plain = (usual_step(found.reports("gpu", name)[0]) for name in ("one shard", "plain torch"))
    assert {name: ours[name] - plain[name] for name in ours} == MORE


def test_a_process_that_reads_a_gpus_memory_without_a_copy_is_killed(set_of: Sets) -> None:
    (report,) = set_of(1).reports("gpu", "plain torch")
    assert report["killed by"] == "SIGSEGV"


@on_each_number
def test_a_parallel_module_computes_as_on_cpus_and_without_races(set_of: Sets, size: int) -> None:
    (alone,) = set_of(1).reports("cpu", "module")
    for kind in ("cpu", "gpu"):
        for report in set_of(size).reports(kind, "module"):
            assert report == {"races": [], "values": alone["values"]}


@pytest.mark.parametrize("name", SHARDS)
def test_a_predictions_shard_waits_for_no_gpu(set_of: Sets, name: str) -> None:
    assert usual_step(set_of(1).reports("gpu", name)[0]) == SHARDS[name]


@pytest.mark.parametrize("name", ["one shard", "bitwise", *SHARDS])
def test_the_first_steps_copy_no_parameter_to_the_host(set_of: Sets, name: str) -> None:
    """The model has eight; what they read is a number for each, all in one copy."""
    report = set_of(1).reports("gpu", name)[0]
    usual = usual_step(report)["copies"]
    early = itertools.pairwise(report["counts"][: EARLY + 1])
    assert max(after[1] - before[1] for before, after in early) <= usual + EARLY_COPIES[name]


@on_each_number
def test_outputs_too_large_for_their_dtype_are_told_as_on_the_cpu(set_of: Sets, size: int) -> None:
    gpu, cpu = ([report["notes"] for report in set_of(size).reports(kind, "narrow")] for kind in ("gpu", "cpu"))
    assert gpu == cpu
    lines = [line for notes in gpu for line in notes if "outputs.dtype" in line]
    assert lines, "some are too large"
    assert all("large has numbers too large for float16" in line and "step 0, shard 0" not in line for line in lines)


def test_a_bitwise_job_tells_that_an_allocation_was_tried_again(set_of: Sets) -> None:
    says = "bitwise: rank 0 on host: cuda:0 had too little memory for an allocation at first"
    assert [note.startswith(says) for note in set_of(1).reports("gpu", "tight")[0]["notes"]] == [True]
    for kind, name in (("cpu", "tight"), ("gpu", "bitwise")):
        assert set_of(1).reports(kind, name)[0]["notes"] == []


def usual_step(report: dict[str, Any]) -> dict[str, int]:
    """The fewest kernels, copies and waits of a step after the early ones; some steps also keep the history."""
    counts = report["counts"][EARLY:]
    added = [list(map(int.__sub__, after, before)) for before, after in itertools.pairwise(counts)]
    return dict(zip(MORE, map(min, zip(*added, strict=True)), strict=True))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wait_that_is_left_out_shows(set_of: Sets, name: str) -> None:
    mutant = MUTANTS[name]
    reports = set_of(mutant.size).reports(name, mutant.job)
    if mutant.shows == "ended":
        assert reports[0]["ended"] != "well"
    elif mutant.shows == "garbage":
        assert reports[0]["garbage"]
    elif mutant.shows == "context":
        assert any(report["contexts"].keys() != {str(rank * 2)} for rank, report in enumerate(reports))
    elif mutant.shows == "bits":
        alone = set_of(1).folder / "gpu" / mutant.job
        assert results(set_of(mutant.size).folder / name / mutant.job, mutant.job) != results(alone, mutant.job)
    else:
        assert any(mutant.shows in race for report in reports for race in report["races"])


def test_each_wait_of_the_code_has_a_mutant() -> None:
    """The calls of streams, events and the allocator in dp_ray, and of FUNCTIONS, found in its sources."""
    found = set()
    for path in sorted((ROOT / "dp_ray").rglob("*.py")):
        module = path.relative_to(ROOT / "dp_ray").with_suffix("").as_posix().replace("/", ".")
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
                found |= {(module, function.name, name) for call in calls if (name := left_out(call))}
    named = {(one.module, one.caller, one.method) for one in MUTANTS.values() if one.method != "is_gpu"}
    assert found - NO_ORDER == named


def left_out(call: ast.expr) -> str | None:
    """The name of a call of which each place has a mutant."""
    if (name := ast.unparse(call)) in FUNCTIONS:
        return name.rpartition(".")[2]
    is_own = isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "self"
    return call.attr if isinstance(call, ast.Attribute) and call.attr in METHODS and not is_own else None


@pytest.mark.full
def test_a_hung_kernel_is_told_from_the_gpu_that_waits_for_it(library: Path, tmp_path: Path) -> None:
    """Both loops wait for their GPU some steps further on; what they wait in does not tell the cause."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plan = {"folder": str(tmp_path), "size": 2, "ports": [0, store.port], "jobs": [], "mutants": [], "hangs": True}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    processes = [begin("tests.sim", str(library), str(tmp_path / "plan.json"), str(rank)) for rank in range(2)]
    assert [process.wait(300) for process in processes] == [0, 0]
    places, waits, steps = zip(*(told(tmp_path / f"told.{rank}.json") for rank in range(2)), strict=True)
    assert places == (DevicePlace(STEP - 1, Part.EXCHANGE), DevicePlace(STEP - 1, Part.FORWARD))
    assert min(steps) > STEP
    dog = Watchdog(1.0, [WorkerReady("a", World(rank, 2), 0, ()) for rank in range(2)])
    for rank in range(2):
        dog.take(Beat("a", rank, steps[rank], 9.0, "stack", waits[rank], places[rank]))
    hang = dog.hang()
    assert hang is not None
    assert hang.ranks == (HUNG,)


@pytest.fixture(scope="session")
def more_calls(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What tests/sim/calls.py has counted, in a process of its own."""
    folder = tmp_path_factory.mktemp("calls")
    plan = {"folder": str(folder), "size": 1, "ports": [], "jobs": [], "mutants": [], "counts_calls": True}
    (folder / "plan.json").write_text(json.dumps(plan))
    status = begin("tests.sim", str(library), str(folder / "plan.json"), "0").wait(400)
    assert status == 0, "".join(path.read_text() for path in folder.glob("error.*"))
    return json.loads((folder / "calls.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_makes_few_calls_more_than_a_plain_loops(more_calls: Any, name: str) -> None:
    """Each costs the thread that launches the kernels some time, for which the GPU waits where kernels are short."""
    one, two, deep = (more_calls[f"{name}: {kind}"] for kind in ("one", "two", "deep"))
    found = Limit(one["more"], two["more"] - one["more"], deep["deeper"])
    assert all(map(int.__le__, found, LIMITS[name])), "\n".join([f"{found}, of these:", *two["calls"]])


# What of tests/gpu needs CUDA and neither time, Triton nor a program of its own; the rest runs on the CPU.
ON_CUDA_ALONE = (
    "no_step_waits or lags or connects or gives_back or fused or how_many_rows or without_memory or is_flat"
)


@pytest.mark.full
def test_what_of_the_gpus_suite_needs_cuda_passes(library: Path) -> None:
    command = [sys.executable, "-m", "tests.sim.gpu_suite", str(library), "tests/gpu", "-k", ON_CUDA_ALONE]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None and int(found[1]) >= 15, done.stdout[-6000:]
