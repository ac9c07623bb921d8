"""Cut a sequence of blocks into consecutive parts of about the same size."""

from collections.abc import Sequence


def balance(sizes: Sequence[int], parts: int) -> list[range]:
    """The blocks of each part: consecutive, none empty, the largest part as small as possible.

    >>> balance([4, 1, 1, 4, 2], 2)
    [range(0, 3), range(3, 5)]

    Raises ValueError if there are fewer blocks than parts.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(f"{len(sizes)} blocks cannot be cut into {parts} parts of at least one each")
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _parts_needed(sizes, middle) <= parts else (middle + 1, high)
    return _cut(sizes, parts, low)


def _parts_needed(sizes: Sequence[int], limit: int) -> int:
    needed, held = 1, 0
    for size in sizes:
        needed, held = (needed + 1, size) if held + size > limit else (needed, held + size)
    return needed


def _cut(sizes: Sequence[int], parts: int, limit: int) -> list[range]:
    """Fill each part up to the limit, but leave at least one block for each later part."""
    cuts, held = [0], 0
    for at, size in enumerate(sizes):
        still = parts - len(cuts)
        is_full = held + size > limit
        if at > cuts[-1] and still and (is_full or len(sizes) - at == still):
            cuts.append(at)
            held = 0
        held += size
    return [range(first, end) for first, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
