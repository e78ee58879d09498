"""The steps of the safety chain from workspace to monitor, on target poses: what is asked becomes what may be told.

The order is fixed, and there is no switch; the numbers are those of `robots.safety`, whose first two steps come before:

    1 numbers    3 workspace    4 caps per tick    5 leash    6 joints    7 shaping    8 forces    9 what is measured
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

from robots.robot import Command, RobotDescription, RobotError, RobotState
from robots.rotations import (
    angle_between,
    limit_rotation,
    matrix_from_rotation_vector,
    rotation_vector_from_matrix,
)
from robots.safety_config import SafetyConfig, effective_limits
from robots.shaping import Shaper
from robots.workspace import Workspace

_FIRST_SHARE = 0.1  # of the caps at the beginning of the ramp
_RUNAWAY = 1.5  # measured speed over allowed speed
_SAME = 1e-9
_SHAPED_SLACK_M = 1e-3  # a shaped way is curved, and may cut an oblique plane's corner by so much
_BEYOND_RAD = 0.01  # a joint that is measured so far beyond its limit is where it cannot be
_STANDS_RAD_S = 0.01  # below it is the noise of a joint that stands still


@dataclass(frozen=True, kw_only=True)
class SafetyEvent:
    """What a step did.

    Attributes:
        kind: Short name.
        severity: "info"; "clamped": the command was changed; "hold": there is no command; "fault": stop.
        detail: Numbers, for people.
    """

    kind: str
    severity: Literal["info", "clamped", "hold", "fault"]
    detail: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What the robot is to be told.

    Attributes:
        command: None: nothing; it holds.
        events: What the steps did, in order.
    """

    command: Command | None
    events: tuple[SafetyEvent, ...]


@dataclass(kw_only=True, eq=False)
class _Step:
    """The command under way through the chain."""

    position: Float64[np.ndarray, 3]
    rotation: Float64[np.ndarray, "3 3"]
    gripper: float
    events: list[SafetyEvent]

    def note(self, kind: str, severity: Literal["info", "clamped", "hold", "fault"], detail: str) -> None:
        self.events.append(SafetyEvent(kind=kind, severity=severity, detail=detail))

    @property
    def is_refused(self) -> bool:
        return any(event.severity in ("hold", "fault") for event in self.events)


class SafetySteps:
    """Reviews one target pose per control period. See the module's docstring."""

    def __init__(self, rate_hz: float, config: SafetyConfig, description: RobotDescription) -> None:
        """Check the limits.

        Args:
            rate_hz: Of the control periods.
            config: The user's limits.
            description: The driver's.

        Raises:
            ValueError: They are wider than the driver's, or the workspace makes no sense for this robot.
        """
        self._config = config
        self.limits = effective_limits(config, description)
        """Those of the driver, tightened."""
        self._workspace = Workspace(config)
        self._is_lockstep = description.is_lockstep
        self._period_s = 1.0 / rate_hz
        limits = self.limits
        self._linear = Shaper(
            self._period_s, limits.linear_speed_m_s, limits.linear_acceleration_m_s2, limits.linear_jerk_m_s3
        )
        self._angular = Shaper(
            self._period_s, limits.angular_speed_rad_s, limits.angular_acceleration_rad_s2, limits.angular_jerk_rad_s3
        )
        self._target: tuple[np.ndarray, np.ndarray] | None = None
        self._num_since_resync = 0

    def resync(self, state: RobotState) -> None:
        """Forget the last target: after a start, a hold or a fault the next action counts from where the robot is.

        Raises:
            RobotError: That is not known: the state has no finite numbers, or no rotation.
        """
        problem = no_state(state)
        if problem is not None:
            raise RobotError(problem.detail)
        self._target = (state.position_m.copy(), state.rotation.copy())
        self._linear.reset(state.position_m)
        self._angular.reset(np.zeros(3))
        self._num_since_resync = 0

    def last_target(self, state: RobotState) -> tuple[Float64[np.ndarray, 3], Float64[np.ndarray, "3 3"]]:
        """Position and rotation that were commanded last; after a resync, and before anything, those measured."""
        return self._target if self._target is not None else (state.position_m, state.rotation)

    def review(
        self,
        position_m: Float64[np.ndarray, 3],
        rotation: Float64[np.ndarray, "3 3"],
        gripper: float,
        state: RobotState,
    ) -> Decision:
        """One target pose in the robot's present state."""
        problem = no_state(state)
        if problem is not None:
            return Decision(command=None, events=(problem,))
        if self._target is None:
            self.resync(state)
        step = _Step(position=position_m, rotation=rotation, gripper=gripper, events=[])
        try:
            self._review(step, state)
        except (ArithmeticError, ValueError) as error:  # numbers that no step expected; numpy's and scipy's, too
            step.note("no_trajectory", "hold", str(error))
        if step.is_refused:
            return Decision(command=None, events=tuple(step.events))
        self._target = (step.position, step.rotation)
        self._num_since_resync += 1
        command = Command(position_m=step.position, rotation=step.rotation, gripper=step.gripper)
        return Decision(command=command, events=tuple(step.events))

    def check_start(self, state: RobotState) -> tuple[SafetyEvent, ...]:
        """Whether an episode may begin here: the tool must be where it is to stay."""
        problem = no_state(state)
        if problem is not None:
            return (problem,)
        return tuple(
            SafetyEvent(
                kind="start_outside",
                severity="fault",
                detail=f"the tool is at {text(state.position_m)} m, {words}; move the arm by hand, or correct "
                "safety.workspace and safety.keep_out",
            )
            for words in self._workspace.violations(state.position_m)
        )

    # --- The steps, in order -----------------------------------------------------------------------------------------

    def _review(self, step: _Step, state: RobotState) -> None:
        if not (np.isfinite(step.position).all() and np.isfinite(step.rotation).all() and np.isfinite(step.gripper)):
            step.note("not_finite", "hold", f"the target is {step.position} m, {step.rotation}, gripper {step.gripper}")
            return
        self._confine(step)
        self._caps(step)
        self._leash(step, state)
        self._joints(step, state)
        self._shape(step)
        self._stay(step, state)
        self._forces(step, state)
        self._monitor(step, state)

    def _confine(self, step: _Step) -> None:
        inside = self._workspace.nearest(step.position)
        if inside is None:
            violated = "; ".join(self._workspace.violations(step.position))
            step.note("no_workspace", "hold", f"target {text(step.position)} m: {violated}; nothing near is allowed")
        elif np.abs(inside - step.position).max() > _SAME:
            step.note("clipped_workspace", "clamped", f"target {text(step.position)} m moved to {text(inside)} m")
            step.position = inside

    def _caps(self, step: _Step) -> None:
        """At most the allowed speed times the control period away from the last target, less during the ramp."""
        if self._is_lockstep:
            return  # the simulated controller's own limits are those of the training actions
        position, rotation = self._target if self._target is not None else (step.position, step.rotation)
        share = self._ramp()
        cap_m, cap_rad = (
            share * speed * self._period_s for speed in (self.limits.linear_speed_m_s, self.limits.angular_speed_rad_s)
        )
        distance = float(np.linalg.norm(step.position - position))
        if distance > cap_m + _SAME:
            step.note("capped_translation", "clamped", f"{1e3 * distance:.1f} mm in one tick cut to {1e3 * cap_m:.1f}")
            step.position = position + (step.position - position) * (cap_m / distance)
        angle = angle_between(step.rotation, rotation)
        if angle > cap_rad + _SAME:
            step.note("capped_rotation", "clamped", f"{angle:.3f} rad in one tick cut to {cap_rad:.3f}")
            step.rotation = limit_rotation(step.rotation, rotation, cap_rad)

    def _ramp(self) -> float:
        return min(1.0, _FIRST_SHARE + self._num_since_resync * self._period_s / self._config.ramp_in_s)

    def _leash(self, step: _Step, state: RobotState) -> None:
        if self._is_lockstep:
            return  # counts from the measured pose already
        distance = float(np.linalg.norm(step.position - state.position_m))
        if distance > self._config.leash_m + _SAME:
            step.note("leash_translation", "clamped", f"target {1e3 * distance:.0f} mm ahead of the robot")
            step.position = state.position_m + (step.position - state.position_m) * (self._config.leash_m / distance)
        angle = angle_between(step.rotation, state.rotation)
        if angle > self._config.leash_rad + _SAME:
            step.note("leash_rotation", "clamped", f"target {angle:.2f} rad ahead of the robot")
            step.rotation = limit_rotation(step.rotation, state.rotation, self._config.leash_rad)

    def _joints(self, step: _Step, state: RobotState) -> None:
        """Hold if a joint runs towards a limit faster than it can brake, or leaves its margin outwards."""
        limits, q, dq = self.limits, state.joint_positions_rad, state.joint_velocities_rad_s
        if not len(limits.joint_lower_rad) or not len(q):
            return
        beyond = np.maximum(limits.joint_lower_rad - q, q - limits.joint_upper_rad)
        if beyond.max() > _BEYOND_RAD:
            joint = int(np.argmax(beyond))
            step.note("joint_beyond", "fault", f"joint {joint + 1} is {beyond[joint]:.2f} rad beyond its limit")
        if not len(dq):
            return
        margin = self._config.joint_margin_rad
        room = np.where(dq >= 0, limits.joint_upper_rad - q, q - limits.joint_lower_rad)
        # A joint that needs its full speed one margin before the margin brakes over that width
        # with a = v^2 / (2 margin); the margin itself is what a hold has to stop in.
        share = np.sqrt(np.clip((room - margin) / margin, 0.0, 1.0))
        too_fast = np.abs(dq) > np.maximum(share * limits.joint_speed_rad_s, _STANDS_RAD_S)
        if too_fast.any():
            joint = int(np.argmax(too_fast))
            step.note(
                "joint_limit",
                "hold",
                f"joint {joint + 1} moves at {dq[joint]:.2f} rad/s with {room[joint]:.2f} rad left to its limit",
            )

    def _shape(self, step: _Step) -> None:
        if self._is_lockstep:
            self._linear.jump(step.position)
            return
        _, rotation = self._target if self._target is not None else (step.position, step.rotation)
        position = self._linear.follow(step.position)
        turned = self._angular.follow(rotation_vector_from_matrix(step.rotation @ rotation.T))
        self._angular.shift(-turned)  # the next rotation counts from the new target
        if (
            np.abs(position - step.position).max() > 1e-6
            or angle_between(matrix_from_rotation_vector(turned) @ rotation, step.rotation) > 1e-6
        ):
            step.note("shaped", "clamped", f"{1e3 * np.linalg.norm(position - step.position):.1f} mm still to go")
        step.position, step.rotation = position, matrix_from_rotation_vector(turned) @ rotation

    def _stay(self, step: _Step, state: RobotState) -> None:
        """What has been shaped and pulled on a leash is looked at again: it may not lie deeper beyond a wall."""
        if self._is_lockstep:
            return
        before = self._workspace.depth_m(self.last_target(state)[0])
        measured = self._workspace.depth_m(state.position_m)
        depth = self._workspace.depth_m(step.position)
        if depth > max(_SHAPED_SLACK_M, before + _SAME, measured + _SAME):
            step.note("no_workspace", "hold", f"the way to the target leads {1e3 * depth:.1f} mm out of the workspace")

    def _forces(self, step: _Step, state: RobotState) -> None:
        if state.wrench is None:
            return
        force, torque = float(np.linalg.norm(state.wrench[:3])), float(np.linalg.norm(state.wrench[3:]))
        if not (force <= self.limits.force_n and torque <= self.limits.torque_nm):
            step.note("force", "hold", f"external force {force:.1f} N, torque {torque:.1f} N m")

    def _monitor(self, step: _Step, state: RobotState) -> None:
        """A joint that is faster than anything that was commanded has run away."""
        speeds, allowed = np.abs(state.joint_velocities_rad_s), self.limits.joint_speed_rad_s
        if len(allowed) and len(speeds) and (speeds > _RUNAWAY * allowed).any():
            joint = int(np.argmax(speeds / allowed))
            step.note("runaway", "fault", f"joint {joint + 1} moves at {speeds[joint]:.2f} rad/s")


def no_state(state: RobotState) -> SafetyEvent | None:
    """A fault if what is measured is no finite numbers, or no rotation."""
    measured = (state.position_m, state.rotation, state.joint_positions_rad, state.joint_velocities_rad_s)
    wrench = np.zeros(6) if state.wrench is None else state.wrench
    if not all(np.isfinite(values).all() for values in (*measured, wrench)):
        return SafetyEvent(kind="state_not_finite", severity="fault", detail="the measured state is not finite")
    is_rotation = (
        np.abs(state.rotation @ state.rotation.T - np.eye(3)).max() < 1e-3 and np.linalg.det(state.rotation) > 0
    )
    if not is_rotation:
        detail = f"the measured orientation is no rotation: {state.rotation.tolist()}"
        return SafetyEvent(kind="state_no_rotation", severity="fault", detail=detail)
    return None


def text(values: Float64[np.ndarray, 3]) -> str:
    """A position for people."""
    return "(" + ", ".join(f"{value:.3f}" for value in values) + ")"
