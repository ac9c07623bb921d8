"""Serve parallel modules on a worker: begin at `run_task`; a call is a step of this task.

A worker leaves its view where a collective fails, or between two calls.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from dp_ray.engine.world import World, is_gpu, pickler, text_of
from dp_ray.errors import WorkerError
from dp_ray.job.keys import WorkerKeys
from dp_ray.messages import Send, StepControl, StopRequested
from dp_ray.serving import wire
from dp_ray.serving.served import Served
from dp_ray.storage import Storage


@dataclass(eq=False)
class Held:
    """What a process keeps of its modules from one view to the next."""

    served: Served | None = None
    finished = 0  # no worker has more than another

    def lets_go(self) -> bool:
        """Return whether the next view takes its keys anew: nothing changes them."""
        return False


def hold_in_advance(keys: WorkerKeys, here: World, run: Storage, held: Held) -> None:
    """Do nothing: the first call brings what a newcomer needs."""


def run_task(
    keys: WorkerKeys, world: World, run: Storage, send: Send, control: StepControl, rows: Any, held: Held
) -> NoReturn:
    """Answer one call after another, until the view is to be left.

    Raises StopRequested then, and WorkerError if this worker has left its group already.
    """
    if held.served is None:
        if is_gpu(world.device):
            torch.cuda.set_device(world.device)
        held.served = Served(str(world.device), pickler())
    for given, answer in control.take_calls():
        try:
            attempt, asked = wire.unframed(given)
            if attempt != control.attempt:
                found: Any = wire.PeerLost("the worker is in another view")
            elif asked is None:
                answer.put((None, None))
                break
            else:
                found = held.served.answer(asked)
            answer.put((wire.framed(found), None))
        except Exception as error:
            answer.put((None, error))
            raise WorkerError(f"a call failed: {text_of(error)}") from error
        if attempt == control.attempt and wire.has_left(found):
            raise WorkerError("another worker was lost in a call")
    control.is_to_rejoin = True
    raise StopRequested("the view is left between two calls")
