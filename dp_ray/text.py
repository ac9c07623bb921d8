"""Format lists and counts for messages."""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

from dp_ray.secrets import hide, hide_in

SHOWN = 8
# Control characters but newline and tab, marks that turn the direction of writing, and halves of characters.
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def listed(things: Iterable[object]) -> str:
    """`a, b, c`; for more than eight, the first eight and the total number."""
    texts = [str(thing) for thing in things]
    shown = ", ".join(texts[:SHOWN])
    return shown if len(texts) <= SHOWN else f"{shown}, ... ({len(texts)} in all)"


def printable(text: str) -> str:
    """The text without secrets, and with each control character as an escape, newlines too: it acts on no terminal.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in hide(text))


def harmless(text: str) -> str:
    """The same for text of several lines: newlines and tabs stay, as does all else that cannot act on a terminal.

    >>> harmless("a\\x1b[2J\\n\\tb")
    'a\\\\x1b[2J\\n\\tb'
    """
    return ACTING.sub(lambda found: ascii(found[0])[1:-1], hide(text))


def json_text(values: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Values as JSON without secrets; `default` makes plain values of others."""
    plain = default and (lambda value: hide_in(default(value)))
    return json.dumps(hide_in(values), indent=indent, default=plain)


def encodable(text: str) -> str:
    """The text with halves of characters as escapes: no file takes them, and names that are not UTF-8 have them.

    >>> encodable("a\\udcffb\\x1b")
    'a\\\\udcffb\\x1b'
    """
    return text.encode(errors="backslashreplace").decode()


def counted(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """A share as `62 %`."""
    return f"{100 * share:.0f} %"


def replay_command(run_dir: str, step: int) -> str:
    """The command that runs a step of a training again and shows its rows."""
    return f"dp-ray replay {shlex.quote(run_dir)} --step {step}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'train'?` if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
