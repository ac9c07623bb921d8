"""Keys of random streams: what is drawn depends on what it is drawn for, and never on who draws it, or when."""

import hashlib
import struct
from typing import Literal

Purpose = Literal["dataset", "sample", "collate", "forward", "update", "generator"]


def derive_seed(seed: int, purpose: Purpose, *parts: int) -> int:
    """A number of 63 bits: a hash of the job's seed, the purpose and the parts (epoch, step, shard, sample ...)."""
    packed = struct.pack(f"<{1 + len(parts)}q", seed, *parts)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little") >> 1
