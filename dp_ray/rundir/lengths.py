"""How many steps a run has, from its `run.json`."""

from typing import Any

from dp_ray.plan.split import Split


def split_of(job: dict[str, Any], rows: int) -> Split:
    """How a run cuts the rows of its dataset, from the job in its run.json."""
    lengths = (job["epochs"], job["max_steps"]) if job["task"] == "train" else (1, None)
    shards = 1 if job["shards"] == "auto" else job["shards"]  # still to be found: no step is done
    return Split(rows, job["batch_size"], shards, job["drop_last"], *lengths)
