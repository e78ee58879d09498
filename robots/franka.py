"""Driver of a Franka arm through `franky-control`: follows commands with a Cartesian impedance controller.

The controller runs at 1 kHz in franky's own thread; a command only moves its target. Tested against franka-sim 1.1.7
(libfranka protocol 10, communication and motion limits enforced) and franky-control 2.0.0; on no physical robot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from robots.driving import STATE_NAMES, Stops, command_pose, patiently, with_deadline
from robots.franka_arm import end_effector_from_tool, franka_limits
from robots.franka_config import FrankaConfig
from robots.franka_gripper import FrankaGripper
from robots.franka_link import errors_of, faults_of, import_franky, reach, state_of
from robots.robot import Command, RobotDescription, RobotError, RobotState

_BEFORE_REFLEX = 0.7
"""Share of the controller's reflex thresholds at which the safety chain holds: at the same number it came too late."""


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
        self._lock = threading.RLock()  # re-entrant, because a signal may stop what holds it
        self._stops = Stops()
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
                config.arm,
                config.dynamics_factor,
                _BEFORE_REFLEX * config.collision_force_n,
                _BEFORE_REFLEX * config.collision_torque_nm,
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
        franky = self._franky = import_franky()
        self._errors = errors_of(franky)
        self._refusals = (RobotError, *self._errors)
        name = f"the Franka controller at {self._config.host}"
        robot, hand, width_m = with_deadline(lambda: reach(self._config, franky), timeout_s, name)
        self._robot, self._gripper = robot, FrankaGripper(hand, self._franky, self._config.gripper, width_m)
        self._fault, self._tracker, self._is_holding, self._num_recoveries = None, None, False, 0
        self._clock_s, self._clock_seen_s = -1.0, time.monotonic()
        self._stops.clear(self._stops.newest)

    def close(self) -> None:
        """Stop and disconnect; safe at any time."""
        self.stop()
        with patiently(self._lock):  # whether or not somebody still holds it: nothing more is asked of the controller
            gripper, self._robot, self._gripper, self._tracker = self._gripper, None, None, None
        if gripper is not None:
            gripper.close()

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
        seen = state_of(state, received_s, gripper.width_m, self._config.base_in_world_m)
        faults = self._faults(state)
        is_held = seen.mode == "moving" and self._is_holding
        return replace(seen, faults=faults, mode="fault" if faults else "held" if is_held else seen.mode)

    def _faults(self, state: Any) -> tuple[str, ...]:
        """The controller's words; empty if it would move."""
        words = faults_of(state)
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
                tracker = self._tracker or self._start_tracker(robot)
                end_effector = end_effector_from_tool(target, state.F_T_EE.matrix)
                self._require_no_stop()
                tracker.set_target(self._franky.Affine(end_effector))
                self._note_end_of_control(robot)
                if self._stops.is_pending:  # it came while the target was on its way
                    self._end_tracker(robot)
            except self._errors as error:
                self._latch(str(error))
            self._require_no_fault(robot)
            self._is_holding = False
        return replace(command, gripper=gripper.command(float(command.gripper)))

    def hold(self) -> None:
        """Pull the target to where the tool is now; further calls keep that target, so that the arm does not creep.

        Raises:
            RobotError: Another call has kept the driver for too long.
        """
        with patiently(self._lock) as is_mine:
            if not is_mine:
                raise RobotError(f"{self._config.host}: the driver is busy; the arm could not be held")
            robot, tracker = self._robot, self._tracker
            if robot is None or self._fault is not None or self._stops.is_pending:
                return
            try:
                if tracker is None:
                    self._start_tracker(robot)
                elif not self._is_holding:
                    tracker.set_target(self._franky.Affine(robot.state.O_T_EE))
                self._note_end_of_control(robot)
                self._is_holding = True
            except self._refusals as error:
                if not self._stops.is_pending:
                    self._latch(str(error))

    def stop(self) -> None:
        """End all motion; the controller then holds the joints. Commands are refused until `recover`.

        Whoever keeps the driver busy is not waited for: then the controller itself ends the motion.
        """
        self._stops.add()
        gripper = self._gripper
        if gripper is not None:
            gripper.stop()
        with patiently(self._lock) as is_mine:
            robot = self._robot
            if robot is None:
                return
            try:
                if is_mine:
                    self._end_tracker(robot)
                else:
                    with_deadline(robot.stop, 1.0, f"the controller at {self._config.host}")
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
                if self._stops.is_pending or time.monotonic() > deadline_s:
                    with_deadline(robot.stop, 1.0, f"the controller at {self._config.host}")
                    raise RobotError("home was stopped on its way" if self._stops.is_pending else "home took too long")
            self._wait_for_rest(robot)
        except self._errors as error:
            raise self._latch(str(error)) from error

    # --- Faults ------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Clear a `stop`, and a fault of the controller as often as the settings allow; then look before you move.

        Raises:
            RobotError: It persists, was cleared too often, or a `stop` came meanwhile.
        """
        seen = self._stops.newest
        robot, _ = self._connected()
        with self._lock:
            try:
                is_faulty = self._fault is not None or bool(self._faults(robot.state))
                if is_faulty:
                    self._clear_fault(robot)
            except self._errors as error:
                raise self._latch(str(error)) from error
            self._stops.clear(seen)
        self._require_no_stop()

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
        if not self._lock.acquire(blocking=False):
            return  # whoever has it looks by himself, and states must not wait for him
        try:
            if self._tracker is None or robot.is_in_control:
                return
            robot.join_motion(timeout=0.0)
            self._latch("the controller has ended the motion without a reason")
        except self._errors as error:
            self._latch(str(error))
        finally:
            self._lock.release()

    def _require_no_fault(self, robot: Any) -> None:
        faults = self._faults(robot.state)
        if faults:
            raise RobotError(
                f"{self._config.host} refuses to move: {'; '.join(faults)}; recover() clears it once the cause is gone"
            )
        self._require_no_stop()

    def _require_no_stop(self) -> None:
        if self._stops.is_pending:
            raise RobotError(f"{self._config.host} was stopped; recover() allows commands again")

    # --- Pieces ------------------------------------------------------------------------------------------------------

    def _start_tracker(self, robot: Any) -> Any:
        """A stop that came while it was under way found nothing to end, so it is ended here."""
        self._wait_for_rest(robot)
        self._require_no_stop()
        config = self._config
        self._tracker = self._franky.CartesianImpedanceTracker(
            robot,
            translational_stiffness=config.translational_stiffness_n_m,
            rotational_stiffness=config.rotational_stiffness_nm_rad,
            damping=None if config.damping is None else np.array(config.damping),
        )
        if self._stops.is_pending:
            self._end_tracker(robot)
            self._require_no_stop()
        return self._tracker

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
            if time.monotonic() > deadline_s or self._stops.is_pending:
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
