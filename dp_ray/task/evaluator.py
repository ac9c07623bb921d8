"""The evaluations of a training."""

from collections.abc import Mapping
from contextlib import closing, nullcontext

from dp_ray.job import Job
from dp_ray.job_plan import evaluations_of
from dp_ray.plan.plan import Evaluations
from dp_ray.plan.split import Split
from dp_ray.plan.work import Work
from dp_ray.replica.data import seeded_dataset
from dp_ray.replica.evaluation import Evaluation, check_measured
from dp_ray.replica.quarantine import as_planned, load_good
from dp_ray.replica.trainer import Trainer
from dp_ray.replica.world import World, check_rows
from dp_ray.storage import Storage
from dp_ray.task.notices import Send
from dp_ray.task.pins import check_pins
from dp_ray.task.set_aside import SetAside, quarantine_of, set_aside
from dp_ray.task.step_control import StepControl


class Evaluator:
    """Evaluates during a training: at the steps that the job sets, and after the last step.

    It evaluates the average of the weights if the job says so.
    """

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        evaluation: Evaluation,
        world: World,
        run: Storage,
        control: StepControl,
        rows_on_driver: Mapping[str, int],
        send: Send,
        attempt: str,
    ) -> None:
        average = trainer.average if job.ema is not None and job.ema.evaluate else None
        self._model = trainer.called if average is None else average.called(trainer.called)
        self._in_place = nullcontext if average is None else average.in_place
        self._control = control
        self._evaluation = evaluation
        self._world = world
        self._planned: Evaluations | None = None
        self._set_aside: SetAside | None = None
        if job.eval is not None:
            self._job = job.over_eval()
            self._dataset = seeded_dataset(self._job, "eval.dataset")
            check_rows("eval.dataset", len(self._dataset), rows_on_driver)
            check_pins(run, "eval.dataset", self._dataset, world)
            self._planned = evaluations_of(job, len(self._dataset))
            self._set_aside = set_aside(self._job, "eval.dataset", self._dataset, run, send, attempt)

    def is_due(self, split: Split, step: int) -> bool:
        """Whether to evaluate after `step`."""
        return self._planned is not None and self._planned.due.after(split, step)

    def measure(self, step: int) -> dict[str, float]:
        """Evaluate after `step`; return the metrics by their names in the history, nothing if the job has no eval."""
        if self._planned is None:
            return {}
        work = Work(self._planned.split, self._world.world_size, self._world.rank)
        device = self._world.device
        if self._set_aside is not None:
            self._set_aside.begin_evaluation(step)
        quarantine = quarantine_of(self._set_aside)
        real = as_planned if quarantine is None else quarantine.real
        loading = load_good(self._job, self._dataset, work, device, quarantine, name="eval.dataset")
        with self._in_place(), closing(loading) as batches:
            found = self._evaluation.run(
                self._model, work, batches, on_step=lambda _: self._control.touch(), real=real
            )
        if quarantine is not None:
            found["rows"] = self._evaluation.rows
        measured = {f"eval_{name}": value for name, value in found.items()}
        check_measured(self._job, measured)
        return measured
