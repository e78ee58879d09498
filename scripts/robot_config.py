"""Which robot a run is on, and everything about it besides the checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from robots.cameras import CameraConfig
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.lerobot_factory import LeRobotArmConfig, make_lerobot_arm
from robots.robot import Robot
from robots.run_types import RuntimeConfig
from robots.safety import SafetyConfig
from sim.suites import SuiteConfig
from sim.tabletop.suite import TabletopConfig
from vla_rl.config import ConfigModel
from vla_rl.serving.chunking import Blend
from vla_rl.types import Split


class SimRobotConfig(ConfigModel):
    """A world of a suite as the robot."""

    type: Literal["sim"] = "sim"
    """Which robot."""
    suite: SuiteConfig = TabletopConfig()
    """Worlds and tasks; cameras as in training."""
    split: Split = "test"
    """Pool of starts."""
    starts_per_task: int = Field(default=13, ge=1)
    """Episodes per task, each from another start."""
    pace: Literal["lockstep", "real_time"] = "lockstep"
    """"lockstep": the world waits for the policy, and every episode is the one that `vla-rl evaluate` would run.
    "real_time": it moves on by itself."""
    added_latency_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time by which every answer of the policy is delayed."""


class DeployConfig(ConfigModel):
    """Everything about a run on a robot, besides the checkpoint."""

    robot: Annotated[SimRobotConfig | FrankaConfig | LeRobotArmConfig, Field(discriminator="type")] = SimRobotConfig()
    """Which robot."""
    cameras: tuple[CameraConfig, ...] = ()
    """Real cameras, by the contract's names; the simulated robot brings its own."""
    safety: SafetyConfig
    """Limits; the workspace has no default."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Modes, deadlines, recoveries."""
    blend: Blend = "latest"
    """What counts where an old and a new chunk overlap."""


def real_robot(config: FrankaConfig | LeRobotArmConfig) -> Robot:
    """The driver of a config; nothing is connected.

    Raises:
        ImportError: What the driver needs is not installed.
        ValueError: The settings do not fit the robot.
    """
    match config:
        case FrankaConfig():
            return FrankaRobot(config)
        case LeRobotArmConfig():
            return make_lerobot_arm(config)
