"""robosuite tasks through robosuite's own step: other arms, hands and controllers, two arms, Wipe."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from sim import rendering
from sim.adapters.replay_world import Outcome, integration_state, mujoco_fault
from sim.adapters.robosuite_envs import SeededEnv
from sim.model_view import LIBRARY
from sim.mujoco_world import rotation_vector

LIBRARY.mj_copyData.argtypes = [ctypes.c_void_p] * 3  # not among MuJoCo's Python functions
LIBRARY.mj_copyData.restype = ctypes.c_void_p


class RobosuiteStepped:
    """A `SteppedEnv` around one robosuite environment of its own per task.

    Images and proprioception show the instant at which robosuite's own sensors read. All worlds draw with the meshes
    and textures of one model, but with the colours and sizes of their own.

    Args:
        make_env: Makes the environment of a task, by its full name.
        drawable_of: Which meshes and textures a task needs, and how to draw.
    """

    def __init__(self, make_env: Callable[[str], SeededEnv], drawable_of: Callable[[str], rendering.Drawable]) -> None:
        self._make_env = make_env
        self._drawable_of = drawable_of
        self._envs: dict[str, SeededEnv] = {}
        self._task = ""
        self._sensed: mujoco.MjData | None = None

    def mujoco_data(self) -> mujoco.MjData:
        """The environment's data; poses lag one physics step behind the positions, as robosuite leaves them."""
        data: mujoco.MjData = self._env.sim.data._data
        return data

    def reset(self, task: str, seed: int) -> None:
        """The environment's own reset."""
        if task not in self._envs:
            self._envs[task] = self._make_env(task)
            self._envs[task].env.add_observable(self._snapshot_sensor(self._envs[task].env))
        self._task = task
        self._envs[task].reset(seed)

    def step(self, action: Float64[np.ndarray, " action_dim"]) -> Outcome:
        """The environment's own step and success predicate."""
        _, _, is_over, _ = self._env.step(action)
        return Outcome(
            success=bool(self._env._check_success()), is_over=bool(is_over), fault=mujoco_fault(self.mujoco_data())
        )

    def image(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """A camera's image, bottom row first, as robosuite returns it."""
        sensed = self._sensed_data()
        camera_id = mujoco.mj_name2id(sensed.model, mujoco.mjtObj.mjOBJ_CAMERA, camera)
        if camera_id < 0:
            names = [sensed.model.camera(i).name for i in range(sensed.model.ncam)]
            raise ValueError(f"no camera {camera!r} in the model; cameras: {', '.join(names)}")
        image = np.empty((height, width, 3), dtype=np.uint8)
        rendering.render(self._drawable_of(self._task), sensed, camera_id, image)
        return image

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """Of each arm: grip site's position (m), hand's rotation vector (rad), finger joints; in world axes."""
        sensed = self._sensed_data()
        return np.concatenate([_arm_proprio(robot, sensed) for robot in self._env.robots]).astype(np.float32)

    def fingerprint(self) -> Float64[np.ndarray, " entries"]:
        """MuJoCo's integration state."""
        return integration_state(self.mujoco_data())

    @property
    def _env(self) -> Any:
        return self._envs[self._task].env

    def _sensed_data(self) -> mujoco.MjData:
        assert self._sensed is not None, "a reset reads every sensor"
        return self._sensed

    def _snapshot_sensor(self, env: Any) -> Any:
        """A sensor beside robosuite's own that keeps the whole simulation as they see it."""
        from robosuite.utils.observables import Observable, sensor

        def snapshot(_observations: dict[str, Any]) -> float:
            data = env.sim.data._data
            if self._sensed is None or self._sensed.model is not data.model:
                self._sensed = mujoco.MjData(data.model)
            LIBRARY.mj_copyData(self._sensed._address, data.model._address, data._address)
            return float(data.time)

        return Observable(name="sensed_time", sensor=sensor(modality="time")(snapshot), sampling_rate=env.control_freq)


def proprio_names(env: Any) -> tuple[str, ...]:
    """Names of the entries of `RobosuiteStepped.proprio`; with two arms each has a prefix."""
    names: list[str] = []
    for index, robot in enumerate(env.robots):
        prefix = f"robot{index}_" if len(env.robots) > 1 else ""
        names += [f"{prefix}eef_pos_{axis}" for axis in "xyz"]
        names += [f"{prefix}eef_axis_angle_{axis}" for axis in "xyz"]
        names += [f"{prefix}finger_{i}" for i in range(1, 1 + len(robot.gripper.joints))]
    return tuple(names)


def action_names(env: Any) -> tuple[str, ...]:
    """Names of the entries of an action; with two arms each has a prefix."""
    names: list[str] = []
    for index, robot in enumerate(env.robots):
        prefix = f"robot{index}_" if len(env.robots) > 1 else ""
        size = robot.controller.control_dim
        arm = {"OSC_POSE": POSE_ACTIONS, "OSC_POSITION": POSE_ACTIONS[:3]}.get(robot.controller_config["type"])
        names += [f"{prefix}{name}" for name in arm or [f"joint_{i}" for i in range(1, 1 + size)]]
        num_gripper = robot.gripper.dof
        names += [f"{prefix}gripper{f'_{i}' if num_gripper > 1 else ''}" for i in range(1, 1 + num_gripper)]
    return tuple(names)


POSE_ACTIONS = ("dx", "dy", "dz", "drx", "dry", "drz")
"""Displacement and rotation vector of the hand."""


def _arm_proprio(robot: Any, data: mujoco.MjData) -> Float64[np.ndarray, " entries"]:
    hand = data.model.body(robot.robot_model.eef_name).id
    fingers = robot._ref_gripper_joint_pos_indexes or []
    return np.concatenate([data.site_xpos[robot.eef_site_id], rotation_vector(data.xquat[hand]), data.qpos[fingers]])
