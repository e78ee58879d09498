"""A made-up robot and camera, and the runtime around them; for tests of what the runtime does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fakes import POLICY_SPEC, tiny_policy

from robots.contract import DeploymentContract
from robots.recorder import Recorder
from robots.robot import CameraFrame, Command, RobotDescription, RobotError, RobotLimits, RobotState
from robots.run_types import InferenceError, RuntimeConfig, control_period_s
from robots.runtime import Runtime
from robots.safety import SafetyChain, SafetyConfig
from robots.watchdog import Watchdog
from sim.mujoco_world import ACTION_MEANING, PROPRIO_NAMES
from vla_rl.serving.chunking import ChunkBuffer

RATE_HZ = 50.0
SPEC = replace(
    POLICY_SPEC, action_meaning=ACTION_MEANING, proprio_names=PROPRIO_NAMES, control_rate_hz=RATE_HZ, image_size=(8, 8)
)
CONTRACT = tiny_policy(SPEC).contract()
assert isinstance(CONTRACT, DeploymentContract)
SAFETY = SafetyConfig(workspace_low_m=(0.2, -0.3, 0.1), workspace_high_m=(0.7, 0.3, 0.6))
HOME = np.array([0.45, 0.0, 0.3])


class FakeRobot:
    """Follows every command at once; notes what it was told and when."""

    def __init__(self, is_lockstep: bool = False) -> None:
        self.position = HOME.copy()
        self.sent: list[tuple[float, Command]] = []
        self.calls: list[str] = []
        self.fault = ""
        self.fails_after: int | None = None
        self.is_lockstep = is_lockstep
        self._started = time.monotonic()

    @property
    def description(self) -> RobotDescription:
        limits = RobotLimits(
            joint_lower_rad=np.zeros(0),
            joint_upper_rad=np.zeros(0),
            joint_speed_rad_s=np.zeros(0),
            linear_speed_m_s=3.0,
            linear_acceleration_m_s2=1e4,
            linear_jerk_m_s3=1e7,
            angular_speed_rad_s=30.0,
            angular_acceleration_rad_s2=1e4,
            angular_jerk_rad_s3=1e7,
            reach_m=0.9,
        )
        return RobotDescription(
            name="fake",
            arm="Panda",
            spaces=("ee_delta",),
            state_names=PROPRIO_NAMES,
            min_rate_hz=1.0,
            max_rate_hz=100.0,
            limits=limits,
            is_lockstep=self.is_lockstep,
        )

    def connect(self, timeout_s: float) -> None:
        self.calls.append("connect")

    def observe(self) -> RobotState:
        values = [*self.position, 0.0, 0.0, 0.0, 0.04, -0.04]
        return RobotState(
            time_s=time.monotonic() - self._started,
            received_s=time.monotonic(),
            position_m=self.position.copy(),
            rotation=np.eye(3),
            named=dict(zip(PROPRIO_NAMES, values, strict=True)),
            mode="fault" if self.fault else "moving",
            faults=(self.fault,) if self.fault else (),
        )

    def command(self, command: Command) -> Command:
        if self.fails_after is not None and len(self.sent) >= self.fails_after:
            self.fault, self.fails_after = "reflex: joint_velocity_violation", None
            raise RobotError(self.fault)
        self.sent.append((time.monotonic(), command))
        self.position = np.array(command.position_m)
        return command

    def hold(self) -> None:
        self.calls.append("hold")

    def stop(self) -> None:
        self.calls.append("stop")

    def recover(self) -> None:
        self.calls.append("recover")
        self.fault = ""

    def close(self) -> None:
        self.calls.append("close")


class FakeCamera:
    name = "agentview"

    def __init__(self) -> None:
        self.index = 0
        self.frozen_s: float | None = None

    def read(self) -> CameraFrame:
        self.index += self.frozen_s is None
        captured = time.monotonic() if self.frozen_s is None else self.frozen_s
        return CameraFrame(image=np.zeros((8, 8, 3), np.uint8), captured_s=captured, index=self.index)

    def close(self) -> None:
        pass


def policy(action: np.ndarray, latency_s: float = 0.0) -> Callable[[dict, float], SimpleNamespace]:
    def infer(observation: dict, deadline_s: float) -> SimpleNamespace:
        if latency_s > deadline_s:
            time.sleep(deadline_s)
            raise InferenceError("no answer in time")
        time.sleep(latency_s)
        return SimpleNamespace(actions=np.tile(action, (CONTRACT.action_horizon, 1)))

    return infer


def forward(size: float = 0.01) -> np.ndarray:
    return np.array([size, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])


def make(
    robot: FakeRobot, infer: Callable, camera: FakeCamera | None = None, folder: Path | None = None, **config: object
) -> Runtime:
    settings = RuntimeConfig(**{"max_steps": 60, "max_hold_s": 0.3, "inference_deadline_s": 0.5, **config})  # type: ignore[arg-type]
    return Runtime(
        robot,
        [camera or FakeCamera()],
        infer,
        SafetyChain(CONTRACT, SAFETY, robot.description),
        ChunkBuffer(control_period_s(CONTRACT, settings)),
        CONTRACT,
        settings,
        watchdog=None if robot.is_lockstep else Watchdog(),
        recorder=None if folder is None else Recorder(folder, PROPRIO_NAMES, 7),
    )
