"""A scripted expert for every family, in closed loop on the true poses: it can be asked anywhere on a noisy path.

The action depends on the present state alone (and on a style drawn once per episode): whether the object is held, how
far the gripper is from where it should be. There is no phase counter that could be out of step: if the object slips
away, the expert opens the fingers, goes back and tries again. That is what DART needs: the action plus noise is
executed, the action is stored.

Reference: M. Laskey et al., "DART: Noise Injection for Robust Imitation Learning", arXiv 1703.09327.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.tabletop.objects import BOX_HEIGHT, HALF_SIZE, PLATE_HEIGHT
from sim.tabletop.placement import pointing_down, rotation_between
from sim.tabletop.scene import TABLE_HEIGHT
from sim.tabletop.task_scene import TabletopScene
from sim.tabletop.tasks import RELEASE_GAP

OPEN, CLOSE = -1.0, 1.0

_ROTATION_DEADBAND = 0.06
"""A smaller error (rad) is left to the controller, which holds the last goal: nobody corrects three degrees."""
_PUSH_HEIGHT = TABLE_HEIGHT + 0.022
_PUSHER_DEPTH = 0.0095
"""Half the depth of the closed fingers (m)."""

_PLACE_TOLERANCE = {"put_on": 0.020, "put_in": 0.018, "stack": 0.013}
"""How far (m) from the ideal place an object may be let go."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How this demonstrator moves; drawn once per episode.

    Attributes:
        speed: Largest translation action.
        gain: Action per metre of error, in units of the controller's 0.05 m.
        grasp_offset: Where the fingers close relative to the object's centre (m, world).
        place_offset: Where the object is put relative to the ideal place (m, world x and y).
        clearance: Height above the grasp or the resting place at which the hand travels (m).
    """

    speed: float
    gain: float
    grasp_offset: tuple[float, float, float]
    place_offset: tuple[float, float]
    clearance: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Style:
        """A random demonstrator."""
        x, y, z = rng.uniform(-1.0, 1.0, 3).tolist()
        place_x, place_y = (rng.uniform(-1.0, 1.0, 2) * 0.006).tolist()
        return cls(
            speed=float(rng.uniform(0.85, 1.0)),
            gain=float(rng.uniform(1.4, 1.8)),
            grasp_offset=(0.004 * x, 0.004 * y, 0.004 * z),
            place_offset=(place_x, place_y),
            clearance=float(rng.uniform(0.050, 0.070)),
        )


@dataclass(frozen=True)
class _Command:
    """Where the grip site should go (m, world), the yaw of the fingers (rad) and the gripper action."""

    position: tuple[float, float, float]
    yaw: float
    gripper: float


class ScriptedExpert:
    """Solves one task from privileged state.

    Args:
        scene: The task in its scene (`TabletopSuite.scene(start.task)`).
        rng: Source of the style; one expert per episode gives varied demonstrations.
    """

    def __init__(self, scene: TabletopScene, rng: np.random.Generator) -> None:
        self.style = Style.draw(rng)
        self._family = scene.task.family
        model = scene.model.mj_model
        self._item = model.body(scene.task.item).id
        self._place = model.body(scene.task.place).id if scene.task.place else -1
        self._tolerance = _PLACE_TOLERANCE.get(self._family, 0.0)
        self._is_round = scene.task.item.endswith("cylinder")
        self._grip = scene.model.grip_site
        self._fingers = scene.model.gripper_qpos
        self._position_max = scene.model.osc.position_max_m
        self._rotation_max = scene.model.osc.rotation_max_rad

    def act(self, data: mujoco.MjData) -> Float64[np.ndarray, " action_dim"]:
        """The action for this state, each entry in [-1, 1]."""
        command = self._push(data) if self._family == "push_to" else self._pick_and_place(data)
        return self._towards(data, command)

    def _pick_and_place(self, data: mujoco.MjData) -> _Command:
        item, grip = data.xpos[self._item].tolist(), data.site_xpos[self._grip].tolist()
        gap = float(data.qpos[self._fingers[0]] - data.qpos[self._fingers[1]])
        offset = [g - i for g, i in zip(grip, item, strict=True)]
        is_between = math.hypot(offset[0], offset[1]) < 0.014 and abs(offset[2]) < 0.014
        if self._family != "pick_up" and self._is_placed(data, item):
            rise = 0.05 if gap > RELEASE_GAP else 0.0
            return _Command((grip[0], grip[1], grip[2] + rise), 0.0, OPEN)
        if is_between and gap < 2 * HALF_SIZE + 0.002:
            return self._carry(data, item, offset)
        return self._reach(data, item, grip, is_between and gap < 0.076)

    def _reach(self, data: mujoco.MjData, item: list[float], grip: list[float], is_closing: bool) -> _Command:
        """Come down onto the object through a funnel; close once the fingers are around it."""
        x, y, z = (i + o for i, o in zip(item, self.style.grasp_offset, strict=True))
        distance = math.hypot(x - grip[0], y - grip[1])
        yaw = 0.0 if self._is_round else _quarter_turn(data.xmat[self._item])
        is_there = distance < 0.011 and abs(z - grip[2]) < 0.010
        return _Command((x, y, z + self._funnel(distance)), yaw, CLOSE if is_there or is_closing else OPEN)

    def _carry(self, data: mujoco.MjData, item: list[float], offset: list[float]) -> _Command:
        """The object is held: lift it, or bring it over its place and down."""
        if self._family == "pick_up":
            return _Command((item[0] + offset[0], item[1] + offset[1], item[2] + 0.12), 0.0, CLOSE)
        x, y, z = self._goal(data)
        distance = math.hypot(x - item[0], y - item[1])
        height = z + self._funnel(distance)
        is_down = distance < 0.7 * self._tolerance and item[2] - z < 0.005
        return _Command((x + offset[0], y + offset[1], height + offset[2]), 0.0, OPEN if is_down else CLOSE)

    def _goal(self, data: mujoco.MjData) -> tuple[float, float, float]:
        """Where the object's centre is to be let go."""
        x, y, z = data.xpos[self._place].tolist()
        match self._family:
            case "put_on":
                height = PLATE_HEIGHT + HALF_SIZE
            case "put_in":
                height = BOX_HEIGHT + 0.012  # the fingers stay above the rim
            case _:
                height = 2 * HALF_SIZE
        return x + self.style.place_offset[0], y + self.style.place_offset[1], z + height

    def _is_placed(self, data: mujoco.MjData, item: list[float]) -> bool:
        """The object is so close to its final rest that the fingers may let go, or have done so."""
        x, y, z = self._goal(data)
        return math.hypot(x - item[0], y - item[1]) < self._tolerance and item[2] - z < 0.005

    def _funnel(self, distance: float) -> float:
        """Height above the goal for a horizontal distance to it: down only when nearly above it."""
        return min(max(2.5 * (distance - 0.010), 0.0), self.style.clearance)

    def _push(self, data: mujoco.MjData) -> _Command:
        """Get behind the object, seen from the target, and push along the line between them."""
        item, target, grip = data.xpos[self._item], data.xpos[self._place], data.site_xpos[self._grip]
        line = (target - item)[:2]
        direction = line / max(float(np.hypot(*line)), 1e-6)
        relative = (grip - item)[:2]
        along = float(relative @ direction)
        across = float(relative[1] * direction[0] - relative[0] * direction[1])
        is_behind = along < -HALF_SIZE and abs(across) < 0.014
        if is_behind and grip[2] < _PUSH_HEIGHT + 0.012:
            normal = np.array([-direction[1], direction[0]])
            x, y = grip[:2] + 0.04 * direction - 1.5 * across * normal
            return _Command((float(x), float(y), _PUSH_HEIGHT), 0.0, CLOSE)
        if not is_behind and float(np.hypot(*relative)) < 0.045 and grip[2] < _PUSH_HEIGHT + 0.035:
            # Beside the object and too close: move off it before going round, or the fingers drag it along.
            x, y = grip[:2] + 0.03 * relative / float(np.hypot(*relative))
            return _Command((float(x), float(y), _PUSH_HEIGHT + self.style.clearance), 0.0, CLOSE)
        behind = item[:2] - direction * (HALF_SIZE + _PUSHER_DEPTH + 0.015)
        height = _PUSH_HEIGHT + self._funnel(float(np.hypot(*(behind - grip[:2]))))
        return _Command((float(behind[0]), float(behind[1]), height), 0.0, CLOSE)

    def _towards(self, data: mujoco.MjData, command: _Command) -> Float64[np.ndarray, " action_dim"]:
        """The action that moves the gripper towards a command: proportional, limited, fingers kept vertical."""
        style = self.style
        error = np.array(command.position) - data.site_xpos[self._grip]
        current = data.site_xmat[self._grip].reshape(3, 3)
        rotation = rotation_between(current, pointing_down(command.yaw))
        action = np.empty(7)
        action[:3] = np.clip(style.gain * error / self._position_max, -style.speed, style.speed)
        action[3:6] = 0.0
        if np.linalg.norm(rotation) > _ROTATION_DEADBAND:
            action[3:6] = np.clip(rotation / self._rotation_max, -style.speed, style.speed)
        action[6] = command.gripper
        return action


def _quarter_turn(rotation: Float64[np.ndarray, " nine"]) -> float:
    """Yaw of a cube modulo a quarter turn, in [-pi/4, pi/4]."""
    axis = 0 if abs(rotation[6]) < 0.7 else 1  # a side that is not vertical, whichever face the cube stands on
    yaw = math.atan2(rotation[3 + axis], rotation[axis])
    return yaw - math.pi / 2 * round(yaw / (math.pi / 2))
