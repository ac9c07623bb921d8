"""The args of a target as plain JSON values, by which a run is of the same job or not: begin at `describe_args`."""

import dataclasses
import hashlib
import inspect
import json
import re
import sys
import uuid
from collections import deque
from collections.abc import Mapping
from datetime import date, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import BaseModel

from dp_ray.text import hide_in

# Their text holds all that they are.
IN_FULL = (complex, date, time, timedelta, timezone, Decimal, Fraction, PurePath, uuid.UUID, range, slice)
BY_BYTES = "biufcmMSUV"  # kinds of numpy's dtypes whose elements are their bytes
FEW = 4  # elements of an array that are shown beside its digest
LONGEST = 64  # bytes that are shown as they are
DIGITS = 32  # of a digest
MARKED = re.compile(r"\((set|partial|type|enum|pattern|bytes|bytearray|named|numpy|torch|object)\)|<[\w.]+:[^:]+>$")


class DescribedArgs(NamedTuple):
    """Args as plain JSON values, and the paths of the objects in them that cannot be told, like `args.transform`."""

    values: Any
    unknown: tuple[str, ...]


def describe_args(args: Any) -> DescribedArgs:
    """Return args as plain JSON values; two that differ do so there too, but for the kinds of lists and mappings.

    Arrays and tensors are told by dtype, size and a digest of their bytes; dataclasses by their fields; classes and
    functions by the names under which they are imported; other objects of plain Python classes by a digest of their
    attributes. What is left is told by its type alone, and its path is in `unknown`. The order of a mapping's keys
    does not count. Raises ValueError if a list or a mapping holds itself.
    """
    unknown: list[str] = []
    values = _plain(args, "", unknown, frozenset())
    return DescribedArgs(values, tuple(unknown))


def object_in(values: Any, path: str = "args") -> str | None:
    """Return the path of the first Python object in args from `describe_args` of which they hold less than it is."""
    if isinstance(values, str):
        return path if MARKED.match(values) else None
    if isinstance(values, list):
        inner = [object_in(item, inner_path(path, at)) for at, item in enumerate(values)]
    elif isinstance(values, Mapping):
        inner = [
            path if MARKED.match(str(key)) else object_in(item, inner_path(path, key)) for key, item in values.items()
        ]
    else:
        return None
    return next((found for found in inner if found is not None), None)


def _plain(value: Any, path: str, unknown: list[str], around: frozenset[int]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in around:
        raise ValueError(f"{path}: holds itself")
    around = around | {id(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item, inner_path(path, key), unknown, around) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item, inner_path(path, at), unknown, around) for at, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return {"(set)": sorted((_plain(item, path, unknown, around) for item in value), key=_text)}
    if (parts := _parts(value)) is not None:
        return {key: _plain(item, inner_path(path, key), unknown, around) for key, item in parts.items()}
    name = found_name(value)
    text = _in_full(value) or (name and f"(named) {name}") or _array(value) or _tensor(value)
    text = text or _by_state(value, around)
    if text is None:
        unknown.append(path)
        return f"<{type(value).__module__}:{type(value).__qualname__}>"
    return text


def inner_path(path: str, key: Any) -> str:
    """Return the dotted path of a key, or of a number, inside what `path` names."""
    return f"{path}.{key}" if path else str(key)


def _text(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True)


def _digest(raw: Any) -> str:
    return f"sha256 {hashlib.sha256(raw).hexdigest()[:DIGITS]}"


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the parts of a partial, a pydantic model or a dataclass; None of all others."""
    if isinstance(value, partial):
        return {"(partial)": value.func, "args": list(value.args), "keywords": dict(value.keywords)}
    kind = type(value)
    if isinstance(value, BaseModel):
        parts = dict(value)
    elif dataclasses.is_dataclass(kind):
        parts = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(kind)}
        if vars(value).keys() - parts.keys() if hasattr(value, "__dict__") else False:
            return None  # it has more than its fields
    else:
        return None
    return parts if kind.__module__.startswith("dp_ray.") else {"(type)": kind, **parts}


def _in_full(value: Any) -> str | None:
    if isinstance(value, Enum):
        return f"(enum) {type(value).__module__}:{type(value).__qualname__}.{value.name or value.value}"
    if isinstance(value, IN_FULL):
        return str(value)
    if isinstance(value, re.Pattern):
        return f"(pattern) {value.pattern!r}, flags {int(value.flags)}"
    if isinstance(value, bytes | bytearray):
        return str(value) if len(value) <= LONGEST else f"({type(value).__name__}) [{len(value)}] {_digest(value)}"
    torch: Any = sys.modules.get("torch")
    return str(value) if torch is not None and isinstance(value, torch.dtype | torch.device) else None


def found_name(value: Any) -> str | None:
    """Return `module:name` of a class or function that an import finds there; None of any other.

    What a script or a cell defines stands in `__main__`, which is another module in another process.
    """
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    attribute: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        attribute = getattr(attribute, part, None)
    is_found = attribute is not None and module not in ("__main__", "__mp_main__") and attribute == value
    return f"{module}:{name}" if is_found else None


def _array(value: Any) -> str | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic | numpy.dtype):
        return None
    if isinstance(value, numpy.dtype):
        return f"(numpy) dtype {value!s}"
    if isinstance(value, numpy.ma.MaskedArray):
        return f"(numpy) {_array(value.data)}, masked {_array(numpy.ma.getmaskarray(value))}"
    array = numpy.asarray(value)
    if array.dtype.kind in BY_BYTES and array.dtype.names is None:
        raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    else:  # objects, or rows of several fields, whose bytes are addresses or padding
        elements = describe_args(array.tolist())
        if elements.unknown:
            return None
        raw = _text(elements.values).encode()
    return (
        f"(numpy) {array.dtype.str if array.dtype.byteorder == '>' else array.dtype} {_sized(array)} {_digest(raw)}"
    )


def _tensor(value: Any) -> str | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_nested:
        return None
    here = value.detach().cpu().resolve_conj().resolve_neg()
    dtype = str(value.dtype).removeprefix("torch.")
    raw = here.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"(torch) {dtype} {_sized(here)} {_digest(raw)}"


def _sized(array: Any) -> str:
    """Return the size of an array or tensor; with its elements, if they are few."""
    few = array.reshape(-1).tolist() if 0 < array.reshape(-1).shape[0] <= FEW else []
    return str(list(array.shape)) + (f": {', '.join(map(str, few))}," if few else "")


def _by_state(value: Any, around: frozenset[int]) -> str | None:
    """Return a digest of the state that pickle sees of an object of a plain Python class; None of all others."""
    kind, unknown = type(value), list[str]()
    reduces_itself = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    if reduces_itself or not hasattr(value, "__dict__") or (name := found_name(kind)) is None:
        return None
    try:
        reduced: Any = object.__reduce_ex__(value, 2)  # raises TypeError if Python does not show all of its state
        state = _text(hide_in(_plain(reduced[2], "", unknown, around)))
    except Exception:  # it holds itself, or what no file can hold; or its own __getstate__ raises
        return None
    return None if unknown else f"(object) {name} {_digest(state.encode())}"
