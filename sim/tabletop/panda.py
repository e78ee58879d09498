"""A Franka Panda drawn with primitives: kinematics, inertias and motors from the installed robosuite package.

Drawing the meshes of robosuite's own Panda (about 200,000 faces) in software takes tens of milliseconds. Here each mesh
is replaced by a few boxes, cylinders and capsules in the link's frame: the same arm in a fraction of a millisecond.
Body, joint, site, actuator and camera names are those of robosuite ("robot0_joint1", "gripper0_grip_site", ...), so one
controller drives both.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mujoco
import numpy as np
from jaxtyping import Float64

HOME_QPOS: Float64[np.ndarray, " arm"] = np.array(
    [0.0, np.pi / 16, 0.0, -np.pi / 2 - np.pi / 3, 0.0, np.pi - 0.2, np.pi / 4], dtype=np.float64
)
"""Arm joints (rad) of robosuite's Panda at rest: the gripper points down (but for 7 degrees), 0.2 m above the table."""

_WHITE = (0.93, 0.94, 0.95, 1.0)
_DARK = (0.16, 0.17, 0.19, 1.0)
_BLACK = (0.08, 0.08, 0.09, 1.0)


@dataclass(frozen=True)
class _Part:
    """One primitive of a link; `a` and `b` are its ends (capsule, cylinder) or centre and half sizes (box); metres."""

    body: str
    shape: Literal["capsule", "cylinder", "box"]
    a: tuple[float, float, float]
    b: tuple[float, float, float]
    radius: float = 0.0
    rgba: tuple[float, float, float, float] = _WHITE
    collides: bool = False


# Dimensions follow the bounding boxes of robosuite's link meshes. Only what can reach the table or an object collides:
# forearm, wrist, hand and fingers; the other links cannot get there with the gripper pointing down.
_ARM_PARTS = (
    _Part("link0", "cylinder", (0.0, 0.0, 0.0), (0.0, 0.0, 0.14), 0.075),
    _Part("link0", "box", (-0.08, 0.0, 0.05), (0.07, 0.075, 0.05)),
    _Part("link1", "cylinder", (0.0, 0.0, -0.192), (0.0, 0.0, -0.17), 0.060, _DARK),
    _Part("link1", "capsule", (0.0, 0.0, -0.15), (0.0, 0.0, 0.0), 0.058),
    _Part("link2", "cylinder", (0.0, 0.0, -0.070), (0.0, 0.0, 0.070), 0.056, _DARK),
    _Part("link2", "capsule", (0.0, 0.0, 0.0), (0.0, -0.15, 0.0), 0.056),
    _Part("link3", "cylinder", (0.0, 0.0, -0.115), (0.0, 0.0, -0.095), 0.059, _DARK),
    _Part("link3", "capsule", (0.0, 0.0, -0.085), (0.0825, 0.0, 0.0), 0.056),
    _Part("link4", "cylinder", (0.0, 0.0, -0.066), (0.0, 0.0, 0.066), 0.056, _DARK),
    _Part("link4", "capsule", (0.0, 0.0, 0.0), (-0.0825, 0.09, 0.0), 0.056),
    _Part("link5", "cylinder", (0.0, 0.0, -0.26), (0.0, 0.0, -0.24), 0.059, _DARK),
    _Part("link5", "capsule", (0.0, 0.0, -0.22), (0.0, 0.05, -0.07), 0.054),
    _Part("link5", "capsule", (0.0, 0.06, -0.09), (0.0, 0.05, 0.0), 0.050, _WHITE, True),
    _Part("link6", "cylinder", (0.0, 0.0, -0.046), (0.0, 0.0, 0.058), 0.050, _DARK),
    _Part("link6", "capsule", (0.0, 0.0, 0.01), (0.088, 0.0, 0.02), 0.046, _WHITE, True),
    _Part("link7", "cylinder", (0.0, 0.0, 0.05), (0.0, 0.0, 0.107), 0.044, _DARK),
)
_GRIPPER_PARTS = (
    _Part("right_gripper", "box", (0.0, 0.0, 0.035), (0.1, 0.020, 0.031), 0.0, _WHITE, True),
    _Part("leftfinger", "box", (0.0, 0.0095, 0.027), (0.0095, 0.0060, 0.0268), 0.0, _BLACK, True),
    _Part("rightfinger", "box", (0.0, -0.0095, 0.027), (0.0095, 0.0060, 0.0268), 0.0, _BLACK, True),
)


ROBOT_CONTACT = {"contype": 1, "conaffinity": 2}
"""Contact bits of the robot: it touches the scene, never itself (joint limits keep the fingers apart)."""

SCENE_CONTACT = {"contype": 2, "conaffinity": 3}
"""Contact bits of table and objects: they touch each other and the robot."""

_NO_CONTACT = {"contype": 0, "conaffinity": 0}


def assets_folder() -> Path:
    """Folder of the installed robosuite's model files; robosuite itself is not imported (its import is slow and logs).

    Raises:
        ValueError: robosuite is not installed.
    """
    spec = importlib.util.find_spec("robosuite")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the Panda's model comes from robosuite, which is not installed: pip install robosuite==1.4.0")
    return Path(spec.submodule_search_locations[0]) / "models" / "assets"


def add_panda(spec: mujoco.MjSpec, base_pos: tuple[float, float, float]) -> None:
    """Attach the arm and its gripper to a scene.

    Args:
        spec: The scene; changed in place.
        base_pos: Position of the arm's base in the world (m); the arm looks along +x.
    """
    assets = assets_folder()
    arm = _load(assets / "robots" / "panda" / "robot.xml", _ARM_PARTS)
    spec.attach(arm, prefix="robot0_", frame=spec.worldbody.add_frame(pos=base_pos))
    gripper = _load(assets / "grippers" / "panda_gripper.xml", _GRIPPER_PARTS)
    spec.attach(gripper, prefix="gripper0_", frame=spec.body("robot0_right_hand").add_frame())


def _load(path: Path, parts: tuple[_Part, ...]) -> mujoco.MjSpec:
    """Read a robosuite model, drop its meshes, markers and force sensors, and draw the parts instead."""
    spec = mujoco.MjSpec.from_file(str(path))
    spec.compiler.degree = False  # robosuite sets radians in the file that it merges all others into
    for geom in [geom for geom in spec.geoms if geom.type == mujoco.mjtGeom.mjGEOM_MESH]:
        geom.delete()
    for element in [*spec.meshes, *spec.materials, *spec.sensors]:
        element.delete()
    for site in [site for site in spec.sites if site.name != "grip_site"]:
        site.delete()
    for pad in spec.geoms:  # what is left: the finger pads
        pad.contype, pad.conaffinity = ROBOT_CONTACT["contype"], ROBOT_CONTACT["conaffinity"]
        pad.condim = 4  # torsional friction, which robosuite's objects bring along
    for part in parts:
        _add_part(spec.body(part.body), part)
    return spec


def _add_part(body: mujoco.MjsBody, part: _Part) -> None:
    """Add one primitive. Inertia stays robosuite's: every body that moves has its own explicitly."""
    contact = ROBOT_CONTACT if part.collides else _NO_CONTACT
    geom = body.add_geom(rgba=part.rgba, group=1, mass=0.0, **contact)
    match part.shape:
        case "box":
            geom.type, geom.pos, geom.size = mujoco.mjtGeom.mjGEOM_BOX, part.a, part.b
        case "capsule" | "cylinder":
            kinds = {"capsule": mujoco.mjtGeom.mjGEOM_CAPSULE, "cylinder": mujoco.mjtGeom.mjGEOM_CYLINDER}
            geom.type, geom.size = kinds[part.shape], (part.radius, 0.0, 0.0)
            geom.fromto = (*part.a, *part.b)
