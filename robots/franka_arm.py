"""What a Franka arm is: its limits, and where its tool is. The only place that knows how robosuite's Panda differs.

Frames: O base, F flange, EE the end effector that is set in the robot's Desk (any), T our tool. The tool's origin is
robosuite's `grip_site` and its axes are those of robosuite's `right_hand` body, so that a state here is what a policy
saw in training: rotations of the state are of `right_hand`, and rotation commands are multiplied from the left in base
axes, which makes any constant turn of the tool cancel.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64

from robots.robot import RobotLimits

Arm = Literal["FR3", "Panda"]
"""Franka Research 3 (FCI server version 10), and the Franka Emika robot of before (5)."""

Pose = Float64[np.ndarray, "4 4"]
"""Homogeneous transformation."""

_HALF = math.sqrt(0.5)

# robosuite 1.4, panda/robot.xml and panda_gripper.xml: right_hand 0.1065 m behind joint 7, turned by -45 degrees about
# its axis; grip_site 0.097 m further on. Franka's flange lies 0.107 m behind joint 7.
FLANGE_TO_TOOL = np.array(
    [[_HALF, _HALF, 0.0, 0.0], [-_HALF, _HALF, 0.0, 0.0], [0.0, 0.0, 1.0, 0.1065 + 0.097 - 0.107], [0.0, 0.0, 0.0, 1.0]]
)
"""Tool in the flange's frame. With a Franka Hand set in Desk, O_T_EE is 6.9 mm further along the same axis."""


def tool_from_end_effector(end_effector: Pose, flange_to_end_effector: Pose) -> Pose:
    """Tool pose in the base frame from O_T_EE and F_T_EE, whatever end effector the controller has been told of."""
    return np.asarray(end_effector @ np.linalg.inv(flange_to_end_effector) @ FLANGE_TO_TOOL)


def end_effector_from_tool(tool: Pose, flange_to_end_effector: Pose) -> Pose:
    """Inverse of `tool_from_end_effector`."""
    return np.asarray(tool @ np.linalg.inv(FLANGE_TO_TOOL) @ flange_to_end_effector)


# Quaternions (w, x, y, z) of the bodies of robosuite's Panda before their joint turns, link 1 to 7, then right_hand.
_FORTH, _BACK = (_HALF, _HALF, 0.0, 0.0), (_HALF, -_HALF, 0.0, 0.0)
_LINKS = ((1.0, 0.0, 0.0, 0.0), _BACK, _FORTH, _FORTH, _BACK, _FORTH, _FORTH)
_HAND = (math.cos(math.pi / 8), 0.0, 0.0, -math.sin(math.pi / 8))


def training_rotation_vector(
    rotation: Float64[np.ndarray, "3 3"], joint_positions_rad: Float64[np.ndarray, 7]
) -> Float64[np.ndarray, 3]:
    """Rotation vector (rad) of the tool on the branch that the simulated arm would report.

    A hand that points down has turned by about pi, where a rotation vector and its opposite twin meet. Simulators
    compute the hand's quaternion link by link from half the joint angles and keep its sign, so the sign is a function
    of the joint positions; the angle lies in [0, 2 pi]. Here the joints choose the sign and the measured rotation
    gives the rest.

    Args:
        rotation: Tool axes in the base frame, as measured.
        joint_positions_rad: At the same time.
    """
    chain = np.array([1.0, 0.0, 0.0, 0.0])
    for link, angle in zip(_LINKS, joint_positions_rad / 2.0, strict=True):
        chain = _multiply(_multiply(chain, np.array(link)), np.array([math.cos(angle), 0.0, 0.0, math.sin(angle)]))
    chain = _multiply(chain, np.array(_HAND))
    quaternion = _quaternion(rotation)
    if float(quaternion @ chain) < 0.0:
        quaternion = -quaternion
    sine = float(np.linalg.norm(quaternion[1:]))
    if sine == 0.0:
        return np.zeros(3)
    vector: Float64[np.ndarray, 3] = quaternion[1:] * (2.0 * math.atan2(sine, float(quaternion[0])) / sine)
    return vector


def _multiply(a: Float64[np.ndarray, 4], b: Float64[np.ndarray, 4]) -> Float64[np.ndarray, 4]:
    w, v = a[0], a[1:]
    return np.concatenate([[w * b[0] - v @ b[1:]], w * b[1:] + b[0] * v + np.cross(v, b[1:])])


def _quaternion(rotation: Float64[np.ndarray, "3 3"]) -> Float64[np.ndarray, 4]:
    """Unit quaternion (w, x, y, z) of either sign: the largest of Shepperd's four solutions."""
    r = rotation
    candidates = np.array(
        [
            [1 + r[0, 0] + r[1, 1] + r[2, 2], r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], 1 + r[0, 0] - r[1, 1] - r[2, 2], r[0, 1] + r[1, 0], r[0, 2] + r[2, 0]],
            [r[0, 2] - r[2, 0], r[0, 1] + r[1, 0], 1 - r[0, 0] + r[1, 1] - r[2, 2], r[1, 2] + r[2, 1]],
            [r[1, 0] - r[0, 1], r[0, 2] + r[2, 0], r[1, 2] + r[2, 1], 1 - r[0, 0] - r[1, 1] + r[2, 2]],
        ]
    )
    best: Float64[np.ndarray, 4] = candidates[int(np.argmax(np.diag(candidates)))]
    best /= np.linalg.norm(best)
    return best


# Franka Robotics, "Robot and interface specifications" (Franka Control Interface documentation), joint and Cartesian
# limits of the two arms.
_JOINT_LOWER: dict[Arm, tuple[float, ...]] = {
    "FR3": (-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159),
    "Panda": (-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973),
}
_JOINT_UPPER: dict[Arm, tuple[float, ...]] = {
    "FR3": (2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159),
    "Panda": (2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973),
}
_JOINT_SPEED: dict[Arm, tuple[float, ...]] = {
    "FR3": (2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26),
    "Panda": (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61),
}
_LINEAR: dict[Arm, tuple[float, float, float]] = {"FR3": (3.0, 9.0, 4500.0), "Panda": (1.7, 13.0, 6500.0)}
_ANGULAR: dict[Arm, tuple[float, float, float]] = {"FR3": (2.5, 17.0, 8500.0), "Panda": (2.5, 25.0, 12500.0)}
_REACH_M = 1.27
"""From the DH table, all links stretched: 0.333 + |(0.316, 0.0825)| + |(0.384, 0.0825)| + |(0.088, 0.2035)|."""


def franka_limits(arm: Arm, dynamics_factor: float, force_n: float, torque_nm: float) -> RobotLimits:
    """Limits of an arm.

    Args:
        arm: Model.
        dynamics_factor: Fraction of the maker's speeds, accelerations and jerks that is allowed, in (0, 1].
        force_n: External force at which the safety chain holds.
        torque_nm: Likewise, torque.

    Raises:
        ValueError: Unknown arm, or a factor outside of (0, 1].
    """
    if arm not in get_args(Arm):
        raise ValueError(f"arm is {arm!r}; choose one of {', '.join(get_args(Arm))}")
    if not 0.0 < dynamics_factor <= 1.0:
        raise ValueError(f"dynamics_factor is {dynamics_factor}; it lies in (0, 1]")
    linear, angular = np.array(_LINEAR[arm]) * dynamics_factor, np.array(_ANGULAR[arm]) * dynamics_factor
    return RobotLimits(
        joint_lower_rad=np.array(_JOINT_LOWER[arm]),
        joint_upper_rad=np.array(_JOINT_UPPER[arm]),
        joint_speed_rad_s=np.array(_JOINT_SPEED[arm]) * dynamics_factor,
        linear_speed_m_s=float(linear[0]),
        linear_acceleration_m_s2=float(linear[1]),
        linear_jerk_m_s3=float(linear[2]),
        angular_speed_rad_s=float(angular[0]),
        angular_acceleration_rad_s2=float(angular[1]),
        angular_jerk_rad_s3=float(angular[2]),
        reach_m=_REACH_M,
        force_n=force_n,
        torque_nm=torque_nm,
    )
