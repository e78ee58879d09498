"""`preprocessor_config.json` of the published format: what the towers expect of an image.

Our image chain is fixed (see `vla_rl.policies.images`); a checkpoint that was trained with another one is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vla_rl.policies.images import DINOV2_MEAN, DINOV2_STD, SIGLIP_MEAN, SIGLIP_STD
from vla_rl.policies.openvla.checkpoint import read_json

_FILE = "preprocessor_config.json"


def preprocessor_config(image_size: int) -> dict[str, Any]:
    """Content of the file for square images of this many pixels."""
    square = {"output_size": [image_size, image_size]}
    resize = {"antialias": True, "interpolation": 3, "max_size": None, "size": [image_size, image_size]}
    means = [list(DINOV2_MEAN), list(SIGLIP_MEAN)]
    stds = [list(DINOV2_STD), list(SIGLIP_STD)]
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "processor_class": "PrismaticProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, image_size, image_size]] * 2,
        "interpolations": ["bicubic", "bicubic"],
        "means": means,
        "stds": stds,
        "tvf_crop_params": [square, square],
        "tvf_do_letterbox": False,
        "tvf_letterbox_fill": None,
        "tvf_normalize_params": [
            {"inplace": False, "mean": mean, "std": std} for mean, std in zip(means, stds, strict=True)
        ],
        "tvf_resize_params": [resize, resize],
        "use_fused_vision_backbone": True,
    }


def check_preprocessor(folder: Path, image_size: int) -> None:
    """Refuse a checkpoint whose images are prepared in another way; a folder without the file is taken as usual.

    Raises:
        ValueError: The file is damaged, or asks for something else; lists what.
    """
    path = folder / _FILE
    if not path.is_file():
        return
    found, expected = read_json(path), preprocessor_config(image_size)
    others = [
        f"{name} {found[name]}, not {value}"
        for name, value in expected.items()
        if not _agree(found.get(name, value), value)
    ]
    if others:
        raise ValueError(f"{path} has {'; '.join(others)}; other images than OpenVLA-7B's are not supported")


def _agree(found: Any, expected: Any) -> bool:
    """Equal, but for numbers that went through float32."""
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(_agree(found.get(key, value), value) for key, value in expected.items())
    if isinstance(expected, list):
        is_alike = isinstance(found, list) and len(found) == len(expected)
        return is_alike and all(map(_agree, found, expected))
    if isinstance(expected, float):
        return isinstance(found, float | int) and math.isclose(found, expected, rel_tol=1e-6)
    return bool(found == expected)
