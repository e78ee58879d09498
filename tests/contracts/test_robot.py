"""What every `Robot` promises: worlds, and an arm of LeRobot's; the Franka's has its own tests (`tests/robots`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import fake_lerobot
import numpy as np
import pytest
from fakes import norm_stats

from robots.contract import DeploymentContract
from robots.lerobot import LeRobotArm, LeRobotConfig
from robots.robot import Command, Robot
from robots.sim_robot import SimRobot
from sim.suites import make_suite
from sim.tabletop.suite import TabletopConfig
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.word_tokenizer import WordTokenizer


def contract_of_tabletop() -> DeploymentContract:
    suite = make_suite(TabletopConfig(image_size=16))
    config = TinyVLAConfig(hidden_dim=16, num_keypoints=2)
    policy = TinyVLA(config, suite.spec, norm_stats(suite.spec), WordTokenizer.from_instructions(["go"]))
    contract = policy.contract()
    assert contract is not None
    return contract


def sim_robot(is_lockstep: bool) -> SimRobot:
    suite = make_suite(TabletopConfig(image_size=16))
    robot = SimRobot(suite.make_world(), contract_of_tabletop(), is_lockstep=is_lockstep)
    robot.begin(suite.start(suite.tasks[0], "train", 0))
    return robot


def lerobot_arm() -> LeRobotArm:
    config = LeRobotConfig(
        arm="TwoLinks",
        joints=("shoulder", "elbow"),
        gripper_width_m=0.06,
        joint_lower_rad=(-3.0, 0.0),
        joint_upper_rad=(3.0, 3.0),
        joint_speed_rad_s=2.0,
        linear_speed_m_s=0.5,
        angular_speed_rad_s=2.0,
        reach_m=0.61,
        base_in_world_m=(0.0, 0.0, 0.0),
    )
    return LeRobotArm(fake_lerobot.TwoLinksArm(fake_lerobot.TwoLinksConfig("nowhere")), fake_lerobot.TwoLinks(), config)


ROBOTS: dict[str, Callable[[], Robot]] = {
    "world that waits": lambda: sim_robot(True),
    "world in real time": lambda: sim_robot(False),
    "arm of LeRobot's": lerobot_arm,
}


@pytest.fixture(params=ROBOTS)
def robot(request: pytest.FixtureRequest) -> Iterator[Robot]:
    robot = ROBOTS[request.param]()
    yield robot
    robot.close()


def here(robot: Robot) -> Command:
    state = robot.observe()
    return Command(position_m=state.position_m, rotation=state.rotation, gripper=-1.0)


def test_it_says_what_it_is_before_anything_is_connected(robot: Robot) -> None:
    assert isinstance(robot, Robot)
    described = robot.description
    assert 0 < described.min_rate_hz <= described.max_rate_hz
    limits = described.limits
    assert min(limits.linear_speed_m_s, limits.linear_acceleration_m_s2, limits.linear_jerk_m_s3, limits.reach_m) > 0
    assert min(limits.angular_speed_rad_s, limits.angular_acceleration_rad_s2, limits.angular_jerk_rad_s3) > 0


def test_a_state_has_every_entry_that_was_described(robot: Robot) -> None:
    robot.connect(1.0)
    state = robot.observe()
    assert set(robot.description.state_names) <= set(state.named)
    assert np.isfinite(list(state.named.values())).all()
    np.testing.assert_allclose(state.rotation @ state.rotation.T, np.eye(3), atol=1e-6)
    assert np.linalg.det(state.rotation) > 0
    assert robot.observe().time_s >= state.time_s


def test_a_command_comes_back_as_it_was_sent(robot: Robot) -> None:
    robot.connect(1.0)
    wanted = here(robot)
    wanted = replace(wanted, position_m=wanted.position_m - np.array([0.005, 0.005, 0.0]))
    sent = robot.command(wanted)
    np.testing.assert_allclose(sent.position_m, wanted.position_m, atol=1e-6)
    assert sent.gripper == wanted.gripper


def test_holding_is_idempotent_and_commands_may_follow(robot: Robot) -> None:
    robot.connect(1.0)
    robot.command(here(robot))
    for _ in range(3):
        robot.hold()
    before = robot.observe().position_m
    robot.hold()
    np.testing.assert_allclose(robot.observe().position_m, before, atol=2e-3)
    robot.command(here(robot))


def test_stop_and_close_are_safe_in_any_state_and_thread_and_recover_undoes_a_stop(robot: Robot) -> None:
    robot.stop()
    robot.connect(1.0)
    robot.recover()
    robot.command(here(robot))
    threads = [threading.Thread(target=robot.stop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    robot.stop()
    robot.recover()
    robot.command(here(robot))
    robot.close()
    robot.close()
    robot.stop()
