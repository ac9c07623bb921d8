"""Writes the page of a run, or of several, where the user wants it."""

from collections.abc import Sequence
from pathlib import Path

from dp_ray.errors import StorageError
from dp_ray.report.comparison import comparison_of
from dp_ray.report.page import REPORT, page_of, write_page
from dp_ray.rundir.files import RESULT, RUN, damage_told
from dp_ray.storage import Storage


def save_page(run_dirs: Sequence[str], file: str | None = None) -> str:
    """Write the page of a run, or the one that compares several; return where it is.

    Without `file`, it is `report.html` in the directory of the first run. Raises StorageError if one holds no run, or
    if the files of one are so damaged that no page can be made.
    """
    runs = [Storage(run_dir) for run_dir in run_dirs]
    for run in runs:
        if not (run.exists(RUN) or run.exists(RESULT)):
            raise StorageError(f"{run}: is not a run directory")
    with damage_told(" or ".join(run_dirs)):
        if file is None:
            write_page(runs[0])
            return runs[0].shown(REPORT)
        place = Path(file).absolute()
        page = page_of(runs[0]) if len(runs) == 1 else comparison_of(runs)
    Storage(str(place.parent)).write_text(place.name, page)
    return str(place)


def save_comparison(runs: Sequence[Storage], folder: Storage) -> str:
    """Write the page that compares runs into a folder; return where it is. Raises what `save_page` raises."""
    with damage_told(" or ".join(map(str, runs))):
        page = comparison_of(runs)
    folder.write_text(REPORT, page)
    return folder.shown(REPORT)
