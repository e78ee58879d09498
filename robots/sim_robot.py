"""Any world behind the Robot seam: the reference that deployment is held against, and a robot for those without one.

In lockstep the world waits for each command, so that an episode here is the episode that evaluation would have run. In
real time the runtime's schedule moves it: each control period is one control step, of the command or, when there is
none, of standing still. Control loop and watchdog take turns at the world, and none waits for the other for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Float64

from robots.contract import DeploymentContract
from robots.robot import CameraFrame, Command, Mode, RobotDescription, RobotError, RobotLimits, RobotState
from robots.rotations import matrix_from_rotation_vector, rotation_vector_from_matrix
from vla_rl.types import Observation, SimError, Start, StepResult


@runtime_checkable
class SteppedWorld(Protocol):
    """The part of a `sim.world.World` that a robot is made of."""

    def reset(self, start: Start) -> None:
        """Begin an episode."""

    def step(self, chunk: Float64[np.ndarray, "steps action_dim"], record_frames: bool = False) -> StepResult:
        """Run actions."""

    def observe(self) -> Observation:
        """Pictures and state."""

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """State alone."""


# The simulated controller follows any action in [-1, 1]: speeds are those of a full action in every control step.
_UNLIMITED = np.zeros(0)
_OPEN = -1.0
_BUSY_S = 1.0
"""Longest wait for the other thread: a control step and a picture take milliseconds."""


def _limits(contract: DeploymentContract) -> RobotLimits:
    linear = np.sqrt(3.0) * max(contract.action.scale[:3]) * contract.control_rate_hz
    angular = np.sqrt(3.0) * max(contract.action.scale[3:6]) * contract.control_rate_hz
    rate = contract.control_rate_hz
    # From full speed one way to full speed the other way within one control period, as actions may ask for it.
    return RobotLimits(
        joint_lower_rad=_UNLIMITED,
        joint_upper_rad=_UNLIMITED,
        joint_speed_rad_s=_UNLIMITED,
        linear_speed_m_s=2.0 * linear,
        linear_acceleration_m_s2=100.0 * linear * rate,
        linear_jerk_m_s3=1e4 * linear * rate**2,
        angular_speed_rad_s=2.0 * angular,
        angular_acceleration_rad_s2=100.0 * angular * rate,
        angular_jerk_rad_s3=1e4 * angular * rate**2,
        reach_m=3.0,
    )


class SimRobot:
    """A robot that is a world. Its cameras are `SimCamera`s of the same object."""

    def __init__(self, world: SteppedWorld, contract: DeploymentContract, *, is_lockstep: bool) -> None:
        """Wrap a world.

        Args:
            world: With the cameras and the state of the contract.
            contract: Gives names, rate and scale.
            is_lockstep: Whether time stands still between commands.
        """
        self._world = world
        self._contract = contract
        self._is_lockstep = is_lockstep
        self._observation: Observation | None = None
        self._gripper = _OPEN
        self._lock = threading.RLock()
        self._num_steps = 0
        self._fault: str | None = None
        self.result: StepResult | None = None
        """Outcome of the last control step."""

    @property
    def description(self) -> RobotDescription:
        """Like the training world, whatever it was."""
        contract = self._contract
        return RobotDescription(
            name="sim",
            arm=contract.training_robot,
            spaces=(contract.action.space,),
            state_names=contract.state_names,
            min_rate_hz=contract.control_rate_hz,
            max_rate_hz=contract.control_rate_hz,
            limits=_limits(contract),
            is_lockstep=self._is_lockstep,
        )

    @property
    def is_done(self) -> bool:
        """Whether the world's episode is over."""
        return self.result is not None and self.result.is_done

    def outcome(self) -> str | None:
        """How the world's episode ended ("success" or, at its time limit, "failure"); None while it runs."""
        if self.result is None or not self.result.is_done:
            return None
        return "success" if self.result.success else "failure"

    def begin(self, start: Start) -> None:
        """Put the world at a start."""
        with self._turn():
            self._world.reset(start)
            self._observation, self.result, self._fault = None, None, None
            self._gripper = _OPEN

    def connect(self, timeout_s: float) -> None:
        """Nothing to do."""

    def observe(self) -> RobotState:
        """State of the world now.

        Raises:
            RobotError: The world is busy for longer than it should be.
        """
        with self._turn():
            proprio = self._world.proprio()
        named = dict(zip(self._contract.state_names, proprio.tolist(), strict=True))
        position = np.array([named[f"eef_pos_{axis}"] for axis in "xyz"])
        vector = np.array([named[f"eef_axis_angle_{axis}"] for axis in "xyz"])
        return RobotState(
            time_s=self._num_steps / self._contract.control_rate_hz,
            received_s=time.monotonic(),
            position_m=position,
            rotation=matrix_from_rotation_vector(vector),
            gripper_width_m=float(abs(named.get("finger_1", 0.0)) + abs(named.get("finger_2", 0.0))),
            named=named,
            mode=self._mode(),
            faults=() if self._fault is None else (self._fault,),
        )

    def command(self, command: Command) -> Command:
        """One control step.

        Raises:
            RobotError: The world has crashed, or is busy.
        """
        with self._turn():
            self._gripper = command.gripper
            action = command.action if command.action is not None else self._action(command)
            self._advance(action)
        return replace(command, action=action)

    def hold(self) -> None:
        """One control step without motion; in lockstep time stands still instead.

        Raises:
            RobotError: The world has crashed, or is busy.
        """
        if self._is_lockstep:
            return
        with self._turn():
            if not self.is_done and self._fault is None:
                standing = np.zeros(len(self._contract.action.names))
                standing[-1] = self._gripper * self._contract.action.gripper_closes_at
                self._advance(standing)

    def stop(self) -> None:
        """The world stands still by itself; nothing is waited for."""

    def recover(self) -> None:
        """A crashed world needs a new start.

        Raises:
            RobotError: The world has crashed.
        """
        if self._fault is not None:
            raise RobotError(f"the world has crashed ({self._fault}); begin a new episode")

    def close(self) -> None:
        """Nothing to do."""

    def picture(self, camera: str) -> CameraFrame:
        """What a camera of the world sees now."""
        index = [entry.name for entry in self._contract.cameras].index(camera)
        with self._turn():
            if self._observation is None:  # drawn only when somebody looks
                self._observation = self._world.observe()
            image = self._observation.images[index]
            return CameraFrame(image=image, captured_s=time.monotonic(), index=self._num_steps)

    def _mode(self) -> Mode:
        if self._fault is not None:
            return "fault"
        return "idle" if self.is_done else "moving"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=_BUSY_S):
            raise RobotError(f"the world has been busy for {_BUSY_S:g} s; its simulation hangs")
        try:
            yield
        finally:
            self._lock.release()

    def _action(self, command: Command) -> Float64[np.ndarray, " action_dim"]:
        """The action that moves the tool from where it is to the commanded pose."""
        state, meaning = self.observe(), self._contract.action
        moved = command.position_m - state.position_m
        if meaning.frame == "tool":
            moved, rotation = state.rotation.T @ moved, state.rotation.T @ command.rotation
        else:
            rotation = command.rotation @ state.rotation.T
        turn, gripper = rotation_vector_from_matrix(rotation), command.gripper * meaning.gripper_closes_at
        action = np.concatenate([moved, turn, [gripper]]) / np.array(meaning.scale)
        clipped: Float64[np.ndarray, " action_dim"] = np.clip(action, -1.0, 1.0)
        return clipped

    def _advance(self, action: Float64[np.ndarray, " action_dim"]) -> None:
        if self.is_done:
            return
        try:
            self.result = self._world.step(action[None])
        except SimError as error:
            self._fault = str(error)
            raise RobotError(f"the world has crashed: {error}") from error
        self._num_steps += 1
        self._observation = None


class SimCamera:
    """One camera of a `SimRobot`."""

    def __init__(self, robot: SimRobot, name: str) -> None:
        self._robot = robot
        self._name = name

    @property
    def name(self) -> str:
        """As in the contract."""
        return self._name

    def read(self) -> CameraFrame:
        """Drawn when asked for."""
        return self._robot.picture(self._name)

    def close(self) -> None:
        """Nothing to do."""


def sim_cameras(robot: SimRobot, contract: DeploymentContract) -> list[SimCamera]:
    """All cameras of the contract."""
    return [SimCamera(robot, camera.name) for camera in contract.cameras]
