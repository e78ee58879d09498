"""What drivers share: names of states, commands as floats, stops, and calls that must not wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float64

from robots.robot import Command, RobotError

STATE_NAMES = (
    *(f"eef_pos_{axis}" for axis in "xyz"),
    *(f"eef_axis_angle_{axis}" for axis in "xyz"),
    "finger_1",
    "finger_2",
)
"""As the simulated Pandas name them; the fingers are mirrored, +width/2 and -width/2."""


PATIENCE_S = 0.3
"""How long `hold` and `stop` wait for a call of another thread; shorter than the watchdog's time from hold to stop."""


class Stops:
    """Remembers that a driver was stopped, from any thread or signal, until the very stop that was seen is cleared.

    Each stop is a new object, so one that comes while an older one is being cleared is not lost. Plain values: a
    handler that interrupts the setting of a `threading.Event` would wait for itself.
    """

    def __init__(self) -> None:
        self.newest: object | None = None
        self._cleared: object | None = None

    @property
    def is_pending(self) -> bool:
        """Whether there was a stop that nobody has cleared."""
        return self.newest is not self._cleared

    def add(self) -> None:
        """A stop."""
        self.newest = object()

    def clear(self, seen: object | None) -> None:
        """Forget the stops up to the one that was the `newest` when somebody looked."""
        self._cleared = seen


@contextmanager
def patiently(lock: threading.RLock) -> Iterator[bool]:
    """The lock, or after a while none of it: yields whether it is held."""
    is_mine = lock.acquire(timeout=PATIENCE_S)
    try:
        yield is_mine
    finally:
        if is_mine:
            lock.release()


def command_pose(command: Command) -> Float64[np.ndarray, "4 4"]:
    """The commanded tool pose; floats, whatever was given: drivers refuse integers.

    Raises:
        ValueError: Not finite, or not a rotation.
    """
    pose = np.eye(4)
    pose[:3, 3] = command.position_m
    pose[:3, :3] = rotation = np.asarray(command.rotation, dtype=np.float64)
    is_rotation = np.abs(rotation @ rotation.T - np.eye(3)).max() < 1e-6 and np.linalg.det(rotation) > 0
    if not (np.isfinite(pose).all() and np.isfinite(command.gripper) and is_rotation):
        raise ValueError(f"no pose: {command}; position and gripper are finite, rotation is a rotation matrix")
    return pose


def with_deadline(call: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Result of a call that may block for ever; then its thread is left behind, and what it returns is dropped.

    Raises:
        RobotError: No answer in time.
    """
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if error:
        raise error[0]
    if not result:
        raise RobotError(
            f"{what} has not answered within {timeout_s:g} s; is it on, reachable, and free of other clients?"
        )
    return result[0]
