"""The objects of the tabletop suite: what can be grasped, what things are put on, in or pushed to. Lengths in metres.

An object's name is its colour and its kind ("red_cube"); receptacles that exist once need no colour ("plate", "box").
The origin of a graspable object is its centre; the origin of a receptacle is the centre of its footprint on the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mujoco

from sim.tabletop.panda import SCENE_CONTACT

Kind = Literal["cube", "cylinder", "plate", "box", "target"]

COLOURS: dict[str, tuple[float, float, float, float]] = {
    "red": (0.85, 0.08, 0.08, 1.0),
    "blue": (0.08, 0.22, 0.90, 1.0),
    "green": (0.05, 0.62, 0.15, 1.0),
    "yellow": (0.98, 0.82, 0.05, 1.0),
    "purple": (0.55, 0.12, 0.70, 1.0),
    "orange": (1.00, 0.48, 0.02, 1.0),
}

HALF_SIZE = 0.02
"""Half the edge of a cube; radius and half the height of a cylinder. Graspable objects rest this high."""

PLATE_RADIUS, PLATE_HEIGHT = 0.055, 0.008
BOX_INNER, BOX_WALL, BOX_HEIGHT, BOX_FLOOR = 0.048, 0.004, 0.030, 0.004
"""Half the inner edge of the open box, thickness and height of its walls, thickness of its floor."""
TARGET_RADIUS = 0.045

_MASS_KG = 0.05
_PLATE_RGBA = (0.97, 0.97, 0.93, 1.0)
_FRICTION = (1.0, 0.005, 0.0001)
_PLATE_CENTRE_RGBA = (0.80, 0.82, 0.86, 1.0)
_BOX_FLOOR_RGBA = (0.28, 0.17, 0.09, 1.0)
_BOX_RGBA = (0.42, 0.27, 0.15, 1.0)


@dataclass(frozen=True)
class TableObject:
    """One object of a scene.

    Attributes:
        name: Body name in the model, e.g. "red_cube".
        kind: Shape.
        colour: Key of `COLOURS`; None for the plate and the box.
    """

    name: str
    kind: Kind
    colour: str | None

    @property
    def is_graspable(self) -> bool:
        """Cubes and cylinders are; receptacles are not."""
        return self.kind in ("cube", "cylinder")

    @property
    def footprint_radius(self) -> float:
        """Radius of a circle around the object on the table, for placing objects apart (m)."""
        match self.kind:
            case "cube":
                return HALF_SIZE * 2**0.5
            case "cylinder":
                return HALF_SIZE
            case "plate":
                return PLATE_RADIUS
            case "target":
                return TARGET_RADIUS
            case "box":
                return (BOX_INNER + BOX_WALL) * 2**0.5

    @property
    def rest_height(self) -> float:
        """Height of the origin above the table when the object stands on it (m)."""
        return HALF_SIZE if self.is_graspable else 0.0


def parse_object(name: str) -> TableObject:
    """The object of this name.

    Raises:
        ValueError: The name is not "plate", "box" or "<colour>_<cube|cylinder|target>".
    """
    match name.split("_"):
        case ["plate"]:
            return TableObject(name, "plate", None)
        case ["box"]:
            return TableObject(name, "box", None)
        case [colour, "cube"] if colour in COLOURS:
            return TableObject(name, "cube", colour)
        case [colour, "cylinder"] if colour in COLOURS:
            return TableObject(name, "cylinder", colour)
        case [colour, "target"] if colour in COLOURS:
            return TableObject(name, "target", colour)
    raise ValueError(
        f"unknown object {name!r}; expected plate, box or <colour>_<cube|cylinder|target> "
        f"with one of the colours {', '.join(COLOURS)}"
    )


def add_object(spec: mujoco.MjSpec, item: TableObject, table_height: float) -> None:
    """Add an object at the centre of the table.

    Graspable objects are free bodies. Receptacles are mocap bodies: a start may move them, nothing else does.
    """
    pos = (0.0, 0.0, table_height + item.rest_height)
    body = spec.worldbody.add_body(name=item.name, pos=pos, mocap=not item.is_graspable)
    if item.is_graspable:
        body.add_freejoint(name=f"{item.name}_joint")
    match item.kind:
        case "cube":
            _add_solid(body, mujoco.mjtGeom.mjGEOM_BOX, COLOURS[str(item.colour)])
        case "cylinder":
            _add_solid(body, mujoco.mjtGeom.mjGEOM_CYLINDER, COLOURS[str(item.colour)])
        case "target":
            _add_disc(body, TARGET_RADIUS, 0.001, COLOURS[str(item.colour)], collides=False)
        case "plate":
            _add_disc(body, PLATE_RADIUS, PLATE_HEIGHT, _PLATE_RGBA, collides=True)
            _add_disc(body, 0.7 * PLATE_RADIUS, PLATE_HEIGHT + 0.002, _PLATE_CENTRE_RGBA, collides=False)
        case "box":
            _add_box(body)


def _add_solid(body: mujoco.MjsBody, shape: mujoco.mjtGeom, rgba: tuple[float, float, float, float]) -> None:
    """A graspable body; friction as robosuite's cubes."""
    size = (HALF_SIZE, HALF_SIZE, HALF_SIZE)
    body.add_geom(type=shape, size=size, rgba=rgba, group=1, mass=_MASS_KG, friction=_FRICTION, **SCENE_CONTACT)


def _add_disc(
    body: mujoco.MjsBody, radius: float, height: float, rgba: tuple[float, float, float, float], collides: bool
) -> None:
    contact = SCENE_CONTACT if collides else {"contype": 0, "conaffinity": 0}
    kind = mujoco.mjtGeom.mjGEOM_CYLINDER
    body.add_geom(type=kind, size=(radius, height / 2, 0.0), pos=(0.0, 0.0, height / 2), rgba=rgba, group=1, **contact)


def _add_box(body: mujoco.MjsBody) -> None:
    """An open box: a floor and four walls."""
    middle, outer, half_wall = BOX_INNER + BOX_WALL / 2, BOX_INNER + BOX_WALL, BOX_WALL / 2
    floor = ((0.0, 0.0, BOX_FLOOR / 2), (BOX_INNER, BOX_INNER, BOX_FLOOR / 2), _BOX_FLOOR_RGBA)
    walls = [
        ((sign * middle * along_x, sign * middle * (1 - along_x), BOX_HEIGHT / 2), size, _BOX_RGBA)
        for along_x, size in ((1, (half_wall, outer, BOX_HEIGHT / 2)), (0, (BOX_INNER, half_wall, BOX_HEIGHT / 2)))
        for sign in (-1, 1)
    ]
    for pos, size, rgba in (floor, *walls):
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, pos=pos, size=size, rgba=rgba, group=1, **SCENE_CONTACT)
