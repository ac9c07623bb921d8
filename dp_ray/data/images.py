"""A folder of images as a map-style dataset, with a class for each folder in it or without classes."""

from collections.abc import Sequence

import numpy as np

from dp_ray.data.blocks import Block, Blocks, Item, Rows
from dp_ray.data.decode import BY_EXTENSION, image
from dp_ray.data.files import Paths, find_files, retried
from dp_ray.errors import DataError

SUFFIXES = [f".{extension}" for extension, decoder in BY_EXTENSION.items() if decoder is image]


class Images(Blocks[int]):
    """Images in the order of their names: items are dicts of `image`, `path` and, with classes, `label`.

    `image` is uint8 [3, height, width] in RGB; `path` is the path within the folder. With `classes`, the first folder
    of the path names the class and `label` is its number in the order of the names, which `class_names` gives.
    `height` and `width` resize each image, with Pillow's bilinear filter; one of them alone makes it square.

    Raises DataError if there are no images, if one is damaged, or if one is in no folder though there are classes.
    """

    def __init__(
        self,
        paths: Paths,
        classes: bool = False,
        height: int | None = None,
        width: int | None = None,
    ) -> None:
        files = find_files(paths, SUFFIXES)
        self._size = _size(height, width)
        self.class_names = sorted({_class_of(str(file), file.name) for file in files}) if classes else []
        self._labels = {name: label for label, name in enumerate(self.class_names)}
        super().__init__(files, [Block(file, 1, 0) for file in files], 0)

    def _read(self, block: Block[int]) -> tuple[Item, int]:
        def read() -> bytes:
            with block.file.open() as stream:
                return stream.read()  # type: ignore[no-any-return]

        encoded = retried(read, str(block.file), block.file.is_local)
        try:
            item: Item = {"image": image(encoded, self._size), "path": block.file.name}
        except DataError as error:
            raise DataError(f"{block.file}: {error}") from error
        except Exception as error:
            raise DataError(f"{block.file}: is no image, or is damaged: {error}") from error
        if self.class_names:
            item["label"] = self._label(block)
        return item, len(encoded)  # above what is held, so that the next one takes its place

    def read_values(self, index: int, columns: Sequence[str]) -> Item:
        """Those of an image's values that are known without reading it."""
        block = self._blocks[index]
        item = {"path": block.file.name, **({"label": self._label(block)} if self.class_names else {})}
        return {name: item[name] for name in columns if name in item}

    def _label(self, block: Block[int]) -> np.int64:
        return np.int64(self._labels[_class_of(str(block.file), block.file.name)])

    def _items(self, read: Item, rows: Rows) -> list[Item]:
        return [{**read, "image": read["image"].clone()} for _ in rows]


def _size(height: int | None, width: int | None) -> tuple[int, int] | None:
    if height is None or width is None:
        side = height or width
        return None if side is None else (side, side)
    return height, width


def _class_of(shown: str, name: str) -> str:
    folder, slash, _ = name.partition("/")
    if not slash:
        raise DataError(f"{shown}: is in no folder that names its class; set classes to false for a flat folder")
    return folder
