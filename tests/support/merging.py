"""Merges the outputs of a run directory to their end, as a worker alone does, and proves them as the driver does."""

from pathlib import Path

from dp_ray.job.job import Job
from dp_ray.job.plan import split_of
from dp_ray.outputs.files import prove_outputs
from dp_ray.outputs.read import Merged
from dp_ray.plan.order import Order
from dp_ray.plan.split import FilePlan, Split
from dp_ray.rundir import ledger
from dp_ray.rundir.ledger import FILES, OUTPUTS, PARTS
from dp_ray.storage import Storage
from tests.support.builders import file_merge_of


def begin(run: Storage, files: int = 1) -> Storage:
    """Make the folders of the outputs, cut into so many files; returns that of the parts."""
    for folder in (PARTS, FILES, OUTPUTS):
        run.child(folder).create()
    if ledger.files_in(ledger.committed(run)) is None:
        ledger.note_files(run, "", files)
    return run.child(PARTS)


def merge(run: Storage, split: Split, order: Order) -> Merged:
    """Merge the files that are not whole yet from the parts that count; prove them, and write the manifest."""
    names = ledger.committed(run)
    cut = FilePlan(ledger.files_in(names) or 1, split.total_steps)
    for number in sorted(set(range(cut.files)) - ledger.records_in(names).keys()):
        file = file_merge_of(run, split, order, cut, number)
        try:
            if not file.advance():
                file.refuse()
        finally:
            file.close()
    prove_outputs(run, split.rows_kept)
    return Merged.of(run)


def merged(job: Job, run: Storage | Path, rows: int) -> Merged:
    """The outputs of a prediction whose workers have run, one after another or beside each other."""
    run = run if isinstance(run, Storage) else Storage(str(run))
    split = split_of(job, rows)
    return merge(run, split, Order(rows, job.seed, 0, job.is_shuffled))
