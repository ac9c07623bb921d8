"""What the user sees while a job runs: in a terminal, in a notebook, in a log."""

import io
import itertools
import logging
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

import dp_ray
from dp_ray.engine.world import World
from dp_ray.monitor import console as status_line
from dp_ray.monitor.console import Console, Losses, Progress, StatusLine, _display, rewritten
from tests.support.screens import as_a_notebook_shows


def progressed() -> Progress:
    """Two workers in step 95 of 540."""
    progress = Progress("job", steps=540, rows=17244)
    progress.start([World(0), World(1)])
    progress.run(94)
    progress.advance(95, 3034)
    progress.last = {"loss": 0.394217}
    return progress


def test_the_status_is_rewritten_and_all_else_stands_above_it() -> None:
    stream = io.StringIO()
    line = StatusLine(stream)
    line.show("1/3 steps, a long status")
    line.show("2/3 steps")
    assert as_a_notebook_shows(stream.getvalue()) == ["2/3 steps"]
    print("epoch 0", "loss 0.3", file=line)
    assert as_a_notebook_shows(stream.getvalue()) == ["epoch 0 loss 0.3", ""]
    line.show("3/3 steps")
    line.end()
    assert as_a_notebook_shows(stream.getvalue()) == ["epoch 0 loss 0.3", "3/3 steps", ""]


def test_a_line_that_is_not_at_its_end_is_not_overwritten() -> None:
    stream = io.StringIO()
    line = StatusLine(stream)
    line.show("1/3 steps")
    line.write("loading ")
    line.show("2/3 steps")
    line.write("done\n")
    line.show("3/3 steps")
    assert as_a_notebook_shows(stream.getvalue()) == ["loading done", "3/3 steps"]


def test_stderr_ends_with_the_status_of_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_line, "REFRESH_SECONDS", 0.01)
    before, steps = sys.stderr, itertools.count(1)
    with pytest.raises(KeyError), rewritten(lambda: f"step {next(steps)}"):
        _fail_after(0.3)
    assert sys.stderr is before
    shown = as_a_notebook_shows(capsys.readouterr().err)
    assert shown == [f"step {next(steps) - 1}", ""]
    assert not [thread for thread in threading.enumerate() if thread.name == "status line"]


def _fail_after(seconds: float) -> None:
    time.sleep(seconds)
    raise KeyError


def test_a_forked_process_writes_without_the_lock() -> None:
    stream = io.StringIO()
    line = StatusLine(stream)
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with line._lock:
            taken.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    line._pid = -1  # as in a forked process
    line.write("from the loader\n")
    release.set()
    thread.join()
    assert stream.getvalue() == "from the loader\n"


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Stderr is a terminal; yields the end that a user looks at."""
    monkeypatch.setenv("TERM", "xterm")
    looked_at, written = pty.openpty()
    with os.fdopen(written, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        yield looked_at
        stream.flush()
    os.close(looked_at)


def test_a_terminal_shows_what_goes_on_though_nobody_tells_of_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `workers: 0` nobody calls `progress` before the first steps are through."""
    progress = Progress("job", steps=10, rows=100)
    progress.start([World(0)])
    with terminal(monkeypatch) as looked_at, Console("job").live(progress):
        shown = ""
        while "building the dataset and the model" not in shown and wait([looked_at], 60):
            shown += os.read(looked_at, 100_000).decode()
    assert "building the dataset and the model" in shown


def test_a_terminal_shows_the_newest_of_many_epochs_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as looked_at:
        console = Console("job")
        losses = Losses(console, "runs/job")
        with console.live(progressed()):
            for epoch in range(2000):
                losses.say([{"step": epoch, "epoch": epoch, "loss": 1.0, "epoch_loss": 0.5, "rows": 7}])
                if epoch % 500 == 499:
                    time.sleep(0.25)  # the display is drawn five times a second
        losses.end()
        read = b""
        while wait([looked_at], 0.3):
            read += os.read(looked_at, 1 << 16)
    shown = read.decode()
    printed = re.findall(r"job: epoch (\d+), step", shown)
    assert [int(number) for number in printed] == [*range(20), 1999]
    assert "  epoch 1999, step 1999: epoch_loss 0.5" in shown


def test_threads_that_share_a_terminal_print_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown_by(name: str) -> None:
        console, progress = Console(name), progressed()
        with console.live(progress):
            console.progress(progress, at_once=True)

    with terminal(monkeypatch) as looked_at:
        threads = [threading.Thread(target=shown_by, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.stderr.flush()
        shown = ""
        while shown.count("\n") < 2 and wait([looked_at], 10):  # a terminal passes on in pieces
            shown += os.read(looked_at, 100_000).decode()
    assert "\x1b" not in shown
    assert sorted(line.partition(",")[0] for line in shown.splitlines()) == ["one: 95/540 steps", "two: 95/540 steps"]


@pytest.mark.parametrize("columns", [24, 40, 80, 200])
def test_a_narrow_terminal_shows_the_progress_whole(columns: int) -> None:
    progress = progressed()
    screen = RichConsole(file=io.StringIO(), width=columns)
    screen.print(_display(progress))
    assert isinstance(screen.file, io.StringIO)
    text = " ".join(screen.file.getvalue().split())
    assert re.search(r"^job [━╸╺ ]+95/540 steps, 3034 rows, [\d,]+ rows/s, loss 0\.3942, \d+:\d\d left ", text)


def test_a_log_has_lines_with_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    console, progress = Console("job"), progressed()
    console.say("run directory runs/job")
    with console.live(progress):
        console.progress(progress, at_once=True)
        console.progress(progress)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "job: run directory runs/job"
    assert [line.partition(",")[0] for line in told[1:]] == ["job: 95/540 steps"]


def test_many_short_epochs_have_few_lines_and_the_last_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    losses = Losses(Console("run"), "runs/run")
    for epoch in range(400):
        losses.say([{"step": epoch, "epoch": epoch, "loss": 1.0, "epoch_loss": 0.5, "rows": 7}])
    losses.end()
    told = capsys.readouterr().err.splitlines()
    assert told[:20] == [f"run: epoch {epoch}, step {epoch}: epoch_loss 0.5" for epoch in range(20)]
    assert len(told) < 30
    assert told[-1] == "run: epoch 399, step 399: epoch_loss 0.5"


def test_rows_that_another_rank_0_sends_again_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    losses = Losses(Console("run"), "runs/run")
    rows = [{"step": step, "epoch": step, "loss": 1.0, "epoch_loss": 0.5, "rows": 7} for step in range(3)]
    losses.say(rows[:2])
    losses.say(rows)
    losses.say([{**rows[2], "epoch_loss": 0.25}])
    told = [line.removeprefix("run: epoch ") for line in capsys.readouterr().err.splitlines()]
    assert told == [
        *("0, step 0: epoch_loss 0.5", "1, step 1: epoch_loss 0.5", "2, step 2: epoch_loss 0.5"),
        "2, step 2: epoch_loss 0.25",
    ]


@pytest.mark.parametrize(("is_brief", "first"), [(False, 20), (True, 0)])
def test_a_log_has_every_tenth_of_many_long_epochs(
    is_brief: bool, first: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    losses = Losses(Console("run", is_brief=is_brief), "runs/run")
    for epoch in range(105):
        now[0] += 20
        losses.say([{"step": epoch, "epoch": epoch, "loss": 1.0, "epoch_loss": 0.5, "rows": 7}])
    losses.end()
    epochs = [int(found) for found in re.findall(r"epoch (\d+),", capsys.readouterr().err)]
    assert epochs == [*range(first), *range(first + 9, 105, 10), 104]


def test_a_log_of_a_day_has_few_lines_of_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console, progress = Console("job"), progressed()
    for second in range(24 * 3600):
        now[0] = float(second)
        console.progress(progress)
    assert 1000 < len(capsys.readouterr().err.splitlines()) < 2000


class Kept(logging.Handler):
    """A handler of a program that embeds runs: it keeps the lines, with their level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@contextmanager
def handler_on(name: str) -> Iterator[Kept]:
    handler = Kept()
    logging.getLogger(name).addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger("dp_ray").setLevel(logging.NOTSET)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_program_that_sets_up_the_logger_gets_the_lines_instead_of_stderr(
    is_own: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with handler_on("dp_ray" if is_own else "") as kept:
        if not is_own:
            logging.getLogger("dp_ray").setLevel(logging.INFO)
        Console("job").say("50 % done")
        Console("job", quiet=True).say("not said")
        Console("job", quiet=True).printed(World(1), "by user code")
    assert kept.lines == [("INFO", "job: 50 % done"), ("INFO", "[rank 1] by user code")]
    assert capsys.readouterr().err == ""


def test_a_handler_of_the_root_alone_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that logs its own things has not asked for the lines."""
    with handler_on("") as kept:
        Console("job").say("50 % done")
    assert (kept.lines, capsys.readouterr().err) == ([], "job: 50 % done\n")


def test_a_whole_run_can_be_routed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(storage: str) -> str:
        dp_ray.run("jobs/tutorial.yaml", workers=0, storage=str(tmp_path / storage))
        return re.sub(r"\d+\.\d+|\d+ rows/s", "N", capsys.readouterr().err.replace(f"/{storage}/", "/STORAGE/"))

    on_stderr = run("plain")
    with handler_on("dp_ray") as kept:
        assert run("routed") == ""
    lines = "".join(f"{line}\n" for _, line in kept.lines).replace("/routed/", "/STORAGE/")
    assert re.sub(r"\d+\.\d+|\d+ rows/s", "N", lines) == on_stderr != ""
