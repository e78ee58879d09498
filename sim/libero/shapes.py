"""What stands where, as the expert sees it: solid boxes, and a map of their heights as seen from above.

LIBERO's collision shapes are boxes almost without exception; any other shape counts as its bounding box.
"""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float64, Int64

_CELL_M = 0.005
_POINT_SPACING_M = 0.004


@dataclass(frozen=True, eq=False)
class Boxes:
    """Oriented boxes that move with their geoms.

    Attributes:
        geoms: Geom ids.
        centres: Centre of each box in the geom's frame (m).
        halves: Half sizes (m).
    """

    geoms: Int64[np.ndarray, " boxes"]
    centres: Float64[np.ndarray, "boxes 3"]
    halves: Float64[np.ndarray, "boxes 3"]

    @classmethod
    def of(cls, model: mujoco.MjModel, geoms: Int64[np.ndarray, " boxes"]) -> Boxes:
        """The bounding boxes of some geoms (not planes, which have none)."""
        return cls(geoms=geoms, centres=model.geom_aabb[geoms, :3].copy(), halves=model.geom_aabb[geoms, 3:].copy())

    def poses(self, data: mujoco.MjData) -> tuple[Float64[np.ndarray, "boxes 3"], Float64[np.ndarray, "boxes 3 3"]]:
        """Centres (m, world) and rotation matrices."""
        rotations = data.geom_xmat[self.geoms].reshape(-1, 3, 3)
        return data.geom_xpos[self.geoms] + np.einsum("bij,bj->bi", rotations, self.centres), rotations

    def points(self, data: mujoco.MjData) -> Float64[np.ndarray, "points 3"]:
        """A lattice of points (m, world) that fills the boxes, corners included."""
        lattices = []
        for centre, rotation, half in zip(*self.poses(data), self.halves, strict=True):
            axes = [np.linspace(-h, h, 2 + int(2 * h / _POINT_SPACING_M)) for h in half]
            lattice = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
            lattices.append(centre + lattice @ rotation.T)
        points = np.concatenate(lattices)
        _, first = np.unique(np.rint(points / (0.75 * _POINT_SPACING_M)), axis=0, return_index=True)
        return points[first]  # boxes overlap


def collision_geoms(model: mujoco.MjModel, bodies: Int64[np.ndarray, " bodies"]) -> Int64[np.ndarray, " geoms"]:
    """Geoms of these bodies that can touch something, planes left out."""
    is_solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    is_box_like = model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE
    return np.flatnonzero(is_solid & is_box_like & np.isin(model.geom_bodyid, bodies))


@dataclass(frozen=True, eq=False)
class HeightMap:
    """Height (m, world) of the topmost solid thing over each cell of a horizontal grid.

    Attributes:
        corner: x and y (m, world) of the middle of the first cell.
        heights: By x, then y.
    """

    corner: Float64[np.ndarray, " 2"]
    heights: Float64[np.ndarray, "x y"]

    @classmethod
    def of(
        cls, boxes: Boxes, data: mujoco.MjData, low: tuple[float, float], high: tuple[float, float], floor: float
    ) -> HeightMap:
        """Look down on some boxes.

        Args:
            boxes: What stands there.
            data: Poses.
            low: Smallest x and y (m, world).
            high: Largest x and y.
            floor: Height where there is nothing.
        """
        corner = np.array(low)
        shape = np.ceil((np.array(high) - corner) / _CELL_M).astype(int)
        heights = np.full(tuple(shape), floor)
        for centre, rotation, half in zip(*boxes.poses(data), boxes.halves, strict=True):
            reach = np.abs(rotation[:2]) @ half
            first = np.clip(np.floor((centre[:2] - reach - corner) / _CELL_M).astype(int), 0, shape)
            last = np.clip(np.ceil((centre[:2] + reach - corner) / _CELL_M).astype(int) + 1, 0, shape)
            window = heights[first[0] : last[0], first[1] : last[1]]
            x = corner[0] + _CELL_M * np.arange(first[0], last[0]) - centre[0]
            y = corner[1] + _CELL_M * np.arange(first[1], last[1]) - centre[1]
            np.maximum(window, centre[2] + _top(x, y, rotation, half), out=window)
        return cls(corner=corner, heights=heights)

    def at(self, xy: Float64[np.ndarray, "*shape 2"]) -> Float64[np.ndarray, "*shape"]:
        """Heights at some places; outside of the map those of its edge."""
        cells = np.rint((xy - self.corner) / _CELL_M).astype(int)
        x, y = (np.clip(cells[..., i], 0, self.heights.shape[i] - 1) for i in range(2))
        heights: Float64[np.ndarray, "*shape"] = self.heights[x, y]
        return heights

    def widened(self, radius: float) -> HeightMap:
        """The map of the largest height within `radius` (m) of each cell."""
        near = _shifted_max(self.heights, [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)])
        n = int(radius / _CELL_M)
        # Every other cell suffices, as each has the largest height of its neighbours already.
        steps = range(-(n - n % 2), n + 1, 2)
        disc = [(i, j) for i in steps for j in steps if i * i + j * j <= n * n]
        return HeightMap(corner=self.corner, heights=_shifted_max(near, disc))


def _shifted_max(heights: Float64[np.ndarray, "x y"], shifts: list[tuple[int, int]]) -> Float64[np.ndarray, "x y"]:
    pad = max(abs(step) for shift in shifts for step in shift)
    padded = np.pad(heights, pad, mode="edge")
    nx, ny = heights.shape
    highest = heights.copy()
    for i, j in shifts:
        np.maximum(highest, padded[pad + i : pad + i + nx, pad + j : pad + j + ny], out=highest)
    return highest


def _top(
    x: Float64[np.ndarray, " x"],
    y: Float64[np.ndarray, " y"],
    rotation: Float64[np.ndarray, "3 3"],
    half: Float64[np.ndarray, " 3"],
) -> Float64[np.ndarray, "x y"]:
    """Where vertical lines through (x, y) leave a box, relative to its centre; minus infinity where they miss it."""
    lower, upper = np.full((len(x), len(y)), -np.inf), np.full((len(x), len(y)), np.inf)
    half = half + _CELL_M / 2  # or thin walls would slip between the lines
    for axis in range(3):
        # In the box's frame, the line is start + height * slope.
        start = rotation[0, axis] * x[:, None] + rotation[1, axis] * y[None, :]
        slope = rotation[2, axis]
        slope = slope if abs(slope) > 1e-9 else 1e-9
        ends = (half[axis] - start) / slope, (-half[axis] - start) / slope
        lower, upper = np.maximum(lower, np.minimum(*ends)), np.minimum(upper, np.maximum(*ends))
    return np.where(upper >= lower, upper - _CELL_M / 2, -np.inf)
