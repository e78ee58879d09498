"""Where to take hold of a thing: the best of some thousand grasps from above, judged by shape and by what is around.

A bowl is wider than the hand opens, so only its wall fits between the fingers; a carton is taken across its narrow
side; a bottle by its cap. None of this is told by kind: a grasp is good if something not too wide is between the
fingers, if the fingers and the hand touch nothing on the way down, and if the sides are upright.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64

from sim.libero.shapes import HeightMap

# The Panda hand (m), seen from the grip site: the fingers open along its first axis; heights are counted upwards.
OPENING = 0.038
"""Half the distance between the opened pads."""
FINGER_TIP = 0.0095
"""How far the fingers reach below the site."""
PALM = 0.031
"""How far above the site the hand begins."""
HAND_HALF_WIDTH, HAND_HALF_DEPTH = 0.104, 0.022
WRIST, WRIST_HALF_WIDTH, WRIST_DEPTHS = 0.15, 0.055, (-0.136, 0.045)
"""The arm's last but one link: how far above, along the opening direction, and across it."""
_FINGER_OUTSIDE, _FINGER_HALF_DEPTH = 0.060, 0.011
_PAD_HALF_DEPTH, _PAD_BELOW, _PAD_ABOVE = 0.008, 0.004, 0.0115

_WIDEST = 0.068
_NUM_YAWS = 16
_ALONG = np.arange(-0.060, 0.0601, 0.005)
_MARGIN = 0.004
_DEPTHS = (0.014, 0.020, 0.026)
_FIRM = 10
"""Points of the object's lattice that each pad presses on in a firm grasp."""
_COLLISION_COST, _SHAKY_COST, _HOOK_COST, _MISS_COST = 0.02, 0.01, 0.01, 10.0


@dataclass(frozen=True, kw_only=True)
class Taste:
    """What one demonstrator likes; drawn once per episode.

    Attributes:
        direction: Side of the object (rad, world) that is preferred, where several are as good.
        strength: What the opposite side costs, in metres of width.
        depth: How far below the top of the object the pads close (m).
        across: How far beside its middle, across the opening direction (m).
    """

    direction: float
    strength: float
    depth: float
    across: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Taste:
        """A random taste."""
        return cls(
            direction=float(rng.uniform(-math.pi, math.pi)),
            strength=float(rng.uniform(0.0, 0.01)),
            depth=float(rng.uniform(0.014, 0.026)),
            across=float(rng.uniform(-0.008, 0.008)),
        )


@dataclass(frozen=True, kw_only=True)
class Grasp:
    """Pose of the grip site, vertical: position (m, world) and yaw (rad) of the opening direction minus a quarter turn.

    Attributes:
        position: Of the site.
        yaw: In the sense of `sim.tabletop.placement.pointing_down`, in [-pi/2, pi/2].
        middle: Where along the opening direction the middle of what is between the pads is, seen from the site (m).
        width: Of what is between the pads (m).
    """

    position: Float64[np.ndarray, " 3"]
    yaw: float
    middle: float
    width: float


def find_grasp(
    points: Float64[np.ndarray, "points 3"],
    obstacles: HeightMap,
    taste: Taste,
    extra_cost: Callable[[Float64[np.ndarray, "grasps 3"]], Float64[np.ndarray, " grasps"]],
) -> Grasp:
    """The grasp that costs least, all costs in metres of width between the fingers.

    Args:
        points: The object (m, world).
        obstacles: Everything else.
        taste: What this demonstrator likes.
        extra_cost: What grip sites (m, world) cost for reasons of the caller.
    """
    best, lowest_cost = None, math.inf
    for depth in _DEPTHS:
        z = max(points[:, 2].max() - depth, points[:, 2].min() + FINGER_TIP + 0.002)
        yaws, positions = _candidates(points, z, taste.across)
        along = np.stack([-np.sin(yaws), np.cos(yaws)], axis=1)  # opening direction
        across = np.stack([np.cos(yaws), np.sin(yaws)], axis=1)
        reachable = points[points[:, 2] > z - FINGER_TIP - _MARGIN]
        offsets = reachable[None, :, :2] - positions[:, None]
        u, v = ((offsets @ axes[:, :, None])[..., 0] for axes in (along, across))
        cost, first, last = _shape_cost(u, v, reachable[:, 2] - z)
        cost += _COLLISION_COST * _num_collisions(positions, along, across, z, obstacles)
        beside = positions - points[:, :2].mean(axis=0)
        cost += 0.5 * np.hypot(*beside.T)
        cost += 0.008 * (yaws / (math.pi / 2)) ** 2  # turning the hand takes time
        cost -= taste.strength * (beside @ (math.cos(taste.direction), math.sin(taste.direction))) / 0.05
        cost += 0.5 * abs(depth - taste.depth)
        sites = np.column_stack([positions, np.full(len(positions), z)])
        cost += extra_cost(sites)
        index = int(np.argmin(cost))
        if best is None or cost[index] < lowest_cost:
            lowest_cost = float(cost[index])
            best = Grasp(
                position=sites[index],
                yaw=float(yaws[index]),
                middle=0.5 * float(first[index] + last[index]),
                width=float(last[index] - first[index]),
            )
    assert best is not None
    return best


def _candidates(
    points: Float64[np.ndarray, "points 3"], z: float, across: float
) -> tuple[Float64[np.ndarray, " grasps"], Float64[np.ndarray, "grasps 2"]]:
    """Yaws, and horizontal positions on a line near the middle of the part that the pads reach."""
    slab = points[np.abs(points[:, 2] - z) < 0.012, :2]
    middle = 0.5 * (slab.min(axis=0) + slab.max(axis=0))
    choices = -math.pi / 2 + math.pi / _NUM_YAWS * np.arange(_NUM_YAWS)
    yaws, along = (grid.ravel() for grid in np.meshgrid(choices, _ALONG, indexing="ij"))
    x = middle[0] - along * np.sin(yaws) + across * np.cos(yaws)
    y = middle[1] + along * np.cos(yaws) + across * np.sin(yaws)
    return yaws, np.stack([x, y], axis=1)


def _shape_cost(
    u: Float64[np.ndarray, "grasps points"], v: Float64[np.ndarray, "grasps points"], z: Float64[np.ndarray, " points"]
) -> tuple[Float64[np.ndarray, " grasps"], Float64[np.ndarray, " grasps"], Float64[np.ndarray, " grasps"]]:
    """Cost of width, slope, loose contact and collisions; and where what is between the pads begins and ends (m)."""
    is_beside = (np.abs(u) > OPENING - _MARGIN) & (np.abs(u) < _FINGER_OUTSIDE)
    hits_finger = is_beside & (np.abs(v) < _FINGER_HALF_DEPTH + _MARGIN)
    is_high = z > PALM - 0.002
    hits_hand = is_high & (np.abs(u) < HAND_HALF_WIDTH) & (np.abs(v) < HAND_HALF_DEPTH)
    is_between = (np.abs(u) < OPENING - _MARGIN) & (np.abs(v) < _PAD_HALF_DEPTH)
    upper, lower = is_between & (z > 0.0035) & (z < _PAD_ABOVE), is_between & (z <= 0.0035) & (z > -_PAD_BELOW)
    first, last = _extent(u, upper | lower)
    slope = sum(np.abs(a - b) for a, b in zip(_extent(u, upper), _extent(u, lower), strict=True))
    both = upper.any(axis=1) & lower.any(axis=1)
    width = last - first
    cost = width + 0.5 * np.abs(first + last) + 0.5 * np.where(both, slope, 0.02)
    cost += _COLLISION_COST * ((hits_finger | hits_hand).sum(axis=1) > 0)
    cost += 0.001 * (hits_finger | hits_hand).sum(axis=1)
    for is_face in (u < first[:, None] + 0.003, u > last[:, None] - 0.003):
        num_pressed = (is_face & (upper | lower)).sum(axis=1)
        cost += _SHAKY_COST * (1.0 - np.minimum(num_pressed / _FIRM, 1.0))
        is_over_pad = is_face & (np.abs(v) < 1.5 * _PAD_HALF_DEPTH) & (z > _PAD_ABOVE) & (z < _PAD_ABOVE + 0.008)
        has_contact_below = (is_face & upper & (z > _PAD_ABOVE - 0.005)).any(axis=1)
        cost += _HOOK_COST * (is_over_pad.any(axis=1) & ~has_contact_below)
    cost[~(upper | lower).any(axis=1) | (width > _WIDEST)] = _MISS_COST
    return cost, first, last


def _extent(
    u: Float64[np.ndarray, "grasps points"], mask: Bool[np.ndarray, "grasps points"]
) -> tuple[Float64[np.ndarray, " grasps"], Float64[np.ndarray, " grasps"]]:
    """Smallest and largest of the masked entries of each row; 0 where there are none."""
    first, last = np.where(mask, u, np.inf).min(axis=1), np.where(mask, u, -np.inf).max(axis=1)
    is_empty = ~mask.any(axis=1)
    return np.where(is_empty, 0.0, first), np.where(is_empty, 0.0, last)


def _num_collisions(
    positions: Float64[np.ndarray, "grasps 2"],
    along: Float64[np.ndarray, "grasps 2"],
    across: Float64[np.ndarray, "grasps 2"],
    z: float,
    obstacles: HeightMap,
) -> Float64[np.ndarray, " grasps"]:
    """How many of some places under the fingers and the hand are too high."""
    sides = np.linspace(OPENING - _MARGIN, _FINGER_OUTSIDE + _MARGIN, 6)
    finger = _footprint(np.concatenate([-sides, sides]), np.array([-_FINGER_HALF_DEPTH, 0.0, _FINGER_HALF_DEPTH]))
    hand = _footprint(
        np.linspace(-HAND_HALF_WIDTH, HAND_HALF_WIDTH, 21), np.linspace(-HAND_HALF_DEPTH, HAND_HALF_DEPTH, 5)
    )
    wrist = _footprint(np.linspace(-WRIST_HALF_WIDTH, WRIST_HALF_WIDTH, 5), np.linspace(*WRIST_DEPTHS, 8))
    total = np.zeros(len(positions))
    for footprint, height in ((finger, z - FINGER_TIP), (hand, z + PALM), (wrist, z + WRIST)):
        places = positions[:, None] + footprint[:, 0, None] * along[:, None] + footprint[:, 1, None] * across[:, None]
        total += (obstacles.at(places) > height - _MARGIN / 2).sum(axis=1)
    return total


def _footprint(u: Float64[np.ndarray, " u"], v: Float64[np.ndarray, " v"]) -> Float64[np.ndarray, "places 2"]:
    return np.stack(np.meshgrid(u, v, indexing="ij"), axis=-1).reshape(-1, 2)
