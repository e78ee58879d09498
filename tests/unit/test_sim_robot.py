"""A world as a robot: what the contract says of frame and gripper is what the world gets, from two threads at once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from fakes import POLICY_SPEC, fake_start, tiny_policy

from robots import sim_robot
from robots.contract import DeploymentContract
from robots.robot import Command, Robot, RobotError
from robots.rotations import angle_between, matrix_from_rotation_vector, rotation_vector_from_matrix
from robots.sim_robot import SimRobot
from sim.mujoco_world import ACTION_MEANING, PROPRIO_NAMES
from vla_rl.types import Observation, StepResult

TURN = matrix_from_rotation_vector(np.array([0.3, -0.4, 0.5]))


class PoseWorld:
    """Does at once what an action asks for, in the frame and with the gripper's sign that it was made with."""

    def __init__(self, frame: str, closes_at: int) -> None:
        self.frame, self.closes_at = frame, closes_at
        self.position, self.rotation, self.is_closed = np.array([0.1, 0.2, 0.9]), TURN.copy(), False
        self.num_inside = self.max_inside = 0
        self.work_s, self.go_on = 0.0, threading.Event()
        self.go_on.set()

    def reset(self, start: object) -> None:
        self.is_closed = False

    def step(self, chunk: np.ndarray, record_frames: bool = False) -> StepResult:
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        assert self.go_on.wait(30.0)
        time.sleep(self.work_s)
        (action,) = chunk
        moved, turned = 0.05 * action[:3], matrix_from_rotation_vector(0.5 * action[3:6])
        if self.frame == "tool":
            moved, self.rotation = self.rotation @ moved, self.rotation @ turned
        else:
            self.rotation = turned @ self.rotation
        self.position = self.position + moved
        self.is_closed = action[6] * self.closes_at > 0
        self.num_inside -= 1
        return StepResult(num_steps=1, success=False, truncated=False)

    def observe(self) -> Observation:
        raise AssertionError("nobody looks")

    def proprio(self) -> np.ndarray:
        fingers = (0.0, 0.0) if self.is_closed else (0.04, -0.04)
        values = [*self.position, *rotation_vector_from_matrix(self.rotation), *fingers]
        return np.array(values, dtype=np.float32)


def contract_of(frame: str = "base", closes_at: int = 1) -> DeploymentContract:
    meaning = replace(ACTION_MEANING, frame=frame, gripper_closes_at=closes_at)  # type: ignore[arg-type]
    contract = tiny_policy(replace(POLICY_SPEC, proprio_names=PROPRIO_NAMES, action_meaning=meaning)).contract()
    assert contract is not None
    return contract


def robot_of(frame: str = "base", closes_at: int = 1) -> tuple[SimRobot, PoseWorld]:
    world = PoseWorld(frame, closes_at)
    robot = SimRobot(world, contract_of(frame, closes_at), is_lockstep=False)
    assert isinstance(robot, Robot)
    robot.begin(fake_start(0))
    return robot, world


@pytest.mark.parametrize("frame", ["base", "tool"])
@pytest.mark.parametrize("closes_at", [1, -1])
def test_a_commanded_pose_is_reached_whatever_the_actions_mean(frame: str, closes_at: int) -> None:
    robot, world = robot_of(frame, closes_at)
    position = world.position + np.array([0.01, -0.02, 0.03])
    rotation = matrix_from_rotation_vector(np.array([0.1, 0.2, -0.1])) @ TURN
    robot.command(Command(position_m=position, rotation=rotation, gripper=1.0))
    state = robot.observe()
    np.testing.assert_allclose(state.position_m, position, atol=1e-6)
    assert angle_between(state.rotation, rotation) < 1e-5
    assert state.gripper_width_m == 0.0
    robot.command(Command(position_m=position, rotation=rotation, gripper=-1.0))
    assert robot.observe().gripper_width_m == pytest.approx(0.08)


@pytest.mark.parametrize("closes_at", [1, -1])
def test_a_hold_keeps_the_gripper(closes_at: int) -> None:
    robot, world = robot_of(closes_at=closes_at)
    robot.hold()
    assert not world.is_closed  # as it began
    robot.command(Command(position_m=world.position, rotation=world.rotation, gripper=1.0))
    robot.hold()
    assert world.is_closed
    robot.begin(fake_start(1))
    robot.hold()
    assert not world.is_closed


def test_loop_and_watchdog_take_turns_at_the_world() -> None:
    robot, world = robot_of()
    world.work_s = 0.002
    command = Command(position_m=world.position, rotation=world.rotation, gripper=0.0)
    threads = [
        threading.Thread(target=lambda call=call: [call() for _ in range(30)])
        for call in (robot.hold, lambda: robot.command(command), robot.observe)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.max_inside == 1
    assert robot.observe().time_s == pytest.approx(60 / 20)


def test_a_world_that_hangs_blocks_neither_hold_nor_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_robot, "_BUSY_S", 0.05)
    robot, world = robot_of()
    world.go_on.clear()
    command = Command(position_m=world.position, rotation=world.rotation, gripper=0.0)
    loop = threading.Thread(target=lambda: robot.command(command))
    loop.start()
    while not world.num_inside:
        time.sleep(0.001)
    with pytest.raises(RobotError, match=r"has been busy for 0\.05 s"):
        robot.hold()
    robot.stop()
    world.go_on.set()
    loop.join()
    robot.hold()
