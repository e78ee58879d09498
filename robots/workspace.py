"""Where the tool may be: a box, and the sides of keep-out planes that their normals point to."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from robots.safety_config import SafetyConfig

_NUM_PROJECTIONS = 100
_SAME = 1e-9


class Workspace:
    """Positions in metres, base frame."""

    def __init__(self, config: SafetyConfig) -> None:
        self._low, self._high = np.array(config.workspace_low_m), np.array(config.workspace_high_m)
        self._planes = [
            (np.array(plane.point_m), np.array(plane.normal) / np.linalg.norm(plane.normal))
            for plane in config.keep_out
        ]

    def depth_m(self, position: Float64[np.ndarray, 3]) -> float:
        """How far a position is beyond the side or plane that it is furthest beyond; 0 inside."""
        beyond_box = float(np.maximum(self._low - position, position - self._high).max())
        return max(0.0, beyond_box, *(float(normal @ (point - position)) for point, normal in self._planes))

    def violations(self, position: Float64[np.ndarray, 3]) -> list[str]:
        """Every side and plane that a position is beyond, and by how much; for people."""
        words = []
        for axis, value, low, high in zip("xyz", position, self._low, self._high, strict=True):
            if not low - _SAME <= value <= high + _SAME:
                off = 1e3 * max(low - value, value - high)
                words.append(f"{axis} is {off:.1f} mm outside of the workspace, {low:g} to {high:g} m")
        for number, (point, normal) in enumerate(self._planes):
            depth = float(normal @ (point - position))
            if depth > _SAME:
                words.append(f"{1e3 * depth:.1f} mm beyond keep-out plane {number}")
        return words

    def nearest(self, position: Float64[np.ndarray, 3]) -> Float64[np.ndarray, 3] | None:
        """An allowed position close by, the position itself if it is one; None if there seems to be none.

        Alternating projections: box and planes one after the other, until nothing is violated any more. Where planes
        meet obliquely that takes several rounds, and at a needle's tip it may fail.
        """
        for _ in range(_NUM_PROJECTIONS):
            if self.depth_m(position) <= _SAME:
                return position
            position = np.clip(position, self._low, self._high)
            for point, normal in self._planes:
                position = position + max(0.0, float(normal @ (point - position))) * normal
        return None
