"""The command that brings a run here: fetch."""

from pathlib import Path
from typing import Any

import click

from dp_ray.cli.completion import folders
from dp_ray.cli.options import say
from dp_ray.text import harmless


@click.command()
@click.argument("name")
@click.argument("folder", metavar="[DIR]", default="runs", shell_complete=folders)
@click.option("--weights", is_flag=True, help="The weights alone; of a training that goes on, its newest checkpoint.")
@click.option("--outputs", is_flag=True, help="The outputs alone.")
@click.option("--page", is_flag=True, help="The page alone.")
@click.option("--address", help="The dashboard of the cluster that ran it, like http://HEAD:8265.")
@click.option(
    "--storage",
    shell_complete=folders,
    help="Where the run lies, as the cluster sees it. Default: where its job put it.",
)
@click.option("--overwrite", is_flag=True, help="Replace a run of this name in DIR.")
def fetch(name: str, folder: str, address: str | None, storage: str | None, overwrite: bool, **kinds: Any) -> None:
    """Bring the run of a submitted job, by its name or the job's id, to DIR/NAME; DIR is `runs` if you name none."""
    from dp_ray.cluster.fetch import FetchRequest, fetch_run

    wanted = tuple(kind for kind, is_wanted in kinds.items() if is_wanted)
    for run_dir in fetch_run(FetchRequest(name, wanted, storage, address, overwrite), Path(folder), say):
        click.echo(harmless(str(run_dir)))
