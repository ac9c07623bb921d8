"""Inputs of a prediction that its page shows: thumbnails, read by Pillow, and numbers in words."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dp_ray
from dp_ray.outputs.previews import Previews, png, read_previews, thumbnail
from dp_ray.plan.split import Shard
from dp_ray.storage import Storage


def pixels_of(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_holds_its_pixels(channels: int) -> None:
    drawn = torch.randint(0, 256, (5, 7, channels), dtype=torch.uint8)
    assert np.array_equal(pixels_of(png(drawn)).reshape(5, 7, channels), drawn.numpy())


@pytest.mark.parametrize(
    ("shape", "thumb"),
    [((3, 8, 8), (8, 8, 3)), ((8, 9, 1), (8, 9, 1)), ((1, 300, 200), (60, 40, 1)), ((4,), None), ((8, 8), None)],
)
def test_what_is_an_image_becomes_a_thumbnail(shape: tuple[int, ...], thumb: tuple[int, ...] | None) -> None:
    made = thumbnail(torch.rand(shape))
    assert thumb == (None if made is None else tuple(made.shape))


def test_pixels_are_as_they_are_and_floats_are_spread() -> None:
    given = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    made = thumbnail(given)
    assert made is not None and torch.equal(made, given.permute(1, 2, 0))
    spread = thumbnail(torch.linspace(-2, 3, 64).reshape(1, 8, 8))
    assert spread is not None and spread.flatten()[0] == 0 and spread.flatten()[-1] == 255


def test_the_first_rows_and_the_last_are_kept(tmp_path: Path) -> None:
    run = Storage(str(tmp_path))
    previews = Previews(run, 40)
    for number in range(4):
        shard = Shard(number, 0, 10 * number, 10 * number + 10, missing=(1,) if number == 0 else ())
        indices = torch.tensor([index for index in range(shard.start, shard.stop) if index not in shard.missing])
        previews.on_inputs(shard, indices, {"x": indices[:, None].float()})
    found = sorted(read_previews(run), key=lambda preview: preview.sample_index)
    assert [preview.sample_index for preview in found] == [0, *range(2, 8), *range(32, 40)]
    assert found[-1].text == "x (1): 39"


def test_all_named_inputs_are_told_with_their_shapes(tmp_path: Path) -> None:
    """Also of the inputs beside a target; what has no row of its own for each sample is left out."""
    images = torch.randint(0, 256, (2, 3, 8, 9), dtype=torch.uint8)
    named = {"ids": torch.arange(16).reshape(2, 8), "more": {"mask": torch.ones(2, 3)}, "image": images}
    named |= {"weight": torch.tensor([0.5, 0.25]), "name": ["one", "t" * 70], "scale": torch.ones(7)}
    for number, inputs in enumerate((named, (named, torch.zeros(2)))):
        run = Storage(str(tmp_path / str(number)))
        Previews(run, 2).on_inputs(Shard(0, 0, 0, 2), torch.arange(2), inputs)
        first, other = read_previews(run)
        assert first.text.splitlines() == [
            "ids (8): 0, 1, 2, 3, 4, 5 ...",
            "more.mask (3): 1, 1, 1",
            "image (3x8x9)",
            "weight: 0.5",
            "name: one",
        ]
        assert other.text.splitlines()[-1] == f"name: {'t' * 60} ..."
        assert np.array_equal(pixels_of(base64.b64decode(other.png)), images[1].permute(1, 2, 0).numpy())


def test_of_very_many_named_inputs_the_first_are_told(tmp_path: Path) -> None:
    Previews(Storage(str(tmp_path)), 1).on_inputs(
        Shard(0, 0, 0, 1), torch.arange(1), {f"k{at}": torch.ones(1) for at in range(15)}
    )
    (preview,) = read_previews(Storage(str(tmp_path)))
    assert preview.text.splitlines()[-2:] == ["k11: 1", "and 3 more"]


def test_an_unnamed_input_is_told_by_its_numbers(tmp_path: Path) -> None:
    for number, (inputs, text) in enumerate(
        {torch.ones(1, 2): "1, 1", torch.ones(1, 2, 4): "1, 1, 1, 1, 1, 1 ... (2x4)"}.items()
    ):
        run = Storage(str(tmp_path / str(number)))
        Previews(run, 1).on_inputs(Shard(0, 0, 0, 1), torch.arange(1), inputs)
        assert [preview.text for preview in read_previews(run)] == [text]


def test_of_a_list_of_images_each_is_kept(tmp_path: Path) -> None:
    images = [torch.randint(0, 256, (3, 8 + row, 9), dtype=torch.uint8) for row in range(3)]
    Previews(Storage(str(tmp_path)), 3).on_inputs(Shard(0, 0, 0, 3), torch.arange(3), images)
    found = read_previews(Storage(str(tmp_path)))
    for image, preview in zip(images, found, strict=True):
        assert np.array_equal(pixels_of(base64.b64decode(preview.png)), image.permute(1, 2, 0).numpy())


def test_a_prediction_of_images_shows_them(tmp_path: Path, in_project: Path) -> None:
    result = dp_ray.run("jobs/digits_predict.yaml", workers=0, storage=str(tmp_path), name="run", quiet=True)
    html = (tmp_path / "run" / "report.html").read_text()
    images = re.findall(r'base64,([^"]+)" alt="input of sample (\d+)"', html)
    last = result.rows
    assert {int(sample) for _, sample in images} == {*range(8), *range(last - 8, last)}
    data = torch.utils.data.default_collate([image for image, _ in __import__("jobs.digits").digits.Digits()])
    for drawn, sample in images:
        shown, image = pixels_of(base64.b64decode(drawn)) / 255, data[int(sample), 0].numpy()
        assert np.allclose(shown, (image - image.min()) / (image.max() - image.min()), atol=1 / 255)
    assert f"largest at {int(result.outputs[0].argmax())}" in html
