"""How the expert moves the hand: a style, a command, and the action that follows a command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float64, Int64

from sim.libero.grasps import Taste
from sim.model import SimModel
from sim.tabletop.placement import rotation_between

OPEN, CLOSE = -1.0, 1.0
GAP_OPEN, GAP_EMPTY = 0.074, 0.002
"""Distance between the pads (m) from which on the fingers count as open, and below which nothing is between them."""

NEAR = 0.025
"""Within this horizontal distance (m) of its target the hand may come down between obstacles."""
_ROTATION_DEADBAND = 0.05
"""A smaller error (rad) is left to the controller, which holds the last goal."""

_SHOULDER_ABOVE, _WRIST_ABOVE, _WRIST_INWARDS = 0.333, 0.204, 0.088
"""The Panda's shoulder above its base, and its wrist seen from the grip site of a hand that points down (m)."""

HeightOver = Callable[[Float64[np.ndarray, "places 2"]], Float64[np.ndarray, " places"]]
"""Height (m, world) that the grip site needs over some places (x and y)."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How this demonstrator moves; drawn once per episode.

    Attributes:
        speed: Largest translation action.
        gain: Action per metre of error, in units of the controller's 0.05 m.
        taste: Which of several good grasps is liked best.
        place_offset: Where the object is put, as a share of what is allowed around the ideal place (x and y).
        clearance: Height above obstacles at which the hand travels (m).
        tilt: Angle (rad) between the vertical and a hand that takes a handle.
    """

    speed: float
    gain: float
    taste: Taste
    place_offset: tuple[float, float]
    clearance: float
    tilt: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Style:
        """A random demonstrator."""
        x, y = rng.uniform(-1.0, 1.0, 2).tolist()
        return cls(
            speed=float(rng.uniform(0.85, 1.0)),
            gain=float(rng.uniform(1.4, 1.8)),
            taste=Taste.draw(rng),
            place_offset=(x, y),
            clearance=float(rng.uniform(0.020, 0.040)),
            tilt=math.radians(float(rng.uniform(78.0, 88.0))),
        )


@dataclass(frozen=True, eq=False)
class Command:
    """Where the grip site should go (m, world), how it should be turned, and the gripper action."""

    position: Float64[np.ndarray, " 3"]
    orientation: Float64[np.ndarray, "3 3"]
    gripper: float


class Hand:
    """Reads the hand's state and writes its actions.

    Args:
        model: Model with the robot.
    """

    def __init__(self, model: SimModel) -> None:
        self._sim, self._model = model, model.mj_model
        self._fingers = [
            subtree(self._model, int(self._model.joint(name).bodyid[0])) for name in model.names.gripper_joints
        ]
        self.base = int(self._model.body_rootid[model.hand_body])

    def position(self, data: mujoco.MjData) -> Float64[np.ndarray, " 3"]:
        """Of the grip site (m, world)."""
        position: Float64[np.ndarray, " 3"] = data.site_xpos[self._sim.grip_site]
        return position

    def rotation(self, data: mujoco.MjData) -> Float64[np.ndarray, "3 3"]:
        """Of the grip site; columns: opening direction, across, approach."""
        rotation: Float64[np.ndarray, "3 3"] = data.site_xmat[self._sim.grip_site].reshape(3, 3)
        return rotation

    def gap(self, data: mujoco.MjData) -> float:
        """Distance between the pads (m)."""
        return float(np.abs(data.qpos[self._sim.gripper_qpos]).sum())

    def touching(self, data: mujoco.MjData, bodies: Int64[np.ndarray, " bodies"]) -> list[bool]:
        """Which fingers touch one of these bodies."""
        pairs = self._model.geom_bodyid[data.contact.geom[: data.ncon]]
        touching = pairs[np.isin(pairs, bodies).any(axis=1)]
        return [bool(np.isin(touching, finger).any()) for finger in self._fingers]

    def leave(self, data: mujoco.MjData, bodies: Int64[np.ndarray, " bodies"]) -> Float64[np.ndarray, " 3"]:
        """Where to move (m) to get away from an object that is let go."""
        if self.gap(data) < GAP_OPEN:
            return np.zeros(3)
        touching = self.touching(data, bodies)
        if any(touching):  # a rim or a gable has caught on a finger: move that finger outwards
            outwards = data.xpos[self._fingers[touching.index(True)][0]] - self.position(data)
            side = self.rotation(data)[:, 0]
            return 0.03 * float(np.sign(outwards @ side)) * side
        return np.array([0.0, 0.0, 0.05])

    def action(self, data: mujoco.MjData, command: Command, style: Style) -> Float64[np.ndarray, " action_dim"]:
        """The action towards a command: proportional, limited, each entry in [-1, 1]."""
        error = style.gain * (command.position - self.position(data)) / self._sim.osc.position_max_m
        rotation = rotation_between(self.rotation(data), command.orientation)
        action = np.zeros(7)
        action[:2] = error[:2] * min(1.0, style.speed / max(float(np.hypot(*error[:2])), 1e-9))
        action[2] = min(max(error[2], -style.speed), style.speed)
        if np.linalg.norm(rotation) > _ROTATION_DEADBAND:
            action[3:6] = np.clip(rotation / self._sim.osc.rotation_max_rad, -style.speed, style.speed)
        action[6] = command.gripper
        return action


def travel(
    position: Float64[np.ndarray, " 3"],
    target: Float64[np.ndarray, " 3"],
    height_over: HeightOver,
    hover: float,
    clearance: float,
) -> Float64[np.ndarray, " 3"]:
    """The next position to command on a way that rises before obstacles and comes down through a funnel.

    Args:
        position: Where the grip site is (m, world).
        target: Where it should be.
        height_over: What obstacles demand; added to the clearance, and ignored near the target.
        hover: Height above the target in which the funnel begins (m).
        clearance: Above obstacles (m).
    """
    way = target[:2] - position[:2]
    distance = float(np.hypot(*way))
    share = np.linspace(0.0, 1.0, 2 + int(distance / 0.015))
    needed = height_over(position[:2] + share[:, None] * way) + clearance
    needed[(1.0 - share) * distance < NEAR] = -np.inf
    ahead = np.maximum(share * distance - 0.03, 0.0)
    funnel = float(target[2]) + min(max(5.0 * (distance - 0.006), 0.0), hover)
    height = max(funnel, float((needed - 0.8 * ahead).max()))
    missing = float(needed[ahead == 0.0].max() - position[2])
    freedom = min(max(1.0 - (missing - 0.008) / 0.02, 0.0), 1.0)
    return np.append(position[:2] + freedom * way, height)


def stretch(sites: Float64[np.ndarray, "sites 3"], base: Float64[np.ndarray, " 3"]) -> Float64[np.ndarray, " sites"]:
    """Distance (m) from the Panda's shoulder to its wrist with the hand pointing down; 0.70 is a straight arm.

    Args:
        sites: Grip sites (m, world).
        base: The robot's base (m, world).
    """
    relative = sites - base
    outwards = np.hypot(relative[:, 0], relative[:, 1]) - _WRIST_INWARDS
    distance: Float64[np.ndarray, " sites"] = np.hypot(outwards, relative[:, 2] + _WRIST_ABOVE - _SHOULDER_ABOVE)
    return distance


def subtree(model: mujoco.MjModel, body: int) -> Int64[np.ndarray, " bodies"]:
    """A body that moves by itself, first, and those fixed to it."""
    others = np.flatnonzero((model.body_weldid == model.body_weldid[body]) & (np.arange(model.nbody) != body))
    return np.concatenate([[body], others])


def yaw_of(opening: Float64[np.ndarray, " 3"]) -> float:
    """Yaw of the vertical hand whose fingers open along a direction or its opposite, in [-pi/2, pi/2]."""
    yaw = math.atan2(-opening[0], opening[1])
    return yaw - math.pi * round(yaw / math.pi)
