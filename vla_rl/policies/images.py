"""The images as OpenVLA sees them: the published LIBERO chain, its training augmentation, the towers' normalisation.

OpenVLA's training data passed through TensorFlow, and so do the images of the published evaluation: JPEG, `lanczos3`
resize, central crop. The functions below do the same arithmetic without TensorFlow and give the same pixels. All of
them are pure. Images are RGB, uint8 on the host until `normalize_pixels`.

Sources: M. Kim et al., OpenVLA-OFT, arXiv:2502.19645 (LIBERO evaluation, data loading); TensorFlow 2.15,
`tf.image.resize`, `tf.image.crop_and_resize`, `tf.image.adjust_*`; K. Black, dlimp (`augment`).
Shape letters: B batch, C cameras, H height, W width.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped, UInt8
from PIL import Image

DINOV2_MEAN, DINOV2_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Channel statistics that the DINOv2 tower expects, of pixels in [0, 1] (ImageNet)."""
SIGLIP_MEAN, SIGLIP_STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""The same of the SigLIP tower."""
_NUM_PARAMETERS = 6

_JPEG_QUALITY = 95
_CROP_SIDE = float(np.sqrt(np.float32(0.9)))  # of the published crop, whose area is 0.9; rounded as TensorFlow does
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 0.2, 0.2, 0.2, 0.05


def prepare_images(
    images: Shaped[np.ndarray, "*shape"],
    *,
    orientation: Literal["bottom_up", "top_down"],
    image_size: int,
    use_jpeg: bool = True,
    centre_crop: bool = True,
) -> UInt8[np.ndarray, "cameras size size 3"]:
    """The published chain: rotate, JPEG, resize, crop.

    Args:
        images: One per camera, (C, H, W, 3) uint8, as the suite returns them.
        orientation: Of the images. "bottom_up" images are rotated by 180 degrees, as the published LIBERO data were:
            the scene ends up upright and mirrored, which is how OpenVLA knows it.
        image_size: Height and width of the result, pixels.
        use_jpeg: Compress and decompress, as the training data were.
        centre_crop: Enlarge the central 0.9 of the area to the whole image, for a policy that was trained with random
            crops of that size.

    Returns:
        What the towers see before normalisation.

    Raises:
        ValueError: Wrong type or shape.
        ImportError: `use_jpeg` without the package simplejpeg.
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or 0 in images.shape:
        raise ValueError(
            f"images must be uint8 of shape (cameras, height, width, 3); got {images.dtype} of shape {images.shape}"
        )
    if image_size < 1:
        raise ValueError(f"image_size must be at least 1 pixel; got {image_size}")
    prepared = np.empty((len(images), image_size, image_size, 3), np.uint8)
    for camera, image in enumerate(images):
        upright = rotate_180(image) if orientation == "bottom_up" else image
        decoded = jpeg_round_trip(upright) if use_jpeg else upright
        resized = lanczos3_resize(decoded, image_size)
        prepared[camera] = centre_crop_resize(resized) if centre_crop else resized
    return prepared


def rotate_180(image: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "height width 3"]:
    """The image turned by 180 degrees."""
    turned = np.empty_like(image)
    for channel in range(3):  # numpy is slow at copying runs of three bytes
        turned[..., channel] = image[::-1, ::-1, channel]
    return turned


def jpeg_round_trip(image: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "height width 3"]:
    """What JPEG leaves of an image: quality 95, 4:2:0, as `tf.io.encode_jpeg` and `tf.io.decode_jpeg` do by default.

    Pillow encodes as TensorFlow does. It cannot decode so: TensorFlow chooses libjpeg's fast inverse cosine transform,
    which differs from the accurate one by up to 9 levels; simplejpeg offers it.

    Raises:
        ImportError: simplejpeg is not installed.
    """
    try:
        import simplejpeg
    except ImportError as error:
        raise ImportError(
            "decoding JPEG as OpenVLA's training data were needs the package simplejpeg; run: pip install "
            "'vla-rl[openvla]', or switch JPEG off for a policy that was trained without it"
        ) from error
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=_JPEG_QUALITY, subsampling="4:2:0")
    decoded: UInt8[np.ndarray, "height width 3"] = simplejpeg.decode_jpeg(
        buffer.getvalue(), fastdct=True, fastupsample=False
    )
    return decoded


def lanczos3_resize(image: UInt8[np.ndarray, "height width 3"], size: int) -> UInt8[np.ndarray, "size size 3"]:
    """`tf.image.resize(image, (size, size), "lanczos3", antialias=True)`, rounded half to even and clipped.

    The sums run in TensorFlow's order (vertical first, old pixels ascending, float32), so that results equal its own
    but for one value in 700 000 or so, which is rounded to the other side.
    """
    height, width, _ = image.shape
    if (height, width) == (size, size):
        return image.copy()
    vertical = _weighted_rows(_planes(image), *_lanczos3_taps(height, size))
    horizontal = _weighted_rows(vertical.swapaxes(1, 2).copy(), *_lanczos3_taps(width, size))
    np.rint(horizontal, out=horizontal)
    np.clip(horizontal, 0, 255, out=horizontal)
    return _interleaved(horizontal.swapaxes(1, 2))


def centre_crop_resize(image: UInt8[np.ndarray, "height width 3"]) -> UInt8[np.ndarray, "height width 3"]:
    """Enlarge the central 0.9 of the area to the whole image, as the published evaluation does."""
    offset = (1 - _CROP_SIDE) / 2
    columns = _columns(image)
    columns *= np.float32(1 / 255)
    # No clipping: an interpolated value leaves [0, 1] by a rounding error at most, which the conversion cuts off.
    return _interleaved(crop_and_resize(columns, (offset, offset), _CROP_SIDE) * np.float32(255.5))


def crop_and_resize(
    columns: Float32[np.ndarray, "3 width height"], top_left: tuple[float, float], side: float
) -> Float32[np.ndarray, "3 height width"]:
    """`tf.image.crop_and_resize` of one square box, back to the size of the image (bilinear, corners aligned).

    Args:
        columns: The image, one plane per channel, columns before rows.
        top_left: Upper and left edge of the box, fractions of height and width.
        side: Of the box, as a fraction.

    Returns:
        The enlarged box, one plane per channel, rows before columns.

    Raises:
        ValueError: The box reaches outside of the image.
    """
    top, left = top_left
    if not (min(top, left) >= 0 and max(top, left) + side <= 1 + 1e-6):
        raise ValueError(f"a crop of side {side:g} at (top, left) ({top:g}, {left:g}) is not within the image, 0 to 1")
    horizontal = _interpolated_rows(columns, left, side)
    return _interpolated_rows(horizontal.swapaxes(1, 2).copy(), top, side)


def normalize_pixels(
    images: UInt8[torch.Tensor, "batch cameras height width 3"], dtype: torch.dtype
) -> Float[torch.Tensor, "batch cameras 6 height width"]:
    """What the towers take, computed where the images are: three channels for DINOv2, then three for SigLIP.

    Args:
        images: From `prepare_images` or `augment_image`.
        dtype: Of the result; the arithmetic is float32.

    Returns:
        Normalised pixels.
    """
    device = images.device
    # A divisor on the device: CUDA replaces division by a Python number by multiplication, which rounds differently.
    unit = images.movedim(-1, 2).float() / torch.full((), 255.0, device=device)
    towers = ((DINOV2_MEAN, DINOV2_STD), (SIGLIP_MEAN, SIGLIP_STD))
    statistics = torch.tensor(towers, device=device)[..., None, None]
    return torch.cat([((unit - mean) / std).to(dtype) for mean, std in statistics], dim=2)


def draw_augmentation(
    generator: np.random.Generator, batch: int, cameras: int
) -> Float64[np.ndarray, "batch cameras parameters"]:
    """Parameters of OpenVLA's training augmentation, uniform, each camera on its own.

    The published code draws both offsets of the crop from the same seed, so that its crops lie on the image's
    diagonal. That is an oversight; here they are independent.

    Returns:
        Per image: top and left edge of the crop (fractions), brightness (added), contrast (factor), saturation
        (factor), hue (added, in turns).
    """
    offset = 1 - _CROP_SIDE
    low = [0.0, 0.0, -_BRIGHTNESS, 1 - _CONTRAST, 1 - _SATURATION, -_HUE]
    high = [offset, offset, _BRIGHTNESS, 1 + _CONTRAST, 1 + _SATURATION, _HUE]
    return generator.uniform(low, high, size=(batch, cameras, _NUM_PARAMETERS))


def augment_image(
    image: UInt8[np.ndarray, "height width 3"], parameters: Float64[np.ndarray, " parameters"]
) -> UInt8[np.ndarray, "height width 3"]:
    """OpenVLA's training augmentation, in place of the central crop.

    Crop, brightness, contrast, saturation, hue, in this order, each clipped to [0, 1] (dlimp, with TensorFlow's
    `adjust_*`).

    Args:
        image: Resized, not cropped.
        parameters: One row of `draw_augmentation`.

    Returns:
        An image of the same size.

    Raises:
        ValueError: Other than six parameters, or a crop outside of the image.
    """
    if parameters.shape != (_NUM_PARAMETERS,):
        raise ValueError(
            f"expected {_NUM_PARAMETERS} parameters (top, left, brightness, contrast, saturation, hue); "
            f"got shape {parameters.shape}"
        )
    top, left, brightness, contrast, saturation, hue = (float(value) for value in parameters)
    columns = _columns(image)
    columns /= np.float32(255)
    planes = _clip(crop_and_resize(columns, (top, left), _CROP_SIDE))
    planes = _clip(planes + np.float32(brightness))
    planes = _clip(adjust_contrast(planes, contrast))
    planes = _clip(adjust_saturation(planes, saturation))
    planes = _clip(adjust_hue(planes, hue))
    return _interleaved(planes * np.float32(255))


def adjust_contrast(
    planes: Float32[np.ndarray, "3 height width"], factor: float
) -> Float32[np.ndarray, "3 height width"]:
    """Stretch each channel about its mean."""
    mean = planes.mean(axis=(1, 2), dtype=np.float64, keepdims=True).astype(np.float32)
    stretched: Float32[np.ndarray, "3 height width"] = (planes - mean) * np.float32(factor) + mean
    return stretched


def adjust_saturation(
    planes: Float32[np.ndarray, "3 height width"], factor: float
) -> Float32[np.ndarray, "3 height width"]:
    """Multiply the saturation S of HSV, at most to 1; planes in [0, 1].

    Hue and value stay, so the distance of each channel to the largest one, V, grows as S does. S = chroma / V.
    """
    value, chroma = _value_and_chroma(planes)
    growth = np.minimum(np.float32(factor), value / np.where(chroma > 0, chroma, np.float32(1)))
    grown: Float32[np.ndarray, "3 height width"] = value - (value - planes) * growth
    return grown


def adjust_hue(planes: Float32[np.ndarray, "3 height width"], delta: float) -> Float32[np.ndarray, "3 height width"]:
    """Turn the hue H of HSV by `delta` turns, at most one either way."""
    red, green, blue = planes
    value, chroma = _value_and_chroma(planes)
    divisor = np.where(chroma > 0, chroma, np.float32(1))
    # In sixths of a turn: 0 red, 2 green, 4 blue.
    hue = np.where(
        red == value,
        (green - blue) / divisor,
        np.where(green == value, (blue - red) / divisor + np.float32(2), (red - green) / divisor + np.float32(4)),
    )
    hue += np.float32(6 * delta)
    hue -= np.float32(6) * np.floor(hue / np.float32(6))
    # Over the circle a channel is at its lowest for two sixths, rises for one, is at its highest for two, falls for
    # one; `distance` is 0 where it is highest, 1 where it is lowest.
    turned = np.empty_like(planes)
    for plane, centre in zip(turned, (0, 2, 4), strict=True):
        away = np.abs(hue - np.float32(centre))
        distance = np.clip(np.minimum(away, np.float32(6) - away) - np.float32(1), 0, 1)
        plane[:] = value - chroma * distance
    return turned


def _value_and_chroma(
    planes: Float32[np.ndarray, "3 height width"],
) -> tuple[Float32[np.ndarray, "height width"], Float32[np.ndarray, "height width"]]:
    """V of HSV, the largest channel, and its distance to the smallest."""
    value = planes.max(axis=0)
    return value, value - planes.min(axis=0)


def _clip(planes: Float32[np.ndarray, "3 height width"]) -> Float32[np.ndarray, "3 height width"]:
    return np.clip(planes, 0, 1, out=planes)


def _planes(image: UInt8[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "3 height width"]:
    """One contiguous plane per channel: whole rows are then gathered and added quickly."""
    planes = np.empty((3, *image.shape[:2]), np.float32)
    for channel, plane in enumerate(planes):
        plane[:] = image[..., channel]
    return planes


def _columns(image: UInt8[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "3 width height"]:
    return _planes(image.swapaxes(0, 1))


def _interleaved(planes: Float32[np.ndarray, "3 height width"]) -> UInt8[np.ndarray, "height width 3"]:
    """Inverse of `_planes`; cuts off decimals."""
    image = np.empty((*planes.shape[1:], 3), np.uint8)
    for channel, plane in enumerate(planes):
        image[..., channel] = plane
    return image


def _weighted_rows(
    planes: Float32[np.ndarray, "3 rows columns"],
    sources: Int64[np.ndarray, "taps new_rows"],
    weights: Float32[np.ndarray, "taps new_rows"],
) -> Float32[np.ndarray, "3 new_rows columns"]:
    """Each new row is a weighted sum of old ones, added tap by tap."""
    total: Float32[np.ndarray, "3 new_rows columns"] = np.take(planes, sources[0], axis=1)
    total *= weights[0, :, None]
    term = np.empty_like(total)
    for source, weight in zip(sources[1:], weights[1:], strict=True):
        np.take(planes, source, axis=1, out=term, mode="clip")  # other modes take a detour when `out` is given
        term *= weight[:, None]
        total += term
    return total


@cache
def _lanczos3_taps(num_old: int, num_new: int) -> tuple[Int64[np.ndarray, "taps new"], Float32[np.ndarray, "taps new"]]:
    """Old pixels that a new one is made of, ascending, and their weights; unused taps weigh 0."""
    one, half, radius = np.float32(1), np.float32(0.5), np.float32(3)
    pixels_per_new = one / (np.float32(num_new) / np.float32(num_old))
    stretch = np.maximum(pixels_per_new, one)  # antialias: a wider kernel when the image shrinks
    samples = (np.arange(num_new, dtype=np.float32) + half) * pixels_per_new
    first = np.clip(np.ceil(samples - radius * stretch - half), 0, num_old - 1).astype(np.int64)
    last = np.clip(np.floor(samples + radius * stretch - half), 0, num_old - 1).astype(np.int64)
    sources = first + np.arange((last - first).max() + 1)[:, None]
    weights = _lanczos3((sources.astype(np.float32) + half - samples) * (one / stretch))
    weights[sources > last] = 0
    total = np.zeros(num_new, np.float32)
    for weight in weights:
        total += weight
    weights *= one / total
    return np.minimum(sources, num_old - 1), weights


def _lanczos3(offsets: Float32[np.ndarray, "taps new"]) -> Float32[np.ndarray, "taps new"]:
    """3 sin(pi x) sin(pi x / 3) / (pi x)^2 for |x| <= 3, in float32 but for the sines, which are rounded to it.

    numpy's float32 sines depend on the machine. TensorFlow's are those of the C library, a last bit off now and then.
    """
    pi, radius = np.float32(np.pi), np.float32(3)
    x = np.abs(offsets)
    is_centre = x <= np.float32(1e-3)
    x[is_centre] = 1
    angles = np.stack([pi * x, pi * x / radius])
    slow, fast = np.sin(angles.astype(np.float64)).astype(np.float32)[::-1]
    kernel: Float32[np.ndarray, "taps new"] = radius * fast * slow / (pi * pi * x * x)
    kernel[is_centre] = 1
    kernel[x > radius] = 0
    return kernel


def _interpolated_rows(
    planes: Float32[np.ndarray, "3 rows columns"], start: float, side: float
) -> Float32[np.ndarray, "3 rows columns"]:
    """As many rows as there are, from `start` to `start + side` of the height, linearly interpolated."""
    last = planes.shape[1] - 1
    begin, end = np.float32(start), np.float32(start) + np.float32(side)
    spacing = (end - begin) * np.float32(last) / np.float32(max(last, 1))
    positions = begin * np.float32(last) + np.arange(last + 1, dtype=np.float32) * spacing
    positions = np.minimum(positions, np.float32(last))  # a rounding error beyond; TensorFlow would draw a black row
    lower = np.floor(positions)
    result: Float32[np.ndarray, "3 rows columns"] = np.take(planes, lower.astype(np.int64), axis=1)
    rise = np.take(planes, np.ceil(positions).astype(np.int64), axis=1)
    rise -= result
    rise *= (positions - lower)[:, None]
    result += rise
    return result
