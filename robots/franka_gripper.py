"""The Franka Hand on its own thread: its calls take 20 ms to a second and must never hold up the arm."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from robots.robot import RobotError
from vla_rl.config import ConfigModel

_CLOSE_S = 1.0


class GripperConfig(ConfigModel):
    """How the hand opens and closes. A grasp closes as far as it can and then holds with `force_n`."""

    min_width_m: float = Field(default=0.0, ge=0, le=0.08, allow_inf_nan=False)
    """Distance of the fingers when closed on nothing."""
    max_width_m: float = Field(default=0.08, gt=0, le=0.08, allow_inf_nan=False)
    """Distance of the fingers when open; fingers other than Franka's may have less than 0.08."""
    speed_m_s: float = Field(default=0.1, gt=0, le=0.1, allow_inf_nan=False)
    """Of the fingers, relative to each other."""
    force_n: float = Field(default=30.0, gt=0, le=70, allow_inf_nan=False)
    """Of a grasp; the hand bears 70 N continuously."""
    hysteresis: float = Field(default=0.2, ge=0, lt=1, allow_inf_nan=False)
    """Commands between minus and plus this change nothing; closing begins above, opening below."""
    min_hold_s: float = Field(default=0.3, ge=0, le=60.0, allow_inf_nan=False)
    """Shortest time between two changes: a policy that wavers must not hammer."""
    poll_s: float = Field(default=0.03, gt=0, le=1.0, allow_inf_nan=False)
    """Time between two readings of the width."""

    @model_validator(mode="after")
    def _opens(self) -> Self:
        if not self.min_width_m < self.max_width_m:
            raise ValueError(f"min_width_m {self.min_width_m} must be below max_width_m {self.max_width_m}")
        return self


Goal = Literal["open", "closed"]


class FrankaGripper:
    """Carries out the latest goal and reads the width; every method returns at once.

    Args:
        hand: A connected `franky.Gripper`.
        franky: The module, for its exceptions.
        config: Settings.
        width_m: Distance of the fingers now.
    """

    def __init__(self, hand: Any, franky: Any, config: GripperConfig, width_m: float) -> None:
        self._hand = hand
        self._franky = franky
        self._config = config
        self._wake = threading.Condition()
        self._goal: Goal | None = None
        self._done: Goal | None = None  # what the hand was told last
        self._motion: Any = None  # its future, while it runs
        self._changed_s = float("-inf")
        self._is_stop_asked = False
        self._is_closing_down = False
        self._failures: deque[str] = deque(maxlen=20)
        self._lost: str | None = None
        self._width_m = width_m
        self._thread = threading.Thread(target=self._work, name="franka gripper", daemon=True)
        self._thread.start()

    @property
    def width_m(self) -> float:
        """Distance of the fingers when it was last read.

        Raises:
            RobotError: The hand no longer answers.
        """
        self._require_hand()
        return self._width_m

    @property
    def failures(self) -> tuple[str, ...]:
        """Motions that the hand refused or broke off, in its own words; the newest last, 20 at most."""
        return tuple(self._failures)

    def command(self, command: float) -> float:
        """Ask for a state of the hand; a newer wish replaces an older one.

        Args:
            command: -1 (open) to +1 (closed).

        Returns:
            What the hand will do: -1 or +1; 0 if nothing was decided yet.

        Raises:
            RobotError: The hand no longer answers.
        """
        self._require_hand()
        with self._wake:
            wish: Goal | None = None
            if abs(command) > self._config.hysteresis:
                wish = "closed" if command > 0 else "open"
            if wish not in (None, self._goal) and time.monotonic() - self._changed_s >= self._config.min_hold_s:
                self._goal = wish
                self._changed_s = time.monotonic()
                self._wake.notify()
            return {None: 0.0, "open": -1.0, "closed": 1.0}[self._goal]

    def stop(self) -> None:
        """Forget the goal, and end a motion that is under way; a grasp that has closed keeps its force."""
        with self._wake:
            self._goal = None
            self._changed_s = float("-inf")
            self._is_stop_asked = True
            self._wake.notify()

    def close(self) -> None:
        """Stop, and end the thread: one that is in the hand's library when the program ends takes the program down."""
        with self._wake:
            self._is_closing_down = True
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)  # a hand that hangs keeps it

    def _require_hand(self) -> None:
        if self._lost is not None:
            raise RobotError(f"the gripper is lost ({self._lost}); stop, look at the hand, and connect again")

    # --- The thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._lost is None:
            with self._wake:
                self._wake.wait_for(self._has_work, self._config.poll_s)
                goal, is_stop_asked, is_closing_down = self._goal, self._is_stop_asked, self._is_closing_down
                self._is_stop_asked = False
            try:
                if self._motion is not None and (is_stop_asked or goal not in (None, self._done)):
                    self._interrupt()
                if is_closing_down:
                    return
                if goal not in (None, self._done):
                    self._begin(goal)
                self._collect()
                self._width_m = float(self._hand.width)
            except (self._franky.CommandException, self._franky.GripperException) as error:
                self._failures.append(str(error))
            except Exception as error:  # the connection, or anything else: nobody moves the hand any more
                self._lost = str(error) or repr(error)

    def _has_work(self) -> bool:
        return self._is_stop_asked or self._is_closing_down or self._goal not in (None, self._done)

    def _begin(self, goal: Goal | None) -> None:
        config, self._done = self._config, goal
        if goal == "open":
            self._motion = self._hand.move_async(config.max_width_m, config.speed_m_s)
        else:
            # Any width counts as a grasp: the policy does not say how wide the object is.
            self._motion = self._hand.grasp_async(
                config.min_width_m, config.speed_m_s, config.force_n, 0.0, config.max_width_m
            )

    def _interrupt(self) -> None:
        motion, self._motion, self._done = self._motion, None, None
        self._hand.stop()
        motion.wait(1.0)

    def _collect(self) -> None:
        if self._motion is not None and self._motion.wait(0.0):
            motion, self._motion = self._motion, None
            motion.get()  # raises what went wrong
