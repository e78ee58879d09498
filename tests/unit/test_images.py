"""The image chain by hand: resizing, cropping, colours, normalisation. `golden` compares it with TensorFlow's."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from vla_rl.policies import images
from vla_rl.policies.images import (
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    augment_image,
    centre_crop_resize,
    crop_and_resize,
    draw_augmentation,
    jpeg_round_trip,
    lanczos3_resize,
    normalize_pixels,
    prepare_images,
    rotate_180,
)

SIDE = np.sqrt(0.9)
# One pixel each: reddish, greenish, bluish, grey, purple, black. Shape (3, 1, 6).
COLOURS = np.array(
    [[[0.9, 0.2, 0.1, 0.5, 0.6, 0.0]], [[0.3, 0.8, 0.3, 0.5, 0.1, 0.0]], [[0.2, 0.4, 0.7, 0.5, 0.5, 0.0]]], np.float32
)


def grey(rows: list[list[int]]) -> np.ndarray:
    """An image of equal channels."""
    return np.repeat(np.array(rows, np.uint8)[..., None], 3, axis=-1)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_rotation_turns_rows_and_columns_and_keeps_colours() -> None:
    image = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    expected = [[[15, 16, 17], [12, 13, 14], [9, 10, 11]], [[6, 7, 8], [3, 4, 5], [0, 1, 2]]]
    assert rotate_180(image).tolist() == expected


def test_the_orientation_decides_on_the_rotation() -> None:
    frames = np.stack([noise(16, 16, seed) for seed in range(2)])
    options = {"image_size": 16, "use_jpeg": False, "centre_crop": False}
    np.testing.assert_array_equal(prepare_images(frames, orientation="top_down", **options), frames)
    np.testing.assert_array_equal(prepare_images(frames, orientation="bottom_up", **options), frames[:, ::-1, ::-1])


def test_the_chain_is_jpeg_then_resize_then_crop_of_each_camera() -> None:
    frames = np.stack([noise(48, 40, seed) for seed in range(2)])
    found = prepare_images(frames, orientation="top_down", image_size=28)
    for image, frame in zip(found, frames, strict=True):
        resized = lanczos3_resize(jpeg_round_trip(frame), 28)
        np.testing.assert_array_equal(image, centre_crop_resize(resized))
    uncropped = prepare_images(frames, orientation="top_down", image_size=28, centre_crop=False)
    np.testing.assert_array_equal(uncropped[1], resized)
    assert (uncropped != prepare_images(frames, orientation="top_down", image_size=28, use_jpeg=False)).mean() > 0.5


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        (np.zeros((1, 8, 8, 3), np.float32), r"uint8 of shape .* got float32 of shape \(1, 8, 8, 3\)"),
        (np.zeros((8, 8, 3), np.uint8), r"\(cameras, height, width, 3\); got uint8 of shape \(8, 8, 3\)"),
        (np.zeros((1, 3, 8, 8), np.uint8), r"got uint8 of shape \(1, 3, 8, 8\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"got uint8 of shape \(0, 8, 8, 3\)"),
    ],
)
def test_other_arrays_are_refused(frames: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare_images(frames, orientation="top_down", image_size=8)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="image_size must be at least 1 pixel; got 0"):
        prepare_images(np.zeros((1, 8, 8, 3), np.uint8), orientation="top_down", image_size=0)


def test_jpeg_keeps_flat_grey_and_any_shape() -> None:
    flat = np.full((37, 50, 3), 129, np.uint8)
    np.testing.assert_array_equal(jpeg_round_trip(flat), flat)


def test_jpeg_halves_the_resolution_of_colour_only() -> None:
    columns = np.zeros((16, 16, 3), np.uint8)
    columns[:, ::2] = 200
    stripes = jpeg_round_trip(columns).astype(int)
    assert np.abs(stripes - columns).max() < 10
    colours = np.full((16, 16, 3), 100, np.uint8)
    colours[:, ::2, 2] = 200
    blue = jpeg_round_trip(colours).astype(int)[..., 2]
    assert np.abs(blue[:, ::2] - blue[:, 1::2]).max() < 30  # of 100


def test_without_simplejpeg_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(ImportError, match=r"simplejpeg; run: pip install 'vla-rl\[openvla\]', or switch JPEG off"):
        jpeg_round_trip(np.zeros((8, 8, 3), np.uint8))


def test_two_pixels_become_their_mean_rounded_half_to_even() -> None:
    assert lanczos3_resize(grey([[1, 2], [1, 2]]), 1).tolist() == [[[2, 2, 2]]]
    assert lanczos3_resize(grey([[2, 3], [2, 3]]), 1).tolist() == [[[2, 2, 2]]]
    assert lanczos3_resize(grey([[10, 10], [20, 20]]), 1).tolist() == [[[15, 15, 15]]]


def test_lanczos_weights_by_hand() -> None:
    # From 4 to 2 pixels the kernel is twice as wide. New pixel 0 is at 1.0; the old ones are at 0.5, 1.5, 2.5, 3.5,
    # so 0.25, 0.25, 0.75 and 1.25 new pixels away. L(x) = 3 sin(pi x) sin(pi x / 3) / (pi x)^2:
    # L(1/4) = 0.89007, L(3/4) = 0.27019, L(5/4) = -0.13287.
    sources, weights = images._lanczos3_taps(4, 2)
    kernel = np.array([0.890067, 0.890067, 0.270190, -0.132871])
    assert sources[:, 0].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(weights[:, 0], kernel / kernel.sum(), atol=1e-5)
    np.testing.assert_allclose(weights[:, 1], kernel[::-1] / kernel.sum(), atol=1e-5)


def test_an_enlarged_image_is_interpolated_and_clipped() -> None:
    edge = grey([[0] * 8 + [255] * 8] * 16)
    large = lanczos3_resize(edge, 32)
    assert large.shape == (32, 32, 3)
    profile = large[5, :, 1].tolist()
    assert profile[:6] == [0] * 6  # the undershoot beside the edge would be negative
    assert profile[26:] == [255] * 6
    assert (large == large[0]).all()


@pytest.mark.parametrize(("height", "width"), [(256, 256), (90, 130), (20, 300)])
def test_a_flat_image_stays_flat(height: int, width: int) -> None:
    for level in (0, 77, 255):
        resized = lanczos3_resize(np.full((height, width, 3), level, np.uint8), 56)
        np.testing.assert_array_equal(resized, np.full((56, 56, 3), level))


def test_equal_sizes_are_copied() -> None:
    image = noise(20, 20)
    resized = lanczos3_resize(image, 20)
    np.testing.assert_array_equal(resized, image)
    assert not np.shares_memory(resized, image)


def test_a_crop_of_a_slope_is_a_gentler_slope() -> None:
    rows, columns = np.meshgrid(np.arange(5.0), np.arange(5.0), indexing="ij")
    plane = (10 * rows + columns).astype(np.float32)
    planes = np.stack([plane, 2 * plane, 3 * plane])
    # Upper edge at 0.25 * 4 = 1, left edge at 0.125 * 4 = 0.5, spacing 0.5.
    expected = 10 * (1 + 0.5 * rows) + (0.5 + 0.5 * columns)
    found = crop_and_resize(planes.swapaxes(1, 2), (0.25, 0.125), 0.5)
    np.testing.assert_allclose(found, [expected, 2 * expected, 3 * expected], rtol=1e-6)


def test_the_whole_box_is_the_image() -> None:
    planes = np.random.default_rng(0).random((3, 7, 7), np.float32)
    np.testing.assert_array_equal(crop_and_resize(planes, (0.0, 0.0), 1.0), planes.swapaxes(1, 2))


@pytest.mark.parametrize("corner", [(-0.01, 0.0), (0.0, 0.06), (float("nan"), 0.0)])
def test_a_box_outside_of_the_image_is_refused(corner: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="is not within the image, 0 to 1"):
        crop_and_resize(np.zeros((3, 4, 4), np.float32), corner, 0.95)


def test_the_central_crop_by_hand() -> None:
    # Old columns of the new columns 0, 1, 2: 2 * (1 - sqrt(0.9)) / 2 = 0.0513, then 1, then 1.9487.
    ramp = grey([[0, 100, 200]] * 3)
    assert centre_crop_resize(ramp)[1, :, 0].tolist() == [5, 100, 195]  # 5.13 + 0.01, 100.2, 195.25: cut off
    np.testing.assert_array_equal(centre_crop_resize(ramp), centre_crop_resize(ramp.swapaxes(0, 1)).swapaxes(0, 1))


def test_contrast_stretches_each_channel_about_its_mean() -> None:
    planes = np.array([[[0.2, 0.4]], [[0.5, 0.5]], [[0.0, 1.0]]], np.float32)
    expected = [[[0.15, 0.45]], [[0.5, 0.5]], [[-0.25, 1.25]]]
    np.testing.assert_allclose(adjust_contrast(planes, 1.5), expected, atol=1e-6)


# Values of `tf.image.adjust_saturation` and `tf.image.adjust_hue`, TensorFlow 2.15.
@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0.8, [[0.9, 0.42, 0.34], [0.32, 0.8, 0.48], [0.22, 0.38, 0.7], [0.5] * 3, [0.6, 0.2, 0.52], [0] * 3]),
        (1.2, [[0.9, 0.18, 0.06], [0.08, 0.8, 0.32], [0, 0.233333, 0.7], [0.5] * 3, [0.6, 0, 0.48], [0] * 3]),
        (3.0, [[0.9, 0.128571, 0], [0, 0.8, 0.266667], [0, 0.233333, 0.7], [0.5] * 3, [0.6, 0, 0.48], [0] * 3]),
    ],
)
def test_saturation_as_tensorflow(factor: float, expected: list[list[float]]) -> None:
    np.testing.assert_allclose(adjust_saturation(COLOURS, factor)[:, 0].T, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        (0.05, [[0.9, 0.51, 0.2], [0.2, 0.8, 0.58], [0.1, 0.12, 0.7], [0.5] * 3, [0.6, 0.1, 0.35], [0] * 3]),
        (-0.05, [[0.9, 0.2, 0.31], [0.2, 0.8, 0.22], [0.1, 0.48, 0.7], [0.5] * 3, [0.55, 0.1, 0.6], [0] * 3]),
        (0.4, [[0.2, 0.9, 0.58], [0.64, 0.2, 0.8], [0.7, 0.14, 0.1], [0.5] * 3, [0.3, 0.6, 0.1], [0] * 3]),
    ],
)
def test_hue_as_tensorflow(delta: float, expected: list[list[float]]) -> None:
    np.testing.assert_allclose(adjust_hue(COLOURS, delta)[:, 0].T, expected, atol=1e-6)


def test_identities_of_saturation_and_hue() -> None:
    planes = np.random.default_rng(0).random((3, 9, 8), np.float32)
    np.testing.assert_allclose(adjust_saturation(planes, 1.0), planes, atol=1e-6)
    np.testing.assert_allclose(adjust_saturation(planes, 0.0), np.stack([planes.max(axis=0)] * 3), atol=1e-6)
    for delta in (0.0, 1.0, -1.0):
        np.testing.assert_allclose(adjust_hue(planes, delta), planes, atol=2e-6)
    # A third of a turn: what was red is green, green is blue, blue is red.
    np.testing.assert_allclose(adjust_hue(planes, 1 / 3), planes[[2, 0, 1]], atol=2e-6)
    np.testing.assert_allclose(adjust_hue(adjust_hue(planes, 0.23), -0.23), planes, atol=3e-6)


def test_the_whole_augmentation_as_tensorflow() -> None:
    y, x, c = np.meshgrid(np.arange(4), np.arange(4), np.arange(3), indexing="ij")
    image = ((37 * y + 61 * x + 97 * c + 13 * x * y * c) % 256).astype(np.uint8)
    parameters = np.array([0.01, 0.04, -0.1, 1.15, 0.85, 0.04])
    expected = [
        [[27, 55, 184], [61, 116, 224], [79, 196, 51], [166, 24, 70]],
        [[34, 91, 194], [59, 179, 56], [139, 20, 97], [218, 88, 196]],
        [[33, 128, 19], [113, 17, 78], [214, 78, 216], [22, 148, 119]],
        [[69, 167, 44], [154, 36, 125], [215, 168, 83], [36, 230, 228]],
    ]
    assert augment_image(image, parameters).tolist() == expected


def test_each_step_of_the_augmentation_is_clipped() -> None:
    white = np.full((4, 4, 3), 250, np.uint8)
    white[:2] = 50
    # Brightness 0.2: 250 becomes 255 and 50 becomes 101; then contrast 0.8 about their mean of 178, cut off.
    centre = (1 - SIDE) / 2
    found = augment_image(white, np.array([centre, centre, 0.2, 0.8, 1.0, 0.0]))
    assert found[0, 0].tolist() == [116, 116, 116]
    assert found[3, 3].tolist() == [239, 239, 239]


def test_an_augmentation_needs_its_six_parameters() -> None:
    with pytest.raises(ValueError, match=r"expected 6 parameters \(top, left, .* got shape \(5,\)"):
        augment_image(noise(8, 8), np.zeros(5))


def test_draws_fill_their_ranges_on_their_own() -> None:
    drawn = draw_augmentation(np.random.default_rng(0), 4000, 2)
    assert drawn.shape == (4000, 2, 6)
    flat = drawn.reshape(-1, 6)
    low = np.array([0, 0, -0.2, 0.8, 0.8, -0.05])
    high = np.array([1 - SIDE, 1 - SIDE, 0.2, 1.2, 1.2, 0.05])
    margin = (high - low) * 0.01
    assert (flat >= low - 1e-7).all()
    assert (flat <= high + 1e-7).all()
    assert (flat.min(axis=0) < low + margin).all()
    assert (flat.max(axis=0) > high - margin).all()
    # Neither two parameters nor two cameras go together.
    correlations = np.corrcoef(drawn.reshape(4000, 12).T) - np.eye(12)
    assert np.abs(correlations).max() < 0.07
    np.testing.assert_array_equal(drawn, draw_augmentation(np.random.default_rng(0), 4000, 2))


def test_every_draw_fits_the_image() -> None:
    image = noise(14, 14)
    offset = 1 - float(np.sqrt(np.float32(0.9)))
    corner = np.array([offset, offset, 0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(augment_image(image, corner)[-1, -1], image[-1, -1], atol=1)


def test_pixels_are_normalised_for_both_towers_by_hand() -> None:
    levels = torch.zeros((2, 1, 1, 2, 3), dtype=torch.uint8)
    levels[1, 0, 0, 1] = torch.tensor([255, 51, 102])
    pixels = normalize_pixels(levels, torch.float32)
    assert pixels.shape == (2, 1, 6, 1, 2)
    black = [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225, -1, -1, -1]
    colour = [0.515 / 0.229, (0.2 - 0.456) / 0.224, (0.4 - 0.406) / 0.225, 1, -0.6, -0.2]
    np.testing.assert_allclose(pixels[0, 0, :, 0, 1], black, atol=1e-6)
    np.testing.assert_allclose(pixels[1, 0, :, 0, 1], colour, atol=1e-6)
    half = normalize_pixels(levels, torch.bfloat16)
    assert torch.equal(half, pixels.bfloat16())
