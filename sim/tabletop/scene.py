"""Builds the model of a tabletop scene: table, Panda, cameras, light and objects. Lengths in metres, world frame.

The world's origin lies on the floor below the centre of the table; x points away from the robot, z up.
"""

from __future__ import annotations

from typing import Final

import mujoco
import numpy as np

from sim.tabletop.objects import add_object, parse_object
from sim.tabletop.panda import SCENE_CONTACT, add_panda

TABLE_HEIGHT = 0.8
TABLE_HALF_SIZE = (0.30, 0.40)
ROBOT_BASE = (-0.56, 0.0, 0.912)
"""Table top and base as in robosuite's Lift, so that the arm's home pose is the same 0.2 m above the table."""

TIMESTEP_S = 0.005
"""Physics step; robosuite uses 2 ms. Ten of these make a control step of 20 Hz."""

CONTROL_RATE_HZ = 20.0

AGENTVIEW: Final = "agentview"

_AGENTVIEW_POS = (0.72, 0.0, 1.38)
_AGENTVIEW_PITCH_DEG = 30.5
_AGENTVIEW_FOVY_DEG = 30.0
"""Framed so that the placement area fills the width of the picture and the hand stays in it 0.2 m above the table."""

_WALL_RGBA = (0.55, 0.66, 0.74, 1.0)
_TABLE_RGBA = (0.62, 0.58, 0.52, 1.0)
_FLOOR_RGBA = (0.30, 0.33, 0.36, 1.0)
_PEDESTAL_RGBA = (0.38, 0.42, 0.46, 1.0)


def build_scene(objects: tuple[str, ...]) -> mujoco.MjSpec:
    """A scene with these objects, all at the centre of the table until a start places them.

    Args:
        objects: Names as `parse_object` understands them; their order fixes the layout of qpos and mocap_pos.

    Returns:
        An uncompiled specification.
    """
    spec = mujoco.MjSpec()
    spec.modelname = "tabletop"
    _set_options(spec)
    _add_room(spec)
    add_panda(spec, ROBOT_BASE)
    _add_cameras(spec)
    for name in objects:
        add_object(spec, parse_object(name), TABLE_HEIGHT)
    return spec


def _set_options(spec: mujoco.MjSpec) -> None:
    """Contacts as in robosuite (elliptic cones, impratio 20), and few facets: software GL pays for every vertex."""
    spec.option.timestep = TIMESTEP_S
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = 20.0
    spec.option.enableflags |= mujoco.mjtEnableBit.mjENBL_MULTICCD  # else a cylinder stands on one point and wobbles
    spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_MIDPHASE  # same contacts; faster with few geoms per body
    spec.visual.quality.numslices = 16
    spec.visual.quality.numstacks = 6
    spec.visual.quality.numquads = 1
    spec.visual.quality.offsamples = 0
    spec.visual.quality.shadowsize = 0
    spec.visual.map.znear = 0.02
    spec.visual.map.zfar = 5.0
    spec.visual.headlight.ambient = (0.45, 0.45, 0.45)
    spec.visual.headlight.diffuse = (0.25, 0.25, 0.25)
    spec.visual.headlight.specular = (0.0, 0.0, 0.0)
    spec.stat.extent = 1.0
    spec.stat.center = (0.0, 0.0, TABLE_HEIGHT)


def _add_room(spec: mujoco.MjSpec) -> None:
    world = spec.worldbody
    box = mujoco.mjtGeom.mjGEOM_BOX
    world.add_light(
        directional=True,
        pos=(0.3, 0.4, 2.5),
        dir=(-0.3, -0.4, -1.0),
        diffuse=(0.5, 0.5, 0.5),
        specular=(0.1, 0.1, 0.1),
        castshadow=False,
    )
    nothing = {"contype": 0, "conaffinity": 0}
    top, under = (0.0, 0.0, TABLE_HEIGHT), (0.0, 0.0, TABLE_HEIGHT - 0.025)
    # Contacts with a plane cost a fraction of those with a box. Its price: nothing falls off the table.
    world.add_geom(
        name="table", type=mujoco.mjtGeom.mjGEOM_PLANE, pos=top, size=(1.0, 1.0, 0.1), group=0, **SCENE_CONTACT
    )
    world.add_geom(type=box, pos=under, size=(*TABLE_HALF_SIZE, 0.025), rgba=_TABLE_RGBA, group=1, **nothing)
    world.add_geom(type=box, pos=(0, 0, -0.05), size=(2, 2, 0.05), rgba=_FLOOR_RGBA, group=1, **nothing)
    world.add_geom(type=box, pos=(-1.6, 0, 1), size=(0.05, 2, 1.5), rgba=_WALL_RGBA, group=1, **nothing)
    half = ROBOT_BASE[2] / 2
    base, size = (ROBOT_BASE[0], 0.0, half), (0.12, 0.12, half)
    world.add_geom(type=box, pos=base, size=size, rgba=_PEDESTAL_RGBA, group=1, **nothing)


def _add_cameras(spec: mujoco.MjSpec) -> None:
    """Names as in LIBERO: the view from the front that faces the robot; the camera on the hand comes with the arm."""
    half = np.deg2rad(_AGENTVIEW_PITCH_DEG) / 2
    c, s = np.cos(half) / 2, np.sin(half) / 2
    quat = (c + s, c - s, c - s, c + s)  # w, x, y, z: looks along -x with z up, then tilts down by the pitch
    spec.worldbody.add_camera(name=AGENTVIEW, pos=_AGENTVIEW_POS, quat=quat, fovy=_AGENTVIEW_FOVY_DEG)
