"""Decoders: functions that turn a stored value, like the bytes of a JPEG, into what a model takes."""

import io
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from dp_ray.errors import DataError, JobError
from dp_ray.system.import_path import importing_from_here
from dp_ray.text import did_you_mean, listed

Decoder: TypeAlias = Callable[[Any], Any]
Decode: TypeAlias = Mapping[str, Decoder | str]


def image(value: Any, size: tuple[int, int] | None = None) -> torch.Tensor:
    """The image in the bytes of a JPEG, a PNG or another format of Pillow: uint8 [3, height, width], in RGB.

    It is resized to `size` (height, width), with Pillow's bilinear filter, if that is given. A dict with the key
    `bytes`, as Hugging Face stores images, is taken too. Of 16 bits the upper 8 are kept, in grey as in colour.

    Raises DataError if Pillow is missing, and for pixels of 32 bits, whose range is not known.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise DataError(f"images need Pillow: pip install 'dp-ray[images]': {error}") from None
    encoded = value["bytes"] if isinstance(value, Mapping) else value
    try:
        given = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError:  # which would show where the bytes lie in memory
        raise UnidentifiedImageError("cannot identify the format of the image") from None
    with given as opened:
        narrow = _upper_bits(opened, Image)
        rgb = narrow if narrow.mode == "RGB" else narrow.convert("RGB")  # which copies it
        if size is not None:
            rgb = rgb.resize(size[::-1], Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def _upper_bits(opened: Any, pillow: Any) -> Any:
    """An image of more than 8 bits a pixel with 8; Pillow would cut larger values off at 255, which is white."""
    if opened.mode.startswith("I;16") or (opened.mode == "I" and opened.format in ("PNG", "PPM")):
        return pillow.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    if opened.mode in ("I", "F"):
        bits = "32-bit numbers" if opened.mode == "F" else "32-bit whole numbers"
        raise DataError(f"the pixels of the image are {bits}; decode them with a function that knows their range")
    return opened


def float_image(value: Any) -> torch.Tensor:
    """The same as float32 from 0 to 1, as models of images take it."""
    return image(value).float() / 255


def array(value: bytes) -> torch.Tensor:
    """The array in the bytes of a NumPy file (.npy), without objects."""
    return torch.from_numpy(np.load(io.BytesIO(value), allow_pickle=False))


def tensors(value: bytes) -> Any:
    """What the bytes of a file of torch.save hold: tensors and plain values, no other objects."""
    return torch.load(io.BytesIO(value), weights_only=True)


def text(value: bytes) -> str:
    """The bytes, decoded as UTF-8."""
    return value.decode()


def number(value: bytes) -> int:
    """The whole number that the bytes show in digits."""
    return int(value)


def decode_of(decode: Decode | None, columns: Sequence[str] | None) -> dict[str, Decoder]:
    """The decoders by column; a text names one, as `package.module:function`.

    Raises JobError if one cannot be imported, or if its column is not among those that are read.
    """
    for name in decode or ():
        if columns is not None and name not in columns:
            raise JobError(
                f"decode: {name!r} is not among the columns{did_you_mean(name, columns)}: {listed(columns)}"
            )
    return {
        name: named("decode", given, f" for {name!r}") if isinstance(given, str) else given
        for name, given in (decode or {}).items()
    }


def named(argument: str, given: str, what: str = "") -> Callable[..., Any]:
    """The function that the text of an argument names, as `package.module:function`; `what` says what it is for.

    Raises JobError if it cannot be imported or called.
    """
    try:
        with importing_from_here():
            found: Callable[..., Any] = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        raise JobError(f"{argument}: cannot import {given!r}{what}: {error}") from error
    if not callable(found):
        raise JobError(f"{argument}: {given}{what} is {found!r:.60}, which cannot be called")
    return found


def decoded(item: dict[str, Any], decode: Mapping[str, Decoder]) -> dict[str, Any]:
    """The item with its values decoded. Raises DataError, which names the key, if a decoder raises."""
    for name, decoder in decode.items():
        if name not in item:
            raise DataError(f"there is no {name!r} to decode; the item has {listed(item)}")
        try:
            item[name] = decoder(item[name])
        except DataError as error:
            raise DataError(f"{name!r} cannot be decoded: {error}") from error
        except Exception as error:
            raise DataError(f"{name!r} cannot be decoded: {type(error).__name__}: {error}") from error
    return item


BY_EXTENSION: dict[str, Decoder] = {
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"), image),
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("cls", "cls2", "index", "id"), number),
    "json": json.loads,
    "npy": array,
    **dict.fromkeys(("pt", "pth"), tensors),
}
