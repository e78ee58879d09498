"""A scripted expert."""

from __future__ import annotations

import numpy as np

from sim.libero.scene import LiberoScene


class LiberoExpert:
    """Placeholder."""

    def __init__(self, scene: LiberoScene, rng: np.random.Generator) -> None:
        raise ValueError(f"no expert for {scene.task.full_name}")
