"""Steps of declared trainings, run again in this process."""

from pathlib import Path

from dp_ray.driver.replay import replay
from dp_ray.replay.replay import StepChoice
from dp_ray.results.replayed import Replayed


def replayed(run_dir: Path | str, step: int, shard: int | None = None) -> Replayed:
    """The step, run again; with a `shard`, that one alone."""
    (found,) = replay(str(run_dir), StepChoice(step, shard), lambda line: None)
    assert isinstance(found, Replayed)
    return found
