"""The tasks: what to do with which object, which other objects stand about, and when it is done.

| family    | done when                                                                                         |
|-----------|---------------------------------------------------------------------------------------------------|
| `pick_up` | the object's centre is 5 cm above its resting height                                              |
| `put_on`  | the object's centre is over the plate at resting height, and the fingers have let go              |
| `put_in`  | the object's centre is inside the box below the rim, and the fingers have let go                  |
| `push_to` | the object's centre is inside the target disc and the object stands on the table (held or not)    |
| `stack`   | the object rests on the other one, which stands on the table, and the fingers have let go         |

"Let go" means that the gap between the fingers exceeds the object's width by 6 mm: with a real gripper this can be read
off the finger joints, and a policy cannot score by holding the object in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mujoco

from sim.tabletop.objects import BOX_HEIGHT, BOX_INNER, HALF_SIZE, PLATE_HEIGHT, PLATE_RADIUS, TARGET_RADIUS
from sim.tabletop.scene import TABLE_HEIGHT

Family = Literal["pick_up", "put_on", "put_in", "push_to", "stack"]
Difficulty = Literal["easy", "medium", "hard"]

LIFT_HEIGHT = 0.05
"""How far `pick_up` must lift (m)."""

RELEASE_GAP = 2 * HALF_SIZE + 0.006
"""Gap between the fingers (m) from which on an object counts as released."""

_PAIRS = (("red_cube", "blue_cube"), ("green_cube", "yellow_cylinder"))
_HARD_EXTRAS = ("red_cylinder", "purple_cube")
_TARGETS = ("green_target", "yellow_target")


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: E.g. "put_red_cube_on_plate".
        family: What kind of task.
        item: The object to move.
        place: The receptacle or object where it goes; empty for `pick_up`.
    """

    name: str
    family: Family
    item: str
    place: str = ""

    def scene_objects(self, difficulty: Difficulty) -> tuple[str, ...]:
        """Objects in the scene, graspable ones first. Tasks with equal tuples share one compiled model.

        Without the instruction the task cannot be known: the item always has a partner that could be meant as well, two
        targets are drawn where one is asked for, and the plate also stands there when nothing is to be put on it.
        """
        partners: tuple[str, ...] = next(pair for pair in _PAIRS if self.item in pair)
        graspable = partners if difficulty == "easy" else _PAIRS[0] + _PAIRS[1]
        receptacles: tuple[str, ...] = {"put_in": ("box",), "push_to": _TARGETS}.get(self.family, ("plate",))
        if difficulty == "hard":
            graspable += _HARD_EXTRAS
            receptacles = _TARGETS if self.family == "push_to" else ("plate", "box")
        return graspable + receptacles


def _all_tasks() -> tuple[Task, ...]:
    items = [item for pair in _PAIRS for item in pair]
    cubes = [item for item in items if item.endswith("cube")]
    stacks = [(a, b) for pair in _PAIRS for a, b in (pair, pair[::-1]) if b.endswith("cube")]
    return (
        *(Task(f"pick_up_{item}", "pick_up", item) for item in items),
        *(Task(f"put_{item}_on_plate", "put_on", item, "plate") for item in items),
        *(Task(f"put_{item}_in_box", "put_in", item, "box") for item in items),
        *(Task(f"push_{item}_to_{target}", "push_to", item, target) for item in cubes for target in _TARGETS),
        *(Task(f"stack_{item}_on_{other}", "stack", item, other) for item, other in stacks),
    )


TASKS: dict[str, Task] = {task.name: task for task in _all_tasks()}
"""All tasks by name."""

FAMILIES: tuple[Family, ...] = ("pick_up", "put_on", "put_in", "push_to", "stack")


def make_success(task: Task, model: mujoco.MjModel) -> Callable[[mujoco.MjData], bool]:
    """The test for a task, with all addresses looked up beforehand; it reads a few numbers of qpos and mocap_pos.

    Args:
        task: The task.
        model: A compiled model that contains the task's objects.

    Returns:
        A function of the world's data, a few microseconds per call.
    """
    item = _free_joint_address(model, task.item)
    fingers = tuple(int(model.joint(f"gripper0_finger_joint{i}").qposadr[0]) for i in (1, 2))
    match task.family:
        case "pick_up":
            return lambda data: bool(data.qpos[item + 2] > TABLE_HEIGHT + HALF_SIZE + LIFT_HEIGHT)
        case "push_to":
            target = int(model.body(task.place).mocapid[0])
            return lambda data: _is_pushed(data, item, target)
        case "put_on":
            plate = int(model.body(task.place).mocapid[0])
            return lambda data: _has_let_go(data, fingers) and _is_on_plate(data, item, plate)
        case "put_in":
            box = int(model.body(task.place).mocapid[0])
            return lambda data: _has_let_go(data, fingers) and _is_in_box(data, item, box)
        case "stack":
            other = _free_joint_address(model, task.place)
            return lambda data: _has_let_go(data, fingers) and _is_stacked(data, item, other)


def _free_joint_address(model: mujoco.MjModel, name: str) -> int:
    return int(model.joint(f"{name}_joint").qposadr[0])


def _has_let_go(data: mujoco.MjData, fingers: tuple[int, ...]) -> bool:
    return bool(data.qpos[fingers[0]] - data.qpos[fingers[1]] > RELEASE_GAP)


def _is_pushed(data: mujoco.MjData, item: int, target: int) -> bool:
    x, y, z = data.qpos[item : item + 3].tolist()
    tx, ty, _ = data.mocap_pos[target].tolist()
    return bool(z < TABLE_HEIGHT + HALF_SIZE + 0.01 and (x - tx) ** 2 + (y - ty) ** 2 < TARGET_RADIUS**2)


def _is_on_plate(data: mujoco.MjData, item: int, plate: int) -> bool:
    x, y, z = data.qpos[item : item + 3].tolist()
    px, py, _ = data.mocap_pos[plate].tolist()
    height = z - (TABLE_HEIGHT + PLATE_HEIGHT + HALF_SIZE)
    return bool(abs(height) < 0.004 and (x - px) ** 2 + (y - py) ** 2 < (PLATE_RADIUS - 0.005) ** 2)


def _is_in_box(data: mujoco.MjData, item: int, box: int) -> bool:
    x, y, z = data.qpos[item : item + 3].tolist()
    bx, by, _ = data.mocap_pos[box].tolist()
    return bool(z < TABLE_HEIGHT + BOX_HEIGHT and max(abs(x - bx), abs(y - by)) < BOX_INNER)


def _is_stacked(data: mujoco.MjData, item: int, other: int) -> bool:
    x, y, z = data.qpos[item : item + 3].tolist()
    ox, oy, oz = data.qpos[other : other + 3].tolist()
    is_resting = oz < TABLE_HEIGHT + HALF_SIZE + 0.004 and abs(z - oz - 2 * HALF_SIZE) < 0.004
    return bool(is_resting and (x - ox) ** 2 + (y - oy) ** 2 < HALF_SIZE**2)
