"""dp_ray with one wait, one note to the allocator, or one care for alignment taken out: each must show."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import CodeType
from typing import Any, NamedTuple

import torch


class Mutant(NamedTuple):
    """A call that is left out: `owner.method`, or a function, where the function `caller` of the module calls it.

    `shows` is what the report then says: a race of these words, `garbage` in a checkpoint, or `ended`: by a number
    that nobody gave, or by the model's own check. `bits` are other ones than those of one worker, `context` is
    one on another worker's GPU.
    """

    module: str
    caller: str
    method: str
    job: str
    size: int
    shows: str


RACE = "waits for no event behind that"
REUSE = "may be handed out again"
MUTANTS = {
    "the loader's copy is not noted": Mutant("engine.loads.loading", "_copied_ahead", "record", "ddp", 1, RACE),
    "a batch waits for no copy": Mutant("engine.loads.loading", "_wait_for", "wait", "ddp", 1, RACE),
    "a batch may be freed": Mutant("engine.loads.loading", "_wait_for", "record_stream", "ddp", 1, REUSE),
    "a number's copy is not noted": Mutant("engine.host_copy", "__init__", "record", "long", 1, "ended"),
    "a number is read too early": Mutant("engine.host_copy", "wait", "synchronize", "long", 1, "ended"),
    "outputs are copied too early": Mutant("engine.host_copy", "__init__", "wait_event", "predict", 1, RACE),
    "outputs may be freed": Mutant("engine.host_copy", "__init__", "record_stream", "predict", 1, REUSE),
    "a checkpoint waits for no copy": Mutant("rundir.checkpoint", "_stage", "synchronize", "kept", 1, "garbage"),
    "gradients are not noted": Mutant("engine.sums.tree_sum", "begin", "record_event", "paused", 3, RACE),
    "an exchange waits for no gradient": Mutant("engine.sums.tree_sum", "_complete", "wait_event", "paused", 3, RACE),
    "an exchange's sums may be freed": Mutant(
        "engine.sums.tree_sum", "_complete", "record_stream", "paused", 3, REUSE
    ),
    "gradients begin anywhere": Mutant("engine.trainer", "__init__", "must_align", "odd", 3, "bits"),
    "one worker's gradients begin anywhere": Mutant(
        "engine.trainer", "__init__", "must_align", "odd views", 1, "bits"
    ),
    "buffers begin anywhere": Mutant("engine.trainer", "_new_state", "must_align", "odd buffer", 1, "ended"),
    "outputs' gradients begin anywhere": Mutant(
        "engine.sums.whole_batch", "__init__", "must_align", "odd over batch", 1, "ended"
    ),
    "inputs begin anywhere": Mutant("engine.loads.loading", "load_steps", "must_align", "odd rows", 1, "ended"),
    "outputs are read from the first GPU": Mutant(
        "outputs.parts", "__post_init__", "is_gpu", "predict", 3, "context"
    ),
    "a checkpoint is pinned for the first GPU": Mutant(
        "rundir.checkpoint", "_pin", "device", "fsdp kept", 3, "context"
    ),
    "an exchange ends on the first GPU": Mutant(
        "engine.sums.tree_sum", "_complete", "device", "paused", 3, "context"
    ),
}
METHODS = "wait_event", "wait_stream", "record_event", "record", "synchronize", "record_stream"
FUNCTIONS = "must_align", "torch.cuda.device", "torch.Event.wait"
# What orders nothing: the times of a step's parts. A task's own thread.
NO_ORDER = {("engine.clock", "enter", "record")}
NO_ORDER |= {
    ("serving.served", caller, "synchronize") for caller in ("run", "_run")
}  # for the milliseconds of a shard
NO_ORDER |= {("tasks.task", "gpus_ready", "device")}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """While a job runs: dp_ray without that call; None leaves it as it is."""
    if name is None:
        yield
        return
    mutant = MUTANTS[name]
    file = f"dp_ray/{mutant.module.replace('.', '/')}.py"
    module = import_module(f"dp_ray.{mutant.module}")
    owners: tuple[Any, ...] = torch.Tensor, torch.cuda.Stream, torch.Event, torch.cuda.Event, module
    if mutant.method == "device":  # of a tensor that is an attribute
        owners = (torch.cuda,)
    kept = {owner: getattr(owner, mutant.method) for owner in owners if hasattr(owner, mutant.method)}

    def is_left_out(code: CodeType) -> bool:
        return code.co_name == mutant.caller and code.co_filename.endswith(file)

    def leaving_out(call: Any) -> Any:
        if isinstance(call, type):  # torch.cuda.device, which torch asks values for
            made = {
                "__new__": lambda cls, *args: none() if is_left_out(sys._getframe(1).f_code) else object.__new__(cls)
            }
            return type(call.__name__, (call,), made)
        return lambda *args: none() if is_left_out(sys._getframe(1).f_code) else call(*args)

    def none() -> Any:
        if mutant.method == "record_event":  # an event that was never recorded holds nothing back
            return torch.cuda.Event()  # type: ignore[no-untyped-call]
        return nullcontext() if mutant.method == "device" else None

    for owner, call in kept.items():
        setattr(owner, mutant.method, leaving_out(call))
    try:
        yield
    finally:
        for owner, call in kept.items():
            setattr(owner, mutant.method, call)
