"""What `bitwise` needs: workers of one kind. Another kind is a process where torch takes its lowest kernels."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dp_ray.driver.replay import replay
from dp_ray.driver.verify import _numerics
from dp_ray.engine.world import World, everyone, form_group, leave_group
from dp_ray.errors import JobError
from dp_ray.messages import Computes, StepControl
from dp_ray.process.numerics import OtherKind, computes_on, numerics_of
from dp_ray.replay.replay import StepChoice
from dp_ray.results.compare import comparison_text, comparison_values, read_compared_run
from dp_ray.results.result import load
from dp_ray.rundir.files import ABOUT_JSON
from dp_ray.storage import Storage
from dp_ray.system import linux
from dp_ray.tasks.task import run_task
from tests.support.forked import Ended, ended, run_job, started
from tests.support.group import LOCALHOST
from tests.support.kinds import lowest_kind
from tests.support.trainings import job_of, keys_of

X86 = """processor\t: {}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz
stepping\t: 7
cpu MHz\t\t: 25{}.0
flags\t\t: fpu vme

"""
ARM = """processor\t: {}
BogoMIPS\t: 243.75
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0x{}
CPU revision\t: 1

"""


class OnNode(StepControl):
    """The control of a worker whose cluster names its node, and knows the kind of the job's last attempt."""

    def __init__(self, node_id: str, kind: str = "") -> None:
        self.node_id, self.kind = node_id, kind

    def settle(self, kind: str) -> None:
        print(json.dumps({"settled": kind}))


def be_worker(rank: int, port: int, folder: str, bitwise: bool, kind: str, node: str) -> None:
    """Be one of two workers, and print what it tells and how it ends."""
    control = OnNode(node, kind)
    job = job_of("mlp", workers=2, shards=4, epochs=1, max_steps=2, bitwise=bitwise)
    form_group("gloo", TCPStore(LOCALHOST, port), World(rank, 2))

    def send(message: Any) -> None:
        if isinstance(message, Computes):
            print(json.dumps({"kinds": [[kind.nodes, kind.computes["capability"]] for kind in message.kinds]}))

    try:
        run_task(job, World(rank, 2, node=node), Storage(folder), send, control)
    except JobError as error:
        ids = error.node_ids if isinstance(error, OtherKind) else None
        print(json.dumps({"error": str(error), "ids": ids}))
    dist.barrier(group=everyone())
    leave_group()


def two_workers(
    folder: Path, *, bitwise: bool = True, kinds: tuple[str, str] = ("", ""), nodes: str = "ab"
) -> list[dict[str, Any]]:
    """What two workers tell of which the second one is of the lowest kind; `kinds` are what each was told."""
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    with ExitStack() as running:
        programs = []
        for rank, node in enumerate(nodes):
            with lowest_kind(rank == 1):
                given = (be_worker, rank, store.port, str(folder), bitwise, kinds[rank], node)
                programs.append(running.enter_context(started(*given)))
        return [told_by(program.end()) for program in programs]


def told_by(program: Ended) -> dict[str, Any]:
    assert program.returncode == 0, program.stderr
    told: dict[str, Any] = {}
    for line in program.stdout.splitlines():
        told |= json.loads(line)
    return told


def print_capability() -> None:
    print(json.dumps({"own": torch.backends.cpu.get_cpu_capability(), "kind": computes_on("cpu")}))


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """What a worker of this machine's own kind computes on."""
    with lowest_kind(False):
        return told_by(ended(print_capability))


def assert_names(says: str, own: str) -> None:
    assert "MKL_CBWR is not there on a and COMPATIBLE on b" in says
    if own != "DEFAULT":
        assert f"capability is {own} on a and DEFAULT on b" in says


@pytest.mark.slow
def test_workers_that_differ_are_an_error_on_every_rank(tmp_path: Path, own: dict[str, Any]) -> None:
    first, second = two_workers(tmp_path)
    assert first["error"] == second["error"] and first["ids"] is None
    assert first["error"].startswith("bitwise: the workers would not give the same bits: ")
    assert_names(first["error"], own["own"])
    assert "placement: STRICT_PACK" in first["error"] and "set bitwise: false" in first["error"]
    assert first["kinds"] == [[["a"], own["own"]], [["b"], "DEFAULT"]] and "kinds" not in second
    assert not (tmp_path / "weights.safetensors").exists() and not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_without_bitwise_they_run(tmp_path: Path) -> None:
    first, second = two_workers(tmp_path, bitwise=False)
    assert "error" not in first | second and "settled" not in first
    assert [nodes for nodes, _ in first["kinds"]] == [["a"], ["b"]]
    assert (tmp_path / "weights.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "goes_on"), [("ab", False), ("ab", True), ("aa", False)])
def test_one_that_comes_later_and_differs_is_not_taken(
    tmp_path: Path, own: dict[str, Any], nodes: str, goes_on: bool
) -> None:
    """Unless its node has workers of both kinds: that cannot be left out. One that `goes_on` was told no kind."""
    kind = json.dumps(own["kind"], sort_keys=True)
    first, second = two_workers(tmp_path, kinds=("" if goes_on else kind, kind), nodes=nodes)
    assert first["error"] == second["error"]
    if nodes == "ab":
        assert first["ids"] == ["b"] and first["error"].startswith("no workers are taken on b, ")
        assert_names(first["error"], own["own"])
    else:
        assert first["ids"] is None and "MKL_CBWR is not there on rank 0 on a and COM" in first["error"]


def halves(folder: Path, name: str, **keys: Any) -> tuple[dict[str, Any], str]:
    """Train a run whose first steps another kind computed, and return its keys, and what the resumed one says."""
    given = keys_of(storage=str(folder), name=name, checkpoint={"every_steps": 1}, **keys)
    with lowest_kind():
        assert ended(run_job, {**given, "max_steps": 2}).returncode == 0
    lines: list[str] = []
    list(replay(str(folder / name), StepChoice(1, None), lines.append))
    differs = "MKL_CBWR" not in os.environ  # else this process is of the lowest kind too
    assert sum("other bits are computed here" in line for line in lines) == (differs and "bitwise" in given), lines
    with lowest_kind(False):
        resumed = ended(run_job, {**given, "max_steps": 4, "quiet": False})
    assert resumed.returncode == 0, resumed.stderr
    return given, resumed.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_is_resumed_on_another_kind_says_so(tmp_path: Path, own: dict[str, Any]) -> None:
    given, says = halves(tmp_path, "bits", bitwise=True)
    (line,) = [line for line in says.splitlines() if "other bits" in line]
    assert "MKL_CBWR is COMPATIBLE before and not there now" in line
    about = ABOUT_JSON.read(Storage(str(tmp_path / "bits")))
    assert [attempt.step for attempt in about.attempts] == [0, 2]
    assert [attempt.kinds[0].computes["capability"] for attempt in about.attempts] == ["DEFAULT", own["own"]]
    assert about.attempts[1].kinds[0].computes == own["kind"]
    with lowest_kind(False):
        again = ended(run_job, {**given, "max_steps": 6, "quiet": False})
        assert again.returncode == 0 and "other bits" not in again.stderr
        whole = ended(run_job, {**given, "max_steps": 4, "name": "whole"})
        assert whole.returncode == 0, whole.stderr
    assert "other bits" not in halves(tmp_path, "rounded")[1], "it does not promise the bits"
    runs = [read_compared_run(Storage(str(tmp_path / name))) for name in ("bits", "whole")]
    assert comparison_values(runs)["computed"]["MKL_CBWR"] == ["COMPATIBLE and not there", None]
    assert "so their bits may differ" in comparison_text(runs).splitlines()[0]
    assert comparison_values([runs[1], runs[1]])["computed"] == {}
    results = [load(tmp_path / name) for name in ("whole", "bits")]
    assert "MKL_CBWR is not there on localhost" in str(_numerics(results))
    assert _numerics(results[:1]) is None


def test_the_processor_counts_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    here = {"processor", "capability"}
    on_cpu, on_gpu, on_both = (numerics_of(one) for one in ([cpu], [gpu], [cpu, gpu]))
    assert on_cpu.computes.keys() >= here | {"torch"} and not on_cpu.beside
    assert on_gpu.computes.keys() >= {"gpu", "torch"} and not on_gpu.computes.keys() & here
    assert on_gpu.computes["gpu"] == "NVIDIA H200, compute capability 9.0" and on_gpu.beside.keys() == here
    assert on_both.computes.keys() >= here | {"gpu", "torch"} and not on_both.beside


def test_a_file_of_an_older_version_still_loads(tmp_path: Path) -> None:
    (tmp_path / "about.json").write_text('{"drivers": [{"cpus": 2}]}')
    about = ABOUT_JSON.read(Storage(str(tmp_path)))
    assert about.drivers == [{"cpus": 2}] and about.attempts == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            X86.format(0, 1) + X86.format(1, 2),
            "GenuineIntel, Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz, cpu family 6, model 85, stepping 7",
        ),
        (
            ARM.format(0, "d40") + ARM.format(1, "d40") + ARM.format(2, "d41"),
            "CPU implementer 0x41, CPU architecture 8, CPU variant 0x3, CPU part 0xd40, CPU revision 1 and "
            "CPU implementer 0x41, CPU architecture 8, CPU variant 0x3, CPU part 0xd41, CPU revision 1",
        ),
    ],
)
def test_a_processor_is_told_by_vendor_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(linux, "PROC", str(tmp_path))
    assert linux.processor() == says
    monkeypatch.setattr(linux, "PROC", str(tmp_path / "nothing"))
    assert linux.processor(), "what Python tells"
