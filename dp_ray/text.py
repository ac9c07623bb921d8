"""Format lists and counts for messages."""

import difflib
from collections.abc import Iterable

SHOWN = 8


def listed(things: Iterable[object]) -> str:
    """`a, b, c`; for more than eight, the first eight and the total number."""
    texts = [str(thing) for thing in things]
    shown = ", ".join(texts[:SHOWN])
    return shown if len(texts) <= SHOWN else f"{shown}, ... ({len(texts)} in all)"


def printable(text: str) -> str:
    """The text with each control character as an escape, so that it cannot act on a terminal; newlines too.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """A share as `62 %`."""
    return f"{100 * share:.0f} %"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'train'?` if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
