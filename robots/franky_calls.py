"""How we call franky: imported late, with one tuple of its errors, never waiting for ever, and with floats only."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64

from robots.robot import Command, RobotError


def errors_of(franky: Any) -> tuple[type[Exception], ...]:
    """All that libfranka and franky raise."""
    libfranka = (
        "Command",
        "Control",
        "Network",
        "Protocol",
        "InvalidOperation",
        "IncompatibleVersion",
        "Model",
        "Realtime",
    )
    names = (*libfranka, "Realtime", "InvalidMotionType", "Gripper")
    return (franky.Exception, *(getattr(franky, f"{name}Exception") for name in names))


def import_franky() -> Any:
    """The module.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("franky")
    except ImportError as error:
        raise ImportError(f"the Franka driver needs franky-control ({error}): pip install 'vla-rl[franka]'") from error


def command_pose(command: Command) -> Float64[np.ndarray, "4 4"]:
    """The commanded tool pose; floats, whatever was given: franky refuses integers.

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
