"""The workers' shape reports: put in order, written, and printed if the user asks for it; and their steps' times."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from dp_ray.monitor.console import Console
from dp_ray.replica.world import World
from dp_ray.results.shape_journal import Journal
from dp_ray.results.shape_recorder import Report, ShardSpan
from dp_ray.results.shape_reports import Collector, ReportColumns, ReportFile
from dp_ray.results.shapes import Seen, decode_sizes, shape_lines
from dp_ray.results.step_time_files import StepTimeWriter


class ShapeReports:
    """Takes in shape reports; calls `on_steps` with the number of steps done by all workers, and the new rows."""

    def __init__(
        self,
        file: ReportFile,
        journal: Journal | None,
        times: StepTimeWriter | None,
        console: Console,
        prints: bool,
        batch_dim: int,
        on_steps: Callable[[int, int], None],
    ) -> None:
        self._file = file
        self._journal = journal
        self._times = times
        self._must_keep = False
        self._console = console
        self._prints = prints
        self._batch_dim = batch_dim
        self._on_steps = on_steps
        self._stdout = sys.stdout
        self._collector = Collector(self._on_rows)
        self._decoded: dict[int, tuple[Any, Any]] = {}

    def restore(self, spans: Sequence[tuple[World, Seen, ShardSpan]]) -> None:
        """Take in the reports that a resumed run has of its finished steps."""
        self._collector.restore(spans)

    def begin(self, worlds: Sequence[World], attempt: int) -> None:
        """Begin an attempt of the run with these workers; attempts count from 0."""
        self._collector.begin(worlds)
        if self._times:
            self._times.begin(attempt)

    def take(self, report: Report) -> int:
        """Take in a report; return the number of rows in it."""
        self._collector.take(report)
        if self._times and report.times is not None:
            self._times.add(report.world, report.times)
        return sum(self._collector.rows_of(report.world.rank, span) for span in report.spans)

    def keep(self) -> None:
        """Write all reports to the journal at the next `emit`."""
        self._must_keep = True

    def emit(self) -> None:
        """Pass on the steps that all workers have finished; write the journal if `keep` asked for it, and times."""
        self._collector.emit()
        if self._times:
            self._times.tick()
        if self._must_keep and self._journal:
            self._must_keep = False
            self._journal.save(self._collector)

    def close(self) -> None:
        """Pass on all reports, also those of unfinished steps, and finish the file."""
        self._collector.emit()
        self._on_steps = lambda step, rows: None  # the steps that are left are not done
        self._collector.close()
        self._file.close()
        if self._times:
            self._times.close()

    def _on_rows(self, collector: Collector, rows: ReportColumns) -> None:
        block = self._file.write(collector, rows)
        if self._journal:
            self._journal.add(block)
        self._on_steps(int(rows.step[-1]) + 1, _num_rows(collector, rows))
        if self._prints:
            self._print(self._lines(collector, rows))

    def _print(self, lines: Iterator[str]) -> None:
        """Print lines to stdout; a closed pipe, as with `| head`, ends the printing but not the job."""
        try:
            for line in lines:
                print(line, file=self._stdout)
            self._stdout.flush()
        except BrokenPipeError:
            self._prints = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            self._console.say("stdout was closed, no more shapes are printed")

    def _lines(self, collector: Collector, rows: ReportColumns) -> Iterator[str]:
        numbered = zip(rows.step.tolist(), rows.seen.tolist(), strict=True)
        for _, pieces in groupby(numbered, key=lambda pair: pair[0]):
            yield from shape_lines([self._sizes(collector, seen) for _, seen in pieces], self._batch_dim)

    def _sizes(self, collector: Collector, number: int) -> tuple[Any, Any]:
        if number not in self._decoded:
            seen = collector.seen[number]
            self._decoded[number] = decode_sizes(seen.input_size), decode_sizes(seen.output_size)
        return self._decoded[number]


def _num_rows(collector: Collector, rows: ReportColumns) -> int:
    """The number of the dataset's rows in these reports."""
    counts = np.bincount(rows.seen).tolist()
    return sum(count * collector.seen[number].rows for number, count in enumerate(counts))
