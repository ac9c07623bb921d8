"""Text on its way out: secrets are hidden, and nothing acts on a terminal.

Every text goes through here: `harmless` shows it, `json_text` makes a file or a line of it. `hide` hides secrets in
all that is shown or kept: those of URLs, like s3://KEY:SECRET@bucket, and values of keys. Below: lists and counts for
messages.
"""

import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"

_PORT = r"\d{1,5}(?:\D|$)"
_FOLLOWED = r"""(?=[^\s'"])"""  # else it is a URL before a colon of the sentence
_NO_PORT = rf"""[^/\s'"@:\[]*:(?!{_PORT}){_FOLLOWED}"""
_USER = re.compile(
    r"""(?<=://)(?:"""
    r"""[^/\s'"]*@|"""  # KEY:SECRET@
    rf"""{_NO_PORT}[^\s'"]*@|"""  # a secret with a slash, which URL parsers reject
    rf"""{_NO_PORT}[^\s'"]*)"""  # a secret truncated before its @
)
# A secret that begins like a port, with digits and a slash. The bucket of an object store has no port, unless a
# server's name stands in its place.
_LIKE_PORT = re.compile(
    r"""\b((?:s3[an]?|gs|gcs|abfss?|wasbs?|az|oss)://)"""
    rf"""(?!localhost:|[^/\s'"@:]*\.)(?:[^/\s'"@:\[]+:{_PORT}[^\s'"]*@|\w{{16,}}:{_PORT}[^\s'"]*)"""
)

_NOTHING = r"""(?!(?:true|false|none|null|yes|no|\(hidden\))?(?:[\s&,;'")\]}]|$))"""  # what is no value to hide
_OPTION = re.compile(
    r"""([?&#](?:amp;)?(?:[\w.-]*(?:secret|passw|token|signature|credential|access_?key|account_?key|api[_-]?key|sas|"""
    rf"""authorization)[\w.-]*|sig|auth|pwd|pass|key(?==[\w-]{{20}}))=){_NOTHING}[^&\s'"]*""",
    re.I,
)
_KEY = (
    r"(?:password|passwd|api[_-]?key|secret|secret[_-]?key|secret[_-]?access[_-]?key|access[_-]?token|auth[_-]?token"
    r"|account[_-]?key|private[_-]?key|client[_-]?secret|shared[_-]?access[_-]?(?:key|signature)|connection[_-]?string)"
)
_NAMED = re.compile(rf"(?:.*[._-])?{_KEY}", re.I)
_VALUE = rf"""(?:(['"]){_NOTHING}[^'"\n]+\2|{_NOTHING}[^\s&,;'"()\[\]{{}}]+(?![\w(\[]))"""
_ASSIGNED = re.compile(  # api_key=..., 'api_key': '...'
    rf"""(?<![\w.?&-])((?:[\w.-]*[._-])?{_KEY}(?:=|['"]\s*:\s*)){_VALUE}""", re.I
)
_HEADER = re.compile(r"""(\bAuthorization['"]?\s*[:=]\s*['"]?(?:Bearer|Basic|Token)\s+)[^\s'",]+""", re.I)


def hide(text: str) -> str:
    """Return the text without the users, passwords and secret options of URLs, and without values of secret keys.

    >>> hide("s3://key:secret@bucket/runs?region=us-east-1 cannot be read")
    's3://bucket/runs?region=us-east-1 cannot be read'
    >>> hide("GET /data?X-Amz-Signature=1f2e: api_key='1f2e'")
    "GET /data?X-Amz-Signature=(hidden) api_key='(hidden)'"
    """
    if "://" in text:
        text = _USER.sub("", _LIKE_PORT.sub(r"\1", text))
    if "=" in text or ":" in text:
        text = _HEADER.sub(rf"\1{HIDDEN}", _OPTION.sub(rf"\1{HIDDEN}", text))
        text = _ASSIGNED.sub(lambda found: f"{found[1]}{found[2] or ''}{HIDDEN}{found[2] or ''}", text)
    return text


def hide_in(value: Any) -> Any:
    """Return JSON values with `hide` applied to each text and each key; a secret key's value is hidden as a whole."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        hidden: dict[Any, Any] = {}
        for key, inner in value.items():
            is_secret = isinstance(key, str) and isinstance(inner, str) and inner and _NAMED.fullmatch(key)
            hidden[_unused(hide(key), hidden) if isinstance(key, str) else key] = (
                HIDDEN if is_secret else hide_in(inner)
            )
        return hidden
    if not isinstance(value, list | tuple):
        return value
    # A list may hold a number for each step of a run.
    return [inner if type(inner) in (int, float) else hide_in(inner) for inner in value]


def _unused(key: str, taken: Mapping[Any, Any]) -> str:
    """Return the key, with a number if another one has become the same: keys may differ in their secrets alone."""
    number = 2
    shown = key
    while shown in taken:
        shown, number = f"{key} ({number})", number + 1
    return shown


SHOWN = 8
# Control characters but newline and tab, marks that turn the direction of writing, and halves of characters.
ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def listed(things: Iterable[object]) -> str:
    """Return `a, b, c`; for more than eight, the first eight and the total number."""
    texts = [str(thing) for thing in things]
    shown = ", ".join(texts[:SHOWN])
    return shown if len(texts) <= SHOWN else f"{shown}, ... ({len(texts)} in all)"


def a_kind(value: object) -> str:
    """Return the class of a value with its article, for messages.

    >>> a_kind(3), a_kind({}), a_kind(None)
    ('an int', 'a dict', 'a NoneType')
    """
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def printable(text: str) -> str:
    """Return the text without secrets and with control characters, newlines too, as escapes: it acts on no terminal.

    >>> printable("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in hide(text))


def harmless(text: str) -> str:
    """Return the same for text of several lines: newlines, tabs and all else that cannot act on a terminal stay.

    >>> harmless("a\\x1b[2J\\n\\tb")
    'a\\\\x1b[2J\\n\\tb'
    """
    return ACTING.sub(lambda found: ascii(found[0])[1:-1], hide(text))


def json_text(values: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Return values as JSON without secrets; `default` makes plain values of others."""
    plain = default and (lambda value: hide_in(default(value)))
    return json.dumps(hide_in(values), indent=indent, default=plain)


def encodable(text: str) -> str:
    """Return the text with halves of characters as escapes: no file takes them; names that are not UTF-8 have them.

    >>> encodable("a\\udcffb\\x1b")
    'a\\\\udcffb\\x1b'
    """
    return text.encode(errors="backslashreplace").decode()


def relative(path: str) -> str:
    """Return a path below the working directory relative to it; any other path or URL unchanged."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if "://" not in path and Path(path).is_relative_to(here) else path


def counted(number: int, noun: str) -> str:
    """Return `1 worker`, `2 workers`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """Return a share as `62 %`."""
    return f"{100 * share:.0f} %"


def command_for(name: str, run_dir: object) -> str:
    """Return the command NAME for a run's directory, as a shell takes it."""
    return f"dp-ray {name} {shlex.quote(str(run_dir))}"


def replay_command(run_dir: str, step: int) -> str:
    """Return the command that runs a step of a training again and shows its rows."""
    return f"{command_for('replay', run_dir)} --step {step}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'train'?` if one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
