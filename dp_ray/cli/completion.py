"""Complete words of `dp-ray` in a shell; the command completion prints the script that switches it on.

A shell asks the program at each press of Tab, so nothing here imports more than the command line itself does.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dp_ray.text import harmless

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VARIABLE = "_DP_RAY_COMPLETE"  # with it the scripts ask the program what may follow
NAMES = (".yaml", ".yml", ".json")
RUNS = "runs"  # where a job keeps its runs by default


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes commands, options, job files and runs.

    \b
    Bash, in ~/.bashrc:                    eval "$(dp-ray completion bash)"
    Zsh, in ~/.zshrc, after compinit:      eval "$(dp-ray completion zsh)"
    Fish, in ~/.config/fish/config.fish:   dp-ray completion fish | source
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click has all three
    click.echo(harmless(made(context.find_root().command, {}, "dp-ray", VARIABLE).source()))


def job_files(context: click.Context, parameter: click.Parameter, text: str) -> "list[CompletionItem[Any]]":
    """Complete a job file: those in the folder that the text names so far, or a folder."""
    folder = os.path.dirname(text)
    found = (os.path.join(folder, entry.name) for entry in _entries(folder) if entry.name.endswith(NAMES))
    return _offered(text, sorted(found))


def run_dirs(context: click.Context, parameter: click.Parameter, text: str) -> "list[CompletionItem[Any]]":
    """Complete a run's directory: those in `runs` and in the folder that the text names, the newest first."""
    written: dict[str, float] = {}
    for folder in (RUNS, os.path.dirname(text)):
        for entry in _entries(folder):
            with suppress(OSError):  # it holds no run
                written[os.path.join(folder, entry.name)] = os.stat(Path(entry, "run.json")).st_mtime
    return _offered(text, sorted(written, key=lambda run: -written[run]))


def folders(context: click.Context, parameter: click.Parameter, text: str) -> "list[CompletionItem[Any]]":
    """Complete a folder."""
    return _offered(text, [])


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder or ".") as entries:
        yield from entries


def _offered(text: str, found: list[str]) -> "list[CompletionItem[Any]]":
    """Return what begins with the text; if nothing does, have the shell offer folders.

    Not both: zsh would take back a part of the text, and bash offers folders only where there is nothing else.
    """
    from click.shell_completion import CompletionItem

    if not text.isprintable():  # click cannot write a name that is no UTF-8, nor a shell read one with a line break
        return []
    items = [CompletionItem(name) for name in found if name.startswith(text) and name.isprintable()]
    return items or [CompletionItem(text, type="dir")]
