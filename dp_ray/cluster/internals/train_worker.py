"""Ray Train's worker: the first thing that a worker's process imports, without Ray Data and pandas.

Public: none; `import ray.train` imports both, which takes a quarter of the time of a worker's start.
"""

import os
import queue
from dataclasses import dataclass
from typing import Any

import ray

from dp_ray.system.imports import postponed
from dp_ray.system.process import bind_to

with postponed("ray.data", "pandas"):
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker as RaysOwn


MESSAGES = "messages"  # the concurrency group of `RayTrainWorker.answer`
Answer = queue.SimpleQueue[tuple[Any, Exception | None]]  # which comes once: a value, or an error
messages: queue.SimpleQueue[tuple[Any, Answer] | None] = queue.SimpleQueue()  # to this worker; None ends them


class RayTrainWorker(RaysOwn):  # type: ignore[misc]
    """Ray Train's own, in a module that imports less; a worker that serves answers messages too."""

    @ray.method(concurrency_group=MESSAGES, enable_task_events=False)  # type: ignore[untyped-decorator]
    def answer(self, message: Any) -> Any:
        """Have the train function's thread answer; Ray Train's own thread stays free for its polls."""
        answer: Answer = queue.SimpleQueue()
        messages.put((message, answer))
        value, error = answer.get()
        if error is not None:
            raise error
        return value


def enter_process(variables: dict[str, str]) -> None:
    """Set environment variables, and have gloo and NCCL use the interface with the node's Ray address.

    A host with several addresses may resolve its own name to any of them, and gloo would listen there. The user's own
    choice stays.
    """
    os.environ.update(variables)
    bind_to(ray.util.get_node_ip_address())


class _WorkerBackend(Backend):  # type: ignore[misc]
    """Does nothing: each job forms a process group, and each module's workers do."""

    share_cuda_visible_devices = True  # as of Ray Train's torch backend: NCCL needs it


@dataclass
class WorkerBackendConfig(BackendConfig):  # type: ignore[misc]
    """Ray Train's settings for `_WorkerBackend`; not a TorchConfig, so that the controller imports no torch."""

    backend: str = "gloo"  # TorchTrainer asks for it; nobody uses it

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that Ray Train uses."""
        return _WorkerBackend
