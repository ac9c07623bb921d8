"""Start Ray Train's controller with our policies, from the driver."""

import functools
import math
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray

from dp_ray.cluster.internals.controller import WorkerController
from dp_ray.cluster.internals.core import label_of, put_apart
from dp_ray.cluster.internals.train import OwnController, WorkerRestarts, WorkerScaling, WorkersStart
from dp_ray.cluster.internals.variables import WARN_BLOCKING
from dp_ray.system.imports import postponed
from dp_ray.system.process import patched

with postponed("ray.data", "pandas"):
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.constants import get_env_vars_to_propagate
    from ray.train.v2.api import data_parallel_trainer

if TYPE_CHECKING:
    from dp_ray.cluster.policies import ElasticScalingPolicy, RestartPolicy


class ControlledTrainer(TorchTrainer):  # type: ignore[misc]
    """A TorchTrainer with our policies, which can be aborted and starts no needless process.

    `is_own` says that its Ray, or the connection to it, ends with these workers, `is_first` that no others were
    started in this connection. Public: none; TorchTrainer takes no policies.
    """

    def __init__(
        self,
        *args: Any,
        scaling: "ElasticScalingPolicy",
        restarts: "RestartPolicy",
        start: WorkersStart,
        is_own: bool,
        is_first: bool,
        **keys: Any,
    ) -> None:
        super().__init__(*args, **keys)
        self._on_start = start
        # How many starts of workers may take processes that Ray holds ready: with `env` only the first one. In a
        # later one, a process may have imported torch for a task before `env` is set. On a Ray of the caller's it may
        # have run the caller's code.
        self._idle_starts = 0.0 if not is_own else float(is_first) if start.env else math.inf
        self._unneeded: tuple[type[Any], ...] = (_NoDatasets,)
        if is_own:
            # The end of the job cleans up instead. Its actor would ask the Ray that was started last on this host,
            # and wait for 12 s at the end if that one is dead.
            self._unneeded += (PlacementGroupCleanerCallback,)
        self._controller: Any = None  # the actor, once it is started
        self._ended: Future[Any] = Future()
        self._policies = {
            "scaling_policy": WorkerScaling(self.scaling_config, scaling),
            "failure_policy": WorkerRestarts(self.run_config.failure_config, restarts),
        }

    def _create_default_callbacks(self) -> list[Any]:
        """Add our callback, and drop those that start a needless process: together two seconds of each run."""
        with patched(data_parallel_trainer, DatasetsCallback=_NoDatasets):
            made = super()._create_default_callbacks()
        return [self._on_start, *(callback for callback in made if type(callback) not in self._unneeded)]

    def start(self) -> None:
        """Start Ray Train's controller, which starts the workers; does not wait for them."""
        self.fit()

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        """Start Ray Train's controller on this node, so that it can be aborted at any time.

        Ray's own method waits for the controller's end. It asks the controller to abort itself, but a controller that
        waits for capacity does not react.
        """
        here = label_of(ray.get_runtime_context().get_node_id())
        variables = {WARN_BLOCKING: "0", **get_env_vars_to_propagate()}
        runtime_env = {} if self._idle_starts else {"env_vars": variables}
        actor = ray.remote(num_cpus=0, label_selector=here, runtime_env=runtime_env)(WorkerController)
        make = functools.partial(OwnController, self._idle_starts)
        self._controller = actor.remote(variables, [put_apart((make, {**given, **self._policies}))])
        self._ended = self._controller.run.remote().future()
        return SimpleNamespace(error=None)  # `fit` looks for an error in it

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended, and its workers with it."""
        return self._ended.done()

    def when_ended(self, do: Callable[[], None]) -> None:
        """Call `do` in another thread when the controller has ended, or at once if it has."""
        self._ended.add_done_callback(lambda _: do())

    def wait(self, seconds: float) -> None:
        """Wait for the controller's end, at most so long."""
        futures.wait([self._ended], seconds)

    def failure(self) -> BaseException | None:
        """Return the error with which the controller has ended; None if it ended without."""
        error: BaseException | None
        try:
            self._ended.result()
            error = ray.get(self._controller.error.remote())
        except ray.exceptions.RayError as lost:
            error = lost
        return error

    def abort(self) -> None:
        """Kill the controller, and with it its workers."""
        if self._controller is not None and ray.is_initialized():
            ray.kill(self._controller)


class _NoDatasets:
    """In place of the callback for datasets of Ray Data, which imports it."""

    def __init__(self, **_: Any) -> None:
        pass
