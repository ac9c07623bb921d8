"""A process that serves its own parallel modules, with `workers: 0` and without Ray."""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from dp_ray.engine.random import preserved
from dp_ray.engine.ship import PicklerHere
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import WorkerPlace
from dp_ray.serving.served import Served
from dp_ray.serving.wire import ServingWorker


class ServingHere:
    """This process as the only worker. Its random states and settings stay as they are."""

    pickler: ClassVar[type[pickle.Pickler]] = PicklerHere

    def __init__(self, keys: WorkerKeys) -> None:
        self.keys = keys
        self.each: Mapping[str, float] = {}
        has_gpu = torch.cuda.is_available() and keys.gpus_per_worker != 0
        device = keys.devices[0] if keys.devices else "cuda:0" if has_gpu else "cpu"
        self._served = Served(device, self.pickler, is_worker=False)
        self._member = ServingWorker(WorkerPlace("localhost", "", os.getpid(), device, {}))

    def ready(self) -> list[ServingWorker]:
        """Return this process."""
        return [self._member]

    def ask(self, messages: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the answers to the messages."""
        answers = {}
        for member, message in messages.items():
            # A worker has no mode of the caller's but those of the message.
            with ExitStack() as within:
                within.enter_context(preserved(torch.device(self._member.place.device)))
                within.enter_context(torch.inference_mode(False))
                within.enter_context(torch.enable_grad())
                within.enter_context(_without_hooks())
                answers[member] = self._served.answer(message)
        return answers

    def keep_one_kind(self) -> None:
        """There is one kind."""

    def close(self) -> None:
        """Forget all modules."""
        self._served = Served(self._member.place.device, self.pickler, is_worker=False)


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Run the block without the hooks on what graphs save that the caller has set, as a checkpoint does around it."""
    of_torch: Any = torch._C._autograd
    found = []
    while (hooks := of_torch._top_saved_tensors_default_hooks(True)) is not None:
        found.append(hooks)
        of_torch._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(found):
            of_torch._push_saved_tensors_default_hooks(*hooks)
