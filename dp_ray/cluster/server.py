"""A worker that serves parallel modules: begin at `serve`, which the loop of `cluster/loop.py` calls.

The train function's thread answers one message after another. With whom it forms a process group is said by the
channel, which makes the views of those that serve as it makes a job's. The driver says by messages when to leave a
view: so all leave it between the same two calls.
"""

import os
import pickle
import threading
import uuid
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.cloudpickle import CloudPickler

from dp_ray.cluster.channel import GROUP, Terms, WorkerConfig, send
from dp_ray.cluster.group import SOON, leave_view, next_view, place_of_worker, process_group, report, with_devices
from dp_ray.cluster.heartbeat import Heartbeat
from dp_ray.cluster.internals.train_worker import messages
from dp_ray.cluster.serving_messages import HasFormed, LeaveView, Serves, framed, unframed
from dp_ray.engine.world import World
from dp_ray.errors import Error, JobError, WorkerError
from dp_ray.messages import Ending, Finished, WorkerExit
from dp_ray.storage import Storage
from dp_ray.system.imports import imported_files
from dp_ray.system.threads import waiting
from dp_ray.tasks.numerics import computes_on
from dp_ray.tasks.serve import Served
from dp_ray.tasks.wire import PeerLost, WorkerPlace


def serve(worker: WorkerConfig, terms: Terms, packed: bytes) -> None:
    """Serve a process's parallel modules until they are closed; `packed` are the workers' keys, and the backend."""
    here, node_id = place_of_worker(terms.workers), ray.get_runtime_context().get_node_id()
    worker = replace(worker, number=terms.number, node_id=node_id, name=uuid.uuid4().hex)
    attempt = f"{os.environ[GROUP]}-{terms.number}"
    restored: AbstractContextManager[list[str]] = nullcontext([])
    if not terms.is_last:
        from dp_ray.tasks.isolation import isolated  # here: it is for workers that go on

        restored = isolated()
    with restored as remains:
        try:
            keys, backend = pickle.loads(packed)
            world = with_devices(here, keys, 1)
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            served, device = Served(str(world.device), CloudPickler), str(world.device)
            where = WorkerPlace(world.node, node_id, os.getpid(), device, computes_on(device))
        except Exception as error:
            raise WorkerExit(
                Ending.MISTAKEN, report(worker.channel, terms.number, attempt, here, error), False
            ) from None
        threading.Thread(target=_await_end, args=(worker.channel, terms.number), name="end", daemon=True).start()
        handle = ray.get_runtime_context().current_actor
        send(worker.channel, Serves(worker.name, world.rank, where, handle), terms.number)
        serve_in_views(worker, world, attempt, backend, served)
        del served
    imported = imported_files() if here.rank == 0 and not terms.is_last else ()
    send(worker.channel, Finished(attempt, here.rank, False, tuple(remains), imported), terms.number)


def serve_in_views(worker: WorkerConfig, here: World, attempt: str, backend: str, served: Served) -> None:
    """Answer messages in one view after another, until what is served has ended."""
    is_broken: bool | None = False
    while (given := next_view(worker, here, has_lost_peer=bool(is_broken))) is not None:
        view, world, on_node = given
        in_view, of_view = replace(worker, view=view.number), f"{attempt}-{view.number}"
        with Heartbeat(in_view, of_view, world, Storage(""), None):
            try:
                with ExitStack() as formed:
                    with waiting("the group to form"):
                        group = process_group(in_view, of_view, world, backend, None, on_node, SOON)
                        formed.enter_context(group)
                    is_broken = answer_all(served, view.number)
            except (WorkerError, JobError) as error:
                is_broken = answer_all(served, view.number, error)
                is_broken = None if is_broken is None else True
            leave_view(bool(is_broken))
        if is_broken is None:
            return
    answer_all(served, 0, WorkerError("the workers serve no longer"))


def answer_all(served: Served, view: int, error: Error | None = None) -> bool | None:
    """Answer messages until the view of this number is to be left; return whether a collective has failed.

    None if nothing more comes. `error` says why the group could not be formed.
    """
    is_broken = False
    while (taken := messages.get()) is not None:
        message, answer = taken
        try:
            asked = unframed(message)
            if isinstance(asked, LeaveView):
                answer.put((framed(None), None))
                if asked.view >= view:
                    return is_broken
                continue
            if isinstance(asked, HasFormed) and not isinstance(error, JobError):
                given = (
                    f"a worker is in another view than {asked.view}" if asked.view != view else error and str(error)
                )
            elif error is not None:
                raise error
            else:
                given = served.answer(asked)
            is_broken |= isinstance(given, PeerLost)
            answer.put((framed(given), None))
        except Exception as raised:
            answer.put((None, raised))
    return None


def _await_end(channel: Any, job_number: int) -> None:
    """Have the loop end once the channel has ended what it serves, or is gone."""
    with suppress(ray.exceptions.RayError):  # the driver is gone, and Ray will end this worker soon
        ray.get(channel.ended.remote(job_number))
    messages.put(None)
