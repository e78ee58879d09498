"""A stand-in for franky that obeys at once, and lets a test act in the middle of any call (`hooks`)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class FrankyError(Exception):
    """Base of all that franky raises."""


class Affine:
    def __init__(self, matrix: Any) -> None:
        self.matrix = np.array(getattr(matrix, "matrix", matrix))


class Errors:
    def __init__(self, words: tuple[str, ...] = ()) -> None:
        self.words = words

    def __repr__(self) -> str:
        return "[" + ", ".join(f'"{word}"' for word in self.words) + "]"


class Controller:
    """What all clients of one fake controller see; `log` is what it was told, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.hooks: dict[str, Callable[[], None]] = {}
        self.is_in_control = False
        self.errors: tuple[str, ...] = ()
        self.pose = np.diag([1.0, -1.0, -1.0, 1.0])
        self.pose[:3, 3] = 0.45, 0.0, 0.3
        self._clock = 0.0

    def note(self, what: str) -> None:
        """Log a call; its hook, if there is one, acts once in the middle of it."""
        self.log.append(what)
        hook = self.hooks.pop(what, None)
        if hook is not None:
            hook()

    @property
    def state(self) -> SimpleNamespace:
        self._clock += 0.001
        seconds = self._clock
        return SimpleNamespace(
            robot_mode=SimpleNamespace(name="Reflex" if self.errors else "Move" if self.is_in_control else "Idle"),
            current_errors=Errors(self.errors),
            time=SimpleNamespace(to_sec=lambda: seconds),
            O_T_EE=Affine(self.pose),
            F_T_EE=Affine(np.eye(4)),
            q=[0.0, -0.6, 0.0, -2.4, 0.0, 1.8, 0.785],
            dq=[0.0] * 7,
            O_F_ext_hat_K=[0.0] * 6,
        )


class TorqueStopMotion:
    """Ends whatever runs."""


class Robot:
    """One client; `controller` is set by `fake_franky`."""

    controller: Controller
    state = property(lambda self: self.controller.state)
    is_in_control = property(lambda self: self.controller.is_in_control)

    def __init__(self, host: str, **_: Any) -> None: ...

    def move(self, motion: Any, asynchronous: bool) -> None:
        self.controller.note(f"move {type(motion).__name__}")
        self.controller.is_in_control = not isinstance(motion, TorqueStopMotion)

    def join_motion(self, timeout: float | None = None) -> bool:
        return not self.controller.is_in_control

    def stop(self) -> None:
        self.controller.note("stop")
        self.controller.is_in_control = False

    def recover_from_errors(self) -> bool:
        self.controller.note("recover")
        self.controller.errors = ()
        return True


class Tracker:
    """Runs from its making on."""

    def __init__(self, robot: Robot, **_: Any) -> None:
        self.controller = robot.controller
        self.controller.note("start")
        self.controller.is_in_control = True

    def set_target(self, pose: Affine) -> None:
        self.controller.note("target")


class Gripper:
    """A hand that is always done."""

    width = 0.05

    def __init__(self, host: str) -> None: ...

    def move_async(self, *_: float) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda timeout: True, get=lambda: True)

    grasp_async = move_async


def fake_franky(controller: Controller) -> SimpleNamespace:
    """The module."""
    kinds = (
        "Command",
        "Control",
        "Network",
        "Protocol",
        "InvalidOperation",
        "IncompatibleVersion",
        "Model",
        "Realtime",
    )
    names = (*kinds, "InvalidMotionType", "Gripper")
    errors = {f"{name}Exception": type(f"{name}Exception", (FrankyError,), {}) for name in names}
    return SimpleNamespace(
        Exception=FrankyError,
        RealtimeConfig=SimpleNamespace(Enforce=1, Ignore=0),
        Affine=Affine,
        Robot=type("Robot", (Robot,), {"controller": controller}),
        Gripper=Gripper,
        CartesianImpedanceTracker=Tracker,
        TorqueStopMotion=TorqueStopMotion,
        **errors,
    )
