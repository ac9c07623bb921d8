"""Where the collectives of this process stand, by torch's flight recorder: `recorded_collectives`."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch._C import _distributed_c10d

from dp_ray.messages import STATES, Collective


def recorded_collectives() -> tuple[str, tuple[Collective, ...]]:
    """Return torch's flight recorder as JSON, and where each process group stands; "" if it records nothing.

    NCCL and gloo keep the last collectives, by default 2,000. Any thread may call this, also while collectives hang.
    As JSON it holds no stacks: these would be looked up under Python's lock.
    """
    calls = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, which a build for CPUs has not, and of gloo
    texts = [getattr(_distributed_c10d, name)().decode() for name in calls if hasattr(_distributed_c10d, name)]
    recorded = [entry for text in texts for entry in json.loads(text).get("entries", ())]
    return f"[{', '.join(texts)}]" if recorded else "", current_collectives(recorded)


def current_collectives(recorded: Iterable[Mapping[str, Any]]) -> tuple[Collective, ...]:
    """Return where each process group stands, of the flight recorder's entries in the order of their begin."""
    current: dict[str, Collective] = {}
    for entry in recorded:
        # One of two ranks alone has a count of its own; and the default group is the user's, of one rank.
        if entry["is_p2p"] or entry["process_group"][-1] == "default_pg":
            continue
        backend, _, name = entry["profiling_name"].partition(":")
        # gloo leaves the state as it was, and only retires what is over. NCCL also retires what has timed out.
        is_over = entry["state"] == "completed" or (backend == "gloo" and entry["retired"])
        state = STATES[-1] if is_over else entry["state"]
        group = " ".join([backend, *entry["process_group"]])
        sizes = " ".join(map(str, entry["input_sizes"])) or "nothing"
        new = Collective(group, entry["collective_seq_id"], name, sizes, state)
        before = current.get(group)
        # The numbers start again with each job of a session, whose groups have the same names.
        if before is None or before.state == STATES[-1] or new.number < before.number:
            current[group] = new
    return tuple(current.values())
