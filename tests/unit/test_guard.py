"""What the runtime does when something is wrong: watchdog, faults, emergency stops, and modes that only look on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_robot import CONTRACT, HOME, RATE_HZ, FakeRobot, forward, make, policy

from robots.robot import Command, RobotDescription, RobotError
from robots.run_types import RunState
from robots.runtime import Runtime


def live(robot: FakeRobot, **config: object) -> Runtime:
    """After its preflight."""
    runtime = make(robot, policy(forward()), **config)  # type: ignore[arg-type]
    runtime.preflight()
    return runtime


# --- Emergency stops -------------------------------------------------------------------------------------------------


def test_there_is_no_recovery_while_an_emergency_stop_is_pending() -> None:
    class Reflex(FakeRobot):
        def command(self, command: Command) -> Command:
            runtime.emergency_stop()  # by a signal, while a reflex is on its way
            raise RobotError("reflex")

    robot = Reflex()
    runtime = live(robot, max_recoveries=2)
    report = runtime.run_episode("go on")
    assert (report.outcome, runtime.state) == ("estop", RunState.ESTOP)
    assert "recover" not in robot.calls
    assert "recovered" not in report.events
    runtime.close()


def test_an_emergency_stop_during_a_recovery_is_made_good_after_it() -> None:
    class Recovering(FakeRobot):
        def recover(self) -> None:
            runtime.emergency_stop()
            super().recover()  # may clear the stop with the rest

    robot = Recovering()
    robot.fails_after = 3
    runtime = live(robot)
    report = runtime.run_episode("go on")
    assert report.outcome == "estop"
    assert "recovered" not in report.events
    assert "stop" in robot.calls[robot.calls.index("recover") :]
    assert len(robot.sent) == 3
    runtime.close()


def test_an_emergency_stop_while_a_command_is_on_its_way_stops_right_after_it() -> None:
    stopped_s: list[float] = []

    class Interrupted(FakeRobot):
        def command(self, command: Command) -> Command:
            runtime.emergency_stop()
            stopped_s.clear()
            return super().command(command)

        def stop(self) -> None:
            stopped_s.append(time.monotonic())

    robot = Interrupted()
    runtime = live(robot, mode="slow", slow_factor=0.02, max_hold_s=10.0)  # a second from one tick to the next
    assert runtime.run_episode("go on").outcome == "estop"
    assert len(robot.sent) == 1
    assert stopped_s[0] - robot.sent[0][0] < 0.5
    runtime.close()


# --- The watchdog ----------------------------------------------------------------------------------------------------


class Stalling(FakeRobot):
    """Blocks once, in its fifth command, and is found elsewhere after it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.rest = HOME + np.array([0.0, 0.1, 0.0])

    def command(self, command: Command) -> Command:
        sent = super().command(command)
        if len(self.sent) == 5:
            time.sleep(self.seconds)
            self.position = self.rest.copy()
        return sent


def test_after_a_hold_of_the_watchdog_the_next_action_counts_from_where_the_robot_is() -> None:
    robot = Stalling(0.5)
    runtime = live(robot, max_hold_s=1.0)
    long_chunk = SimpleNamespace(actions=np.tile(forward(), (60, 1)))  # there would be something to go on with
    runtime._infer = lambda observation, deadline_s: long_chunk
    report = runtime.run_episode("go on")
    runtime.close()
    assert report.events["watchdog_hold"] >= 1
    assert report.events["hold"] >= 2  # at the start, and the loop's own after the watchdog's
    assert len(robot.sent) > 10
    # From the last target, the leash alone would have brought it to within 40 mm.
    np.testing.assert_allclose(robot.sent[5][1].position_m, robot.rest, atol=2e-3)


def test_a_stop_of_the_watchdog_is_a_fault_that_counts() -> None:
    robot = Stalling(1.3)
    runtime = live(robot, max_recoveries=1)
    report = runtime.run_episode("go on")
    runtime.close()
    assert report.events["watchdog_stop"] >= 1
    assert (report.events["fault"], report.events["recovered"]) == (1, 1)
    assert report.outcome == "failure"  # the time limit


def test_nobody_watches_during_a_long_recovery() -> None:
    class Slow(FakeRobot):
        def recover(self) -> None:
            time.sleep(1.3)
            super().recover()

    robot = Slow()
    robot.fails_after = 3
    runtime = live(robot)
    report = runtime.run_episode("go on")
    runtime.close()
    assert (report.events["fault"], report.events["recovered"]) == (1, 1)
    assert "watchdog_stop" not in report.events


# --- Modes that only look on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dry_run", "shadow"])
def test_onlookers_note_faults_and_silence_and_touch_nothing(mode: str) -> None:
    robot = FakeRobot()
    runtime = live(robot, mode=mode, max_steps=500, max_recoveries=1)
    guard = runtime._guard
    threading.Timer(0.2, guard.watchdog_hold, ["no news"]).start()
    threading.Timer(0.3, guard.watchdog_stop, ["no news"]).start()
    threading.Timer(0.5, setattr, [robot, "fault", "reflex of somebody else"]).start()
    report = runtime.run_episode("go on")
    assert report.outcome == "fault"
    assert {"watchdog_hold", "watchdog_stop", "fault"} <= set(report.events)
    assert "recovered" not in report.events
    runtime.acknowledge()
    assert robot.calls == ["connect"]
    assert robot.sent == []
    runtime.emergency_stop()  # a person's, though, is obeyed
    assert robot.calls == ["connect", "stop"]
    runtime.close()


# --- Where and how fast an episode may begin -------------------------------------------------------------------------


def test_a_tool_outside_the_workspace_is_refused_before_and_at_the_start() -> None:
    robot = FakeRobot()
    runtime = make(robot, policy(forward()))
    robot.position = np.array([0.45, 0.0, 0.05])
    with pytest.raises(RobotError, match=r"z is 50\.0 mm outside of the workspace, 0\.1 to 0\.6 m"):
        runtime.preflight()
    robot.position = np.array([0.45, 0.0, 0.3])
    runtime.preflight()
    robot.position = np.array([0.45, 0.5, 0.3])  # somebody pushed it
    report = runtime.run_episode("go on")
    assert report.outcome == "fault"
    assert "y is 200.0 mm outside" in report.detail
    assert report.events["start_outside"] == 1
    assert robot.sent == []
    runtime.close()


def test_slow_mode_is_slow_and_nobody_takes_it_for_silence() -> None:
    robot = FakeRobot()
    runtime = make(robot, policy(forward()), mode="slow", slow_factor=0.05, max_steps=8, max_hold_s=5.0)  # 2.5 Hz
    assert runtime.period_s == pytest.approx(0.4)  # the watchdog would hold after 0.25 s
    assert any("rate: 2.5 Hz" in line for line in runtime.preflight())
    started = time.monotonic()
    report = runtime.run_episode("go on")
    runtime.close()
    assert (report.outcome, report.num_steps) == ("failure", 8)
    assert time.monotonic() - started >= 7 * 0.4
    assert "watchdog_hold" not in report.events
    assert len(robot.sent) >= 5


def test_slow_mode_below_the_robots_slowest_rate_is_refused() -> None:
    class Brisk(FakeRobot):
        @property
        def description(self) -> RobotDescription:
            return replace(super().description, min_rate_hz=5.0)

    assert CONTRACT.control_rate_hz == RATE_HZ
    with pytest.raises(ValueError, match=r"means 2 Hz .*'fake' needs 5 Hz at least; set runtime.slow_factor to 0\.1"):
        make(Brisk(), policy(forward()), mode="slow", slow_factor=0.04)
    make(Brisk(), policy(forward()), mode="slow", slow_factor=0.1).close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e6])
@pytest.mark.parametrize("name", ["slow_factor", "inference_deadline_s", "max_hold_s", "max_camera_age_s"])
def test_deadlines_that_would_never_act_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        make(FakeRobot(), policy(forward()), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_recoveries"):
        make(FakeRobot(), policy(forward()), max_recoveries=1000)
