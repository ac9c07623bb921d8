"""The JSON files of a run: one reader and writer, and one policy each for a file that fails.

A `Record` stands beside the module that owns the file, and names what the file holds: a frozen dataclass, or plain
JSON. A file appears whole or not at all (see `storage`), so after a kill it holds the old value or the new one.

missing       The record's value for it, or an error.
damaged       An error that names the file; or, of a file that only informs, as if it were missing.
foreign       What a later version has written beside is left out; all else that does not fit is damage.
unreachable   The storage fails, at reading or writing: an error; or, of a file that a run can do without, nothing.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from dp_ray.errors import Error, StorageError
from dp_ray.storage import Storage
from dp_ray.text import json_text

T = TypeVar("T")


Policy = Enum("Policy", "FAIL IGNORE")  # raise StorageError; go on as if there were no file
FAIL, IGNORE = Policy.FAIL, Policy.IGNORE


class Damaged(StorageError):
    """A file does not hold what dp_ray writes."""


@dataclass(frozen=True)
class Record(Generic[T]):
    """A JSON file, or several of a kind, whose names the callers give.

    `kind` is the type of its value. `missing` is the value of a file that is not there, or FAIL. If it `hides`,
    secrets are left out of what is written. `indent` and `end` are its form.
    """

    kind: Any
    name: str = ""
    missing: T | Policy = FAIL
    damaged: Policy = FAIL
    unreachable: Policy = FAIL
    hides: bool = True
    indent: int | None = None
    end: str = "\n"

    def read(self, folder: Storage, name: str = "") -> T:
        """Return the value in the file, as the policies say."""
        name = name or self.name
        missing: Any = self.missing
        try:
            return folder.read(name, lambda data: self.parse(data.decode()))
        except StorageError as error:
            # A file that is not there shows when it is read: on an object store, to look first is a second request.
            is_missing = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError)
            if (missing if is_missing else self.unreachable) is FAIL:
                raise
        except (ValueError, RecursionError) as error:
            if self.damaged is FAIL:
                raise Damaged(f"{folder}/{name}: is damaged: {_reason(error)}") from None
        return copy(missing)  # type: ignore[no-any-return]

    def write(self, folder: Storage, value: T, name: str = "") -> bool:
        """Write the file, in place of one of that name; return whether it is written."""
        try:
            folder.write_text(name or self.name, self.text(value))
        except StorageError:
            if self.unreachable is FAIL:
                raise
            return False
        return True

    def parse(self, text: str) -> T:
        """Undo `text`; raises ValueError or RecursionError if it is none."""
        value: T = _checked(self.kind).validate_python(json.loads(text))
        return value

    def text(self, value: T) -> str:
        """Return the contents of the file."""
        text = json_text if self.hides else json.dumps
        return text(_plain(value), indent=self.indent, default=str) + self.end


_checked = cache(TypeAdapter)


def _plain(value: Any) -> Any:
    """Return our own dataclasses as JSON values; a user's objects stay, and are written as their text."""
    if isinstance(value, list):
        return list(map(_plain, value))
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _reason(error: Exception) -> str:
    """Return what is wrong, in a line; of several things the first: `parts: Input should be a valid list`."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


@contextmanager
def damage_told(run: object) -> Iterator[None]:
    """Raise StorageError for whatever a foreign or damaged file of a run makes the block raise."""
    try:
        yield
    except Error:
        raise
    except Exception as error:  # files of any content: each raises what it likes
        first = next(iter(str(error).splitlines()), "")
        raise Damaged(f"{run}: is damaged: {type(error).__name__}: {first}") from error
