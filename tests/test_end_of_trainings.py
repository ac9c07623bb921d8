"""What a training leaves in its workers' processes, which run the next job of a session: nothing."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import group
from tests.support.group import run_group
from tests.support.trainings import job_of

LOSES = {"on_error": {"quarantine": 3}}


@pytest.mark.parametrize(
    ("workers", "keys"),
    [
        (2, {}),
        (3, {"bitwise": True, "shards": 4}),
        (2, {**LOSES, "ema": {"decay": 0.9}}),
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "fsdp", "bitwise": True, "shards": 4}),
        (2, {"task": "evaluate"}),
        (2, {"task": "predict"}),
    ],
)
def test_its_model_and_its_group_are_gone(tmp_path: Path, workers: int, keys: dict[str, Any]) -> None:
    """Each process group has three threads and more, for as long as anything holds the group."""

    def threads_after(number: int) -> int:
        run_group(job_of("mlp", "Pairs", workers=workers, epochs=1, **keys), tmp_path / str(number))
        return sum(psutil.Process(process.pid).num_threads() for process, _ in group._idle)

    found = [threads_after(number) for number in range(5)]
    assert found[4] - found[1] < 3 * workers, "three more jobs leave less than one group"
