"""The evaluations of a training."""

from collections.abc import Mapping

from torch import nn

from dp_ray.job import Job
from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.replica.data import load_shards, seeded_dataset
from dp_ray.replica.evaluation import Evaluation, check_measured
from dp_ray.replica.world import World, check_rows
from dp_ray.task.step_control import StepControl


class Evaluator:
    """Evaluates during a training: at the steps that the job sets, and after the last step."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        evaluation: Evaluation,
        world: World,
        control: StepControl,
        rows_on_driver: Mapping[str, int],
    ) -> None:
        self._model = model
        self._control = control
        self._evaluation = evaluation
        self._world = world
        self._eval = job.eval
        if job.eval is not None:
            self._job = job.over_eval()
            self._dataset = seeded_dataset(self._job, "eval.dataset")
            check_rows("eval.dataset", len(self._dataset), rows_on_driver)
            self._split = Split(len(self._dataset), self._job.batch_size, job.num_shards)

    def is_due(self, split: Split, step: int) -> bool:
        """Whether an evaluation is due after `step`."""
        if self._eval is None:
            return False
        if step + 1 == split.total_steps:
            return True
        epoch, place = split.cursor(step)
        each = self._eval.every_epochs or (None if self._eval.every_steps else 1)
        at_epoch = each is not None and place + 1 == split.steps and (epoch + 1) % each == 0
        return at_epoch or (self._eval.every_steps is not None and (step + 1) % self._eval.every_steps == 0)

    def after_step(self, split: Split, step: int) -> dict[str, float]:
        """Evaluate after `step` if that is due; return the metrics by their names in the history, else nothing."""
        if not self.is_due(split, step):
            return {}
        work = Work(self._split, self._world.world_size, self._world.rank)
        device = self._world.device
        batches = load_shards(self._job, self._dataset, work, device, name="eval.dataset")
        found = self._evaluation.run(self._model, work, batches, on_step=lambda _: self._control.touch())
        measured = {f"eval_{name}": value for name, value in found.items()}
        check_measured(self._job, measured)
        return measured
