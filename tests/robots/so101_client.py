"""Run in LeRobot's environment: our wrapper drives LeRobot's SO-101 on an emulated bus; prints one JSON line.

Before that, each line that begins with "?" asks the test to do something to the bus; it answers with one line of JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from robots.driving import STATE_NAMES
from robots.lerobot import LeRobotArm, LeRobotConfig, make_lerobot
from robots.robot import Command

PERIOD_S = 1 / 30
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
M_PER_DEG = 0.002
HOME_M = np.array([0.3, 0.0, 0.2])
LIMIT_RAD = (float(np.pi / 2),) * 5
CONFIG = LeRobotConfig(
    arm="SO101",
    joints=JOINTS,
    gripper_width_m=0.1,
    joint_lower_rad=tuple(-limit for limit in LIMIT_RAD),
    joint_upper_rad=LIMIT_RAD,
    joint_speed_rad_s=4.0,
    linear_speed_m_s=0.5,
    angular_speed_rad_s=2.0,
    reach_m=0.5,
    base_in_world_m=(0.0, 0.0, 0.0),
)


class CartesianToy:
    """Not an SO-101's geometry, but exactly invertible: three sliders and a wrist.

    The first three joints move the tool along x, y and z, 2 mm per degree; the fourth turns it about y, the fifth about
    its own x. Orientations that turn about z are not among those that it can reach.
    """

    def forward_kinematics(self, joint_pos_deg: np.ndarray) -> np.ndarray:
        (cf, cr), (sf, sr) = np.cos(np.deg2rad(joint_pos_deg[3:])), np.sin(np.deg2rad(joint_pos_deg[3:]))
        pose = np.eye(4)
        pose[:3, :3] = [[cf, sf * sr, sf * cr], [0.0, cr, -sr], [-sf, cf * sr, cf * cr]]
        pose[:3, 3] = HOME_M + M_PER_DEG * joint_pos_deg[:3]
        return pose

    def inverse_kinematics(self, current_joint_pos: np.ndarray, desired_ee_pose: np.ndarray) -> np.ndarray:
        turn = desired_ee_pose[:3, :3]
        wrist = np.arctan2(-turn[2, 0], turn[0, 0]), np.arctan2(-turn[1, 2], turn[1, 1])
        return np.concatenate([(desired_ee_pose[:3, 3] - HOME_M) / M_PER_DEG, np.rad2deg(wrist)])


def ask(what: str) -> Any:
    print(f"?{what}", flush=True)
    return json.loads(sys.stdin.readline())


def failure(call: Callable[[], Any]) -> list[Any]:
    """Name of the error's type ("" if none), its message, and how long the call took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - started]
    return ["", "", time.monotonic() - started]


def make_arm(port: str, folder: str, **options: Any) -> LeRobotArm:
    everything = {"port": port, "id": "peer", "calibration_dir": Path(folder), "use_degrees": True, **options}
    return LeRobotArm(make_lerobot("so101_follower", everything), CartesianToy(), CONFIG)


def pose_command(joints_deg: list[float], gripper: float = -1.0) -> Command:
    pose = CartesianToy().forward_kinematics(np.array(joints_deg))
    return Command(position_m=pose[:3, 3], rotation=pose[:3, :3], gripper=gripper)


def follow(arm: LeRobotArm, goal_deg: list[float], report: dict[str, Any]) -> None:
    """A ramp of one and a third seconds, closing the gripper, then a second to arrive."""
    observing, commanding = [], []
    for tick in range(70):
        started = time.monotonic()
        arm.observe()
        observed = time.monotonic()
        share = min(tick / 40, 1.0)
        sent = arm.command(pose_command([share * angle for angle in goal_deg], gripper=1.0))
        commanding.append(1e3 * (time.monotonic() - observed))
        observing.append(1e3 * (observed - started))
        time.sleep(max(0.0, started + PERIOD_S - time.monotonic()))
    state = arm.observe()
    report["reached_deg"] = np.rad2deg(state.joint_positions_rad).tolist()
    report["reached_m"], report["sent_m"] = state.position_m.tolist(), sent.position_m.tolist()
    report["gripper_m"], report["named"] = state.gripper_width_m, sorted(state.named) == sorted(STATE_NAMES)
    report["observe_ms"], report["command_ms"] = statistics.median(observing), statistics.median(commanding)
    report["slowest_ms"] = max(map(sum, zip(observing, commanding, strict=True)))


def drive(port: str, folder: str) -> dict[str, Any]:
    """Motion, targets that must not be followed, hold, stop, and torque after close."""
    report: dict[str, Any] = {}
    uncalibrated = make_arm(port, folder, id="nobody")
    report["uncalibrated"] = failure(lambda: uncalibrated.connect(10.0))
    uncalibrated.close()

    arm = make_arm(port, folder, disable_torque_on_disconnect=False)
    report["connect"] = failure(lambda: arm.connect(10.0))
    begun = arm._robot.get_observation()
    report["features"] = sorted(begun) == sorted(arm._robot.observation_features)
    follow(arm, [10.0, 20.0, -15.0, 12.0, -25.0], report)
    goals = ask("goals")
    nowhere = replace(pose_command([0.0] * 5), position_m=np.array([np.nan, 0.0, 0.2]))
    report["nan"] = failure(lambda: arm.command(nowhere))
    report["nan_sent_nothing"] = ask("goals") == goals
    arm.command(pose_command([-80.0, 20.0, -15.0, 12.0, -25.0]))  # 90 degrees away: a third of a second
    time.sleep(0.1)
    arm.hold()
    held = arm.observe()
    time.sleep(0.4)
    later = arm.observe()
    report["held_deg"] = np.rad2deg(held.joint_positions_rad)[0]
    report["sank_deg"] = np.rad2deg(later.joint_positions_rad - held.joint_positions_rad).tolist()
    report["far_sent_m"] = arm.command(pose_command([1000.0, 0.0, 0.0, 0.0, 0.0])).position_m.tolist()
    time.sleep(1.0)
    report["far_deg"] = np.rad2deg(arm.observe().joint_positions_rad).tolist()
    report["absurd"] = failure(lambda: arm.command(pose_command([1e6, 0.0, 0.0, 0.0, 0.0])))
    arm.stop()
    report["stopped"] = failure(lambda: arm.command(pose_command([0.0] * 5)))
    arm.recover()
    report["recovered"] = failure(lambda: arm.command(pose_command([0.0] * 5)))
    arm.close()
    report["torque_kept"] = ask("torques")

    leashed = make_arm(port, folder, max_relative_target=10.0)
    leashed.connect(10.0)
    time.sleep(1.0)
    begun_m = leashed.observe().position_m
    far = leashed.command(pose_command([-1000.0, 0.0, 0.0, 0.0, 0.0]))
    report["leashed_m"] = (far.position_m - begun_m).tolist()
    leashed.close()
    report["torque_dropped"] = ask("torques")

    each = make_arm(port, folder, max_relative_target=dict.fromkeys((*JOINTS, "gripper"), 10.0))
    each.connect(10.0)
    each.command(pose_command([5.0] * 5))
    report["stop_with_leash_per_motor"] = failure(each.stop)
    report["close_with_leash_per_motor"] = failure(each.close)
    return report


def lose(port: str, folder: str) -> dict[str, Any]:
    """A bus that is silent at first, then speaks, then falls silent while the arm moves."""
    report: dict[str, Any] = {}
    arm = make_arm(port, folder)
    ask("silence")
    report["connect"] = failure(lambda: arm.connect(10.0))
    ask("speak")
    report["connect_again"] = failure(lambda: arm.connect(10.0))
    for angle in range(10):
        arm.command(pose_command([float(angle)] * 5))
        time.sleep(PERIOD_S)
    ask("silence")
    report["command"] = failure(lambda: arm.command(pose_command([20.0] * 5)))
    report["observe"] = failure(arm.observe)
    report["hold"] = failure(arm.hold)
    report["stop"] = failure(arm.stop)
    report["recover"] = failure(arm.recover)
    report["close"] = failure(arm.close)
    report["is_closed"] = not arm._robot.is_connected
    return report


def main() -> None:
    what, port, folder = sys.argv[1:]
    print(json.dumps(drive(port, folder) if what == "drive" else lose(port, folder)))


if __name__ == "__main__":
    main()
