"""The Franka driver on a stand-in for franky: stops that come at the worst moment, and calls that block."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_franky import Controller, fake_franky

from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.robot import Command, RobotError
from robots.watchdog import Watchdog


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def robot(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Iterator[FrankaRobot]:
    monkeypatch.setitem(sys.modules, "franky", fake_franky(controller))  # type: ignore[arg-type]
    config = FrankaConfig(host="127.0.0.9", base_in_world_m=(0.0, 0.0, 0.0), rest_timeout_s=0.2)
    robot = FrankaRobot(config)
    robot.connect(1.0)
    yield robot
    controller.hooks.clear()
    robot.close()


def here(robot: FrankaRobot) -> Command:
    state = robot.observe()
    return Command(position_m=state.position_m, rotation=state.rotation, gripper=0.0)


def stands(controller: Controller, robot: FrankaRobot) -> bool:
    """Nothing moves the arm, and nothing may until somebody recovers."""
    with pytest.raises(RobotError, match=r"was stopped|refuses to move"):
        robot.command(here(robot))
    return not controller.is_in_control and "target" not in controller.log[-1:]


# --- A stop in the middle of another call ----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["start", "target"])
@pytest.mark.parametrize("call", ["command", "hold"])
def test_a_signal_that_stops_in_the_middle_of_a_call_has_the_last_word(
    robot: FrankaRobot, controller: Controller, call: str, moment: str
) -> None:
    """The handler runs in the thread that holds the lock, which lets it in."""
    command = here(robot)
    if moment == "target":
        robot.command(command)
    signal_before = signal.signal(signal.SIGUSR1, lambda *_: robot.stop())
    controller.hooks[moment] = lambda: signal.raise_signal(signal.SIGUSR1)
    try:
        if call == "command":
            with pytest.raises(RobotError, match="was stopped"):
                robot.command(command)
        else:
            robot.hold()
    finally:
        signal.signal(signal.SIGUSR1, signal_before)
    assert not controller.is_in_control
    after = controller.log[controller.log.index("move TorqueStopMotion") :]
    assert "start" not in after
    assert "target" not in after
    assert stands(controller, robot)


def test_a_stop_between_the_check_and_the_target_ends_what_was_started(
    robot: FrankaRobot, controller: Controller
) -> None:
    controller.hooks["start"] = robot.stop
    with pytest.raises(RobotError, match="was stopped"):
        robot.command(here(robot))
    assert "target" not in controller.log
    assert stands(controller, robot)


def test_recover_clears_the_stop_that_it_saw_and_none_that_came_meanwhile(
    robot: FrankaRobot, controller: Controller
) -> None:
    robot.command(here(robot))
    robot.stop()
    controller.errors = ("joint_velocity_violation",)
    controller.hooks["recover"] = robot.stop
    with pytest.raises(RobotError, match="was stopped"):
        robot.recover()
    assert stands(controller, robot)
    robot.recover()
    robot.command(here(robot))
    assert controller.is_in_control


# --- Calls that block ------------------------------------------------------------------------------------------------


class Blocked:
    """A call that another thread never comes back from."""

    def __init__(self, robot: FrankaRobot, controller: Controller) -> None:
        self.is_inside, self.release = threading.Event(), threading.Event()
        robot.command(here(robot))
        command = here(robot)
        controller.hooks["target"] = self._block
        self.thread = threading.Thread(target=self._command, args=(robot, command), daemon=True)
        self.thread.start()
        assert self.is_inside.wait(5.0)

    def _block(self) -> None:
        self.is_inside.set()
        self.release.wait(20.0)

    def _command(self, robot: FrankaRobot, command: Command) -> None:
        with pytest.raises(RobotError):
            robot.command(command)


def test_hold_gives_up_and_stop_acts_although_the_driver_is_blocked(robot: FrankaRobot, controller: Controller) -> None:
    blocked = Blocked(robot, controller)
    begun = time.monotonic()
    with pytest.raises(RobotError, match="busy"):
        robot.hold()
    robot.observe()
    robot.stop()
    assert time.monotonic() - begun < 3.0
    assert controller.log[-1] == "stop"
    assert not controller.is_in_control
    blocked.release.set()
    blocked.thread.join(5.0)
    assert stands(controller, robot)


def test_the_watchdog_stops_a_blocked_driver_in_time(robot: FrankaRobot, controller: Controller) -> None:
    stopped, dog = threading.Event(), Watchdog({"command": (0.05, 0.1)})

    def stop(reason: str) -> None:
        robot.stop()
        stopped.set()

    blocked = Blocked(robot, controller)
    dog.start(lambda reason: robot.hold(), stop)
    dog.feed("command", 1)
    assert stopped.wait(5.0)
    dog.stop()
    assert controller.log[-1] == "stop"
    blocked.release.set()
    blocked.thread.join(5.0)


def test_closing_waits_for_nobody(robot: FrankaRobot, controller: Controller) -> None:
    blocked = Blocked(robot, controller)
    begun = time.monotonic()
    robot.close()
    assert time.monotonic() - begun < 3.0
    assert "stop" in controller.log
    blocked.release.set()


# --- What the driver offers ------------------------------------------------------------------------------------------


def test_the_chain_is_offered_less_force_than_makes_the_controller_reflex() -> None:
    config: dict[str, Any] = {"collision_force_n": 50.0, "collision_torque_nm": 20.0}
    robot = FrankaRobot(FrankaConfig(host="127.0.0.9", base_in_world_m=(0.0, 0.0, 0.0), **config))
    limits = robot.description.limits
    assert (limits.force_n, limits.torque_nm) == pytest.approx((35.0, 14.0))


def test_a_lost_hand_stops_commands(robot: FrankaRobot) -> None:
    command = here(robot)
    assert robot._gripper is not None
    robot._gripper._lost = "unplugged"
    for call in (robot.observe, lambda: robot.command(command)):
        with pytest.raises(RobotError, match="the gripper is lost"):
            call()
    robot._gripper._lost = None
