"""What a job measures, and the metrics by which its training decides."""

import re
from collections.abc import Iterator, Sequence

from dp_ray.job_keys import JobKeys

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The columns that every history has; each metric adds one of its own name.
COLUMNS = (
    *("step", "epoch", "loss", "learning_rate", "gradient_norm", "rows", "rows_per_second", "data_wait_seconds"),
    "epoch_loss",
)
# What a training measures without an evaluation: the epoch's mean loss.
_OF_EPOCHS = {"scheduler.metric": ("loss",), "early_stopping.metric": ("loss", "epoch_loss")}


class MeasuringKeys(JobKeys):
    """The keys of a job, with what follows from its metrics and its evaluations."""

    @property
    def eval_names(self) -> tuple[str, ...]:
        """What an evaluation during a training measures, like `eval_loss`."""
        if self.eval is None:
            return ()
        has_loss = self.loss is not None or self.step is not None
        return tuple(f"eval_{name}" for name in [*["loss"] * has_loss, *self.metrics])

    @property
    def watched(self) -> dict[str, str]:
        """The metrics of evaluations by which a training decides, by the keys that name them."""
        best, stopping = self.checkpoint.best, self.early_stopping
        named = {
            "checkpoint.best.metric": best and best.metric,
            "scheduler.metric": getattr(self.scheduler, "metric", None),
            "early_stopping.metric": stopping and stopping.metric,
        }
        is_train = self.task == "train"
        return {key: name for key, name in named.items() if is_train and name and name not in _OF_EPOCHS.get(key, ())}

    def owners(self, name: str) -> list[str]:
        """The metrics of which `name` may be an element: `eval_recall_0` of recall, if that gives a vector."""
        if self.eval is None:
            return []
        return [metric for metric in self.metrics if name.startswith(f"eval_{metric}_")]

    def _of_metrics(self) -> Iterator[str]:
        """Metrics whose name is taken, and names of metrics that nothing measures."""
        for name in self.metrics:
            if not NAME.fullmatch(name) or name == "loss":
                yield f"metrics.{name}: must be a name of letters, digits, '.', '_' and '-' other than 'loss'"
            elif self.task == "train" and (name in COLUMNS or name.startswith("eval_")):
                yield f"metrics.{name}: is a column of the history, like {', '.join(COLUMNS)} and eval_...; rename it"
        for key, name in self.watched.items():
            if name not in self.eval_names and not self.owners(name):
                others = "".join(f"{other} or " for other in _OF_EPOCHS.get(key, ())[-1:])
                yield f"{key}: must be {others}one that eval measures ({_listed(self.eval_names)}), got {name!r}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing: there is no eval"
