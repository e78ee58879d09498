"""Which robot a run is on, and everything about it besides the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from robots.cameras import CameraConfig
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.lerobot_factory import LeRobotArmConfig, make_lerobot_arm
from robots.response import Correction
from robots.robot import Robot
from robots.run_types import RuntimeConfig
from robots.safety import SafetyConfig
from sim.suites import SuiteConfig
from sim.tabletop.suite import TabletopConfig
from vla_rl.config import ConfigModel
from vla_rl.serving.chunking import Blend
from vla_rl.types import Split

SCALE_RANGE = (0.2, 5.0)
Factor = Annotated[float, Field(ge=SCALE_RANGE[0], le=SCALE_RANGE[1], allow_inf_nan=False)]


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
    action_scale: tuple[Factor, Factor, Factor, Factor, Factor, Factor] = (1.0,) * 6
    """What displacements (x, y, z) and rotations are multiplied with before the safety chain, so that they move the
    robot as far as the training world; `vla-rl calibrate-response` finds it."""


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


def corrected_settings(
    robot: SimRobotConfig | FrankaConfig | LeRobotArmConfig, corrections: Sequence[Correction]
) -> tuple[dict[str, Any], list[str]]:
    """Settings of a `DeployConfig` with which a robot answers like the training world, as far as they reach.

    Args:
        robot: As it was measured.
        corrections: One per axis, in the order of `robots.response.AXES`.

    Returns:
        The settings, and where they do not reach.
    """
    notes: list[str] = []

    def within(what: str, value: float, low: float, high: float) -> float:
        if not low <= value <= high:
            notes.append(f"{what} should be {value:.3g}, but can only be {low:g} to {high:g}")
        return round(min(max(value, low), high), 4)

    axes = [within(f"action_scale of {change.axis}", change.scale, *SCALE_RANGE) for change in corrections]
    settings: dict[str, Any] = {"action_scale": axes}
    match robot:
        case FrankaConfig():
            stiffness = [robot.translational_stiffness_n_m] * 3 + [robot.rotational_stiffness_nm_rad] * 3
            damping = robot.damping or tuple(2.0 * np.sqrt(stiffness))
            factors = np.array([change.stiffness for change in corrections])
            linear, angular = (float(np.exp(np.mean(np.log(part)))) for part in (factors[:3], factors[3:]))
            settings["robot"] = {
                "type": "franka",
                # One number for three axes: their geometric mean.
                "translational_stiffness_n_m": within("translational stiffness", stiffness[0] * linear, 10.0, 3000.0),
                "rotational_stiffness_nm_rad": within("rotational stiffness", stiffness[3] * angular, 1.0, 300.0),
                "damping": [
                    within(f"damping of {change.axis}", float(value * change.damping), 0.1, 500.0)
                    for value, change in zip(damping, corrections, strict=True)
                ],
            }
        case SimRobotConfig() | LeRobotArmConfig():
            notes.append("stiffness and damping of this robot's controller cannot be set from here")
    return settings, notes
