"""dp_ray with one thing broken at a time: the tests must fail for each; `make mutants` runs this.

Thirty are in `MUTANTS`, one for each mechanism that docs/contributing/how-it-runs.md walks through. Ten more are
drawn from the code (`drawn`): a comparison turned round, or a call left out. Each is made in a copy of the last
commit. First run the tests that showed it last, then its package's, then the rest of `make test`, then what
`make full` has beside them, until one fails. `make test` must fail for all but two, `make full` for each.

`ONLY="lease drawn"` runs those with one of these words in what they are or in their file. What pytest says of each
is in `build/mutants.txt`: look whether the test that failed is of more than a message's text.
"""

import ast
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
BELOW, ON_RAY, FULL = (f"{marks} and not places" for marks in ("not full and not ray", "not full and ray", "full"))
MOST = 2  # that `make full` alone may catch
LIMIT = 1500  # seconds of one run of pytest: a test that hangs has failed
PASSED, NONE_CHOSEN = 0, 5  # pytest's status
SEED, DRAWN = 67, 10
PACKAGES = ("plan", "engine", "rundir", "outputs")  # from which the others are drawn


class Mutant(NamedTuple):
    """A part of a file that is replaced: `old`, which occurs once, by `new`. `shows` is the test that failed last."""

    what: str
    file: str
    old: str
    new: str
    shows: str = ""


MUTANTS = [
    Mutant(
        "a shard's rows: cut evenly, not as torch.chunk cuts",
        "plan/split.py",
        "return min(rows, shard * size), min(rows, (shard + 1) * size)",
        "return (rows * shard // shards, rows * (shard + 1) // shards) if size else (0, 0)",
        "tests/plan/test_split.py::test_shards_are_what_torch_chunk_cuts",
    ),
    Mutant(
        "an order's key: without the epoch",
        "plan/order.py",
        "permutation(self.num_samples, (self.seed, self.epoch))",
        "permutation(self.num_samples, (self.seed, 0))",
        "tests/plan/test_order.py::test_agrees_with_python_integers",
    ),
    Mutant(
        "a window of blocks: a stretch that wraps around loses its second part",
        "plan/order.py",
        "rows = [(first_row, min(stop_row, end)), (begin, begin + stop_row - end)]",
        "rows = [(first_row, min(stop_row, end))]",
        "tests/data/test_reading_ahead.py::test_what_is_read_ahead_is_what_the_process_needs_and_in_time",
    ),
    Mutant(
        "a mixture's order: the same in each epoch of a source",
        "plan/mixture.py",
        "streams = hashed(streams, epochs[firsts].astype(np.uint64))",
        "streams = hashed(streams, np.zeros_like(epochs[firsts]).astype(np.uint64))",
        "tests/plan/test_mixture.py::test_a_source_keeps_its_order_beside_others_and_differs_in_each_epoch",
    ),
    Mutant(
        "a sum's order: the workers' sums one after another, not by the tree",
        "engine/sums/tree_sum.py",
        "own = fold(slices, root, lambda left, right: right.add_(left))",
        "first, *others = slices.values()\n    own = first.clone()\n    for other in others:\n        own += other",
        "tests/engine/test_trainer.py::test_bitwise_is_the_same_bits_on_any_number_of_workers",
    ),
    Mutant(
        "a collective's layout: the slices of several nodes in the wrong order",
        "engine/sums/tree_sum.py",
        "by_owner = rows.transpose(0, 1).contiguous()",
        "by_owner = rows.contiguous()",
        "tests/engine/test_trainer.py::test_sizes_that_divide_nothing_end_at_a_plain_loops_weights",
    ),
    Mutant(
        "a seed: all shards of a step draw the same numbers",
        "engine/random.py",
        '"forward", shard.epoch, shard.step, shard.shard, *more)',
        '"forward", shard.epoch, shard.step, *more)',
        "tests/engine/test_rng.py::test_a_models_noise_is_the_shards_and_the_callers_generators_are_given_back",
    ),
    Mutant(
        "a buffer: a shard starts from what the one before it on its worker wrote",
        "engine/forward/replica.py",
        "if self._ran is not None:\n            self.restore()",
        "if self._ran is not None:\n            self._ran = None",
        "tests/engine/forward/test_forward_writes.py::test_each_way_to_write_follows_shard_0",
    ),
    Mutant(
        "a step's state: what a worker's last shard writes stays, not what shard 0 does",
        "engine/forward/replica.py",
        "if keeps and shard.shard == 0:",
        "if keeps:",
        "tests/engine/forward/test_forward_writes.py::test_each_way_to_write_follows_shard_0",
    ),
    Mutant(
        "a loss's weight: the gradient is divided by the rows",
        "engine/update.py",
        "return 0.0 if weight <= 0 else rows / weight",
        "return 0.0 if weight <= 0 else 1.0",
        "tests/engine/test_trainer.py::test_ragged_rows_count_by_their_tokens",
    ),
    Mutant(
        "a mask of labels: only torch's own number is left out, whatever ignore_index is",
        "engine/forward/step.py",
        "weights = kept = target != loss.ignore_index",
        "weights = kept = target != -100",
        "tests/engine/forward/test_loss.py::test_cross_entropys_mean_is_torchs_whatever_the_split",
    ),
    Mutant(
        "a clip: a small gradient is made as large as the limit",
        "engine/update.py",
        "clip = (self.clip / (norm + 1e-6)).clamp(max=1.0)",
        "clip = self.clip / (norm + 1e-6)",
        "tests/engine/test_partial_optimizers.py::test_norm_and_clip_are_over_what_the_optimizer_updates",
    ),
    Mutant(
        "a scheduler's step: also after an update that fp16 has skipped",
        "engine/update.py",
        "if self.schedule.per_step and not self.has_skipped:",
        "if self.schedule.per_step:",
        "tests/engine/sharded/test_fsdp.py::test_workers_skip_the_updates_that_fp16_overflowed_in_one_workers_part",
    ),
    Mutant(
        "a vote: one worker's does not stop all",
        "engine/trainer.py",
        "self.stops = bool(trainer.votes.take(totals.votes))",
        "self.stops = (trainer.votes.take(totals.votes) or 0) > 1",
        "tests/tasks/test_loops.py::test_a_planned_stop_of_one_worker_stops_all_after_a_step_and_the_run_goes_on",
    ),
    Mutant(
        "a loss of the whole batch: an output without rows gets its gradient once for each shard",
        "engine/sums/whole_batch.py",
        "return gradient if shard.shard == self.first else torch.zeros_like(gradient)",
        "return gradient",
        "tests/engine/sums/test_whole_batch.py::test_it_is_plain_torch_on_the_whole_batch",
    ),
    Mutant(
        "a loader's skip: the positions of the first epoch in all",
        "engine/loads/loading.py",
        "dataclasses.replace(self._order, epoch=shard.epoch)",
        "dataclasses.replace(self._order, epoch=0)",
        "tests/engine/loads/test_skip.py::test_shards_without_what_is_skipped",
    ),
    Mutant(
        "a shard of FSDP: the norm has what all workers hold whole once for each worker",
        "engine/sharded/state.py",
        "if gradient.numel() and (is_first or id(parameter) not in whole)",
        "if gradient.numel()",
        "tests/engine/sharded/test_fsdp.py::test_a_training_goes_on_by_the_other_strategy",
    ),
    Mutant(
        "a rename: a file has its name while it is written",
        "storage.py",
        "self._path = storage.file(name if storage.is_atomic else temporary)",
        "self._path = storage.file(name)",
        "tests/test_storage.py::test_a_file_appears_only_when_it_is_whole",
    ),
    Mutant(
        "an ETag: an object's version is its time",
        "data/files.py",
        "version=tag.decode().strip('\"') or file.version)",
        "version=file.version)",
        "tests/data/test_on_s3.py::test_an_object_that_is_replaced_within_a_second_has_another_version",
    ),
    Mutant(
        "a record's policy: a store that does not answer counts as one without the file",
        "records.py",
        "if (missing if is_missing else self.unreachable) is FAIL:",
        "if missing is FAIL:",
        "tests/rundir/test_records.py::test_a_storage_that_fails_is_an_error_unless_the_file_only_informs",
    ),
    Mutant(
        "a lease: one that another machine renews counts as free",
        "rundir/lease.py",
        "if now is not None and (is_here or now != seen):",
        "if now is not None and is_here:",
        "tests/rundir/test_lease.py::test_a_driver_on_another_host_that_renews_is_alive",
    ),
    Mutant(
        "a claim: a driver goes on to write after another one has claimed the run",
        "rundir/claim.py",
        "return replace(claimed, storage=run.guarded(claimed.check_ours))",
        "return claimed",
        "tests/rundir/test_claim.py::test_a_driver_writes_nothing_more_once_another_one_has_claimed_its_run",
    ),
    Mutant(
        "a history's row: of a step that was run again the oldest counts",
        "rundir/history.py",
        "_, last = np.unique(steps[::-1], return_index=True)\n"
        "    return table.take((len(steps) - 1 - last).tolist())",
        "_, first = np.unique(steps, return_index=True)\n    return table.take(first.tolist())",
        "tests/rundir/test_recent_history.py::test_of_a_step_that_a_longer_training_runs_again_the_newest_row_counts",
    ),
    Mutant(
        "a ledger's part: one that a superseded worker commits later counts",
        "rundir/ledger.py",
        "if of == self.attempt or (of is not None and name in earlier)]",
        "if of is not None]",
        "tests/outputs/test_merging.py::test_any_schedule_of_parts_merging_deaths_and_resumes_gives_each_row_once",
    ),
    Mutant(
        "a fence: a superseded worker still names its files",
        "rundir/ledger.py",
        "before()\n        check_newest(run, attempt)",
        "before()",
        "tests/outputs/test_merging.py::test_a_superseded_worker_gets_no_file_and_removes_no_part",
    ),
    Mutant(
        "a merge's order: a step is merged once one of its parts is there",
        "outputs/files.py",
        "and all(map(self._is_there, self._shards())):",
        "and any(map(self._is_there, self._shards())):",
        "tests/outputs/test_merging.py::test_any_schedule_of_parts_merging_deaths_and_resumes_gives_each_row_once",
    ),
    Mutant(
        "a carry column: beside the outputs of other samples",
        "outputs/columns.py",
        "arrays[key] = pa.array(values)",
        "arrays[key] = pa.array(values[::-1])",
        "tests/outputs/test_carried_values.py::test_each_row_has_the_values_of_its_sample",
    ),
    Mutant(
        "a view's number: a member of an earlier view is not told to leave it",
        "cluster/membership.py",
        "if number < self.view.number or self.phase is Phase.BREAKING:",
        "if self.phase is Phase.BREAKING:",
        "tests/cluster/test_membership.py::test_ranks_go_node_by_node_and_the_oldest_first",
    ),
    Mutant(
        "a session's worker: the next job's first view waits for the lost ones too",
        "cluster/channel.py",
        "max(1, len(self._started - self._lost))",
        "len(self._started)",
        "tests/cluster/test_views.py::test_a_job_begins_with_those_that_live_and_takes_in_who_comes_for_the_one_lost_while_idle",
    ),
    Mutant(
        "a parallel module's version: with the module's own tensors, so that a change in place is not seen",
        "parallel/weights.py",
        "copies[index] = _copy(tensors[index])",
        "copies[index] = tensors[index]",
        "tests/parallel/test_module_watch.py::test_each_change_of_a_tensor_in_place_is_seen",
    ),
]

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# The tests that showed what is drawn, the last time.
SHOWN = {
    "drawn: Evaluation._measure_batch: `merged is None`": (
        "tests/engine/sums/test_whole_batch.py::test_a_step_and_evaluations"
    ),
    "drawn: check_packs: `dump(value, nowhere, base, Apart().storage, reduced)`": (
        "tests/engine/test_ship.py::test_what_cannot_be_pickled_is_named_on_any_number_of_workers"
    ),
    "drawn: climb: `node in above`": (
        "tests/plan/test_reduction_tree.py::test_sums_that_climb_as_they_come_are_those_by_definition"
    ),
    "drawn: StepInspection.find: `self.prepare(step, whole)`": (
        "tests/engine/sums/test_whole_batch.py::test_replay_gives_the_loss_and_each_rows_gradient"
    ),
    "drawn: State._check_parameters: `name not in self._parameters`": (
        "tests/engine/forward/test_forward_writes.py::test_each_way_to_write_follows_shard_0"
    ),
    "drawn: Merger._merge_files: `self._merge(merge)`": (
        "tests/outputs/test_merging.py::test_what_a_dead_attempt_commits_later_is_not_merged"
    ),
    "drawn: decide: `before.get(key, rows[key]) != rows[key]`": (
        "tests/rundir/test_decisions.py::test_it_is_decided_case_by_case"
    ),
    "drawn: TimedLoader.__next__: `self._watch is None`": (
        "tests/engine/test_loading_times.py::test_the_next_batch_can_be_asked_for_after_an_error"
    ),
    "drawn: NotFiniteFinder._on_output: `self.output is None`": (
        "tests/replay/test_replay.py::test_a_poisoned_row_in_10000_is_named_first"
    ),
    "drawn: InspectedPass._look: `model.debugs_in[0] == len(model.found)`": (
        "tests/replay/test_replay_of_loops.py::test_the_debugger"
    ),
}
# What is drawn and not counted, with the reason: the next one is drawn in its place.
PASSED_OVER = {
    "drawn: Evaluation._update_states: `_moved(metric, outputs.device)`": "only a model over several GPUs shows it",
    "drawn: _numbers: `row.numel() <= NUMBERS`": "it decides on three dots behind numbers alone",
    "drawn: named_parameters_of: `seen.add(id(parameter))`": "what a step and its model share is kept twice, alike",
    "drawn: raise_located: `located.add_note(note)`": "it is of an error's text alone",
}


def drawn(seed: int, files: list[Path]) -> Iterator[Mutant]:
    """Return mutants of these files, in an order by the seed that a change elsewhere in the code leaves as it is."""
    found = {}
    for path in files:
        name, text = path.relative_to(ROOT / "dp_ray").as_posix(), path.read_text()
        for where, old, new in broken(text):
            key = hashlib.blake2b(f"{seed} {name} {where} {old}".encode()).hexdigest()
            if text.count(old) == 1:
                what = f"drawn: {where}: `{' '.join(old.split())}`"
                found[key] = Mutant(what, name, old, new, SHOWN.get(what, ""))
    return (mutant for _, mutant in sorted(found.items()) if mutant.what not in PASSED_OVER)


def broken(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield where a comparison can be turned round or a call left out, as it stands, and what takes its place."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while waiting:
        where, node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}".strip(".")
        elif isinstance(
            node, ast.JoinedStr | ast.Assert
        ):  # Python 3.11 does not know where in a text its parts stand
            continue
        waiting += [(where, child) for child in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            node.ops = [TURNED[type(node.ops[0])]()]
            yield where, part_of(lines, node), f"({ast.unparse(node)})"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield where, part_of(lines, node), "pass"


def part_of(lines: list[bytes], node: ast.expr | ast.stmt) -> str:
    """Return the text of a node, as `ast.get_source_segment` does, which takes the whole text apart each time."""
    assert node.end_lineno is not None
    first, *more = lines[node.lineno - 1 : node.end_lineno]
    *more, last = [first, *more]
    last = last[: node.end_col_offset]
    return (b"".join([*more, last])[node.col_offset :]).decode()


class Copy:
    """A copy of the last commit in a folder, in which tests run; their processes import the copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        look = [sys.executable, "-c", "import dp_ray; print(dp_ray.__file__)"]
        found = subprocess.run(look, cwd=folder, env=self.environment, check=True, capture_output=True, text=True)
        assert Path(found.stdout.strip()).is_relative_to(folder), f"the copy's tests would import {found.stdout}"

    def change(self, mutant: Mutant) -> str:
        """Break the copy; return what it was."""
        path = self.folder / "dp_ray" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.what}: the text is there {text.count(mutant.old)} times"
        self.write(path, text.replace(mutant.old, mutant.new))
        return text

    def write(self, path: Path, text: str) -> None:
        """Write a module, and have Python compile it anew, however soon after the last write."""
        path.write_text(text)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def failed(self, marks: str, tests: list[str]) -> tuple[str, str]:
        """Run tests until one fails; return its name, empty if none did, and what pytest says."""
        command = [sys.executable, "-m", "pytest", "-x", "-m", marks, *tests]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, cwd=self.folder, env=self.environment)
            try:
                status: int | None = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                status = None
                whole = psutil.Process(process.pid)
                for each in [*whole.children(recursive=True), whole]:
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
                process.wait()
            said.seek(0)
            text = said.read()
        if status in (PASSED, NONE_CHOSEN):
            return "", text
        names = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)", text, re.M)
        ended = f"took more than {LIMIT} s" if status is None else f"ended with status {status}"
        return names[0] if names else f"pytest {ended}", text


def caught(copy: Copy, mutant: Mutant) -> tuple[str, str]:
    """Return the first test that fails, empty if none does, and the marks with which it was run."""
    package = mutant.file.partition("/")[0]
    own = f"tests/{package}" if "/" in mutant.file else f"tests/test_{package}"
    if not (ROOT / own).exists():
        own = "tests"
    several = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    runs = [(BELOW, mutant.shows.split()), (ON_RAY, mutant.shows.split()), (BELOW, [*several, own])]
    runs += [(BELOW, [*several, "tests", f"--ignore={own}"]), (ON_RAY, ["tests"]), (FULL, [own]), (FULL, ["tests"])]
    for marks, tests in runs:
        name, text = copy.failed(marks, tests) if tests else ("", "")
        if name:
            with (ROOT / "build" / "mutants.txt").open("a") as told:
                told.write(f"\n\n# {mutant.what}\n{text[-20000:]}")
            return name, marks
    return "", ""


def every() -> list[Mutant]:
    """Return all forty."""
    files = [path for package in PACKAGES for path in sorted((ROOT / "dp_ray" / package).rglob("*.py"))]
    return [*MUTANTS, *islice(drawn(SEED, files), DRAWN)]


def main(words: list[str]) -> int:
    """Print for each mutant the first test that fails; return whether `make test` or `make full` misses too many."""
    wanted = [each for each in every() if not words or any(word in f"{each.what} {each.file}" for word in words)]
    (ROOT / "build").mkdir(exist_ok=True)
    in_full, missed = 0, 0
    with tempfile.TemporaryDirectory(prefix="dp-ray-mutants-") as made:
        copy = Copy(Path(made, "copy"))
        showing = sorted({test for each in wanted for test in each.shows.split()})
        test, text = copy.failed("not full and not places", showing) if showing else ("", "")
        if test:
            sys.exit(f"{text[-2000:]}\nthis fails where nothing is broken: {test}")
        for mutant in wanted:
            began, before = time.monotonic(), copy.change(mutant)
            test, marks = caught(copy, mutant)
            copy.write(copy.folder / "dp_ray" / mutant.file, before)
            in_full, missed = in_full + (marks == FULL), missed + (not test)
            says = f"{test}{' of make full' if marks == FULL else ''}" if test else "NOT CAUGHT"
            print(f"{mutant.what}: {says}, {time.monotonic() - began:.0f} s", flush=True)
    return int(bool(missed) or in_full > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
