"""A task in its scene: the compiled model, how a start is written into the data, and the success test."""

from __future__ import annotations

from functools import cache

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.model import OscConfig, RenderOptions, SimModel
from sim.tabletop.objects import TableObject, parse_object
from sim.tabletop.panda import HOME_QPOS
from sim.tabletop.placement import FINGER_START_QPOS
from sim.tabletop.scene import CONTROL_RATE_HZ, TABLE_HEIGHT, build_scene
from sim.tabletop.tasks import Difficulty, Task, make_success
from sim.world import TaskScene
from vla_rl.types import Start


@cache
def scene_model(objects: tuple[str, ...]) -> SimModel:
    """The compiled model of a scene; compiled once per process."""
    mj_model = build_scene(objects).compile()
    return SimModel.build(
        mj_model,
        control_rate_hz=CONTROL_RATE_HZ,
        osc=OscConfig(nullspace_posture=tuple(HOME_QPOS.tolist())),
        render=RenderOptions(samples=0, shadows=False, reflections=False, geom_groups=(1,), site_groups=()),
    )


class TabletopScene(TaskScene):
    """One task in its scene (a `TaskScene`)."""

    def __init__(self, task: Task, difficulty: Difficulty) -> None:
        """Compile the scene, or share it with another task that has the same objects."""
        self.task = task
        names = task.scene_objects(difficulty)
        self.objects: tuple[TableObject, ...] = tuple(parse_object(name) for name in names)
        self.model = scene_model(names)
        self._is_solved = make_success(task, self.model.mj_model)

    def place(self, data: mujoco.MjData, start: Start) -> None:
        """Write qpos and the positions of the receptacles.

        Raises:
            ValueError: The start does not belong to this scene.
        """
        nq, expected = self.model.mj_model.nq, self.model.mj_model.nq + 3 * self.model.mj_model.nmocap
        if start.init.shape != (expected,):
            raise ValueError(f"{start.key}: init has shape {start.init.shape}, this scene needs ({expected},)")
        data.qpos[:] = start.init[:nq]
        data.mocap_pos[:] = start.init[nq:].reshape(-1, 3)

    def is_success(self, data: mujoco.MjData) -> bool:
        """Whether the task is solved; a few microseconds."""
        return self._is_solved(data)

    def initial_state(
        self, layout: dict[str, tuple[float, float, float]], arm: Float64[np.ndarray, " arm"]
    ) -> Float64[np.ndarray, " init"]:
        """What `place` reads: qpos (arm, fingers, free bodies), then the positions of the receptacles."""
        bodies: list[float] = []
        places: list[float] = []
        for item in self.objects:
            x, y, yaw = layout[item.name]
            position = (x, y, TABLE_HEIGHT + item.rest_height)
            if item.is_graspable:
                bodies += [*position, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
            else:
                places += position
        return np.array([*arm, *FINGER_START_QPOS, *bodies, *places], dtype=np.float64)
