"""What can be known of the Franka driver without franky: limits, frames, settings, the hand's thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
from pydantic import ValidationError

from robots.driving import command_pose, with_deadline
from robots.franka import FrankaRobot
from robots.franka_arm import (
    FLANGE_TO_TOOL,
    end_effector_from_tool,
    franka_limits,
    tool_from_end_effector,
    training_rotation_vector,
)
from robots.franka_config import FrankaConfig
from robots.franka_gripper import FrankaGripper, GripperConfig
from robots.robot import Command, Robot, RobotError
from sim.mujoco_world import rotation_vector
from sim.tabletop.panda import add_panda

ORIGIN = (0.0, 0.0, 0.0)


def turn_about_z(angle: float) -> np.ndarray:
    pose = np.eye(4)
    pose[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return pose


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, robots.franka, robots.cameras, robots.lerobot; "
        "print(sorted({'franky', 'cv2', 'torch', 'lerobot', 'mujoco'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_franky_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "franky", None)
    robot = FrankaRobot(FrankaConfig(host="127.0.0.9", base_in_world_m=ORIGIN))
    with pytest.raises(ImportError, match=r"pip install 'vla-rl\[franka\]'"):
        robot.connect(1.0)


def test_before_connecting() -> None:
    robot = FrankaRobot(FrankaConfig(host="127.0.0.9", base_in_world_m=ORIGIN))
    assert isinstance(robot, Robot)
    assert robot.description.arm == "Panda"
    robot.hold()
    robot.stop()
    robot.close()
    for call in (robot.observe, robot.recover):
        with pytest.raises(RobotError, match="connect"):
            call()


@pytest.mark.parametrize(
    "changes",
    [
        {"base_in_world_m": None},
        {"host": ""},
        {"translational_stiffness_n_m": 0.0},
        {"rotational_stiffness_nm_rad": float("nan")},
        {"dynamics_factor": 1.5},
        {"max_recoveries": -1},
        {"gripper": {"max_width_m": 0.2}},
        {"gripper": {"hysteresis": 1.0}},
        {"gripper": {"min_width_m": 0.05, "max_width_m": 0.04}},
        {"base_in_world_m": (0.0, float("nan"), 0.0)},
        {"damping": (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0)},
        {"damping": (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)},
        {"damping": (float("inf"),) * 6},
        {"max_recoveries": 1000},
        {"stale_after_s": float("inf")},
        {"recover_timeout_s": float("inf")},
        {"rest_speed_rad_s": 5.0},
        {"stifness": 3.0},
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    good = {"host": "172.16.0.2", "base_in_world_m": ORIGIN}
    FrankaConfig.model_validate(good)
    with pytest.raises(ValidationError):
        FrankaConfig.model_validate({**good, **changes})


def test_limits_are_the_makers_times_the_factor() -> None:
    limits = franka_limits("FR3", 0.5, force_n=30.0, torque_nm=20.0)
    assert limits.joint_upper_rad[3] == -0.1518
    assert limits.joint_lower_rad[5] == 0.5445
    assert limits.joint_speed_rad_s[4] == 2.63  # 5.26 rad/s
    assert (limits.linear_speed_m_s, limits.angular_jerk_rad_s3) == (1.5, 4250.0)
    assert (limits.force_n, limits.torque_nm) == (30.0, 20.0)
    panda = franka_limits("Panda", 1.0, 30.0, 20.0)
    assert (panda.linear_speed_m_s, panda.joint_upper_rad[5]) == (1.7, 3.7525)
    assert np.all(panda.joint_lower_rad < panda.joint_upper_rad)
    with pytest.raises(ValueError, match="dynamics_factor"):
        franka_limits("FR3", 0.0, 30.0, 20.0)


def test_the_tool_is_the_same_whatever_end_effector_is_set() -> None:
    flange = turn_about_z(0.3)
    flange[:3, 3] = 0.5, 0.1, 0.4
    hand = turn_about_z(-np.pi / 4)
    hand[2, 3] = 0.1034
    tool = tool_from_end_effector(flange @ hand, hand)
    np.testing.assert_allclose(tool, tool_from_end_effector(flange, np.eye(4)), atol=1e-12)
    # Franka's hand as set in Desk: same axes, 0.1034 - 0.0965 = 6.9 mm further on.
    np.testing.assert_allclose(np.linalg.inv(tool) @ flange @ hand, _shift(0.0069), atol=1e-12)
    np.testing.assert_allclose(end_effector_from_tool(tool, hand), flange @ hand, atol=1e-12)


def _shift(z: float) -> np.ndarray:
    pose = np.eye(4)
    pose[2, 3] = z
    return pose


def test_the_simulated_panda_has_the_same_tool_and_the_same_rotation_vector() -> None:
    spec = mujoco.MjSpec()
    add_panda(spec, ORIGIN)
    model = spec.compile()
    data = mujoco.MjData(model)
    low, high = model.jnt_range[:7].T
    num_beyond_pi = 0
    for joints in np.random.default_rng(0).uniform(low, high, (200, 7)):
        data.qpos[:7] = joints
        mujoco.mj_kinematics(model, data)
        hand = data.body("robot0_right_hand")
        vector = training_rotation_vector(hand.xmat.reshape(3, 3).copy(), joints)
        np.testing.assert_allclose(vector, rotation_vector(hand.xquat), atol=1e-6)
        num_beyond_pi += np.linalg.norm(vector) > np.pi
        link = np.eye(4)
        link[:3, :3], link[:3, 3] = data.body("robot0_link7").xmat.reshape(3, 3), data.body("robot0_link7").xpos
        tool = link @ _shift(0.107) @ FLANGE_TO_TOOL
        np.testing.assert_allclose(tool[:3, 3], data.site("gripper0_grip_site").xpos, atol=1e-9)
        np.testing.assert_allclose(tool[:3, :3], hand.xmat.reshape(3, 3), atol=1e-3)  # robosuite's -45.03 degrees
        assert np.linalg.norm(tool[:3, 3]) < franka_limits("Panda", 1.0, 1.0, 1.0).reach_m
    assert 20 < num_beyond_pi < 180  # both branches were seen


def test_command_poses() -> None:
    pose = command_pose(Command(position_m=np.array([0.5, 0.0, 0.3]), rotation=np.eye(3), gripper=1.0))
    np.testing.assert_array_equal(pose[:3, 3], [0.5, 0.0, 0.3])
    nothing, mirror = np.array([0.0, np.nan, 0.0]), np.diag([1.0, 1.0, -1.0])
    for position, rotation, gripper in (
        (nothing, np.eye(3), 0.0),
        (np.zeros(3), mirror, 0.0),
        (np.zeros(3), 2 * np.eye(3), 0.0),
        (np.zeros(3), np.eye(3), np.inf),
    ):
        with pytest.raises(ValueError, match="no pose"):
            command_pose(Command(position_m=position, rotation=rotation, gripper=gripper))


def test_calls_that_block_or_fail() -> None:
    assert with_deadline(lambda: 3, 1.0, "three") == 3
    with pytest.raises(RobotError, match="the arm has not answered"):
        with_deadline(threading.Event().wait, 0.05, "the arm")
    with pytest.raises(ZeroDivisionError):
        with_deadline(lambda: 1 / 0, 1.0, "nothing")


# --- The hand --------------------------------------------------------------------------------------------------------


class HandError(Exception):
    """What the fake hand raises."""


FRANKY = SimpleNamespace(NetworkException=ConnectionError, CommandException=HandError, GripperException=HandError)


class FakeMotion:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: float) -> bool:
        return self.done.wait(timeout)

    def get(self) -> bool:
        if self.error is not None:
            raise self.error
        return True


class FakeHand:
    """Remembers its orders; motions last until the test ends them."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.motions: list[FakeMotion] = []
        self.width = 0.08

    def _begin(self, order: str) -> FakeMotion:
        self.motions.append(FakeMotion())
        self.orders.append(order)
        return self.motions[-1]

    def move_async(self, width: float, speed: float) -> FakeMotion:
        return self._begin(f"move {width}")

    def grasp_async(self, width: float, speed: float, force: float, inner: float, outer: float) -> FakeMotion:
        return self._begin(f"grasp {force}")

    def stop(self) -> None:
        self.orders.append("stop")
        self.motions[-1].done.set()


def make_gripper(hand: Any, **changes: float) -> FrankaGripper:
    return FrankaGripper(hand, FRANKY, GripperConfig(poll_s=0.002, **{"min_hold_s": 0.0, **changes}), 0.05)


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen within 10 s")


def test_the_hand_has_hysteresis_and_follows_the_latest_wish() -> None:
    hand = FakeHand()
    gripper = make_gripper(hand)
    assert gripper.command(0.1) == 0.0  # undecided
    assert gripper.command(0.5) == 1.0
    wait_for(lambda: hand.orders == ["grasp 30.0"])
    assert gripper.command(-0.1) == 1.0
    assert gripper.command(-1.0) == -1.0  # while the grasp still runs
    wait_for(lambda: hand.orders == ["grasp 30.0", "stop", "move 0.08"])
    hand.motions[-1].done.set()
    hand.width = 0.07
    wait_for(lambda: gripper.width_m == 0.07)
    assert gripper.command(-0.7) == -1.0
    gripper.close()
    assert hand.orders == ["grasp 30.0", "stop", "move 0.08"]


def test_closing_waits_until_nobody_is_in_the_hands_library() -> None:
    is_inside, slow = threading.Event(), threading.Event()

    class SlowHand(FakeHand):
        @property
        def width(self) -> float:  # type: ignore[override]
            is_inside.set()
            time.sleep(0.2)
            slow.set()
            return 0.08

        @width.setter
        def width(self, value: float) -> None: ...

    gripper = make_gripper(SlowHand())
    assert is_inside.wait(10.0)
    gripper.close()
    assert slow.is_set()
    assert not gripper._thread.is_alive()


def test_a_wavering_policy_does_not_hammer() -> None:
    hand = FakeHand()
    gripper = make_gripper(hand, min_hold_s=60.0)
    assert [gripper.command(value) for value in (1.0, -1.0, 1.0, -1.0)] == [1.0] * 4
    wait_for(lambda: len(hand.orders) == 1)
    gripper.close()


def test_stop_ends_a_motion_but_lets_a_grasp_hold() -> None:
    hand = FakeHand()
    gripper = make_gripper(hand)
    gripper.command(1.0)
    wait_for(lambda: len(hand.motions) == 1)
    hand.motions[0].done.set()
    gripper.command(-1.0)
    wait_for(lambda: len(hand.motions) == 2)
    gripper.stop()
    wait_for(lambda: hand.orders[-1] == "stop")
    assert gripper.command(-1.0) == -1.0
    wait_for(lambda: len(hand.motions) == 3)  # asked again, done again
    hand.motions[2].done.set()
    hand.width = 0.06
    wait_for(lambda: gripper.width_m == 0.06)
    num_stops = hand.orders.count("stop")
    gripper.stop()
    hand.width = 0.03
    wait_for(lambda: gripper.width_m == 0.03)
    assert hand.orders.count("stop") == num_stops
    gripper.close()


def test_a_refused_grasp_is_kept_in_the_hands_own_words() -> None:
    hand = FakeHand()
    gripper = make_gripper(hand)
    gripper.command(1.0)
    wait_for(lambda: len(hand.motions) == 1)
    hand.motions[0].error = HandError("out of epsilon")
    hand.motions[0].done.set()
    wait_for(lambda: gripper.failures == ("out of epsilon",))
    gripper.close()


def test_a_lost_hand_is_reported() -> None:
    class Unplugged(FakeHand):
        @property
        def width(self) -> float:  # type: ignore[override]
            raise ConnectionError("UDP receive: Timeout")

        @width.setter
        def width(self, value: float) -> None: ...

    gripper = make_gripper(Unplugged())
    wait_for(lambda: is_lost(gripper, "UDP receive"))
    gripper.close()


def test_a_hand_whose_thread_ends_by_surprise_is_lost_and_not_forgotten() -> None:
    class Strange(FakeHand):
        def grasp_async(self, *_: float) -> FakeMotion:
            raise TypeError("an argument that this version does not know")

    gripper = make_gripper(Strange())
    gripper.command(1.0)
    wait_for(lambda: is_lost(gripper, "does not know"))
    with pytest.raises(RobotError, match="the gripper is lost"):
        gripper.command(-1.0)
    gripper.close()


def is_lost(gripper: FrankaGripper, why: str) -> bool:
    try:
        return gripper.width_m < 0
    except RobotError as error:
        return why in str(error)
