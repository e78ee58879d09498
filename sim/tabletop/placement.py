"""Random starts: where the objects stand and where the gripper hovers. Lengths in metres, world frame.

| level     | objects                    | placement area x, y   | yaw of objects | gripper at the start, x, y, z |
|-----------|----------------------------|-----------------------|----------------|-------------------------------|
| `easy`    | 2 graspable, 1 receptacle  | -0.12 to 0.06, +-0.16 | none           | +-0.06, +-0.08, +-0.04        |
| `medium`  | 4 graspable, 1 receptacle  | -0.14 to 0.08, +-0.18 | +-0.15 rad     | +-0.06, +-0.13, +-0.05        |
| `hard`    | 6 graspable, plate and box | -0.16 to 0.10, +-0.21 | +-0.6 rad      | +-0.07, +-0.16, +-0.06        |

Pushing has two targets in place of the other receptacles. The gripper starts about 0.20 above the table and 0.10 on the
robot's side of its centre, fingers half open and pointing straight down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.tabletop.objects import TableObject
from sim.tabletop.panda import HOME_QPOS
from sim.tabletop.scene import TABLE_HEIGHT
from sim.tabletop.tasks import Difficulty, Task

HOVER: Float64[np.ndarray, " xyz"] = np.array([-0.10, 0.0, TABLE_HEIGHT + 0.20])
"""Grip site at the start, before noise."""
FINGER_START_QPOS = (0.02, -0.02)
"""Half open: what the controller's gripper command of zero holds."""

_CLEARANCE = 0.026
"""Free space between two objects: an opened finger (15 mm thick, pads 8 cm apart) fits beside a cube."""
_MIN_PUSH, _MAX_PUSH = 0.08, 0.20
"""Distance from an object to the target it is to be pushed to."""
_TRIES_PER_OBJECT, _RESTARTS = 30, 200


@dataclass(frozen=True)
class Ranges:
    """Half widths about a centre; see the table above."""

    x: tuple[float, float]
    y: float
    yaw: float
    hover: tuple[float, float, float]


RANGES: dict[Difficulty, Ranges] = {
    "easy": Ranges(x=(-0.12, 0.06), y=0.16, yaw=0.0, hover=(0.06, 0.08, 0.04)),
    "medium": Ranges(x=(-0.14, 0.08), y=0.18, yaw=0.15, hover=(0.06, 0.13, 0.05)),
    "hard": Ranges(x=(-0.16, 0.10), y=0.21, yaw=0.6, hover=(0.07, 0.16, 0.06)),
}


def place_objects(
    task: Task, objects: tuple[TableObject, ...], ranges: Ranges, rng: np.random.Generator
) -> dict[str, tuple[float, float, float]]:
    """Positions without overlaps, found by rejection, large objects first.

    Returns:
        Name -> (x, y, yaw). Receptacles have no yaw.

    Raises:
        RuntimeError: The objects do not fit into the area (a mistake in the ranges, not bad luck).
    """
    order = sorted(objects, key=lambda item: -item.footprint_radius)
    for _ in range(_RESTARTS):
        placed: dict[str, tuple[float, float, float]] = {}
        draws = rng.uniform(-1.0, 1.0, size=(len(order), _TRIES_PER_OBJECT, 3)).tolist()
        for item, tries in zip(order, draws, strict=True):
            spots = (_scale(item, draw, ranges) for draw in tries)
            spot = next((spot for spot in spots if _fits(task, item, spot, placed, objects)), None)
            if spot is None:
                break
            placed[item.name] = spot
        if len(placed) == len(order):
            return placed
    raise RuntimeError(f"{task.name}: {[item.name for item in objects]} do not fit into x {ranges.x}, y +-{ranges.y}")


def _scale(item: TableObject, draw: list[float], ranges: Ranges) -> tuple[float, float, float]:
    """A draw in [-1, 1]^3 as a position whose receptacle stays inside the area."""
    margin = 0.0 if item.is_graspable else item.footprint_radius - 0.03
    low, high = ranges.x[0] + margin, ranges.x[1] - margin
    x = (low + high) / 2 + draw[0] * (high - low) / 2
    return x, draw[1] * (ranges.y - margin), draw[2] * ranges.yaw if item.is_graspable else 0.0


def _fits(
    task: Task,
    item: TableObject,
    spot: tuple[float, float, float],
    placed: dict[str, tuple[float, float, float]],
    objects: tuple[TableObject, ...],
) -> bool:
    radius = {other.name: other.footprint_radius for other in objects}
    for name, (x, y, _) in placed.items():
        distance = math.hypot(spot[0] - x, spot[1] - y)
        if distance < item.footprint_radius + radius[name] + _CLEARANCE:
            return False
        is_push = task.family == "push_to" and {item.name, name} == {task.item, task.place}
        if is_push and not _MIN_PUSH < distance < _MAX_PUSH:
            return False
    return True


class ArmPoser:
    """Arm joints for a gripper position, pointing straight down: a few damped least-squares steps from the home pose.

    Not thread-safe. The result depends on nothing but the arguments.
    """

    _MAX_STEPS = 30
    _DAMPING = 1e-4
    _TOLERANCE = 2e-4

    def __init__(self, model: mujoco.MjModel, grip_site: int) -> None:
        """Use a model whose first seven joints are the arm's."""
        self._model, self._site = model, grip_site
        self._data = mujoco.MjData(model)
        self._jacobian = np.zeros((6, model.nv))

    def solve(self, position: Float64[np.ndarray, " xyz"]) -> Float64[np.ndarray, " arm"]:
        """Joint angles (rad) that put the grip site at `position` (m, world) with the fingers pointing down.

        Raises:
            RuntimeError: The position is out of reach.
        """
        data = self._data
        data.qpos[:7] = HOME_QPOS
        goal = pointing_down(0.0)
        for _ in range(self._MAX_STEPS):
            mujoco.mj_kinematics(self._model, data)
            mujoco.mj_comPos(self._model, data)
            turn = rotation_between(data.site_xmat[self._site].reshape(3, 3), goal)
            error = np.concatenate([position - data.site_xpos[self._site], turn])
            if float(np.abs(error).max()) < self._TOLERANCE:
                return np.array(data.qpos[:7])
            mujoco.mj_jacSite(self._model, data, self._jacobian[:3], self._jacobian[3:], self._site)
            jacobian = self._jacobian[:, :7]
            data.qpos[:7] += jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + self._DAMPING * np.eye(6), error)
        raise RuntimeError(f"no arm pose with the gripper at {position} pointing down")


def pointing_down(yaw: float) -> Float64[np.ndarray, "3 3"]:
    """Orientation of the grip site that looks down; at yaw 0 the fingers open along the world's y axis (home pose)."""
    c, s = math.cos(yaw), math.sin(yaw)
    return np.array([[-s, c, 0.0], [c, s, 0.0], [0.0, 0.0, -1.0]])


def rotation_between(
    current: Float64[np.ndarray, "3 3"], goal: Float64[np.ndarray, "3 3"]
) -> Float64[np.ndarray, " xyz"]:
    """Rotation vector (rad, world frame) between orientations; exact for small angles (sine in place of the angle)."""
    rotation: Float64[np.ndarray, " xyz"] = 0.5 * np.cross(current.T, goal.T).sum(axis=0)
    return rotation
