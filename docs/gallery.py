"""Draw docs/gallery.md: each training of jobs/, with the curve of its loss; `python docs/gallery.py [NAME...]`.

Each runs in one process (`--workers 0`). It takes minutes, on a busy machine many.
"""

import importlib.util
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import dp_ray

HERE = Path(__file__).parent
PAGE, PICTURES = HERE / "gallery.md", HERE / "pictures" / "jobs"
BEGIN, END = "<!-- `python docs/gallery.py` writes what follows. -->\n", "<!-- The end of what it writes. -->\n"
WIDTH, HEIGHT, EDGE = 240, 100, 8


class Shown(NamedTuple):
    """A job of the gallery: its file in jobs/, what it shows, the model's file, the test, and what it needs."""

    job: str
    says: str
    test: str
    before: tuple[str, ...] = ()
    needs: str = ""


JOBS = (
    Shown("digits", "images: a small CNN, the same bits on 1 to 8 workers", "tests/driver/test_training_runs.py"),
    Shown("characters", "a GPT of characters, [sharded](sharding.md) over two workers", "tests/test_examples.py"),
    Shown("gpt", "a GPT of bytes, on [packed](packing.md) documents of two sources", "tests/engine/test_packing.py"),
    Shown("hugging_face", "a model of transformers, sharded", "tests/test_examples.py", needs="transformers"),
    Shown("simclr", "SimCLR: a loss that sees the whole batch", "tests/test_examples.py"),
    Shown(
        "detection", "a detector of torchvision: boxes in, and out", "tests/test_detection.py", needs="torchvision"
    ),
    Shown(
        "model_parallel_train", "a model [over two devices](devices.md) of a worker", "tests/engine/test_devices.py"
    ),
    Shown("loops/gan", "a GAN, in [a loop of its own](loops.md)", "tests/test_examples.py"),
    Shown(
        "loops/distillation",
        "a student that learns from a teacher, in a loop",
        "tests/test_examples.py",
        before=("jobs/digits.yaml",),
    ),
    Shown("loops/reinforce", "REINFORCE: the data is what the policy does", "tests/test_examples.py"),
    Shown("loops/lbfgs", "LBFGS: a step that computes the loss many times", "tests/test_examples.py"),
)


def main(names: list[str]) -> None:
    """Run the jobs of these names, or all; draw their curves, and write the page. The others' rows stay."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {found: row for row in table.splitlines() for found in re.findall(r"\*\*(\w+)\*\*", row)}
    for shown in JOBS:
        name = Path(shown.job).name
        if name in (names or [name]):
            rows[name] = drawn(shown, name)
    lines = ["| its loss | job | at its end |", "|---|---|---|", *(rows[Path(shown.job).name] for shown in JOBS)]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}")


def drawn(shown: Shown, name: str) -> str:
    """Run a job and draw its curve; return its row. Without a package that it needs, there is neither."""
    image = at_its_end = ""
    if not shown.needs or importlib.util.find_spec(shown.needs) is not None:
        found = ran(shown)
        (PICTURES / f"{name}.svg").write_text(curve(found.losses))
        image = f'<img src="pictures/jobs/{name}.svg" width="240" alt="The loss of {name}, step by step">'
        at_its_end = figures(found.result)
    module = "model_parallel" if name == "model_parallel_train" else shown.job
    links = f"[job file](../jobs/{shown.job}.yaml), [code](../jobs/{module}.py)"
    needs = f"; it needs {shown.needs}" if shown.needs else ""
    return f"| {image} | **{name}**: {shown.says}. {links}{needs}; `{shown.test}` | {at_its_end} |"


class Ran(NamedTuple):
    """A training that has ended, and its losses."""

    result: dp_ray.Result
    losses: list[float]


def ran(shown: Shown) -> Ran:
    """Run the job, after those that it needs, in a folder of its own that has the repository's jobs."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE.parent / "jobs", Path(folder) / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        for job in (*shown.before, f"jobs/{shown.job}.yaml"):
            command = [sys.executable, "-m", "dp_ray", "run", job, "--workers", "0", "--quiet"]
            subprocess.run(command, cwd=folder, check=True)
        result = dp_ray.load(f"{folder}/runs/{Path(shown.job).name}")
        return Ran(result, [row["loss"] for row in result.history])


def curve(losses: list[float]) -> str:
    """Return the losses as a line, in an SVG that fits light and dark pages."""
    kept = [loss for loss in losses if math.isfinite(loss)]
    low, high = min(kept), max(kept)
    width, height = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE
    points = " ".join(
        f"{EDGE + width * at / max(1, len(kept) - 1):.1f},{EDGE + height * (high - loss) / ((high - low) or 1):.1f}"
        for at, loss in enumerate(kept)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    )
    line = f'<polyline points="{points}" fill="none" stroke="#2f7ed8" stroke-width="1.5"/>'
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#8888881a"/>'
    return f"{head}{frame}{line}</svg>\n"


def figures(result: dp_ray.Result) -> str:
    """Return what a reader wants of a training, as the cell of a table."""
    wanted = [name for name in result.metrics if name in ("epoch_loss", "reward", "generator") or "eval" in name]
    numbers = ", ".join(f"{name} {result.metrics[name]:.3g}" for name in wanted)
    return f"{result.total_steps} steps: {numbers}"


if __name__ == "__main__":
    main(sys.argv[1:])
