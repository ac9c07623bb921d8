"""Shows an error on the terminal."""

import traceback

import click

from dp_ray.errors import Error
from dp_ray.secrets import hide
from dp_ray.text import harmless
from dp_ray.tracebacks import frames_of, notes_of


def show_error(error: Error, is_verbose: bool) -> None:
    """Print the error below its traceback, here or on a worker: the frames of user code, or all frames if verbose."""
    shown = frames_of(error)
    if is_verbose and not notes_of(error) and error.__cause__ is not None:
        shown = "".join(traceback.format_exception(error.__cause__))
    if shown:
        click.echo(harmless(hide(shown.rstrip("\n"))), err=True)
    click.echo(f"error: {harmless(str(error))}", err=True)
