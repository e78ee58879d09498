"""The watchdog on its own thread, with deadlines of tens of milliseconds."""

from __future__ import annotations

import threading
import time

import pytest

from robots.watchdog import Watchdog

CHANNELS = {"command": (0.05, 0.15), "camera": (0.1, 0.2)}


class Robot:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stopped = threading.Event()

    def hold(self, reason: str) -> None:
        self.calls.append(f"hold: {reason}")

    def stop(self, reason: str) -> None:
        self.calls.append(f"stop: {reason}")
        self.stopped.set()


def test_silence_holds_and_then_stops_once_each() -> None:
    robot, dog = Robot(), Watchdog(CHANNELS)
    dog.start(robot.hold, robot.stop)
    dog.feed("command", 1)
    assert robot.stopped.wait(5.0)
    time.sleep(0.1)
    dog.stop()
    assert [call.split(":")[0] for call in robot.calls] == ["hold", "stop"]
    assert "no news on command" in robot.calls[0]


def test_a_second_silence_is_noticed_after_a_stop_that_was_recovered_from() -> None:
    robot, dog = Robot(), Watchdog(CHANNELS)
    dog.start(robot.hold, robot.stop)
    for i in range(2):
        robot.stopped.clear()
        dog.feed("command", i)
        assert robot.stopped.wait(5.0)
    dog.stop()
    assert [call.split(":")[0] for call in robot.calls] == ["hold", "stop"] * 2


def test_news_keep_it_quiet_and_the_same_news_again_do_not() -> None:
    robot, dog = Robot(), Watchdog(CHANNELS)
    dog.start(robot.hold, robot.stop)
    for i in range(15):
        dog.feed("command", i)
        dog.feed("camera:wrist", i)
        time.sleep(0.02)
    assert robot.calls == []
    while not robot.stopped.wait(0.01):  # a frozen camera: it still answers
        dog.feed("command", time.monotonic())
        dog.feed("camera:wrist", 14)
    dog.stop()
    assert "camera:wrist" in robot.calls[-1]


def test_it_acts_while_the_loop_is_blocked_and_survives_a_driver_that_raises() -> None:
    robot = Robot()

    def broken(reason: str) -> None:
        raise OSError("connection lost")

    dog = Watchdog(CHANNELS)
    dog.start(broken, robot.stop)
    dog.feed("command", 1)
    assert robot.stopped.wait(5.0)
    dog.stop()
    assert "connection lost" in dog.problems[0]


def test_a_hold_that_blocks_for_ever_does_not_keep_the_stop_from_coming_in_time() -> None:
    robot, dog, never = Robot(), Watchdog(CHANNELS), threading.Event()
    dog.start(lambda reason: never.wait(30.0), robot.stop)  # type: ignore[arg-type, return-value]
    begun = time.monotonic()
    dog.feed("command", 1)
    assert robot.stopped.wait(5.0)
    assert time.monotonic() - begun < 2.0  # due after 0.15 s
    dog.stop()
    assert time.monotonic() - begun < 4.0
    never.set()


def test_what_is_due_when_the_watch_ends_is_still_done() -> None:
    """After a process was frozen, the loop may be the first to run again."""
    now = [0.0]
    robot, dog = Robot(), Watchdog(CHANNELS, clock=lambda: now[0])
    dog.start(robot.hold, robot.stop)
    dog.feed("command", 1)
    now[0] = 1.0
    dog.stop()
    assert [call.split(":")[0] for call in robot.calls] == ["hold", "stop"]
    time.sleep(0.05)
    assert len(robot.calls) == 2


def test_a_silence_counts_although_news_came_before_the_watchdog_could_look() -> None:
    now = [0.0]

    def clock() -> float:
        """The watchdog's thread has not run since the beginning."""
        return now[0] if threading.current_thread() is threading.main_thread() else 0.0

    robot, dog = Robot(), Watchdog(CHANNELS, clock=clock)
    dog.start(robot.hold, robot.stop)
    dog.feed("command", 1)
    now[0] = 0.1
    dog.feed("command", 2)
    dog.stop()
    assert [call.split(":")[0] for call in robot.calls] == ["hold"]


def test_deadlines_stretch_with_the_loops_period() -> None:
    robot, dog = Robot(), Watchdog(CHANNELS)
    dog.start(robot.hold, robot.stop, period_s=0.1)  # hold after 3 periods, stop after 6
    dog.feed("command", 1)
    time.sleep(0.2)  # CHANNELS alone would have stopped it
    assert robot.calls == []
    assert robot.stopped.wait(5.0)
    dog.stop()
    assert [call.split(":")[0] for call in robot.calls] == ["hold", "stop"]


def test_starting_again_begins_anew_and_stopping_twice_is_fine() -> None:
    robot, dog = Robot(), Watchdog(CHANNELS)
    dog.stop()
    dog.start(robot.hold, robot.stop)
    dog.feed("command", 1)
    dog.stop()
    dog.stop()
    time.sleep(0.1)
    assert robot.calls == []
    dog.start(robot.hold, robot.stop)
    time.sleep(0.1)
    assert robot.calls == []  # not fed yet
    dog.stop()


@pytest.mark.parametrize("deadlines", [(0.0, 1.0), (1.0, 0.5), (0.1, float("inf")), (float("nan"), 1.0)])
def test_deadlines_that_would_never_act_are_refused(deadlines: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="watchdog channel 'command'"):
        Watchdog({"command": deadlines})


def test_an_unknown_channel_is_refused() -> None:
    with pytest.raises(ValueError, match="no deadline for channel 'gripper'"):
        Watchdog(CHANNELS).feed("gripper", 1)
