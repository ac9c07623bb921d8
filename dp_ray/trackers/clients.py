"""The packages of trackers, each behind a client that the program of its process calls: see `feed.py`.

A client has a `run_id`, the first step that its tracker lacks as `next_step`, and `log`, `finish` and `close`. It
imports nothing of dp_ray.
"""

import os
import posixpath
import re
import time
from typing import Any, TypeAlias

NEXT = "dp_ray.next_step"  # MLflow's tag: the first step that its server lacks
MOST_METRICS = 1000  # what MLflow takes at once
MOST_PARAMS = 100
LONGEST_PARAM, LONGEST_NAME = 6000, 250


def mlflow_name(name: str) -> str:
    """Return the name of a parameter or metric as MLflow takes it; what it refuses becomes `_`.

    >>> mlflow_name("loss_of_web (en)"), mlflow_name("args.x[0]"), mlflow_name("a//b")
    ('loss_of_web _en_', 'args.x_0_', 'a__b')
    """
    name = re.sub(r"[^\w.\- /]", "_", name)[:LONGEST_NAME]
    is_path = posixpath.normpath(name) == name and not name.startswith((".", "/"))  # it may become a file's
    return name if is_path else re.sub(r"^\.|/", "_", name)


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return the values of a row that are drawn over its step."""
    left_out = ("step", "epoch", "rows")
    return {name: value for name, value in row.items() if name not in left_out and value is not None}


class MlflowClient:
    """A run on an MLflow server. A tag says which steps it has, so a request without an answer is not sent twice."""

    def __init__(self, asked: dict[str, Any]) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._client = MlflowClient()
        self.run_id, self.next_step = asked["run_id"] or "", 0
        if not self._reopen():
            self.run_id = self._create(asked)

    def _reopen(self) -> bool:
        """Set the run to running again; return False if the server does not have it."""
        from mlflow.exceptions import MlflowException

        if not self.run_id:
            return False
        try:
            run = self._client.get_run(self.run_id)
            self._client.update_run(self.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        self.next_step = int(run.data.tags.get(NEXT, 0))
        return True

    def _create(self, asked: dict[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if name:
            known = self._client.get_experiment_by_name(name)
            experiment = str(known.experiment_id if known else self._client.create_experiment(name))
        else:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        run = self._client.create_run(
            experiment, start_time=int(time.time() * 1000), tags=asked["tags"], run_name=asked["name"]
        )
        given = asked["params"].items()
        params = [self._param(mlflow_name(name), str(value)[:LONGEST_PARAM]) for name, value in given]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + MOST_PARAMS])
        return str(run.info.run_id)

    def log(self, rows: list[dict[str, Any]], at: float) -> None:
        """Send rows in requests of whole rows, each with the tag that says how far it goes; `at` is their time."""
        batch: list[Any] = []
        for row in rows:
            values, now = scalars(row).items(), int(at * 1000)
            metrics = [self._metric(mlflow_name(name), value, now, row["step"]) for name, value in values]
            if len(batch) + len(metrics) > MOST_METRICS:
                self._send(batch, row["step"])
                batch = []
            batch += metrics
        self._send(batch, rows[-1]["step"] + 1)

    def _send(self, metrics: list[Any], next_step: int) -> None:
        self._client.log_batch(self.run_id, metrics=metrics, tags=[self._tag(NEXT, str(next_step))])
        self.next_step = next_step

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        """End the run: done, failed or interrupted. A training's last values are its metrics; others are added."""
        there = self._client.get_run(self.run_id).data.metrics
        now = int(time.time() * 1000)
        named = {mlflow_name(name): value for name, value in metrics.items()}
        new = [self._metric(name, value, now, 0) for name, value in named.items() if name not in there]
        self._client.log_batch(self.run_id, metrics=new, tags=[self._tag("dp_ray.status", status)])
        states = {"done": "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self.run_id, states.get(status, "KILLED"))

    def close(self) -> None:
        """Leave the run as it is, since its driver was killed: all that was sent is on the server."""


class PackageClient:
    """A run whose package sends rows by itself."""

    _run: Any
    next_step: int

    def log(self, rows: list[dict[str, Any]], at: float) -> None:
        """Hand rows to the package, which gives them its own time."""
        for row in rows:
            self._run.log(scalars(row), step=row["step"])
        self.next_step = rows[-1]["step"] + 1

    def close(self) -> None:
        """Send what is left, since the run's driver was killed."""
        self._run.finish()


class WandbClient(PackageClient):
    """A run of Weights & Biases, whose own process writes it to a local folder and sends it from there."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            id=asked["run_id"],
            name=asked["name"],
            config=asked["params"],
            tags=[asked["tags"]["dp_ray.task"]],
            notes=asked["tags"]["dp_ray.run_dir"],
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run_id = str(self._run.id)
        self.next_step = max(asked["next_step"], int(self._run.step))

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        """End the run and wait until all of it is sent."""
        self._run.summary.update({**metrics, "dp_ray.status": status})
        self._run.finish(exit_code=0 if status == "done" else 1)

    def close(self) -> None:
        """End the run as one that crashed."""
        self._run.finish(exit_code=1)


class TrackioClient(PackageClient):
    """A run of Trackio, which keeps what its server does not take yet, and sends it again."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "dp_ray"),
            # Trackio would add to an earlier run of the same name.
            name=asked["run_id"] or f"{asked['name']}-{time.strftime('%Y%m%d-%H%M%S')}",
            config={**asked["params"], **asked["tags"]},
            resume="allow",
            embed=False,
        )
        self.run_id = str(self._run.name)  # what Trackio resumes by
        is_resumed = bool(asked["run_id"])
        self.next_step = max(asked["next_step"], int(getattr(self._run, "_next_step", 0)) if is_resumed else 0)

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        """End the run. Trackio has no summary, so what an evaluation measured is its step 0."""
        if self.next_step == 0 and metrics:
            self._run.log(dict(metrics), step=0)
        self._run.finish()


Client: TypeAlias = MlflowClient | WandbClient | TrackioClient
CLIENTS: dict[str, type[Client]] = {"mlflow": MlflowClient, "wandb": WandbClient, "trackio": TrackioClient}
