"""Taking hold of a thing from above."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mujoco
import numpy as np
from jaxtyping import Float64, Int64

from sim.libero.grasps import FINGER_TIP, PALM, find_grasp
from sim.libero.motion import CLOSE, GAP_EMPTY, GAP_OPEN, OPEN, Command, Hand, Style, stretch, travel, yaw_of
from sim.libero.shapes import Boxes, HeightMap, collision_geoms
from sim.tabletop.placement import pointing_down

_REACH_LOW, _REACH_HIGH = (-0.55, -0.50), (0.35, 0.50)
"""Ends of the area (x and y in m, world) that the arm works in."""
FINGERS_RADIUS, HAND_RADIUS = 0.065, 0.105
"""Of circles around the grip site that hold the opened fingers and the hand (m)."""
_STRETCH, _STRETCH_COST = 0.66, 3.0
"""Distance from shoulder to wrist (m) that is comfortable, and what each metre more costs."""
_SLACK = 0.008
"""How much wider than what they hold the gap between the fingers may be (m)."""
_STRAY = 0.03
"""An object at rest that lies farther than this (m) from where it was last looked at is looked at again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What was seen when the object was last looked at.

    Attributes:
        position: Of the object then (m, world).
        shape: Points that fill the object, in its frame (m).
        obstacles: Heights of everything but the object and the robot.
        near_object: The same, widened by the object's radius.
        near_fingers: The same, widened by that of the opened fingers.
        near_hand: The same, widened by the hand's.
        site: Grip site of the chosen grasp in the object's frame (m).
        opening: Opening direction of the grasp in the object's frame.
        middle: Where along it the middle of what is between the fingers is (m).
        width: Of what is between the fingers (m).
    """

    position: Float64[np.ndarray, " 3"]
    shape: Float64[np.ndarray, "points 3"]
    obstacles: HeightMap
    near_object: HeightMap
    near_fingers: HeightMap
    near_hand: HeightMap
    site: Float64[np.ndarray, " 3"]
    opening: Float64[np.ndarray, " 3"]
    middle: float
    width: float


def look_around(
    model: mujoco.MjModel, data: mujoco.MjData, hand: Hand, bodies: Int64[np.ndarray, " bodies"]
) -> HeightMap:
    """Heights of everything but some bodies and the robot."""
    is_other = (model.body_rootid != hand.base) & ~np.isin(np.arange(model.nbody), bodies)
    boxes = Boxes.of(model, collision_geoms(model, np.flatnonzero(is_other)))
    return HeightMap.of(boxes, data, _REACH_LOW, _REACH_HIGH, floor=0.0)


class Picker:
    """Takes hold of one thing; what is done with it then is up to a subclass.

    Args:
        model: The compiled model.
        hand: The robot's.
        style: Of the demonstrator.
        bodies: The thing: the body that moves by itself first, then those fixed to it.
    """

    def __init__(self, model: mujoco.MjModel, hand: Hand, style: Style, bodies: Int64[np.ndarray, " bodies"]) -> None:
        self._model, self._hand, self._style, self._taste = model, hand, style, style.taste
        self.bodies, self.body = bodies, int(bodies[0])
        self._first_dof = int(model.body_dofadr[self.body])
        self._boxes = Boxes.of(model, collision_geoms(model, bodies))
        self._view: View | None = None

    def way(
        self, data: mujoco.MjData, shape: Float64[np.ndarray, "points 3"], obstacles: HeightMap
    ) -> Float64[np.ndarray, " 3"]:
        """How far the thing is going to be carried (m): the arm must be able to reach there with the same grasp."""
        return np.zeros(3)

    def view(self, data: mujoco.MjData) -> View:
        """What was seen last; looks now if nothing was."""
        return self._look(data) if self._view is None else self._view

    def is_held(self, data: mujoco.MjData) -> bool:
        """Both fingers touch the thing and are as close together as its shape lets them be."""
        return self._hand.gap(data) < self.view(data).width + _SLACK and all(self._hand.touching(data, self.bodies))

    def orientation(self, data: mujoco.MjData, view: View) -> Float64[np.ndarray, "3 3"]:
        """Of a vertical hand in this grasp."""
        return pointing_down(yaw_of(data.xmat[self.body].reshape(3, 3) @ view.opening))

    def points(self, data: mujoco.MjData, view: View) -> Float64[np.ndarray, "points 3"]:
        """Points that fill the thing where it is now (m, world)."""
        points: Float64[np.ndarray, "points 3"] = (
            data.xpos[self.body] + view.shape @ data.xmat[self.body].reshape(3, 3).T
        )
        return points

    def reach(self, data: mujoco.MjData) -> Command:
        """Come down onto the thing; close once the fingers are around it."""
        view = self.view(data)
        if np.linalg.norm(data.xpos[self.body] - view.position) > _STRAY and self._is_at_rest(data):
            view = self._look(data)
        hand, rotation = self._hand.position(data), data.xmat[self.body].reshape(3, 3)
        gap = self._hand.gap(data)
        # While the fingers close, the hand gives way to what they find, so that both arrive at the same time.
        share = 1.0 - min(gap / GAP_OPEN, 1.0)
        target = data.xpos[self.body] + rotation @ (view.site + share * view.middle * view.opening)
        distance, height = float(np.hypot(*(target - hand)[:2])), abs(float(target[2] - hand[2]))
        turn = math.remainder(yaw_of(rotation @ view.opening) - yaw_of(self._hand.rotation(data)[:, 0]), math.pi)
        is_there = distance < 0.008 and height < 0.006 and abs(turn) < 0.12
        is_closing = distance < 0.015 and height < 0.012 and gap < GAP_OPEN
        if is_closing and gap < GAP_EMPTY:  # closed on nothing: like another side from now on
            self._taste = replace(
                self._taste, direction=self._taste.direction + 2.4, strength=self._taste.strength + 0.01
            )
            self._view = None
        top = float(self.points(data, view)[:, 2].max())
        hover = max(top + FINGER_TIP + 0.01 - float(target[2]), self._style.clearance)

        def height_over(path: Float64[np.ndarray, "places 2"]) -> Float64[np.ndarray, " places"]:
            return np.maximum(view.near_fingers.at(path) + FINGER_TIP, view.near_hand.at(path) - PALM)

        position = travel(hand, target, height_over, hover, self._style.clearance)
        return Command(position, self.orientation(data, view), CLOSE if is_there or is_closing else OPEN)

    def _look(self, data: mujoco.MjData) -> View:
        """Look around and choose a grasp."""
        position, rotation = data.xpos[self.body].copy(), data.xmat[self.body].reshape(3, 3)
        points = self._boxes.points(data)
        obstacles = look_around(self._model, data, self._hand, self.bodies)
        way = self.way(data, points - position, obstacles)
        base = data.xpos[self._hand.base]

        def strain(sites: Float64[np.ndarray, "grasps 3"]) -> Float64[np.ndarray, " grasps"]:
            here, there = (np.maximum(stretch(sites + shift, base) - _STRETCH, 0.0) for shift in (0.0 * way, way))
            cost: Float64[np.ndarray, " grasps"] = _STRETCH_COST * (here + there)
            return cost

        grasp = find_grasp(points, obstacles, self._taste, strain)
        radius = float(np.hypot(*(points.max(axis=0) - points.min(axis=0))[:2])) / 2
        self._view = View(
            position=position,
            shape=(points - position) @ rotation,
            obstacles=obstacles,
            near_object=obstacles.widened(radius),
            near_fingers=obstacles.widened(FINGERS_RADIUS),
            near_hand=obstacles.widened(HAND_RADIUS),
            site=rotation.T @ (grasp.position - position),
            opening=rotation.T @ (-math.sin(grasp.yaw), math.cos(grasp.yaw), 0.0),
            middle=grasp.middle,
            width=grasp.width,
        )
        return self._view

    def _is_at_rest(self, data: mujoco.MjData) -> bool:
        return float(np.linalg.norm(data.qvel[self._first_dof :][:3])) < 0.02
