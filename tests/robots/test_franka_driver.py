"""The Franka driver against franka-sim 1.1.7, which enforces the real controller's communication and motion limits."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import mujoco
import numpy as np
import pytest

from robots.driving import STATE_NAMES
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.robot import Command, Robot, RobotError, RobotState
from sim.mujoco_world import rotation_vector
from sim.tabletop.panda import add_panda

pytestmark = [pytest.mark.robot_peers, pytest.mark.usefixtures("real_time")]

PERIOD_S = 0.05
MAX_TRIES = 3
LOST_PACKETS = "control_command_success_rate: 0."
"""Less than all of them, in the controller's words."""
HOME = (0.0, -0.6, 0.0, -2.4, 0.0, 1.8, 0.785)

MakeConfig = Callable[..., FrankaConfig]
MakeRobot = Callable[..., FrankaRobot]
GoHome = Callable[[FrankaRobot], None]


@pytest.fixture
def make_robot(franka_config: MakeConfig) -> Iterator[MakeRobot]:
    """Connected robots, closed at the end."""
    robots: list[FrankaRobot] = []

    def make(host: str, **changes: object) -> FrankaRobot:
        robots.append(FrankaRobot(franka_config(host, **changes)))
        robots[-1].connect(10.0)
        return robots[-1]

    yield make
    for robot in robots:
        robot.close()


@pytest.fixture
def go_home(note: Callable[[str], None]) -> GoHome:
    """Drive to `HOME`; if the controller lost packets on the way, the machine was busy: say so, and try again."""

    def go(robot: FrankaRobot) -> None:
        for attempt in range(1, 1 + MAX_TRIES):
            try:
                robot.home(HOME)
                return
            except RobotError as error:
                if LOST_PACKETS not in str(error) or attempt == MAX_TRIES:
                    raise
                note(f"home: the controller lost packets; try {attempt} of {MAX_TRIES} does not count ({error})")
            robot.recover()
            robot.close()  # the next connection counts recoveries anew
            robot.connect(10.0)

    return go


def at(state: RobotState, offset_m: tuple[float, float, float] = (0.0, 0.0, 0.0), gripper: float = -1.0) -> Command:
    return Command(position_m=state.position_m + offset_m, rotation=state.rotation, gripper=gripper)


def run_at_20_hz(robot: Robot, num_ticks: int, command_of: Callable[[int], Command]) -> tuple[list[RobotState], Any]:
    """States, and the periods and the time spent in the driver (s) of each tick."""
    states, begins, spent = [], [], []
    due = time.monotonic()
    for tick in range(num_ticks):
        time.sleep(max(0.0, due - time.monotonic()))
        due += PERIOD_S
        begins.append(time.monotonic())
        states.append(robot.observe())
        robot.command(command_of(tick))
        spent.append(time.monotonic() - begins[-1])
    return states, (np.diff(begins), np.array(spent))


def provoke_reflex(robot: Robot) -> RobotError:
    """Ask for a pose that is much too far."""
    start = robot.observe()
    with pytest.raises(RobotError) as caught:  # noqa: PT012 - the reflex comes some ticks after its cause
        for _ in range(100):
            robot.command(at(start, (0.25, 0.0, 0.0)))
            time.sleep(0.02)
    return caught.value


def test_ten_seconds_at_20_hz_without_a_reflex(
    start_peer: Any, make_robot: MakeRobot, go_home: GoHome, note: Callable[[str], None]
) -> None:
    robot = make_robot(start_peer("franka_sim").host)
    assert isinstance(robot, Robot)
    go_home(robot)
    start = robot.observe()
    np.testing.assert_allclose(start.joint_positions_rad, HOME, atol=5e-3)

    def circle(tick: int) -> Command:
        angle = 2 * np.pi * tick * PERIOD_S / 4.0
        offset = (0.05 * np.sin(angle), 0.05 * (1 - np.cos(angle)), 0.03 * np.sin(angle))
        return at(start, offset, gripper=1.0 if (tick // 30) % 2 else -1.0)

    states, (periods, spent) = run_at_20_hz(robot, 200, circle)
    assert {state.mode for state in states[2:]} == {"moving"}
    assert not any(state.faults for state in states)
    assert np.all(np.diff([state.time_s for state in states]) > 0)
    moved = np.array([state.position_m for state in states]) - start.position_m
    wanted = np.array([circle(tick).position_m for tick in range(200)]) - start.position_m
    assert np.linalg.norm(moved - wanted, axis=1).max() < 0.03  # a soft spring lags behind
    assert np.ptp(moved[:, 1]) > 0.08
    widths = [state.gripper_width_m for state in states]
    assert min(widths) < 0.01
    assert max(widths) > 0.07
    quantiles = {name: float(np.quantile(periods, q)) * 1e3 for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
    note(f"driver alone: period {quantiles} ms; {1e3 * spent.mean():.2f} ms of work, {1e3 * spent.max():.2f} at most")


@pytest.mark.parametrize(("peer", "missing_m"), [("franka_sim", 0.107), ("franky_sim", 0.0)])
def test_the_state_is_what_the_simulated_panda_would_report(
    start_peer: Any, make_robot: MakeRobot, go_home: GoHome, peer: str, missing_m: float
) -> None:
    """franka-sim calls joint 7 the flange, which really is 0.107 m further on."""
    robot = make_robot(start_peer(peer).host, base_in_world_m=(-0.56, 0.0, 0.912))
    go_home(robot)
    state = robot.observe()
    spec = mujoco.MjSpec()
    add_panda(spec, (-0.56, 0.0, 0.912))
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = state.joint_positions_rad
    mujoco.mj_kinematics(model, data)
    grip = data.site("gripper0_grip_site").xpos - missing_m * data.site("gripper0_grip_site").xmat[[2, 5, 8]]
    turn = rotation_vector(data.body("robot0_right_hand").xquat)
    named = np.array([state.named[name] for name in STATE_NAMES])
    np.testing.assert_allclose(named[:3], grip, atol=2e-3)
    np.testing.assert_allclose(named[3:6], turn, atol=5e-3)
    np.testing.assert_allclose(state.position_m, grip - (-0.56, 0.0, 0.912), atol=2e-3)
    np.testing.assert_allclose(named[6:], [state.gripper_width_m / 2, -state.gripper_width_m / 2])


def test_a_reflex_is_reported_and_stays_until_recover(
    start_peer: Any, make_robot: MakeRobot, go_home: GoHome, record_property: Callable[[str, object], None]
) -> None:
    robot = make_robot(start_peer("franka_sim").host, max_recoveries=1)
    go_home(robot)
    assert "joint_velocity_violation" in str(provoke_reflex(robot))
    state = robot.observe()
    assert state.mode == "fault"
    assert "joint_velocity_violation" in state.faults[0]
    with pytest.raises(RobotError, match="joint_velocity_violation"):
        robot.command(at(state))
    robot.hold()
    robot.stop()
    assert robot.observe().mode == "fault"
    begun = time.monotonic()
    robot.recover()
    seconds = time.monotonic() - begun
    record_property("recovery_s", seconds)
    print(f"recovered in {seconds:.2f} s")
    state = robot.observe()
    assert state.mode == "idle"
    states, _ = run_at_20_hz(robot, 20, lambda _: at(state))
    assert states[-1].mode == "moving"
    provoke_reflex(robot)
    with pytest.raises(RobotError, match="max_recoveries"):
        robot.recover()


def test_hold_does_not_creep_and_stop_stays_stopped(start_peer: Any, make_robot: MakeRobot, go_home: GoHome) -> None:
    robot = make_robot(start_peer("franka_sim").host)
    go_home(robot)
    start = robot.observe()
    run_at_20_hz(robot, 20, lambda tick: at(start, (0.005 * tick, 0.0, 0.0)))
    positions = []
    for _ in range(40):
        robot.hold()
        positions.append(robot.observe().position_m)
        time.sleep(PERIOD_S)
    assert robot.observe().mode == "held"
    assert np.linalg.norm(positions[-1] - positions[20]) < 1e-3
    robot.stop()
    robot.stop()
    state = robot.observe()
    assert state.mode == "idle"
    assert np.linalg.norm(state.position_m - positions[-1]) < 0.01
    with pytest.raises(RobotError, match="stopped"):
        robot.command(at(state))
    robot.recover()
    robot.command(at(robot.observe()))
    robot.home((0, -1, 0, -2, 0, 2, 1))  # integers; straight after a motion of another kind
    assert robot.observe().mode == "idle"


def test_a_frozen_client_is_told_why_the_arm_stopped(start_peer: Any, run_client: Any, make_robot: MakeRobot) -> None:
    client = run_client("franka_client.py", start_peer("franka_sim").host)
    assert json.loads(client.stdout.readline()) == {"event": "running"}
    client.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    client.send_signal(signal.SIGCONT)
    failed = json.loads(client.stdout.readline())
    assert failed["event"] == "failed"
    assert failed["mode"] == "fault"
    assert "communication_constraints_violation" in failed["words"]
    recovered = json.loads(client.stdout.readline())
    assert (recovered["event"], recovered["mode"]) == ("recovered", "idle")
    print(f"recovered in {recovered['seconds']:.2f} s")


@pytest.mark.parametrize("is_moving", [True, False])
def test_a_controller_that_stands_still_is_noticed(start_peer: Any, make_robot: MakeRobot, is_moving: bool) -> None:
    peer = start_peer("franka_sim")
    robot = make_robot(peer.host)
    state = robot.observe()
    if is_moving:
        run_at_20_hz(robot, 10, lambda _: at(state))
    peer.send(signal.SIGSTOP)
    begun, longest = time.monotonic(), 0.0
    with pytest.raises(RobotError, match=peer.host):  # noqa: PT012 - the last state is good for a while
        while time.monotonic() < begun + 10:
            tick = time.monotonic()
            robot.observe()
            longest = max(longest, time.monotonic() - tick)
            time.sleep(0.02)
    print(f"noticed after {time.monotonic() - begun:.2f} s; an observation took {1e3 * longest:.1f} ms at most")


def test_a_killed_controller_is_noticed(start_peer: Any, make_robot: MakeRobot) -> None:
    peer = start_peer("franka_sim")
    robot = make_robot(peer.host)
    state = robot.observe()
    run_at_20_hz(robot, 10, lambda _: at(state))
    peer.close()
    with pytest.raises(RobotError, match=peer.host):
        run_at_20_hz(robot, 200, lambda _: at(state))
    robot.stop()
    robot.close()
    robot.close()


def test_a_second_client_is_refused_in_time(start_peer: Any, make_robot: MakeRobot, franka_config: MakeConfig) -> None:
    host = start_peer("franka_sim").host
    first = make_robot(host)
    state = first.observe()
    second = FrankaRobot(franka_config(host))
    with pytest.raises(RobotError, match=host):
        second.connect(1.0)
    states, _ = run_at_20_hz(first, 20, lambda _: at(state))
    assert states[-1].mode == "moving"
    second.close()


def test_nobody_there(franka_config: MakeConfig) -> None:
    with pytest.raises(RobotError, match=r"127\.0\.0\.9"):
        FrankaRobot(franka_config("127.0.0.9")).connect(5.0)
