"""Begin to set the bad samples of a dataset aside, if the job asks for it."""

import json
from collections.abc import Callable
from typing import Any

from dp_ray.job import Job
from dp_ray.replica.quarantine import Quarantine, find_reference
from dp_ray.replica.screening import Reference
from dp_ray.replica.skipping import Skipping
from dp_ray.replica.world import broadcast, is_rank_0
from dp_ray.rundir.files import read_json, write_json
from dp_ray.rundir.quarantine_files import QuarantineFiles, forget
from dp_ray.storage import Storage
from dp_ray.task.notices import Note, Send

REFERENCE = "reference-of-{}.json"


class SetAside:
    """What a task sets aside of a dataset: the quarantine, and the files that keep it."""

    def __init__(
        self, job: Job, key: str, dataset: Any, reference: Reference, run: Storage, send: Send, attempt: str | None
    ) -> None:
        assert job.on_error is not None
        self._files = QuarantineFiles(run, key, job.on_error.quarantine, attempt, lambda text: send(Note(text)))
        self.quarantine = Quarantine(job, reference, self._files.keep, Skipping(job, dataset))

    def begin_evaluation(self, after: int) -> None:
        """The dataset is evaluated after step `after` of a training."""
        self._files.after = after


def set_aside(
    job: Job, key: str, dataset: Any, run: Storage, send: Send, attempt: str | None = None
) -> SetAside | None:
    """Begin to set bad samples of the dataset of `key` aside; None if the job does not. Every rank calls this."""
    if job.on_error is None:
        return None
    return SetAside(job, key, dataset, _reference(job, key, dataset, run), run, send, attempt)


def unkept_quarantine(job: Job, key: str, dataset: Any, run: Storage) -> Quarantine | None:
    """The quarantine for steps that are run again to be looked at: nothing of what it sets aside is kept."""
    if job.on_error is None:
        return None
    return Quarantine(job, _reference(job, key, dataset, run), lambda *_: None, Skipping(job, dataset))


def quarantine_of(found: SetAside | None) -> Quarantine | None:
    """Its quarantine, if there is one."""
    return None if found is None else found.quarantine


def forget_from(run: Storage, is_kept: Callable[[int, str], bool]) -> None:
    """On rank 0, remove what was set aside in steps that are run again, or that are not run after all.

    Other ranks may set samples aside only after a broadcast of rank 0.
    """
    if is_rank_0():
        forget(run, is_kept)
    broadcast("")


def _reference(job: Job, key: str, dataset: Any, run: Storage) -> Reference:
    """The run's reference sample of a dataset, which rank 0 chooses when the run begins."""
    name = REFERENCE.format(key)
    if not is_rank_0():
        return Reference(**json.loads(broadcast("")))
    if run.exists(name):
        chosen = Reference(**read_json(run, name))
    else:
        chosen = find_reference(job, dataset, key)
        write_json(run, name, chosen._asdict())
    broadcast(json.dumps(chosen._asdict()))
    return chosen
