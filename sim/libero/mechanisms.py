"""Turning knobs and pulling drawers open."""

from __future__ import annotations

import math

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.libero.motion import CLOSE, GAP_OPEN, OPEN, Command, Hand, Style, subtree
from sim.libero.picking import Picker
from sim.libero.shapes import Boxes, collision_geoms
from sim.tabletop.placement import rotation_between

_KNOB_RADIUS = 0.10
"""Something that reaches farther from its hinge (m) is a door."""
_TURN = 0.35
"""How far ahead of itself a held knob is turned (rad)."""
_PULL = 0.05
"""How far ahead of itself a held handle is pulled (m)."""
_STANDOFF = 0.09
"""Distance (m) from a handle at which the hand is turned towards it."""
_ARC = 0.10
"""Additional height of the way to a handle (m)."""


def is_knob(model: mujoco.MjModel, joint: int) -> bool:
    """Whether a joint turns something small enough to be turned by the hand above it."""
    geoms = collision_geoms(model, subtree(model, int(model.jnt_bodyid[joint])))
    reach = np.linalg.norm(model.geom_pos[geoms] - model.jnt_pos[joint], axis=1) + model.geom_rbound[geoms]
    return bool(model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_HINGE and (reach < _KNOB_RADIUS).all())


def is_drawer(model: mujoco.MjModel, joint: int) -> bool:
    """Whether a joint slides."""
    return bool(model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE)


class KnobTurner(Picker):
    """Turns a knob.

    Args:
        model: The compiled model.
        hand: The robot's.
        style: Of the demonstrator.
        joint: The knob's hinge, whose axis is vertical.
        direction: Sign of the rotation.
    """

    def __init__(self, model: mujoco.MjModel, hand: Hand, style: Style, joint: int, direction: float) -> None:
        super().__init__(model, hand, style, subtree(model, int(model.jnt_bodyid[joint])))
        self._joint, self._direction = joint, direction

    def command(self, data: mujoco.MjData) -> Command:
        """What to do in this state."""
        if not self.is_held(data):
            return self.reach(data)
        angle = _TURN * self._direction * float(np.sign(data.xaxis[self._joint][2]))
        rotation = np.array(
            [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0], [0.0, 0.0, 1.0]]
        )
        anchor = data.xanchor[self._joint]
        position = anchor + rotation @ (self._hand.position(data) - anchor)
        return Command(position, rotation @ self._hand.rotation(data), CLOSE)


class DrawerOpener:
    """Pulls a drawer open by its handle, with a hand that lies on its side.

    Args:
        model: The compiled model.
        hand: The robot's.
        style: Of the demonstrator.
        joint: The drawer's slide, whose axis is horizontal.
    """

    def __init__(self, model: mujoco.MjModel, hand: Hand, style: Style, joint: int) -> None:
        self._hand, self._style, self._joint = hand, style, joint
        self._bodies = subtree(model, int(model.jnt_bodyid[joint]))
        self._boxes = Boxes.of(model, collision_geoms(model, self._bodies))
        self._open_end = float(max(model.jnt_range[joint], key=abs))

    def command(self, data: mujoco.MjData) -> Command:
        """What to do in this state."""
        hand, gap = self._hand.position(data), self._hand.gap(data)
        target, orientation = self._grasp(data)
        if all(self._hand.touching(data, self._bodies)):
            return Command(hand + _PULL * self._outwards(data), orientation, CLOSE)
        approach = orientation[:, 2]
        error = target - hand
        beside = float(np.linalg.norm(error - (error @ approach) * approach))
        turn = float(np.linalg.norm(rotation_between(self._hand.rotation(data), orientation)))
        back = min(5.0 * max(beside - 0.006, 0.0) + 0.3 * max(turn - 0.1, 0.0), _STANDOFF)
        is_there = np.linalg.norm(error) < 0.010 and turn < 0.15
        is_closing = np.linalg.norm(error) < 0.020 and gap < GAP_OPEN
        # From far away the hand comes over what stands in front of the cabinet.
        above = min(0.5 * max(float(np.hypot(*error[:2])) - _STANDOFF, 0.0), _ARC)
        position = target - back * approach + (0.0, 0.0, above)
        return Command(position, orientation, CLOSE if is_there or is_closing else OPEN)

    def _outwards(self, data: mujoco.MjData) -> Float64[np.ndarray, " 3"]:
        outwards: Float64[np.ndarray, " 3"] = np.sign(self._open_end) * data.xaxis[self._joint]
        return outwards

    def _grasp(self, data: mujoco.MjData) -> tuple[Float64[np.ndarray, " 3"], Float64[np.ndarray, "3 3"]]:
        """Where the grip site should be (m, world) and how it should be turned: across the bar that is farthest out."""
        centres, rotations = self._boxes.poses(data)
        outwards = self._outwards(data)
        handle = int(np.argmax(centres @ outwards))
        bar = rotations[handle][:, int(np.argmax(self._boxes.halves[handle]))]
        approach = -math.sin(self._style.tilt) * outwards - np.array([0.0, 0.0, math.cos(self._style.tilt)])
        opening = np.cross(approach, bar)
        opening *= np.sign(opening @ self._hand.rotation(data)[:, 0]) or 1.0
        target = centres[handle] + self._style.taste.across * bar + 0.002 * approach
        return target, np.stack([opening, np.cross(approach, opening), approach], axis=1)
