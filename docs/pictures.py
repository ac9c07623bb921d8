"""Draw the pictures of docs/pictures/: terminals, from real runs; `python docs/pictures.py [NAME...]` runs this.

Each command runs in a folder of its own that has the repository's jobs. A terminal is an SVG, which GitHub and the
site show, and which loads nothing. In the recording each line comes when the run said it, but no wait is longer than
`MOST_SECONDS`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
OUT = HERE / "pictures"
MOST_SECONDS = 1.5
STAYS_SECONDS = 6.0  # the last line, before the recording begins again
NOISE = re.compile(
    r": (importing|building|run directory|starting Ray|waiting for|its page|time of|no part|too short)"
)
_FONTS = re.compile(r"@font-face \{.*?\n    \}\n", re.S)
_TEXT = re.compile(r'<text (?=[^>]*clip-path="url\(#[\w-]+-line-(\d+)\)")')


class Picture(NamedTuple):
    """A command in a terminal of so many columns, after the commands `before` it, and the lines that it shows.

    The command `beside` runs at the same time, in another terminal.
    """

    command: str
    columns: int
    alt: str
    shows_stderr: bool = False
    is_recorded: bool = False
    most_lines: int = 40
    before: tuple[str, ...] = ()
    beside: str = ""


PICTURES = {
    "plan": Picture("dp-ray plan jobs/digits.yaml --workers 3", 92, "the plan of a training"),
    "shards": Picture(
        "dp-ray run jobs/tutorial.yaml --workers 3 --shapes", 88, "the shards of each batch", most_lines=8
    ),
    "verify": Picture("dp-ray verify jobs/digits.yaml --workers 1,2,3,8", 90, "the same bits on 1 to 8 workers"),
    "compare": Picture(
        "dp-ray compare runs/digits runs/slower",
        92,
        "two runs side by side",
        most_lines=34,
        before=(
            "dp-ray run jobs/digits.yaml --workers 0",
            "dp-ray run jobs/digits.yaml --workers 0 --set optimizer.args.lr=0.001 --name slower",
        ),
    ),
    "killed": Picture(
        'dp-ray run jobs/digits.yaml --workers 3 --inject "kill worker 1 at step 60"',
        100,
        "a worker is killed, and the run goes on",
        shows_stderr=True,
        is_recorded=True,
    ),
    "watch": Picture(
        "dp-ray watch runs/digits",
        100,
        "a run is watched from another terminal",
        beside="dp-ray run jobs/digits.yaml --workers 0 --set max_steps=40",
    ),
}


class Line(NamedTuple):
    """A line that a command wrote, and after how many seconds."""

    text: str
    seconds: float


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    OUT.mkdir(exist_ok=True)
    for name in names or PICTURES:
        picture = PICTURES[name]
        svg = drawn(picture, said(picture), name)
        (OUT / f"{name}.svg").write_text(svg)


def said(picture: Picture) -> list[Line]:
    """Run the picture's command in a folder of its own, and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(HERE.parent / "jobs", Path(folder) / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
        *before, beside, command = (
            [sys.executable, "-m", "dp_ray", *shlex.split(line)[1:]]
            for line in (*picture.before, picture.beside, picture.command)
        )
        other = subprocess.DEVNULL
        for line in before:
            subprocess.run(line, cwd=folder, check=True, stdout=other, stderr=other)
        another = subprocess.Popen(beside, cwd=folder, stdout=other, stderr=other) if picture.beside else None
        streams = (other, subprocess.PIPE) if picture.shows_stderr else (subprocess.PIPE, other)
        process = subprocess.Popen(command, cwd=folder, stdout=streams[0], stderr=streams[1], text=True)
        began, lines = time.monotonic(), list[Line]()
        for text in (process.stderr if picture.shows_stderr else process.stdout) or ():
            lines.append(Line(text.rstrip("\n").expandtabs(4), time.monotonic() - began))
        if process.wait() != 0:
            raise SystemExit(f"{picture.command}: exit status {process.returncode}")
        if another is not None and another.wait() != 0:
            raise SystemExit(f"{picture.beside}: exit status {another.returncode}")
    return [line for line in lines if not NOISE.search(line.text)][: picture.most_lines]


def drawn(picture: Picture, lines: list[Line], name: str) -> str:
    """Return the terminal as an SVG."""
    console = Console(record=True, width=picture.columns, file=StringIO(), highlight=False, color_system="truecolor")
    console.print(Text.assemble(("$ ", "green"), (picture.command, "bold")))
    starts, now = [0.0] * _height(picture.command, picture.columns - 2), 0.0
    for before, line in zip([Line("", lines[0].seconds), *lines], lines, strict=False):
        now += min(line.seconds - before.seconds, MOST_SECONDS)
        for part in textwrap.wrap(line.text, picture.columns, subsequent_indent="    ", drop_whitespace=False) or [
            ""
        ]:
            console.print(Text(part, style=_style(line.text)), soft_wrap=True)
            starts.append(now)
    svg = console.export_svg(title=picture.alt, unique_id=f"terminal-{name}")
    svg = "\n".join(line.rstrip() for line in _FONTS.sub("", svg).splitlines()) + "\n"
    return _recorded(svg, starts) if picture.is_recorded else svg


def _height(text: str, columns: int) -> int:
    return -(-len(text) // columns)


def _style(text: str) -> str:
    if "interrupted" in text or "fault injection" in text:
        return "red"
    return "green" if re.search(r"\byes$|^the same, bit for bit|resumed from|: done", text) else ""


def _recorded(svg: str, starts: list[float]) -> str:
    """Return the SVG with each line coming at its second, again and again; at once where motion is not wanted."""
    whole = starts[-1] + STAYS_SECONDS
    frames = {start: f"at-{number}" for number, start in enumerate(sorted(set(starts)))}
    styles = "".join(
        f"@keyframes {name} {{ 0%, {100 * start / whole:.2f}% {{ opacity: 0 }} "
        f"{100 * start / whole + 0.01:.2f}%, 100% {{ opacity: 1 }} }}\n"
        f".{name} {{ animation: {name} {whole:.1f}s infinite }}\n"
        for start, name in frames.items()
        if start
    )

    def timed(found: re.Match[str]) -> str:
        start = starts[min(int(found[1]), len(starts) - 1)]
        return f'<text data-at="{frames[start]}" ' if start else "<text "

    svg = _TEXT.sub(timed, svg)
    # A text has one `class`: rich's.
    svg = re.sub(r'<text data-at="([\w-]+)" class="([^"]+)"', r'<text class="\2 \1"', svg)
    return svg.replace("</style>", f"@media (prefers-reduced-motion: no-preference) {{\n{styles}}}\n</style>", 1)


if __name__ == "__main__":
    main(sys.argv[1:])
