"""A seven-joint arm beside a loose cube: the smallest scene that the generic world runs, with tasks made for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mujoco
import numpy as np

from sim.model import OscConfig, RenderOptions, SimModel
from sim.mujoco_world import MujocoWorld
from sim.world import TaskScene
from vla_rl.types import EnvSpec, Split, Start

POSTURE = (0.0, 0.4, 0.0, -1.6, 0.0, 2.0, 0.8)
LINKS = (
    ("0 0 0.3", "0 0 1"),
    ("0 0 0", "0 1 0"),
    ("0 0 0.3", "0 0 1"),
    ("0.08 0 0", "0 -1 0"),
    ("-0.08 0 0.35", "0 0 1"),
    ("0 0 0", "0 -1 0"),
    ("0.08 0 0", "0 0 -1"),
)


def toy_xml(timestep: float = 0.005) -> str:
    """The model; the first camera looks along the table, the second one down."""
    opened = "".join(
        f'<body pos="{position}"><joint name="robot0_joint{i}" axis="{axis}" damping="0.5" armature="0.1"/>'
        '<geom type="sphere" size="0.03" mass="1" contype="0" conaffinity="0"/>'
        for i, (position, axis) in enumerate(LINKS, start=1)
    )
    hand = """
      <body name="robot0_right_hand" pos="0 0 -0.1">
        <geom type="box" size="0.03 0.06 0.02" mass="0.3" group="1" contype="0" conaffinity="0"/>
        <site name="gripper0_grip_site" pos="0 0 -0.09"/>
        <body pos="0 0.01 -0.06">
          <joint name="gripper0_finger_joint1" type="slide" axis="0 1 0" range="0 0.04" damping="20"/>
          <geom type="box" size="0.01 0.005 0.03" mass="0.05" group="1"/></body>
        <body pos="0 -0.01 -0.06">
          <joint name="gripper0_finger_joint2" type="slide" axis="0 1 0" range="-0.04 0" damping="20"/>
          <geom type="box" size="0.01 0.005 0.03" mass="0.05" group="1"/></body>
      </body>"""
    motors = "".join(
        f'<motor name="robot0_torq_j{i}" joint="robot0_joint{i}" ctrlrange="-80 80" ctrllimited="true"/>'
        for i in range(1, 8)
    )
    return f"""
    <mujoco>
      <compiler autolimits="true"/>
      <option timestep="{timestep}"/>
      <worldbody>
        <light pos="0 0 3"/>
        <camera name="side" pos="0.5 -1.5 0.4" xyaxes="1 0 0 0 0.2 1"/>
        <camera name="top" pos="0.4 0 1.5" xyaxes="0 1 0 -1 0 0"/>
        <geom type="plane" size="2 2 0.1" rgba="0.2 0.2 0.2 1" group="1"/>
        <body name="cube" pos="0.5 0.2 0.03"><freejoint name="cube"/>
          <geom type="box" size="0.03 0.03 0.03" mass="0.1" rgba="1 0 0 1" group="1"/></body>
        <body>{opened}{hand}{"</body>" * len(LINKS)}</body>
      </worldbody>
      <actuator>{motors}
        <position name="gripper0_gripper_finger_joint1" joint="gripper0_finger_joint1" kp="100" ctrlrange="0 0.04"/>
        <position name="gripper0_gripper_finger_joint2" joint="gripper0_finger_joint2" kp="100" ctrlrange="-0.04 0"/>
      </actuator>
    </mujoco>"""


def toy_model(timestep: float = 0.005, render: RenderOptions | None = None) -> SimModel:
    """The compiled toy."""
    return SimModel.build(
        mujoco.MjModel.from_xml_string(toy_xml(timestep)),
        osc=OscConfig(nullspace_posture=POSTURE),
        render=render or RenderOptions(samples=0, shadows=False, reflections=False),
    )


class ToyScene(TaskScene):
    """`raise` is solved 2 cm above its start, `now` always, `never` not at all; `crash` breaks in its third step."""

    def __init__(self, name: str, model: SimModel) -> None:
        self.name, self.model = name, model
        self.start_height = 0.0
        self.num_checks = 0

    def place(self, data: mujoco.MjData, start: Start) -> None:
        data.qpos[:] = start.init
        mujoco.mj_kinematics(self.model.mj_model, data)
        self.start_height = float(data.site_xpos[self.model.grip_site, 2])
        self.num_checks = 0

    def is_success(self, data: mujoco.MjData) -> bool:
        self.num_checks += 1
        if self.name == "crash" and self.num_checks == 2:
            data.qvel[:] = np.nan
        height = float(data.site_xpos[self.model.grip_site, 2])
        return self.name == "now" or (self.name == "raise" and height > self.start_height + 0.02)


class ToyExpert:
    """Moves up."""

    def act(self, data: mujoco.MjData) -> np.ndarray:
        return np.array([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0])


class ToySuite:
    """A `Suite` of the toy tasks."""

    name = "toy"
    tasks: Sequence[str] = ("toy/raise", "toy/never", "toy/now", "toy/crash")
    spec = EnvSpec(
        cameras=("side", "top"),
        image_size=(24, 32),
        image_orientation="bottom_up",
        proprio_names=("x", "y", "z", "rx", "ry", "rz", "finger_1", "finger_2"),
        action_names=("dx", "dy", "dz", "drx", "dry", "drz", "gripper"),
        control_rate_hz=20.0,
    )

    def __init__(self, horizon: int = 30, top_down: bool = False) -> None:
        self.horizon = horizon
        self.model = toy_model()
        if top_down:
            self.spec = replace(self.spec, image_orientation="top_down")

    def start(self, task: str, split: Split, index: int) -> Start:
        rng = np.random.default_rng(index)
        init = self.model.mj_model.qpos0.copy()
        init[self.model.arm_qpos] = POSTURE
        init[:2] += rng.uniform(-0.02, 0.02, 2)
        return Start(task=task, instruction="move", split=split, index=index, init=init, seed=index)

    def make_world(self) -> MujocoWorld:
        return MujocoWorld(lambda task: ToyScene(task.removeprefix("toy/"), self.model), self.spec, self.horizon)

    def make_expert(self, task: str, rng: np.random.Generator) -> ToyExpert:
        return ToyExpert()
