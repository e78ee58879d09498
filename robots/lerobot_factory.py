"""An arm of LeRobot's from a config: LeRobot's factory makes the robot, its kinematics of a URDF place the tool."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from robots.lerobot import Kinematics, LeRobotArm, LeRobotConfig, make_lerobot


class LeRobotArmConfig(LeRobotConfig):
    """One of LeRobot's robots, plugins included."""

    type: Literal["lerobot"] = "lerobot"
    """Which robot."""
    lerobot_type: str = Field(min_length=1)
    """As after LeRobot's `--robot.type=`, e.g. "so101_follower"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of LeRobot's config of that type, e.g. port and id; positions are in degrees."""
    urdf: Path
    """Model of the arm; its joints have the names of `joints`."""
    tool_frame: str = "gripper_frame_link"
    """Frame of the URDF that is the tool."""

    @model_validator(mode="after")
    def _degrees(self) -> Self:
        if self.options.get("use_degrees") is False:
            raise ValueError("options.use_degrees is false, but kinematics need angles; set it to true")
        return self


def make_lerobot_arm(config: LeRobotArmConfig) -> LeRobotArm:
    """The arm, not yet connected.

    Raises:
        ImportError: LeRobot or its kinematics (placo) are not installed.
        ValueError: LeRobot does not know the type, an option or the URDF, or the robot lacks a motor.
    """
    options = dict(config.options)
    if "calibration_dir" in options:
        options["calibration_dir"] = Path(options["calibration_dir"])
    robot = make_lerobot(config.lerobot_type, options)
    return LeRobotArm(robot, _kinematics(config), config)


def _kinematics(config: LeRobotArmConfig) -> Kinematics:
    if not config.urdf.is_file():
        raise ValueError(f"robot.urdf is {config.urdf}, which is no file; give the URDF of the arm")
    try:
        module = importlib.import_module("lerobot.model.kinematics")
        kinematics: Kinematics = module.RobotKinematics(str(config.urdf), config.tool_frame, list(config.joints))
    except ImportError as error:
        raise ImportError(f"LeRobot's kinematics are not complete ({error}): pip install placo") from error
    return kinematics
