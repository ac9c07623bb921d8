"""A ResNet-18 over JPEGs to Parquet, order kept: Ray Data's own script of this benchmark, Daft's own, and a job.

Changed in the scripts are the paths and the number of GPUs, and a line has Ray Data keep the order. Ray is told of
two GPUs, which there are not: so two copies of the model run on the CPU, as with dp_ray's two workers. `obstore`
is what Ray Data asks for. Ray Data 2.60 loses the order all the same: its `download` deals the rows out to blocks
in turn. The labels of Daft differ in part, since its own decoder of JPEG rounds otherwise.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from benchmarks.cluster import scratch
from benchmarks.commands import ROOT
from benchmarks.compare import at_most
from benchmarks.peers.needed import environment, script
from benchmarks.peers.sides import Timed, in_turns, rows, stamps_in, timed
from benchmarks.table import Row, time_text

IMAGES = 3_000
BATCH = 100  # of the scripts; dp_ray's shards have as many
SCRIPTS = {
    "Ray Data": (
        "ray-project/ray",
        "38f7c15620941d8fb3c6fc5578347c58a2444d6e",
        "release/nightly_tests/multimodal_inference_benchmarks/image_classification/ray_data_main.py",
    ),
    "Daft": (
        "Eventual-Inc/Daft",
        "d630396ae004a78a4a8e57d8f3152c5f5e7602fc",
        "benchmarking/ai/image_classification/daft_main.py",
    ),
}
IN_ORDER = "import ray.data\nray.data.DataContext.get_current().execution_options.preserve_order = True\n"
AHEAD = at_most(1.0, "ahead")
FIGURES: dict[str, Callable[[Timed], float]] = {
    "the whole command": lambda found: found.whole,
    "to the end of a first batch": lambda found: found.start,
    "from then to the end of the last one": lambda found: found.stepping,
}
Meanwhile = Callable[[Path], None]
Labelled = list[tuple[str, str]]  # the path and the label of each row, in the order of the files' names


def measure() -> Iterator[Row]:
    python = environment("images", "daft==0.7.26", "torchvision==0.28.0", "obstore==0.12.1")
    texts = {name: script(*where).read_text() for name, where in SCRIPTS.items()}
    what, goals = f"images: {IMAGES:,} JPEGs, ResNet-18, 2 workers", dict.fromkeys(texts, AHEAD)
    with scratch() as folder:
        timed([python, "-m", "benchmarks.peers.photos", folder, IMAGES], ROOT, PYTHONPATH=str(ROOT))
        commands = {name: _theirs(python, folder, name, text) for name, text in texts.items()}
        commands = {"dp_ray": _ours(python, folder), **commands}

        def all_sides(meanwhile: Meanwhile | None) -> dict[str, list[Timed]]:
            return in_turns(
                {name: partial(_run, name, command, folder, meanwhile) for name, command in commands.items()}
            )

        found = all_sides(None)
        for which, figure in FIGURES.items():
            yield from rows(f"{what}: {which}", found, figure, goals)
        yield from _written(what, folder)
        killed, what = all_sides(_kill_one), f"{what}, one killed in the middle"
        yield from rows(f"{what}: the whole command", killed, FIGURES["the whole command"], goals)
        for name in texts:
            mine, theirs = (_more(killed[side], found[side]) for side in ("dp_ray", name))
            against = f"{time_text(theirs)} {name}"
            yield Row(f"{what}: lost by it", time_text(mine), against, "", "no more", mine <= theirs)
        yield from _written(what, folder)


def _more(killed: list[Timed], undisturbed: list[Timed]) -> float:
    return max(0.0, median(found.whole for found in killed) - median(found.whole for found in undisturbed))


def _ours(python: Path, folder: Path) -> list[object]:
    lists, out = f"--set=dataset.args.lists={folder / 'lists'}", folder / "out"
    return [python, "-m", "dp_ray", "run", "benchmarks/peers/images.yaml", lists, f"--storage={out}", "--name=dp_ray"]


def _theirs(python: Path, folder: Path, name: str, text: str) -> list[object]:
    """Write a copy of a script with these paths and two GPUs; the command that runs it."""
    lists, out = str(folder / "lists"), str(folder / "out" / name)
    for constant, value in {"INPUT_PATH": lists, "OUTPUT_PATH": out, "NUM_GPU_NODES": 2}.items():
        text, found = re.subn(rf"^{constant} = .*$", f"{constant} = {value!r}", text, flags=re.MULTILINE)
        assert found == 1, f"{name}: {found} lines that set {constant}"
    if name == "Ray Data":
        first, imports, rest = text.partition("import annotations\n")
        text = first + imports + IN_ORDER + rest
    copy = folder / f"{name.replace(' ', '_')}.py"  # not `ray.py`, which would hide Ray
    copy.write_text(text)
    return [python, copy]


def _run(name: str, command: list[object], folder: Path, meanwhile: Meanwhile | None) -> Timed:
    """Run a side in an empty folder for its outputs. One that does not survive a kill is run anew, as by a user."""
    shutil.rmtree(folder / "out" / name, ignore_errors=True)
    variables = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder), "TORCH_HOME": str(folder)}
    if name != "dp_ray":
        # Ray Data holds a CPU for each copy of the model and one for its downloads: on two, no task of it would ever
        # run. Daft's script asks for keys of S3, which it does not use here.
        variables |= {
            "RAY_OVERRIDE_RESOURCES": '{"CPU": 5, "GPU": 2}',
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
        }
    began = time.time()
    try:
        return timed(command, ROOT, meanwhile, **variables)
    except SystemExit as error:
        if meanwhile is None:
            raise
        print(f"{name} has not survived: {str(error)[-500:]}", file=sys.stderr, flush=True)
        found = timed(command, ROOT, None, **variables)
        return replace(found, whole=time.time() - began)


def _kill_one(stamps: Path) -> None:
    """Kill one of the processes that run the model, once half of all batches are done."""
    while stamps.exists():
        batches = stamps_in(stamps)
        if sum(map(len, batches.values())) >= IMAGES // BATCH // 2:
            os.kill(next(iter(batches)), signal.SIGKILL)
            return
        time.sleep(0.05)


def _listed(folder: Path) -> list[str]:
    return [path for file in sorted((folder / "lists").iterdir()) for path in _column(file, "image_url")]


def _column(file: Path, name: str) -> list[str]:
    return [str(value) for value in pq.read_table(file)[name].to_pylist()]


def labelled(out: Path) -> Labelled:
    """Return the rows that a side has written."""
    files = sorted((out / "outputs" if (out / "outputs").exists() else out).glob("*.parquet"))
    return [row for file in files for row in zip(_column(file, "image_url"), _column(file, "label"), strict=True)]


def _written(what: str, folder: Path) -> Iterator[Row]:
    """Rows lost and twice, whether they are in order, and how many labels are others than dp_ray's."""
    listed = _listed(folder)
    written = {name: labelled(folder / "out" / name) for name in ("dp_ray", *SCRIPTS)}
    ours = dict(written["dp_ray"])

    def told(name: str) -> str:
        paths = [path for path, _ in written[name]]
        lost, twice = set(listed) - set(paths), (Counter(paths) - Counter(listed)).total()
        others = sum(label != ours.get(path) for path, label in written[name])
        return f"{len(lost)}, {twice}, {'in order' if paths == listed else 'NOT in order'}, {others}"

    for name in SCRIPTS:
        what_of, right = f"{what}: rows lost, twice, in which order, labels other than dp_ray's", "0, 0, in order, 0"
        yield Row(what_of, told("dp_ray"), f"{told(name)} {name}", "", right, told("dp_ray") == right)
