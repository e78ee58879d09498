"""The image chain against TensorFlow 2.15, and the normalisation against the published processor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from openvla_golden import FOLDER
from PIL import Image
from safetensors.numpy import load_file

from vla_rl.policies.images import (
    centre_crop_resize,
    jpeg_round_trip,
    lanczos3_resize,
    normalize_pixels,
    prepare_images,
)

CHAIN = load_file(FOLDER / "image_chain_tf215.safetensors")
INPUTS = load_file(FOLDER / "inputs.safetensors")


@pytest.mark.parametrize("index", [0, 1])
def test_each_step_is_tensorflow_s(index: int) -> None:
    decoded, resized, cropped = (
        CHAIN[name][index] for name in ("tf_jpeg_roundtrip", "tf_lanczos224", "tf_center_crop")
    )
    np.testing.assert_array_equal(jpeg_round_trip(CHAIN["raw"][index]), decoded)
    np.testing.assert_array_equal(lanczos3_resize(decoded, 224), resized)
    np.testing.assert_array_equal(centre_crop_resize(resized), cropped)


def test_the_whole_chain_is_tensorflow_s() -> None:
    raw, cropped = CHAIN["raw"], CHAIN["tf_center_crop"]
    np.testing.assert_array_equal(prepare_images(raw, orientation="top_down", image_size=224), cropped)
    upside_down = np.ascontiguousarray(raw[:, ::-1, ::-1])
    np.testing.assert_array_equal(prepare_images(upside_down, orientation="bottom_up", image_size=224), cropped)


def test_other_libraries_are_not() -> None:
    """The easy substitutes change many pixels; were they equal, the tests above would prove little."""
    decoded = CHAIN["tf_jpeg_roundtrip"][0]
    pillow = np.asarray(Image.fromarray(decoded).resize((224, 224), Image.Resampling.LANCZOS))
    assert (pillow != CHAIN["tf_lanczos224"][0]).mean() > 0.05
    without_jpeg = prepare_images(CHAIN["raw"], orientation="top_down", image_size=224, use_jpeg=False)
    assert (without_jpeg != CHAIN["tf_center_crop"]).mean() > 0.5


def test_pixels_are_the_published_processor_s() -> None:
    image = INPUTS["image_uint8"][0][:224, :224]
    pixels = normalize_pixels(torch.from_numpy(image)[None, None], torch.float32)[0]
    golden = load_file(FOLDER / "processor_224_strided4.safetensors")["pixel_values"]
    np.testing.assert_array_equal(pixels[..., ::4, ::4].numpy(), golden)


def test_pixels_of_every_input_are_the_published_processor_s() -> None:
    """The processor resizes with Pillow what has another size, which images from the chain never have."""
    small = [Image.fromarray(image).resize((56, 56), Image.Resampling.BICUBIC) for image in INPUTS["image_uint8"]]
    pixels = normalize_pixels(torch.from_numpy(np.stack([np.array(image) for image in small]))[None], torch.float32)
    np.testing.assert_array_equal(pixels[0].numpy(), INPUTS["pixel_values"])
