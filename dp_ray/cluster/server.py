"""A worker that serves parallel modules: begin at `serve`, which the loop of `cluster/loop.py` calls.

The train function's thread answers one message after another. The driver says by messages too with whom the worker
forms a process group; the channel says only when the modules are closed.
"""

import os
import pickle
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import ray
import torch
from ray.cloudpickle import CloudPickler

from dp_ray.cluster.channel import GROUP, Terms, WorkerConfig, encoded, send
from dp_ray.cluster.group import place_of_worker, process_group, report, with_devices
from dp_ray.cluster.internals.context import place_of_this_worker
from dp_ray.cluster.internals.train_worker import messages
from dp_ray.cluster.serving_messages import JoinGroup, LeaveGroup, Serves, framed, unframed
from dp_ray.engine.world import leave_group
from dp_ray.errors import WorkerError
from dp_ray.messages import Ending, Finished, WorkerExit
from dp_ray.system.imports import imported_files
from dp_ray.system.threads import waiting
from dp_ray.tasks.numerics import computes_on
from dp_ray.tasks.serve import Served
from dp_ray.tasks.wire import WorkerPlace


def serve(worker: WorkerConfig, terms: Terms, packed: bytes) -> None:
    """Serve a process's parallel modules until they are closed; `packed` are the workers' keys."""
    attempt, here = f"{os.environ[GROUP]}-{terms.number}", place_of_worker(terms.workers)
    restored: AbstractContextManager[list[str]] = nullcontext([])
    if not terms.is_last:
        from dp_ray.tasks.isolation import isolated  # here: it is for workers that go on

        restored = isolated()
    with restored as remains:
        try:
            world = with_devices(here, pickle.loads(packed), 1)
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            served = Served(str(world.device), CloudPickler)
            context, device = ray.get_runtime_context(), str(world.device)
            where = WorkerPlace(world.node, context.get_node_id(), os.getpid(), device, computes_on(device))
            num_workers = place_of_this_worker().get_world_size()
            said = encoded(Serves(world.rank, num_workers, where, context.current_actor))
        except Exception as error:
            raise WorkerExit(
                Ending.MISTAKEN, report(worker.channel, terms.number, attempt, here, error), False
            ) from None
        ray.get(worker.channel.serves.remote(said, terms.number))
        threading.Thread(target=_await_end, args=(worker.channel, terms.number), name="end", daemon=True).start()
        with ExitStack() as group:
            while (taken := messages.get()) is not None:
                message, answer = taken
                try:
                    answer.put((framed(_answer(unframed(message), served, worker.channel, group)), None))
                except Exception as error:
                    answer.put((None, error))
            leave_group()
        del served
    imported = imported_files() if here.rank == 0 and not terms.is_last else ()
    send(worker.channel, Finished(attempt, here.rank, False, tuple(remains), imported), terms.number)


def _await_end(channel: Any, job_number: int) -> None:
    """Have the loop end once the channel has ended what it serves, or is gone."""
    with suppress(ray.exceptions.RayError):  # the driver is gone, and Ray will end this worker soon
        ray.get(channel.ended.remote(job_number))
    messages.put(None)


def _answer(message: Any, served: Served, channel: Any, group: ExitStack) -> Any:
    match message:
        case LeaveGroup():
            leave_group()
            group.close()
            return None
        case JoinGroup(attempt=attempt, world=world, backend=backend, local_world_size=local):
            try:
                with waiting("the group to form"):
                    group.enter_context(process_group(channel, attempt, world, backend, None, local))
            except WorkerError as error:
                return str(error)
            return None
        case _:
            return served.answer(message)
