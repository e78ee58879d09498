"""Poses of somebody else's loop: through the safety steps, and watched."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from fake_robot import HOME, SAFETY, FakeRobot

from robots.following import PoseFollower
from robots.robot import RobotError
from robots.watchdog import Watchdog

RATE_HZ = 50.0
FAR = HOME + np.array([0.0, 0.2, 0.0])


class Latched(FakeRobot):
    """Refuses commands after a stop, as drivers do."""

    is_stopped = False

    def stop(self) -> None:
        super().stop()
        self.is_stopped = True

    def recover(self) -> None:
        super().recover()
        self.is_stopped = False

    def command(self, command):  # type: ignore[no-untyped-def]
        if self.is_stopped:
            raise RobotError("the robot was stopped")
        return super().command(command)


@pytest.fixture
def robot() -> Latched:
    return Latched()


@pytest.fixture
def follower(robot: Latched) -> Iterator[PoseFollower]:
    follower = PoseFollower(robot, SAFETY, RATE_HZ, Watchdog({"command": (0.1, 0.3)}))
    follower.connect(1.0)
    yield follower
    follower.close()


def follow(follower: PoseFollower, position: np.ndarray, num_calls: int) -> np.ndarray:
    """Positions sent, call by call."""
    sent = []
    for _ in range(num_calls):
        sent.append(follower.follow(position, np.eye(3), 0.0).position_m)
        time.sleep(1.0 / RATE_HZ)
    return np.array(sent)


def test_a_far_pose_is_reached_in_steps_that_ramp_in(robot: Latched, follower: PoseFollower) -> None:
    sent = follow(follower, FAR, 25)
    steps = np.linalg.norm(np.diff(sent, axis=0, prepend=HOME[None]), axis=1)
    assert 0 < steps[0] <= 0.1 * 3.0 / RATE_HZ + 1e-9  # a tenth of 3 m/s for one period
    assert steps.max() <= SAFETY.leash_m + 1e-9
    np.testing.assert_allclose(sent[-1], FAR, atol=1e-6)
    outside = follow(follower, np.array([0.45, 5.0, 0.3]), 20)
    assert outside[:, 1].max() <= 0.3 + 1e-9


def test_silence_holds_and_stops_and_the_next_pose_counts_from_where_the_robot_is(
    robot: Latched, follower: PoseFollower
) -> None:
    follow(follower, FAR, 3)
    time.sleep(0.8)  # a pause between two episodes
    assert robot.calls[-2:] == ["hold", "stop"]
    robot.position = HOME - np.array([0.0, 0.1, 0.0])
    sent = follow(follower, FAR, 2)
    assert robot.calls[-1] == "recover"
    np.testing.assert_allclose(sent[0], robot.position, atol=0.02)


def test_a_hold_of_the_watchdog_makes_the_next_pose_count_anew(robot: Latched, follower: PoseFollower) -> None:
    follow(follower, FAR, 3)
    time.sleep(0.2)
    assert robot.calls[-1] == "hold"
    robot.position = HOME - np.array([0.0, 0.1, 0.0])
    (sent,) = follow(follower, FAR, 1)
    np.testing.assert_allclose(sent, HOME - np.array([0.0, 0.1, 0.0]), atol=0.01)
    assert "recover" not in robot.calls


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_pose_is_not_sent(robot: Latched, follower: PoseFollower, value: float) -> None:
    bad = HOME.copy()
    bad[1] = value
    sent = follower.follow(bad, np.eye(3), 0.0)
    np.testing.assert_array_equal(sent.position_m, HOME)
    assert robot.calls[-1] == "hold"
    assert robot.sent == []


def test_calls_that_come_too_fast_change_nothing(robot: Latched, follower: PoseFollower) -> None:
    for _ in range(20):
        follower.follow(FAR, np.eye(3), 0.0)
    assert len(robot.sent) <= 3


def test_a_fault_stays_a_fault(robot: Latched, follower: PoseFollower) -> None:
    follow(follower, FAR, 2)
    robot.fault = "reflex"
    time.sleep(0.8)
    with pytest.raises(RobotError, match="reflex"):
        follower.follow(FAR, np.eye(3), 0.0)
    assert "recover" not in robot.calls


def test_a_tool_outside_and_a_rate_that_does_not_fit_are_refused() -> None:
    robot = Latched()
    robot.position = np.array([0.45, 0.0, 0.05])
    with pytest.raises(RobotError, match=r"z is 50\.0 mm outside"):
        PoseFollower(robot, SAFETY, RATE_HZ).connect(1.0)
    assert robot.calls[-1] == "close"
    with pytest.raises(ValueError, match="rate_hz is 500"):
        PoseFollower(robot, SAFETY, 500.0)
