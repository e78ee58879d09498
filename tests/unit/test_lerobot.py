"""LeRobot's robots behind the Robot seam, on one that acts like LeRobot's: a planar arm of two links of 1 m."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from robots.lerobot import Kinematics, LeRobotArm, LeRobotConfig, make_lerobot
from robots.robot import Command, Robot, RobotError


class TwoLinks:
    """Both joints turn about z; the tool points along the second link."""

    def forward_kinematics(self, joint_pos_deg: np.ndarray) -> np.ndarray:
        first, both = np.deg2rad(joint_pos_deg[0]), np.deg2rad(joint_pos_deg[:2].sum())
        pose = np.eye(4)
        pose[:2, :2] = [[np.cos(both), -np.sin(both)], [np.sin(both), np.cos(both)]]
        pose[:2, 3] = np.cos(first) + np.cos(both), np.sin(first) + np.sin(both)
        return pose

    def inverse_kinematics(self, current_joint_pos: np.ndarray, desired_ee_pose: np.ndarray) -> np.ndarray:
        x, y = desired_ee_pose[:2, 3]
        elbow = np.arccos(np.clip((x * x + y * y - 2) / 2, -1, 1))
        shoulder = np.arctan2(y, x) - np.arctan2(np.sin(elbow), 1 + np.cos(elbow))
        return np.rad2deg([shoulder, elbow])


class FakeLeRobot:
    """Goes where it is told, but never further than 10 degrees at once, and says so."""

    name = "two_links"
    is_calibrated = True

    def __init__(self) -> None:
        self.positions = {"shoulder.pos": 0.0, "elbow.pos": 90.0, "gripper.pos": 100.0}
        self.action_features = self.observation_features = dict.fromkeys(self.positions, float)
        self.is_connected = self.is_broken = False
        self.num_sent = 0

    def connect(self, calibrate: bool = True) -> None:
        assert not calibrate  # it would ask on the terminal
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def get_observation(self) -> dict[str, Any]:
        if self.is_broken:
            raise ConnectionError("no status packet")
        return dict(self.positions)

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.num_sent += 1
        for name, value in action.items():
            reach = 10.0 if name != "gripper.pos" else 100.0
            self.positions[name] += float(np.clip(value - self.positions[name], -reach, reach))
        return {name: self.positions[name] for name in action}


def config(**changes: Any) -> LeRobotConfig:
    values = {
        "arm": "TwoLinks",
        "joints": ("shoulder", "elbow"),
        "gripper_width_m": 0.06,
        "joint_lower_rad": (-3.0, 0.0),
        "joint_upper_rad": (3.0, 3.0),
        "joint_speed_rad_s": 2.0,
        "linear_speed_m_s": 0.5,
        "angular_speed_rad_s": 2.0,
        "reach_m": 2.0,
        "base_in_world_m": (0.0, 0.0, 0.9),
    }
    return LeRobotConfig.model_validate({**values, **changes})


@pytest.fixture
def arm() -> LeRobotArm:
    assert isinstance(TwoLinks(), Kinematics)
    arm = LeRobotArm(FakeLeRobot(), TwoLinks(), config())
    assert isinstance(arm, Robot)
    arm.connect(1.0)
    return arm


def test_the_state_comes_from_the_joints(arm: LeRobotArm) -> None:
    state = arm.observe()
    np.testing.assert_allclose(state.position_m, [1.0, 1.0, 0.0], atol=1e-12)  # along x, then along y
    assert state.named["eef_pos_z"] == pytest.approx(0.9)
    assert state.named["eef_axis_angle_z"] == pytest.approx(np.pi / 2)
    assert (state.named["finger_1"], state.named["finger_2"]) == pytest.approx((0.03, -0.03))


def test_what_was_really_sent_comes_back(arm: LeRobotArm) -> None:
    near = np.array([0.95, 1.0, 0.0])
    sent = arm.command(Command(position_m=near, rotation=np.eye(3), gripper=-1.0))
    np.testing.assert_allclose(sent.position_m, near, atol=1e-9)
    assert sent.gripper == -1.0
    far = arm.command(Command(position_m=np.array([-1.0, 1.0, 0.0]), rotation=np.eye(3), gripper=1.0))
    assert np.linalg.norm(far.position_m - near) < 0.4  # 10 degrees of a joint, not 2 m
    np.testing.assert_allclose(arm.observe().position_m, far.position_m, atol=1e-9)
    assert far.gripper == 1.0


def test_hold_sends_once_and_stop_stays(arm: LeRobotArm) -> None:
    robot = arm._robot
    pose = Command(position_m=np.array([0.95, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0)
    arm.command(pose)
    for _ in range(5):
        arm.hold()
    assert robot.num_sent == 2
    assert arm.observe().mode == "held"
    arm.stop()
    with pytest.raises(RobotError, match="stopped"):
        arm.command(pose)
    arm.recover()
    arm.command(pose)
    arm.close()
    arm.close()
    assert not robot.is_connected


def test_a_stop_while_goals_are_on_their_way_has_the_last_word(arm: LeRobotArm) -> None:
    robot, sent = arm._robot, []
    send = robot.send_action

    def interrupted(action: dict[str, Any]) -> dict[str, Any]:
        sent.append(action)
        if len(sent) == 1:
            arm.stop()  # as a signal's handler does
        return send(action)

    robot.send_action = interrupted
    before = robot.positions["shoulder.pos"]
    with pytest.raises(RobotError, match="stopped"):
        arm.command(Command(position_m=np.array([-1.0, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0))
    assert sent[-1]["shoulder.pos"] == robot.positions["shoulder.pos"] != before  # stands where it got to


def test_goals_stay_within_the_joint_limits_and_must_be_numbers(arm: LeRobotArm) -> None:
    bounded = LeRobotArm(arm._robot, TwoLinks(), config(joint_lower_rad=(0.0, 0.0), joint_upper_rad=(0.1, 1.5)))
    pose = Command(position_m=np.array([-1.0, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0)
    for _ in range(20):
        bounded.command(pose)
    assert arm._robot.positions["shoulder.pos"] == pytest.approx(np.rad2deg(0.1))
    bounded._kinematics = nowhere = TwoLinks()
    nowhere.inverse_kinematics = lambda now, pose: np.full(2, np.nan)  # type: ignore[method-assign]
    with pytest.raises(RobotError, match="no joints"):
        bounded.command(pose)


def test_a_broken_bus(arm: LeRobotArm) -> None:
    arm.command(Command(position_m=np.array([0.95, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0))
    arm._robot.is_broken = True
    with pytest.raises(RobotError, match="no status packet"):
        arm.observe()
    arm.stop()
    with pytest.raises(RobotError, match="no status packet"):
        arm.recover()


def test_motors_are_matched_by_name() -> None:
    with pytest.raises(ValueError, match=r"lack wrist\.pos; it has elbow\.pos"):
        LeRobotArm(FakeLeRobot(), TwoLinks(), config(joints=("shoulder", "wrist")))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"joint_lower_rad": (0.0,)}, "2 joints"),
        ({"joint_lower_rad": (-3.0, 3.5)}, "leave no room"),
        ({"joint_upper_rad": (3.0, float("nan"))}, "joint_upper_rad"),
        ({"base_in_world_m": (0.0, float("inf"), 0.0)}, "base_in_world_m"),
        ({"gripper_open": 5.0, "gripper_closed": 5.0}, "are both 5"),
        ({"gripper_open": float("nan")}, "gripper_open"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config(**changes)


def test_a_bus_that_is_kept_busy_keeps_neither_hold_nor_stop_waiting(arm: LeRobotArm) -> None:
    pose = Command(position_m=np.array([0.95, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0)
    arm.command(pose)
    is_inside, release, read = threading.Event(), threading.Event(), arm._robot.get_observation

    def blocked() -> dict[str, Any]:
        is_inside.set()
        release.wait(20.0)
        values: dict[str, Any] = read()
        return values

    arm._robot.get_observation = blocked
    refused: list[str] = []

    def command() -> None:
        try:
            arm.command(pose)
        except RobotError as error:
            refused.append(str(error))

    thread = threading.Thread(target=command, daemon=True)
    thread.start()
    assert is_inside.wait(5.0)
    begun = time.monotonic()
    with pytest.raises(RobotError, match="busy"):
        arm.hold()
    arm.stop()
    assert time.monotonic() - begun < 3.0
    release.set()
    thread.join(5.0)
    assert "was stopped" in refused[0]
    assert arm._robot.num_sent == 2  # the hold, and not what was on its way
    assert arm.observe().mode == "held"


def test_a_stop_during_a_recovery_is_not_cleared_by_it(arm: LeRobotArm) -> None:
    pose = Command(position_m=np.array([0.95, 1.0, 0.0]), rotation=np.eye(3), gripper=0.0)
    arm.command(pose)
    arm.stop()
    read = arm._robot.get_observation

    def interrupted() -> dict[str, Any]:
        arm._robot.get_observation = read
        arm.stop()
        values: dict[str, Any] = read()
        return values

    arm._robot.get_observation = interrupted
    for call in (arm.recover, lambda: arm.command(pose)):
        with pytest.raises(RobotError, match="was stopped"):
            call()
    arm.recover()
    arm.command(pose)


def test_an_uncalibrated_robot_is_refused() -> None:
    robot = FakeLeRobot()
    robot.is_calibrated = False
    with pytest.raises(RobotError, match="lerobot-calibrate"):
        LeRobotArm(robot, TwoLinks(), config()).connect(1.0)


def test_lerobot_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    with pytest.raises(ImportError, match="pip install lerobot"):
        make_lerobot("so101_follower", {"port": "nowhere"})
