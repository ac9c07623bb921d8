"""The way in: the text of `dp-ray` without a command, and the command init, which makes a folder with a job.

The folders of `templates/` are copied as they are; `.py-tpl` becomes `.py`. The head of each `job.yaml` has the
commands to type next, which `init` prints.
"""

import os
import shlex
from pathlib import Path

import click

from dp_ray import __version__
from dp_ray.errors import JobError
from dp_ray.text import harmless

TEMPLATES = Path(__file__).with_name("templates")

FIRST_SCREEN = f"""\
dp_ray {__version__}: train PyTorch models and predict with them, on any number of
workers, with the results of one process.

Begin with an example, which runs on this machine at once:
  dp-ray init first            a folder with a model, its data and a job file;
                               --template image, text, table or predict
  cd first
  dp-ray plan job.yaml         show what a run will do
  dp-ray run job.yaml          run the job; an unfinished run is resumed

Then look at the run:
  dp-ray list                  the runs in runs/
  dp-ray report runs/job       its result; runs/job/report.html is its page
  dp-ray watch runs/job        follow it while it goes on

All commands: dp-ray --help. The options of one: dp-ray run --help.
Tab completes commands and runs: dp-ray completion --help.
Docs: README.md and docs/ in the source of dp_ray; first docs/first-day.md."""


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(file_okay=False))
@click.option(
    "--template",
    type=click.Choice(["image", "text", "table", "predict"]),
    default="image",
    show_default=True,
    help="A training on images, texts or the rows of a table; or a prediction with trained weights.",
)
def init(folder: str, template: str) -> None:
    """Make a folder (default: this one) with a small job to run at once and to change: model, data and job file."""
    files = {Path(folder, file.name.replace(".py-tpl", ".py")): file for file in (TEMPLATES / template).iterdir()}
    # Also a link that leads nowhere: to write through it would make a file elsewhere.
    if taken := sorted(str(path) for path in files if os.path.lexists(path)):
        raise JobError(
            f"{', '.join(taken)}: there already, and nothing is overwritten; take another folder: init DIR"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, source in files.items():
            with path.open("xb") as file:
                file.write(source.read_bytes())
    except OSError as error:
        raise JobError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from None
    click.echo(harmless(f"Made {', '.join(sorted(path.name for path in files))}. Next:\n"))
    if Path(folder).resolve() != Path.cwd():
        click.echo(harmless(f"  cd {shlex.quote(folder)}"))
    for line in (TEMPLATES / template / "job.yaml").read_text().splitlines():
        if line.startswith("#   "):
            click.echo(harmless(line.removeprefix("# ")))
    click.echo(
        harmless(
            "\nThen put your own data and model into job.yaml and model.py. A changed job\n"
            "needs another --name, or --overwrite to replace the run that is there."
        )
    )
