"""Draw docs/gallery.md: each job of jobs/, with a picture of its run; `python docs/gallery.py [NAME...]`.

A training has the curve of its loss, a sweep those of its trials, a prediction its embeddings in two dimensions. Each
runs in one process (`--workers 0`). It takes minutes, on a busy machine many.
"""

import importlib.util
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

import dp_ray

HERE = Path(__file__).parent
PAGE, PICTURES = HERE / "gallery.md", HERE / "pictures" / "jobs"
BEGIN, END = "<!-- `python docs/gallery.py` writes what follows. -->\n", "<!-- The end of what it writes. -->\n"
WIDTH, HEIGHT, EDGE = 240, 100, 8


COLOURS = ("#2f7ed8", "#d87a2f", "#3a9d5d")


class Shown(NamedTuple):
    """A job of the gallery: its file in jobs/, what it shows, its test, the commands before it, and what it needs.

    `code` is the file of its model in jobs/, if that has another name. `sweep` are the options of a sweep of it.
    """

    job: str
    says: str
    test: str
    before: tuple[str, ...] = ()
    needs: str = ""
    code: str = ""
    sweep: str = ""

    @property
    def name(self) -> str:
        """The name of its run, and of its picture."""
        return "sweep" if self.sweep else Path(self.job).name

    @property
    def command(self) -> str:
        """The command that runs it."""
        if self.sweep:
            return f"dp-ray sweep jobs/{self.job}.yaml {self.sweep} --name sweep --workers 0 --quiet"
        return f"dp-ray run jobs/{self.job}.yaml --workers 0 --quiet"


DIGITS = "dp-ray run jobs/digits.yaml --workers 0 --quiet"
EXAMPLES = "tests/test_examples.py"
JOBS = (
    Shown("digits", "images: a small CNN, the same bits on 1 to 8 workers", "tests/driver/test_training_runs.py"),
    Shown("augmented", "images with augmentation, drawn anew in each epoch", EXAMPLES),
    Shown("webdataset", "images in tar shards of WebDataset", EXAMPLES, ("python -m jobs.webdataset",)),
    Shown("table", "a [table](data.md#a-csv-of-your-own) in CSV files", EXAMPLES, ("python -m jobs.table",)),
    Shown("characters", "a GPT of characters, [sharded](sharding.md) over two workers by FSDP", EXAMPLES),
    Shown(
        "gpt",
        "a GPT of bytes, on [packed](packing.md) documents of two sources",
        "tests/engine/loads/test_packing.py",
    ),
    Shown("hugging_face", "a model of transformers, sharded by FSDP", EXAMPLES, needs="transformers"),
    Shown("embeddings", "[a prediction](outputs.md): embeddings and labels, to Parquet", EXAMPLES, (DIGITS,)),
    Shown(
        "digits",
        "[a sweep](sweeps.md) of learning rates",
        "tests/sweeps/test_sweeps.py",
        sweep="--over optimizer.args.lr=0.0003,0.003,0.03",
    ),
    Shown("bad_records", "[damaged samples](bad-records.md) are set aside, and the training goes on", EXAMPLES),
    Shown(
        "audited",
        "[an audit](faults.md#find-a-processor-that-computes-wrong) finds a worker that computes wrong",
        "tests/tasks/test_audits.py",
    ),
    Shown("simclr", "SimCLR: a loss that sees the whole batch", EXAMPLES),
    Shown("vae", "a VAE: a loss that is [a sum over the batch](losses.md#a-sum-over-the-batch)", EXAMPLES),
    Shown(
        "detection", "a detector of torchvision: boxes in, and out", "tests/test_detection.py", needs="torchvision"
    ),
    Shown(
        "model_parallel_train",
        "a model [over two devices](devices.md) of a worker",
        "tests/engine/test_devices.py",
        code="model_parallel",
    ),
    Shown("loops/gan", "a GAN, in [a loop of its own](loops.md)", EXAMPLES),
    Shown("loops/distillation", "a student that learns from a teacher, in a loop", EXAMPLES, (DIGITS,)),
    Shown("loops/reinforce", "REINFORCE: the data is what the policy does", EXAMPLES),
    Shown(
        "loops/actor_critic",
        "an actor and its critic: carts that balance poles",
        "tests/tasks/test_loops_of_users.py",
    ),
    Shown("loops/words", "an LSTM whose state is kept [from step to step](loops.md#from-step-to-step)", EXAMPLES),
    Shown("loops/lbfgs", "LBFGS: a step that computes the loss many times", EXAMPLES),
)


def main(names: list[str]) -> None:
    """Run the jobs of these names, or all; draw their pictures, and write the page. The others' rows stay."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for shown in JOBS:
        if shown.name in (names or [shown.name]):
            write_row(shown.name, drawn(shown))


def write_row(name: str, row: str) -> None:
    """Write a job's row into the page, at once: the next job may fail."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {found: row for row in table.splitlines() for found in re.findall(r"\*\*(\w+)\*\*", row)} | {name: row}
    lines = ["| its run | job | at its end |", "|---|---|---|"]
    lines += [rows[shown.name] for shown in JOBS if shown.name in rows]
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}")


def drawn(shown: Shown) -> str:
    """Run a job and draw its picture; return its row. Without a package that it needs, there is neither."""
    if shown.needs and importlib.util.find_spec(shown.needs) is None:
        return row_of(shown, "", "")
    with tempfile.TemporaryDirectory() as folder:
        return drawn_of(shown, ran(shown, Path(folder)))


def drawn_of(shown: Shown, results: list[dp_ray.Result]) -> str:
    """Draw the picture of a job's results, and return its row."""
    is_prediction = results[0].task == "predict"
    svg = scattered(results[0]) if is_prediction else curves([result.history for result in results])
    (PICTURES / f"{shown.name}.svg").write_text(svg)
    what = "embeddings" if is_prediction else "losses" if shown.sweep else "loss"
    alt = f"The {what} of {shown.name}" + ("" if is_prediction else ", step by step")
    image = f'<img src="pictures/jobs/{shown.name}.svg" width="240" alt="{alt}">'
    return row_of(shown, image, figures(results))


def row_of(shown: Shown, image: str, at_its_end: str) -> str:
    """Return a job's row of the table."""
    links = f"[job file](../jobs/{shown.job}.yaml), [code](../jobs/{shown.code or shown.job}.py)"
    first = [f"; first `{command}`" for command in shown.before if command.startswith("python")]
    sweep = f"; `{shown.command.partition(' --name')[0]}`" if shown.sweep else ""
    needs = f"; it needs {shown.needs}" if shown.needs else ""
    told = f"{links}{''.join(first)}{sweep}{needs}; `{shown.test}`"
    return f"| {image} | **{shown.name}**: {shown.says}. {told} | {at_its_end} |"


def ran(shown: Shown, folder: Path) -> list[dp_ray.Result]:
    """Run the job, after what comes before it, in a folder with the repository's jobs; return its runs' results."""
    shutil.copytree(HERE.parent / "jobs", folder / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    programs = {"python": [sys.executable], "dp-ray": [sys.executable, "-m", "dp_ray"]}
    for line in (*shown.before, shown.command):
        program, *args = shlex.split(line)
        subprocess.run([*programs[program], *args], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    runs = folder.glob("runs/sweep-*") if shown.sweep else [folder / "runs" / shown.name]
    return [dp_ray.load(str(run)) for run in sorted(runs)]


def curves(histories: list[list[dict[str, float]]]) -> str:
    """Return the losses of each history as a line."""
    kept = [[row["loss"] for row in history if math.isfinite(row["loss"])] for history in histories]
    low, high = min(map(min, kept)), max(map(max, kept))
    width, height = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE
    lines = ""
    for losses, colour in zip(kept, COLOURS, strict=False):
        across, up = width / max(1, len(losses) - 1), height / ((high - low) or 1)
        places = ((EDGE + across * at, EDGE + up * (high - loss)) for at, loss in enumerate(losses))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    return framed(lines)


def scattered(result: dp_ray.Result) -> str:
    """Return every fourth embedding where they vary most, in two dimensions, with a colour for each label."""
    found = result.outputs["embedding"].float()
    torch.manual_seed(0)
    _, _, directions = torch.pca_lowrank(found, 2)
    places = (found - found.mean(0)) @ directions
    places = (places - places.amin(0)) / (places.amax(0) - places.amin(0))
    width, height = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE
    labels = list(result.carried["label"])
    return framed(
        "".join(
            f'<circle cx="{EDGE + width * x:.1f}" cy="{EDGE + height * y:.1f}" r="1.5" '
            f'fill="hsl({36 * int(labels[at])},65%,50%)"/>'
            for at, (x, y) in enumerate(places.tolist())
            if at % 4 == 0
        )
    )


def framed(content: str) -> str:
    """Return an SVG that fits light and dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    )
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#8888881a"/>'
    return f"{head}{frame}{content}</svg>\n"


def figures(results: list[dp_ray.Result]) -> str:
    """Return what a reader wants of a run, or of the trials of a sweep, as the cell of a table."""
    if len(results) > 1:
        told = ((f"{result.history[-1]['learning_rate']:.3g}", result.metrics["eval_accuracy"]) for result in results)
        return "eval_accuracy " + ", ".join(f"{accuracy:.3g} with {rate}" for rate, accuracy in told)
    result = results[0]
    if result.task == "predict":
        size = sum(file.stat().st_size for file in Path(result.run_dir, "outputs").glob("*.parquet"))
        return f"{result.rows} rows of {result.outputs['embedding'].shape[1]} numbers, {size / 1000:,.0f} kB"
    wanted = [name for name in result.metrics if name in ("epoch_loss", "reward", "generator") or "eval" in name]
    values = {name: result.metrics[name] for name in wanted if name != "eval_rows"}
    numbers = ", ".join(f"{name} {value:{'.3g' if abs(value) < 100 else ',.0f'}}" for name, value in values.items())
    return f"{result.total_steps} steps: {numbers}" + (
        f"; {result.quarantined} set aside" if result.quarantined else ""
    )


if __name__ == "__main__":
    main(sys.argv[1:])
