"""A driver that follows poses of somebody else's loop, through the safety steps and under a watchdog.

For tools that command absolute poses and know no holds or recoveries, such as LeRobot's. The policies of this project
go through `robots.runtime`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

from robots.robot import Command, Robot, RobotError, RobotState
from robots.safety_config import SafetyConfig
from robots.safety_steps import SafetySteps
from robots.watchdog import Watchdog

_EARLY = 0.5
"""A call that comes sooner than after so much of a control period changes nothing: steps are made for the full one."""


class PoseFollower:
    """One target pose per control period; silence holds the robot, and then stops it."""

    def __init__(
        self,
        robot: Robot,
        config: SafetyConfig,
        rate_hz: float,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put the parts together; nothing moves.

        Args:
            robot: Not yet connected.
            config: Limits.
            rate_hz: At which `follow` is called.
            watchdog: Default: with the usual deadlines.
            clock: Monotonic time.

        Raises:
            ValueError: The rate or the limits do not fit the robot.
        """
        description = robot.description
        if not description.min_rate_hz <= rate_hz <= description.max_rate_hz:
            raise ValueError(
                f"rate_hz is {rate_hz}, but robot {description.name!r} takes {description.min_rate_hz:g} to "
                f"{description.max_rate_hz:g} Hz"
            )
        self._robot = robot
        self._steps = SafetySteps(rate_hz, config, description)
        self._watchdog = watchdog or Watchdog()
        self._period_s = 1.0 / rate_hz
        self._clock = clock
        self._num_calls = 0
        self._sent: tuple[float, Command] | None = None
        self._has_held = self._has_stopped = False

    def connect(self, timeout_s: float) -> None:
        """Reach the robot; nothing moves.

        Raises:
            RobotError: It does not answer, or its tool is outside the workspace.
        """
        self._robot.connect(timeout_s)
        state = self._robot.observe()
        if refused := self._steps.check_start(state):
            self._robot.close()
            raise RobotError("; ".join(event.detail for event in refused))
        self._steps.resync(state)
        self._watchdog.start(self._hold, self._stop, self._period_s)

    def observe(self) -> RobotState:
        """The newest state.

        Raises:
            RobotError: The connection is lost.
        """
        return self._robot.observe()

    def follow(
        self, position_m: Float64[np.ndarray, 3], rotation: Float64[np.ndarray, "3 3"], gripper: float
    ) -> Command:
        """Move towards a pose, as far as the limits allow in a control period.

        After a silence, or a pose that is refused, the robot stands, and moves on from where it was measured.

        Returns:
            What was really sent; where the robot holds if that was nothing.

        Raises:
            RobotError: The robot is in a fault, or something was measured that must not be.
        """
        now = self._clock()
        if self._sent is not None and now - self._sent[0] < _EARLY * self._period_s:
            return self._sent[1]
        self._num_calls += 1
        self._watchdog.feed("command", self._num_calls)
        state = self._begin()
        decision = self._steps.review(position_m, rotation, gripper, state)
        faults = [event.detail for event in decision.events if event.severity == "fault"]
        if faults:
            self._robot.stop()
            raise RobotError("; ".join(faults))
        if decision.command is None:
            self._robot.hold()
            self._steps.resync(state)
            sent = Command(position_m=state.position_m, rotation=state.rotation, gripper=gripper)
        else:
            sent = self._robot.command(decision.command)
        self._sent = (now, sent)
        return sent

    def close(self) -> None:
        """Stop, with torque on, and let go; safe at any time."""
        self._watchdog.stop()
        self._robot.close()

    def _begin(self) -> RobotState:
        """The state, after whatever the watchdog has done meanwhile; its own stop is cleared, a fault is not."""
        has_stopped, has_held = self._has_stopped, self._has_held or self._has_stopped
        self._has_stopped = self._has_held = False
        state = self._robot.observe()
        if state.mode == "fault":
            raise RobotError("; ".join(state.faults) or "the controller reports a fault")
        if has_stopped:
            self._robot.recover()
        if has_held:
            self._steps.resync(state)
        return state

    def _hold(self, reason: str) -> None:
        try:
            self._robot.hold()
        finally:
            self._has_held = True

    def _stop(self, reason: str) -> None:
        try:
            self._robot.stop()
        finally:
            self._has_stopped = True
