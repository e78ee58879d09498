"""Driver of a Franka arm through `franky-control`: follows commands with a Cartesian impedance controller.

The controller runs at 1 kHz in franky's own thread; a command only moves its target. Tested against franka-sim 1.1.7
(libfranka protocol 10, communication and motion limits enforced) and franky-control 2.0.0; on no physical robot.
"""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from robots.driving import STATE_NAMES, command_pose, with_deadline
from robots.franka_arm import (
    end_effector_from_tool,
    franka_limits,
    tool_from_end_effector,
    training_rotation_vector,
)
from robots.franka_config import FrankaConfig
from robots.franka_gripper import FrankaGripper
from robots.robot import Command, Mode, RobotDescription, RobotError, RobotState

_MODES: dict[str, Mode] = {"Idle": "idle", "Move": "moving"}


class FrankaRobot:
    """One arm with its hand; implements `robots.robot.Robot`.

    A fault (reflex, user stop, lost cycles) stays until `recover`, also if the controller itself would allow more; so
    does `stop`. Nothing here clears a fault on its own.
    """

    def __init__(self, config: FrankaConfig) -> None:
        self._config = config
        self._franky: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._refusals: tuple[type[Exception], ...] = (RobotError,)
        self._robot: Any = None
        self._gripper: FrankaGripper | None = None
        self._tracker: Any = None
        self._lock = threading.RLock()
        self._stop_asked = threading.Event()
        self._fault: str | None = None
        self._is_holding = False
        self._num_recoveries = 0
        self._clock_s, self._clock_seen_s = -1.0, 0.0

    @property
    def description(self) -> RobotDescription:
        """An FR3 counts as "Panda", whose dimensions it has; its joint limits are its own."""
        config = self._config
        return RobotDescription(
            name="franka",
            arm="Panda",
            spaces=("ee_delta",),
            state_names=STATE_NAMES,
            min_rate_hz=5.0,
            max_rate_hz=100.0,
            limits=franka_limits(
                config.arm, config.dynamics_factor, config.collision_force_n, config.collision_torque_nm
            ),
        )

    # --- Connection --------------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Reach arm and hand; nothing moves. Another client's session makes the controller not answer.

        Raises:
            ImportError: franky-control is not installed.
            RobotError: No answer in time, or a refusal; names the address.
        """
        if self._robot is not None:
            raise RobotError(f"already connected to {self._config.host}; close() first")
        self._franky = _import_franky()
        self._errors = _errors_of(self._franky)
        self._refusals = (RobotError, *self._errors)
        robot, hand, width_m = with_deadline(self._reach, timeout_s, f"the Franka controller at {self._config.host}")
        self._robot, self._gripper = robot, FrankaGripper(hand, self._franky, self._config.gripper, width_m)
        self._fault, self._tracker, self._is_holding, self._num_recoveries = None, None, False, 0
        self._clock_s, self._clock_seen_s = -1.0, time.monotonic()
        self._stop_asked.clear()

    def _reach(self) -> tuple[Any, Any, float]:
        config, franky = self._config, self._franky
        realtime = franky.RealtimeConfig.Enforce if config.realtime == "enforce" else franky.RealtimeConfig.Ignore
        try:
            robot = franky.Robot(
                config.host,
                relative_dynamics_factor=config.dynamics_factor,
                default_torque_threshold=config.collision_torque_nm,
                default_force_threshold=config.collision_force_n,
                realtime_config=realtime,
            )
            hand = franky.Gripper(config.host)
            return robot, hand, float(hand.width)
        except self._errors as error:
            raise RobotError(f"{config.host}: {error}") from error

    def close(self) -> None:
        """Stop and disconnect; safe at any time."""
        self.stop()
        with self._lock:
            if self._gripper is not None:
                self._gripper.close()
            self._robot, self._gripper, self._tracker = None, None, None

    # --- State -------------------------------------------------------------------------------------------------------

    def observe(self) -> RobotState:
        """The newest state.

        Raises:
            RobotError: Not connected, or the controller's clock stands still.
        """
        robot, gripper = self._connected()
        try:
            state = robot.state
            received_s = time.monotonic()
            self._note_end_of_control(robot)
        except self._errors as error:
            raise RobotError(f"the connection to {self._config.host} is lost: {error}") from error
        clock_s = float(state.time.to_sec())
        if clock_s != self._clock_s:
            self._clock_s, self._clock_seen_s = clock_s, received_s
        elif received_s - self._clock_seen_s > self._config.stale_after_s:
            raise RobotError(
                f"the controller at {self._config.host} has sent no new state for "
                f"{received_s - self._clock_seen_s:.2f} s; look at its power, cable and Desk, then connect again"
            )
        return self._converted(state, received_s, gripper.width_m)

    def _converted(self, state: Any, received_s: float, width_m: float) -> RobotState:
        tool = tool_from_end_effector(state.O_T_EE.matrix, state.F_T_EE.matrix)
        joints = np.array(state.q, dtype=np.float64)
        vector = training_rotation_vector(tool[:3, :3], joints)
        values = [*(tool[:3, 3] + self._config.base_in_world_m), *vector, width_m / 2, -width_m / 2]
        faults = self._faults(state)
        mode: Mode = "fault" if faults else _MODES[state.robot_mode.name]
        return RobotState(
            time_s=float(state.time.to_sec()),
            received_s=received_s,
            position_m=tool[:3, 3].copy(),
            rotation=tool[:3, :3].copy(),
            joint_positions_rad=joints,
            joint_velocities_rad_s=np.array(state.dq, dtype=np.float64),
            gripper_width_m=width_m,
            named=dict(zip(STATE_NAMES, map(float, values), strict=True)),
            wrench=np.array(state.O_F_ext_hat_K, dtype=np.float64),
            mode="held" if mode == "moving" and self._is_holding else mode,
            faults=faults,
        )

    def _faults(self, state: Any) -> tuple[str, ...]:
        """The controller's words; empty if it would move."""
        mode = state.robot_mode.name
        words = tuple(json.loads(repr(state.current_errors)))
        if mode not in _MODES:
            words += (f"the controller is in mode {mode}",)
        return words if self._fault is None else (self._fault, *(w for w in words if w not in self._fault))

    # --- Motion ------------------------------------------------------------------------------------------------------

    def command(self, command: Command) -> Command:
        """Move the target of the impedance controller; starts it if it does not run.

        Returns:
            The command with what the hand will do in place of what was asked of it.

        Raises:
            RobotError: A fault or a `stop` that nobody has recovered from, or the connection is lost.
            ValueError: The command is no pose.
        """
        target = command_pose(command)
        with self._lock:
            robot, gripper = self._connected()
            self._require_no_fault(robot)
            try:
                state = robot.state
                if self._tracker is None:
                    self._start_tracker(robot)
                end_effector = end_effector_from_tool(target, state.F_T_EE.matrix)
                self._tracker.set_target(self._franky.Affine(end_effector))
                self._note_end_of_control(robot)
            except self._errors as error:
                self._latch(str(error))
            self._require_no_fault(robot)
            self._is_holding = False
        return replace(command, gripper=gripper.command(float(command.gripper)))

    def hold(self) -> None:
        """Pull the target to where the tool is now; further calls keep that target, so that the arm does not creep."""
        with self._lock:
            if self._robot is None or self._fault is not None or self._stop_asked.is_set():
                return
            try:
                if self._tracker is None:
                    self._start_tracker(self._robot)
                elif not self._is_holding:
                    self._tracker.set_target(self._franky.Affine(self._robot.state.O_T_EE))
                self._note_end_of_control(self._robot)
                self._is_holding = True
            except self._refusals as error:
                self._latch(str(error))

    def stop(self) -> None:
        """End all motion; the controller then holds the joints. Commands are refused until `recover`."""
        self._stop_asked.set()
        with self._lock:
            if self._robot is None:
                return
            if self._gripper is not None:
                self._gripper.stop()
            try:
                self._end_tracker(self._robot)
            except self._refusals as error:
                self._latch(str(error))

    def home(self, joint_positions_rad: Sequence[float] | Float64[np.ndarray, 7], timeout_s: float = 60.0) -> None:
        """Drive the joints slowly to a posture. Nothing looks for obstacles: the way must be free.

        Args:
            joint_positions_rad: Of the seven joints.
            timeout_s: After which the motion is stopped.

        Raises:
            RobotError: A fault, a `stop` in between, or the posture was not reached in time.
            ValueError: Not seven finite numbers within the joint limits.
        """
        target = np.asarray(joint_positions_rad, dtype=np.float64)
        limits = self.description.limits
        if target.shape != (7,) or not ((limits.joint_lower_rad < target) & (target < limits.joint_upper_rad)).all():
            raise ValueError(
                f"home is {target}; expected 7 joint positions (rad) within the {self._config.arm}'s limits"
            )
        with self._lock:
            robot, _ = self._connected()
            self._require_no_fault(robot)
            try:
                self._end_tracker(robot)
                self._wait_for_rest(robot)
                factor = self._config.home_dynamics_factor / self._config.dynamics_factor
                motion = self._franky.JointMotion(target.tolist(), relative_dynamics_factor=min(factor, 1.0))
                robot.move(motion, asynchronous=True)
            except self._errors as error:
                raise self._latch(str(error)) from error
        self._wait_for_home(robot, time.monotonic() + timeout_s)

    def _wait_for_home(self, robot: Any, deadline_s: float) -> None:
        try:
            while not robot.join_motion(timeout=0.05):
                if self._stop_asked.is_set() or time.monotonic() > deadline_s:
                    with_deadline(robot.stop, 1.0, f"the controller at {self._config.host}")
                    raise RobotError(
                        "home was stopped on its way" if self._stop_asked.is_set() else "home took too long"
                    )
            self._wait_for_rest(robot)
        except self._errors as error:
            raise self._latch(str(error)) from error

    # --- Faults ------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clear a `stop`, and a fault of the controller as often as the settings allow; then look before you move.

        Raises:
            RobotError: It persists, or was cleared too often.
        """
        robot, _ = self._connected()
        with self._lock:
            try:
                is_faulty = self._fault is not None or bool(self._faults(robot.state))
                if is_faulty:
                    self._clear_fault(robot)
            except self._errors as error:
                raise self._latch(str(error)) from error
            self._stop_asked.clear()

    def _clear_fault(self, robot: Any) -> None:
        config, words = self._config, self._fault or "; ".join(self._faults(robot.state))
        if self._num_recoveries >= config.max_recoveries:
            raise RobotError(
                f"{words}; cleared {self._num_recoveries} faults already (max_recoveries); find the cause, then "
                "connect again"
            )
        self._num_recoveries += 1
        self._tracker, self._is_holding = None, False
        deadline_s = time.monotonic() + config.recover_timeout_s
        with_deadline(robot.recover_from_errors, config.recover_timeout_s, f"the error recovery of {config.host}")
        self._fault = None
        while self._faults(robot.state):
            if time.monotonic() > deadline_s:
                raise self._latch("; ".join(self._faults(robot.state)))
            time.sleep(0.02)

    def _latch(self, words: str) -> RobotError:
        """Remember a fault; the first words are the cause, later ones its consequences."""
        self._fault = self._fault or words
        self._tracker, self._is_holding = None, False
        return RobotError(f"{self._config.host}: {self._fault}; recover() clears it once the cause is gone")

    def _note_end_of_control(self, robot: Any) -> None:
        """A tracker that ends by itself has been ended by a fault: keep the controller's words."""
        with self._lock:
            if self._tracker is None or robot.is_in_control:
                return
            try:
                robot.join_motion(timeout=0.0)
                self._latch("the controller has ended the motion without a reason")
            except self._errors as error:
                self._latch(str(error))

    def _require_no_fault(self, robot: Any) -> None:
        faults = self._faults(robot.state)
        if faults:
            raise RobotError(
                f"{self._config.host} refuses to move: {'; '.join(faults)}; recover() clears it once the cause is gone"
            )
        if self._stop_asked.is_set():
            raise RobotError(f"{self._config.host} was stopped; recover() allows commands again")

    # --- Pieces ------------------------------------------------------------------------------------------------------

    def _start_tracker(self, robot: Any) -> None:
        self._wait_for_rest(robot)
        config = self._config
        self._tracker = self._franky.CartesianImpedanceTracker(
            robot,
            translational_stiffness=config.translational_stiffness_n_m,
            rotational_stiffness=config.rotational_stiffness_nm_rad,
            damping=None if config.damping is None else np.array(config.damping),
        )

    def _end_tracker(self, robot: Any) -> None:
        """Brake with damping only, wait for rest; the controller then holds by itself."""
        tracker, self._tracker, self._is_holding = self._tracker, None, False
        if tracker is None or not robot.is_in_control:
            return
        robot.move(self._franky.TorqueStopMotion(), asynchronous=True)
        if not robot.join_motion(timeout=self._config.rest_timeout_s):
            with_deadline(robot.stop, 1.0, f"the controller at {self._config.host}")

    def _wait_for_rest(self, robot: Any) -> None:
        """Both the velocity's sample and the way of 50 ms may say so: a servo can chatter without going anywhere."""
        deadline_s = time.monotonic() + self._config.rest_timeout_s
        state = robot.state
        speed = float(np.abs(state.dq).max())
        while speed > self._config.rest_speed_rad_s:
            if time.monotonic() > deadline_s or self._stop_asked.is_set():
                raise RobotError(f"the arm still moves at {speed:.3f} rad/s; commands of another kind would jump")
            before, begun_s = np.array(state.q), float(state.time.to_sec())
            time.sleep(0.05)
            state = robot.state
            travelled = float(np.abs(np.array(state.q) - before).max())
            speed = min(float(np.abs(state.dq).max()), travelled / max(float(state.time.to_sec()) - begun_s, 1e-3))

    def _connected(self) -> tuple[Any, FrankaGripper]:
        if self._robot is None or self._gripper is None:
            raise RobotError("not connected; call connect() first")
        return self._robot, self._gripper


def _import_franky() -> Any:
    try:
        return importlib.import_module("franky")
    except ImportError as error:
        raise ImportError(f"the Franka driver needs franky-control ({error}): pip install 'vla-rl[franka]'") from error


def _errors_of(franky: Any) -> tuple[type[Exception], ...]:
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
