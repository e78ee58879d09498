"""Writes the golden frame anew; look at it before it is committed. Run from the repository's root."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from sim.libero.suite import LiberoConfig, LiberoSuite

GOLDEN = Path(__file__).with_name("libero_spatial_5.png")


def draw_frame() -> np.ndarray:
    """Both cameras side by side at the first published start, upright; (128, 256, 3) uint8."""
    cameras = ("agentview", "robot0_eye_in_hand")
    suite = LiberoSuite(LiberoConfig(tasks=("libero_spatial/5",), cameras=cameras, image_size=128))
    world = suite.make_world()
    world.reset(suite.start("libero_spatial/5", "test", 0))
    return np.concatenate([image[::-1] for image in world.observe().images], axis=1)


if __name__ == "__main__":
    Image.fromarray(draw_frame()).save(GOLDEN)
