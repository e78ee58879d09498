"""Any joint-controlled robot of LeRobot behind our Robot seam; LeRobot is imported when one is made.

LeRobot's robots take joint positions in degrees under names like "shoulder_pan.pos"; kinematics turn our tool poses
into those and back. `lerobot.model.kinematics.RobotKinematics` of a URDF is one that fits. The other way, LeRobot's
own tools on our Franka driver, is the plugin in `plugins/lerobot_robot_vla_rl`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from robots.driving import STATE_NAMES, command_pose, with_deadline
from robots.robot import Command, Mode, RobotDescription, RobotError, RobotLimits, RobotState
from robots.rotations import rotation_vector_from_matrix
from vla_rl.config import ConfigModel


@runtime_checkable
class Kinematics(Protocol):
    """Where the tool is for given joints, and back; degrees and homogeneous 4 x 4 matrices, as in LeRobot."""

    def forward_kinematics(self, joint_pos_deg: Float64[np.ndarray, " joints"]) -> Float64[np.ndarray, "4 4"]:
        """Tool pose in the base frame."""

    def inverse_kinematics(
        self, current_joint_pos: Float64[np.ndarray, " joints"], desired_ee_pose: Float64[np.ndarray, "4 4"]
    ) -> Float64[np.ndarray, " joints"]:
        """Joints near the present ones that put the tool there."""


class LeRobotConfig(ConfigModel):
    """What LeRobot's features do not say of a robot."""

    arm: str = Field(min_length=1)
    """Model as contracts name it, e.g. "SO101"."""
    joints: tuple[str, ...] = Field(min_length=1)
    """Motors in the order of the kinematics, without the gripper, e.g. shoulder_pan, shoulder_lift, ..."""
    gripper: str = "gripper"
    """Motor of the gripper."""
    gripper_open: float = 100.0
    """Its position when open."""
    gripper_closed: float = 0.0
    """Its position when closed."""
    gripper_width_m: float = Field(gt=0, allow_inf_nan=False)
    """Distance of the fingers when open."""
    joint_lower_rad: tuple[float, ...]
    """One per joint."""
    joint_upper_rad: tuple[float, ...]
    """One per joint."""
    joint_speed_rad_s: float = Field(gt=0, allow_inf_nan=False)
    """Of any joint."""
    linear_speed_m_s: float = Field(gt=0, allow_inf_nan=False)
    """Of the tool; acceleration and jerk limits reach it within a tenth of a second."""
    angular_speed_rad_s: float = Field(gt=0, allow_inf_nan=False)
    """Of the tool, likewise."""
    reach_m: float = Field(gt=0, allow_inf_nan=False)
    """From the base's origin."""
    base_in_world_m: tuple[float, float, float]
    """Where the base stands in the training world."""
    max_rate_hz: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Serial buses take a few milliseconds per exchange."""


def make_lerobot(kind: str, options: Mapping[str, Any]) -> Any:
    """A robot by LeRobot's own factory, plugins included.

    Args:
        kind: As after `--robot.type=`, e.g. "so101_follower".
        options: Of its config; positions must be in degrees (`use_degrees`).

    Raises:
        ImportError: LeRobot is not installed.
        ValueError: LeRobot does not know the kind or an option.
    """
    try:
        robots = importlib.import_module("lerobot.robots")
        importlib.import_module("lerobot.utils.import_utils").register_third_party_plugins()
    except ImportError as error:
        raise ImportError(
            f"LeRobot is not complete ({error}): pip install lerobot (0.5 and later need Python 3.12)"
        ) from error
    try:
        # Configs register themselves when their module is imported; plugins already have.
        if kind not in robots.RobotConfig.get_known_choices():
            importlib.import_module(f"lerobot.robots.{kind}")
        return robots.make_robot_from_config(robots.RobotConfig.get_choice_class(kind)(**options))
    except (ImportError, KeyError, TypeError) as error:
        known = ", ".join(sorted(robots.RobotConfig.get_known_choices()))
        raise ValueError(f"LeRobot cannot make {kind!r} with {dict(options)}: {error}; it knows {known}") from error


class LeRobotArm:
    """Implements `robots.robot.Robot`.

    LeRobot has no controller clock, fault or force to show: `time_s` is this host's clock, a bus that fails raises, and
    the watchdog of the runtime has to do the rest. Motors hold their last goal; set `disable_torque_on_disconnect` to
    false where the arm must not drop when the program ends.
    """

    def __init__(self, robot: Any, kinematics: Kinematics, config: LeRobotConfig) -> None:
        """Check names; nothing moves.

        Raises:
            ValueError: The robot lacks a motor that the config names.
        """
        wanted = {f"{name}.pos" for name in (*config.joints, config.gripper)}
        for side, features in (("actions", robot.action_features), ("observations", robot.observation_features)):
            if not wanted <= set(features):
                raise ValueError(
                    f"the {side} of LeRobot's {robot.name} lack {', '.join(sorted(wanted - set(features)))}; it has "
                    f"{', '.join(sorted(features))}"
                )
        if not len(config.joints) == len(config.joint_lower_rad) == len(config.joint_upper_rad):
            raise ValueError(f"{len(config.joints)} joints need as many lower and upper limits")
        self._robot = robot
        self._kinematics = kinematics
        self._config = config
        self._is_stopped = False
        self._mode: Mode = "idle"

    @property
    def description(self) -> RobotDescription:
        """From the config."""
        config = self._config
        return RobotDescription(
            name="lerobot",
            arm=config.arm,
            spaces=("ee_delta",),
            state_names=STATE_NAMES,
            min_rate_hz=1.0,
            max_rate_hz=config.max_rate_hz,
            limits=RobotLimits(
                joint_lower_rad=np.array(config.joint_lower_rad),
                joint_upper_rad=np.array(config.joint_upper_rad),
                joint_speed_rad_s=np.full(len(config.joints), config.joint_speed_rad_s),
                linear_speed_m_s=config.linear_speed_m_s,
                linear_acceleration_m_s2=config.linear_speed_m_s * 10,
                linear_jerk_m_s3=config.linear_speed_m_s * 1000,
                angular_speed_rad_s=config.angular_speed_rad_s,
                angular_acceleration_rad_s2=config.angular_speed_rad_s * 10,
                angular_jerk_rad_s3=config.angular_speed_rad_s * 1000,
                reach_m=config.reach_m,
            ),
        )

    def connect(self, timeout_s: float) -> None:
        """Open the bus; the robot must be calibrated, for LeRobot asks for that on the terminal.

        Raises:
            RobotError: No answer, or not calibrated.
        """
        try:
            with_deadline(lambda: self._robot.connect(calibrate=False), timeout_s, f"LeRobot's {self._robot.name}")
        except (OSError, RuntimeError) as error:  # LeRobot's DeviceNotConnectedError is a ConnectionError
            raise RobotError(f"LeRobot's {self._robot.name}: {error}") from error
        if not self._robot.is_calibrated:
            raise RobotError(f"LeRobot's {self._robot.name} is not calibrated; run lerobot-calibrate first")

    def observe(self) -> RobotState:
        """Read the bus.

        Raises:
            RobotError: It failed.
        """
        values = self._read()
        now = time.monotonic()
        joints = np.array([values[f"{name}.pos"] for name in self._config.joints], dtype=np.float64)
        pose = self._kinematics.forward_kinematics(joints)
        width_m = (1.0 - self._closing(values)) / 2.0 * self._config.gripper_width_m
        turn = rotation_vector_from_matrix(pose[:3, :3])
        numbers = [*(pose[:3, 3] + self._config.base_in_world_m), *turn, width_m / 2, -width_m / 2]
        return RobotState(
            time_s=now,
            received_s=now,
            position_m=pose[:3, 3].copy(),
            rotation=pose[:3, :3].copy(),
            joint_positions_rad=np.deg2rad(joints),
            gripper_width_m=width_m,
            named=dict(zip(STATE_NAMES, map(float, numbers), strict=True)),
            mode=self._mode,
        )

    def command(self, command: Command) -> Command:
        """Send joint goals.

        Returns:
            What LeRobot says it sent, which its own limits may have changed.

        Raises:
            RobotError: The bus failed, or the robot was stopped.
        """
        pose = command_pose(command)
        if self._is_stopped:
            raise RobotError("the robot was stopped; recover() allows commands again")
        config, values = self._config, self._read()
        now = np.array([values[f"{name}.pos"] for name in config.joints], dtype=np.float64)
        goal = self._kinematics.inverse_kinematics(now, pose)
        share = (float(command.gripper) + 1.0) / 2.0
        action = {f"{name}.pos": float(value) for name, value in zip(config.joints, goal, strict=True)}
        action[f"{config.gripper}.pos"] = config.gripper_open + share * (config.gripper_closed - config.gripper_open)
        sent = self._send(action)
        self._mode = "moving"
        joints = np.array([sent[f"{name}.pos"] for name in config.joints], dtype=np.float64)
        reached = self._kinematics.forward_kinematics(joints)
        return replace(command, position_m=reached[:3, 3], rotation=reached[:3, :3], gripper=self._closing(sent))

    def hold(self) -> None:
        """Make the measured joints the goal, once; repeating it would let the arm sink."""
        if self._mode == "moving" and not self._is_stopped:
            values = self._read()
            self._send({f"{name}.pos": values[f"{name}.pos"] for name in self._config.joints})
            self._mode = "held"

    def stop(self) -> None:
        """Hold, and refuse commands until `recover`; a bus that fails leaves the motors at their last goal."""
        try:
            self.hold()
        except RobotError:
            self._mode = "fault"
        self._is_stopped = True

    def recover(self) -> None:
        """Allow commands again if the bus answers.

        Raises:
            RobotError: It does not.
        """
        self._read()
        self._is_stopped, self._mode = False, "held"

    def close(self) -> None:
        """Stop, and let go of the bus."""
        self.stop()
        if self._robot.is_connected:
            self._robot.disconnect()

    def _closing(self, values: Mapping[str, Any]) -> float:
        """-1 (open) to +1 (closed)."""
        config = self._config
        share = (float(values[f"{config.gripper}.pos"]) - config.gripper_open) / (
            config.gripper_closed - config.gripper_open
        )
        return float(np.clip(2.0 * share - 1.0, -1.0, 1.0))

    def _read(self) -> Mapping[str, Any]:
        try:
            values: Mapping[str, Any] = self._robot.get_observation()
        except (OSError, RuntimeError) as error:
            raise RobotError(f"LeRobot's {self._robot.name} cannot be read: {error}") from error
        return values

    def _send(self, action: dict[str, Any]) -> Mapping[str, Any]:
        try:
            sent: Mapping[str, Any] = self._robot.send_action(action)
        except (OSError, RuntimeError) as error:
            raise RobotError(f"LeRobot's {self._robot.name} took no command: {error}") from error
        return {**action, **sent}
