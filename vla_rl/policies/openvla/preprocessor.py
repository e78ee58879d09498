"""`preprocessor_config.json` of the published format: what the towers expect of an image.

Our image chain is fixed (see `vla_rl.policies.images`); a checkpoint that was trained with another one is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vla_rl.policies.images import DINOV2_MEAN, DINOV2_STD, SIGLIP_MEAN, SIGLIP_STD

_FILE = "preprocessor_config.json"
_DECISIVE = ("image_resize_strategy", "input_sizes", "means", "stds", "tvf_do_letterbox", "use_fused_vision_backbone")


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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    expected = preprocessor_config(image_size)
    others = [
        f"{name} {found[name]}, not {expected[name]}"
        for name in _DECISIVE
        if found.get(name, expected[name]) != expected[name]
    ]
    if others:
        raise ValueError(f"{path} has {'; '.join(others)}; other images than OpenVLA-7B's are not supported")
