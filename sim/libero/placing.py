"""Picking a thing and placing it where a goal wants it."""

from __future__ import annotations

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.libero.grasps import PALM
from sim.libero.motion import CLOSE, OPEN, Command, Hand, Style, subtree, travel
from sim.libero.picking import Picker, View
from sim.libero.predicates import InSitePredicate, OnObjectPredicate, OnSitePredicate
from sim.libero.shapes import HeightMap

PlacePredicate = InSitePredicate | OnObjectPredicate | OnSitePredicate

_TOLERANCE = 0.012
"""Horizontal distance (m) from the place within which the thing is let go."""
_RELEASE_HEIGHT = 0.005
"""Height (m) above the place at which it is let go."""
_DROP_HEIGHT = 0.015
"""How far above a region's top the origin of a thing is when it is let go, to fall in (m)."""
_PRESS = 0.006
"""The thing is lowered until it stands, to this depth below where it should (m)."""


class Placer(Picker):
    """Picks a thing and places it.

    Args:
        model: The compiled model.
        hand: The robot's.
        style: Of the demonstrator.
        goal: What is to be where.
    """

    def __init__(self, model: mujoco.MjModel, hand: Hand, style: Style, goal: PlacePredicate) -> None:
        super().__init__(model, hand, style, subtree(model, goal.body))
        self._goal = goal

    def command(self, data: mujoco.MjData) -> Command:
        """What to do in this state."""
        view, is_held = self.view(data), self.is_held(data)
        points, origin = self.points(data, view), data.xpos[self.body]
        error = self._place(data, points - origin, view.obstacles) - origin
        slack = 1.0 if is_held else 3.0  # what has been let go is not caught again
        if np.hypot(*error[:2]) < slack * _TOLERANCE and error[2] > -slack * _RELEASE_HEIGHT:
            leave = self._hand.position(data) + self._hand.leave(data, self.bodies)
            return Command(leave, self.orientation(data, view), OPEN)
        if is_held:
            return Command(self._carry(data, view, points, error), self.orientation(data, view), CLOSE)
        return self.reach(data)

    def way(
        self, data: mujoco.MjData, shape: Float64[np.ndarray, "points 3"], obstacles: HeightMap
    ) -> Float64[np.ndarray, " 3"]:
        """From where the thing is to its place."""
        way: Float64[np.ndarray, " 3"] = self._place(data, shape, obstacles) - data.xpos[self.body]
        return way

    def _carry(
        self,
        data: mujoco.MjData,
        view: View,
        points: Float64[np.ndarray, "points 3"],
        error: Float64[np.ndarray, " 3"],
    ) -> Float64[np.ndarray, " 3"]:
        """The next position on the way over obstacles to the place and down."""
        hand: Float64[np.ndarray, " 3"] = self._hand.position(data)
        if isinstance(self._goal, OnSitePredicate) and self._goal.contact is None:
            pushed: Float64[np.ndarray, " 3"] = hand + error  # to another part of the table it is not carried
            return pushed
        low, high = points.min(axis=0), points.max(axis=0)
        beside = 0.5 * (low + high)[:2] - hand[:2]

        def height_over(path: Float64[np.ndarray, "places 2"]) -> Float64[np.ndarray, " places"]:
            heights: Float64[np.ndarray, " places"] = view.near_object.at(path + beside) + hand[2] - low[2]
            highest: Float64[np.ndarray, " places"] = np.maximum(heights, view.near_hand.at(path) - PALM)
            return highest

        target = hand + error - (0.0, 0.0, _PRESS)
        return travel(hand, target, height_over, self._style.clearance, self._style.clearance)

    def _place(
        self, data: mujoco.MjData, shape: Float64[np.ndarray, "points 3"], obstacles: HeightMap
    ) -> Float64[np.ndarray, " 3"]:
        """Where the thing's origin is to be let go (m, world); `shape` is relative to it."""
        goal, offset = self._goal, np.array(self._style.place_offset)
        if isinstance(goal, OnObjectPredicate):
            xy = data.xpos[goal.other, :2] + 0.008 * offset
        else:
            axes = data.site_xmat[goal.site].reshape(3, 3)
            allowed = np.minimum(0.3 * np.array(goal.size[:2]), 0.015)
            xy = data.site_xpos[goal.site, :2] + (axes[:, :2] @ (allowed * offset))[:2]
            if isinstance(goal, InSitePredicate):
                top = data.site_xpos[goal.site, 2] + float(np.abs(axes[2] @ goal.size))
                return np.append(xy, top + _DROP_HEIGHT)
        return np.append(xy, (obstacles.at(xy + shape[:, :2]) - shape[:, 2]).max())
