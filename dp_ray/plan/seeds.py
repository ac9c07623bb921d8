"""Seeds of random numbers: they depend on the purpose of a draw, never on the worker or the time."""

import hashlib
import struct
from typing import Literal

Purpose = Literal["dataset", "sample", "collate", "forward", "after", "update", "generator", "sweep"]


def derive_seed(seed: int, purpose: Purpose, *parts: int) -> int:
    """A seed of 63 bits: a hash of the job's seed, the purpose and the parts (epoch, step, shard, sample ...)."""
    packed = struct.pack(f"<{1 + len(parts)}q", seed, *parts)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1
