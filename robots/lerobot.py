"""Any joint-controlled robot of LeRobot behind our Robot seam; LeRobot is imported when one is made.

LeRobot's robots take joint positions in degrees under names like "shoulder_pan.pos"; kinematics turn our tool poses
into those and back. `lerobot.model.kinematics.RobotKinematics` of a URDF is one that fits. The other way, LeRobot's
own tools on our Franka driver, is the plugin in `plugins/lerobot_robot_vla_rl`.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Protocol, Self, runtime_checkable

import numpy as np
from jaxtyping import Float64
from pydantic import Field, model_validator

from robots.driving import STATE_NAMES, Stops, command_pose, patiently, with_deadline
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


Finite = Annotated[float, Field(allow_inf_nan=False)]


class LeRobotConfig(ConfigModel):
    """What LeRobot's features do not say of a robot."""

    arm: str = Field(min_length=1)
    """Model as contracts name it, e.g. "SO101"."""
    joints: tuple[str, ...] = Field(min_length=1)
    """Motors in the order of the kinematics, without the gripper, e.g. shoulder_pan, shoulder_lift, ..."""
    gripper: str = "gripper"
    """Motor of the gripper."""
    gripper_open: Finite = 100.0
    """Its position when open."""
    gripper_closed: Finite = 0.0
    """Its position when closed."""
    gripper_width_m: float = Field(gt=0, allow_inf_nan=False)
    """Distance of the fingers when open."""
    joint_lower_rad: tuple[Finite, ...]
    """One per joint."""
    joint_upper_rad: tuple[Finite, ...]
    """One per joint."""
    joint_speed_rad_s: float = Field(gt=0, allow_inf_nan=False)
    """Of any joint."""
    linear_speed_m_s: float = Field(gt=0, allow_inf_nan=False)
    """Of the tool; acceleration and jerk limits reach it within a tenth of a second."""
    angular_speed_rad_s: float = Field(gt=0, allow_inf_nan=False)
    """Of the tool, likewise."""
    reach_m: float = Field(gt=0, allow_inf_nan=False)
    """From the base's origin."""
    base_in_world_m: tuple[Finite, Finite, Finite]
    """Where the base stands in the training world."""
    max_rate_hz: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Serial buses take a few milliseconds per exchange."""

    @model_validator(mode="after")
    def _ranges_are_ranges(self) -> Self:
        if not len(self.joints) == len(self.joint_lower_rad) == len(self.joint_upper_rad):
            raise ValueError(f"{len(self.joints)} joints need as many lower and upper limits")
        if not all(low < high for low, high in zip(self.joint_lower_rad, self.joint_upper_rad, strict=True)):
            raise ValueError(f"joint limits from {self.joint_lower_rad} to {self.joint_upper_rad} leave no room")
        if self.gripper_open == self.gripper_closed:
            raise ValueError(f"gripper_open and gripper_closed are both {self.gripper_open}")
        return self


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
        _register(robots, kind)
        return robots.make_robot_from_config(robots.RobotConfig.get_choice_class(kind)(**options))
    except (ImportError, KeyError, TypeError, AttributeError) as error:
        known = ", ".join(sorted(robots.RobotConfig.get_known_choices()))
        raise ValueError(f"LeRobot cannot make {kind!r} with {dict(options)}: {error}; it knows {known}") from error


def _register(robots: Any, kind: str) -> None:
    """Configs register themselves when their module is imported, which need not have the kind's name."""
    modules = sorted((one.name for one in pkgutil.iter_modules(robots.__path__)), key=lambda name: name != kind)
    for name in modules:
        if kind in robots.RobotConfig.get_known_choices():
            return
        with contextlib.suppress(ImportError):  # of a robot whose own libraries are not installed
            importlib.import_module(f"lerobot.robots.{name}")


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
        self._robot = robot
        self._kinematics = kinematics
        self._config = config
        # The loop, the watchdog and whoever stops share one bus. Re-entrant, because a signal may stop what holds it.
        self._lock = threading.RLock()
        self._stops = Stops()
        self._mode: Mode = "idle"
        self._gripper_goal = config.gripper_open

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

        def connect() -> bool:
            self._robot.connect(calibrate=False)
            return bool(self._robot.is_calibrated)

        name = f"LeRobot's {self._robot.name}"
        try:
            is_calibrated = with_deadline(connect, timeout_s, name)
        except (OSError, RuntimeError) as error:  # LeRobot's DeviceNotConnectedError is a ConnectionError
            self._disconnect()
            raise RobotError(f"{name}: {error}") from error
        if not is_calibrated:
            self._disconnect()
            raise RobotError(f"{name} is not calibrated; run lerobot-calibrate first")

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
        """Send joint goals, within the config's limits.

        Returns:
            What LeRobot says it sent; limits may have changed it.

        Raises:
            RobotError: The bus failed, the kinematics have no joints for the pose, or the robot was stopped.
        """
        pose = command_pose(command)
        with self._lock:
            sent = self._move(pose, float(command.gripper))
        joints = np.array([sent[f"{name}.pos"] for name in self._config.joints], dtype=np.float64)
        reached = self._kinematics.forward_kinematics(joints)
        return replace(command, position_m=reached[:3, 3], rotation=reached[:3, :3], gripper=self._closing(sent))

    def _move(self, pose: Float64[np.ndarray, "4 4"], gripper: float) -> Mapping[str, Any]:
        config, values = self._config, self._read()
        now = np.array([values[f"{name}.pos"] for name in config.joints], dtype=np.float64)
        goal = self._kinematics.inverse_kinematics(now, pose)
        if not np.isfinite(goal).all():
            raise RobotError(f"the kinematics have no joints for the pose {pose[:3, 3]} m: {goal}")
        goal = np.clip(goal, np.rad2deg(config.joint_lower_rad), np.rad2deg(config.joint_upper_rad))
        share = (gripper + 1.0) / 2.0
        self._gripper_goal = config.gripper_open + share * (config.gripper_closed - config.gripper_open)
        action = {f"{name}.pos": float(value) for name, value in zip(config.joints, goal, strict=True)}
        self._require_no_stop()
        self._mode = "moving"
        sent = self._send({**action, f"{config.gripper}.pos": self._gripper_goal})
        if self._stops.is_pending:  # by a signal, while the goals were on their way: they came after its hold
            self._mode = "fault"
        self._require_no_stop()
        return sent

    def _require_no_stop(self) -> None:
        """A stop that could not hold, or whose hold was overtaken, is made good here."""
        if not self._stops.is_pending:
            return
        if self._mode == "fault":
            self._mode = "moving"
            self.stop()
        raise RobotError("the robot was stopped; recover() allows commands again")

    def hold(self) -> None:
        """Make the measured joints the goal, once; repeating it would let the arm sink. The gripper keeps its goal.

        Raises:
            RobotError: The bus failed, or another call has kept it for too long.
        """
        with patiently(self._lock) as is_mine:
            if not is_mine:
                raise RobotError(f"the bus of LeRobot's {self._robot.name} is busy; the arm could not be held")
            if self._mode == "moving":
                values = self._read()
                joints = {f"{name}.pos": values[f"{name}.pos"] for name in self._config.joints}
                self._send({**joints, f"{self._config.gripper}.pos": self._gripper_goal})
                self._mode = "held"

    def stop(self) -> None:
        """Refuse commands until `recover`, and hold; a bus that fails leaves the motors at their last goal.

        A command that keeps the bus busy holds in its place when it ends.
        """
        self._stops.add()
        try:
            self.hold()
        except RobotError:
            self._mode = "fault"

    def recover(self) -> None:
        """Allow commands again if the bus answers.

        Raises:
            RobotError: It does not, or a `stop` came meanwhile.
        """
        seen = self._stops.newest
        with self._lock:
            self._read()
            self._mode = "held"
            self._stops.clear(seen)
        self._require_no_stop()

    def close(self) -> None:
        """Stop, and let go of the bus."""
        self.stop()
        self._disconnect()

    def _disconnect(self) -> None:
        """Let go of the bus. LeRobot keeps its port where motors do not answer any more; it is closed here then."""
        with patiently(self._lock):
            bus = getattr(self._robot, "bus", None)
            try:
                if self._robot.is_connected:
                    self._robot.disconnect()
            except (OSError, RuntimeError):
                if bus is None:
                    raise
            if bus is not None and bus.is_connected:
                bus.disconnect(disable_torque=False)

    def _closing(self, values: Mapping[str, Any]) -> float:
        """-1 (open) to +1 (closed)."""
        config = self._config
        share = (float(values[f"{config.gripper}.pos"]) - config.gripper_open) / (
            config.gripper_closed - config.gripper_open
        )
        return float(np.clip(2.0 * share - 1.0, -1.0, 1.0))

    def _read(self) -> Mapping[str, Any]:
        try:
            with self._lock:
                values: Mapping[str, Any] = self._robot.get_observation()
        except (OSError, RuntimeError) as error:
            raise RobotError(f"LeRobot's {self._robot.name} cannot be read: {error}") from error
        return values

    def _send(self, action: dict[str, Any]) -> Mapping[str, Any]:
        try:
            sent: Mapping[str, Any] = self._robot.send_action(action)
        except (OSError, RuntimeError, ValueError, TypeError) as error:  # the latter two: its own limits misconfigured
            raise RobotError(f"LeRobot's {self._robot.name} took no command: {error}") from error
        return {**action, **sent}
