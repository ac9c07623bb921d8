"""Shows an error on the terminal."""

import traceback

import click

from dp_ray.errors import Error
from dp_ray.text import harmless
from dp_ray.tracebacks import frames_of, notes_of


def show_error(error: Error, is_verbose: bool) -> None:
    """Print the error below its traceback, here or on a worker: the frames of user code, or all frames if verbose."""
    shown = frames_of(error)
    if is_verbose and not notes_of(error) and error.__cause__ is not None:
        shown = "".join(traceback.format_exception(error.__cause__))
    if shown:
        say(shown.rstrip("\n"))
    say(f"error: {error}")


def say(text: str) -> None:
    """Write to stderr what is neither asked for nor of user code."""
    click.echo(harmless(text), err=True)
