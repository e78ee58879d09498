"""The robots' contract: SI units, base frame, right-handed, one command per control period.

Positions are of the tool point (between the fingertips), rotations are matrices from tool to base axes. Gripper
commands run from -1 (open) to +1 (closed), as in the worlds. Times named `_s` are `time.monotonic()` of this host
unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, UInt8

Mode = Literal["idle", "moving", "held", "fault"]


class RobotError(RuntimeError):
    """The robot cannot do what was asked; the message says what happened and what to do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RobotLimits:
    """What a driver's arm can bear; a user may tighten these and never widen them.

    Attributes:
        joint_lower_rad: Smallest joint positions; empty if the driver has no joints to show.
        joint_upper_rad: Largest joint positions.
        joint_speed_rad_s: Largest joint speeds.
        linear_speed_m_s: Of the tool.
        linear_acceleration_m_s2: Of the tool.
        linear_jerk_m_s3: Of the tool.
        angular_speed_rad_s: Of the tool.
        angular_acceleration_rad_s2: Of the tool.
        angular_jerk_rad_s3: Of the tool.
        reach_m: Largest distance of the tool from the base's origin.
        force_n: External force that ends a motion; infinite if the driver does not measure it.
        torque_nm: External torque that ends a motion; infinite if the driver does not measure it.
    """

    joint_lower_rad: Float64[np.ndarray, " joints"]
    joint_upper_rad: Float64[np.ndarray, " joints"]
    joint_speed_rad_s: Float64[np.ndarray, " joints"]
    linear_speed_m_s: float
    linear_acceleration_m_s2: float
    linear_jerk_m_s3: float
    angular_speed_rad_s: float
    angular_acceleration_rad_s2: float
    angular_jerk_rad_s3: float
    reach_m: float
    force_n: float = float("inf")
    torque_nm: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class RobotDescription:
    """What a driver offers; matched by name against a checkpoint's contract.

    Attributes:
        name: Of the driver's robot, e.g. "franka" or "sim".
        arm: Model of the arm as contracts name it, e.g. "Panda".
        spaces: Action spaces that the driver can follow.
        state_names: Proprioceptive entries that its states have, e.g. "eef_pos_x".
        min_rate_hz: Slowest command rate.
        max_rate_hz: Fastest command rate.
        limits: What the arm can bear.
        is_lockstep: The robot waits for each command, as a simulator can.
    """

    name: str
    arm: str
    spaces: tuple[str, ...]
    state_names: tuple[str, ...]
    min_rate_hz: float
    max_rate_hz: float
    limits: RobotLimits
    is_lockstep: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class RobotState:
    """What the robot measured.

    Attributes:
        time_s: The controller's own clock; a state whose clock stands still is stale.
        received_s: When this host got it.
        position_m: Of the tool.
        rotation: Tool axes in the base frame.
        joint_positions_rad: May be empty.
        joint_velocities_rad_s: May be empty.
        gripper_width_m: Distance between the fingers.
        named: Proprioceptive entries by name, as policies read them.
        wrench: External force (N) and torque (N m) at the tool, base axes; None if not measured.
        mode: "fault" means that the robot refuses to move until `recover`.
        faults: The controller's own words for what is wrong.
    """

    time_s: float
    received_s: float
    position_m: Float64[np.ndarray, 3]
    rotation: Float64[np.ndarray, "3 3"]
    joint_positions_rad: Float64[np.ndarray, " joints"] = field(default_factory=lambda: np.zeros(0))
    joint_velocities_rad_s: Float64[np.ndarray, " joints"] = field(default_factory=lambda: np.zeros(0))
    gripper_width_m: float = 0.0
    named: Mapping[str, float] = field(default_factory=dict)
    wrench: Float64[np.ndarray, 6] | None = None
    mode: Mode = "moving"
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Command:
    """Where the tool should be at the end of the next control period.

    Attributes:
        position_m: Of the tool.
        rotation: Tool axes in the base frame.
        gripper: -1 (open) to +1 (closed).
        action: The policy's own numbers in the contract's units, as long as nothing has changed them: a simulator that
            was trained in takes these, so that nothing is lost in conversions.
    """

    position_m: Float64[np.ndarray, 3]
    rotation: Float64[np.ndarray, "3 3"]
    gripper: float
    action: Float64[np.ndarray, " action_dim"] | None = None


@runtime_checkable
class Robot(Protocol):
    """A driver. `stop` and `close` are always safe, from any state and thread, any number of times."""

    @property
    def description(self) -> RobotDescription:
        """What it offers; known before `connect`."""

    def connect(self, timeout_s: float) -> None:
        """Reach the controller.

        Raises:
            RobotError: It did not answer in time; names the address.
        """

    def observe(self) -> RobotState:
        """The newest state; never blocks for longer than a control period.

        Raises:
            RobotError: The connection is lost.
        """

    def command(self, command: Command) -> Command:
        """Send a command, and return what was really sent.

        Raises:
            RobotError: The robot is in a fault, or the connection is lost.
        """

    def hold(self) -> None:
        """Stay where it is, with torque on; commands may follow. Waits for nobody for long.

        Raises:
            RobotError: It could not be told in time, or the connection is lost; `stop` comes next.
        """

    def stop(self) -> None:
        """End all motion, with torque on, whatever another thread is at; commands are refused until `recover`."""

    def recover(self) -> None:
        """Clear the controller's fault, and a `stop` from before the call.

        Raises:
            RobotError: It persists, or a `stop` came meanwhile.
        """

    def close(self) -> None:
        """Stop and let go of the controller."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CameraFrame:
    """A picture, RGB, first row on top unless the contract says otherwise.

    Attributes:
        image: Pixels.
        captured_s: When it was taken.
        index: Counts the camera's frames; a number that stands still is a frozen camera.
    """

    image: UInt8[np.ndarray, "height width 3"]
    captured_s: float
    index: int


@runtime_checkable
class Camera(Protocol):
    """A source of pictures under a contract's camera name."""

    @property
    def name(self) -> str:
        """As in the contract."""

    def read(self) -> CameraFrame:
        """The newest frame; never blocks for longer than a control period.

        Raises:
            RobotError: There is none, or the device is gone.
        """

    def close(self) -> None:
        """Let go of the device."""
