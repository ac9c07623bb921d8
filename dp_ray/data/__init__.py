"""Data without a line of code: files of common forms as map-style datasets, from a folder, a glob or a URL.

Begin at `blocks.Blocks`, the base of most of them: samples lie in blocks, which are read at once and kept in memory.
`files.py` finds the files, and `values.py` decodes their contents. See docs/data.md.

>>> from dp_ray.data import Parquet
>>> Parquet("s3://bucket/train/*.parquet", columns=["image", "label"])  # doctest: +SKIP
"""

from dp_ray.data.mix import Mix
from dp_ray.data.stream import Stream
from dp_ray.data.tables import Arrow, Parquet
from dp_ray.data.text import Csv, JsonLines
from dp_ray.data.tokens import Tokens, cu_seqlens, document_mask
from dp_ray.data.values import float_image, image
from dp_ray.data.webdataset import Images, WebDataset

__all__ = [
    "Arrow",
    "Csv",
    "Images",
    "JsonLines",
    "Mix",
    "Parquet",
    "Stream",
    "Tokens",
    "WebDataset",
    "cu_seqlens",
    "document_mask",
    "float_image",
    "image",
]
