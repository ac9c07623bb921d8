"""Lists and numbers of things, as messages show them."""

from collections.abc import Iterable

SHOWN = 8


def listed(things: Iterable[object]) -> str:
    """`a, b, c`; of more than eight the first eight, and how many there are in all."""
    texts = [str(thing) for thing in things]
    shown = ", ".join(texts[:SHOWN])
    return shown if len(texts) <= SHOWN else f"{shown}, ... ({len(texts)} in all)"


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'s' * (number != 1)}"
