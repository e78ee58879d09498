"""The safety chain: what the policy asks, step by step, becomes what the robot may be told.

The order is fixed, and there is no switch. Each step looks at one thing, and says what it changed:

    1 numbers    2 contract's units    3 workspace    4 caps per tick    5 leash    6 joints    7 shaping    8 forces
    9 what is measured

The steps from 3 on are in `robots.safety_steps`, for those who command poses. An action that violates nothing passes
with its own numbers untouched (`Command.action`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float64

from robots.contract import DeploymentContract
from robots.robot import RobotDescription, RobotState
from robots.rotations import matrix_from_rotation_vector
from robots.safety_config import KeepOutPlane, SafetyConfig
from robots.safety_steps import Decision, SafetyEvent, SafetySteps, no_state, text

__all__ = ["Decision", "KeepOutPlane", "SafetyChain", "SafetyConfig", "SafetyEvent"]


class SafetyChain:
    """Reviews one action per control period. See the module's docstring."""

    def __init__(self, contract: DeploymentContract, config: SafetyConfig, description: RobotDescription) -> None:
        """Check the limits.

        Raises:
            ValueError: They are wider than the driver's, or the workspace makes no sense for this robot.
        """
        self._contract = contract
        self._config = config
        self._steps = SafetySteps(contract.control_rate_hz, config, description)
        self._is_lockstep = description.is_lockstep
        self._period_s = 1.0 / contract.control_rate_hz
        self._scale = np.array(contract.action.scale)

    def resync(self, state: RobotState) -> None:
        """Forget the last target: after a start, a hold or a fault the next action counts from where the robot is.

        Raises:
            RobotError: That is not known: the state has no finite numbers, or no rotation.
        """
        self._steps.resync(state)

    def review(self, action: Any, state: RobotState) -> Decision:
        """One action, in the contract's units, in the robot's present state."""
        problem = self._no_action(action) or no_state(state)
        if problem is not None:
            return Decision(command=None, events=(problem,))
        decision = self._steps.review(*self._in_units(action, state), state)
        if decision.command is None or any(event.severity == "clamped" for event in decision.events):
            return decision
        return replace(decision, command=replace(decision.command, action=action))

    def check_start(self, state: RobotState) -> tuple[SafetyEvent, ...]:
        """Whether an episode may begin here: the tool must be where it is to stay."""
        return self._steps.check_start(state)

    def check_first_chunk(
        self, actions: Float64[np.ndarray, "horizon action_dim"], state: RobotState
    ) -> tuple[SafetyEvent, ...]:
        """Whether a policy's first chunk looks like what it was trained to say, and its first action can be begun here.

        Wrong statistics, swapped entries or other units show here, before anything moves.
        """
        if actions.ndim != 2 or actions.shape[1] != len(self._scale) or not np.isfinite(actions).all():
            detail = f"the first chunk has shape {actions.shape} or is not finite"
            return (SafetyEvent(kind="not_finite", severity="fault", detail=detail),)
        low, high = np.array(self._contract.action.low), np.array(self._contract.action.high)
        margin = self._config.range_margin * np.maximum(high - low, 0.1)
        outside = (actions < low - margin) | (actions > high + margin)
        if not outside.any():
            return self._check_first_action(actions[0], state)
        index = int(np.argmax(outside.any(axis=0)))
        name, values = self._contract.action.names[index], actions[:, index]
        detail = (
            f"{name} is {values.min():.3g} to {values.max():.3g}, but was {low[index]:.3g} to {high[index]:.3g} in "
            "training: wrong statistics, units or order of entries?"
        )
        return (SafetyEvent(kind="unlike_training", severity="fault", detail=detail),)

    def _check_first_action(
        self, action: Float64[np.ndarray, " action_dim"], state: RobotState
    ) -> tuple[SafetyEvent, ...]:
        """Its target must be within what one control period and the leash allow, counted from the measured pose."""
        if self._is_lockstep:
            return ()  # the simulated controller's own limits are those of the training actions
        start = self.check_start(state)
        if start:
            return start
        values, limits, config = action * self._scale, self._steps.limits, self._config
        asked = (
            ("m", float(np.linalg.norm(values[:3])), config.leash_m + limits.linear_speed_m_s * self._period_s),
            ("rad", float(np.linalg.norm(values[3:6])), config.leash_rad + limits.angular_speed_rad_s * self._period_s),
        )
        return tuple(
            SafetyEvent(
                kind="first_action_too_far",
                severity="fault",
                detail=f"the first action leads {size:.3f} {unit} away from the tool, which is at "
                f"{text(state.position_m)} m; leash and speed limit allow {most:.3f} {unit} in a control period",
            )
            for unit, size, most in asked
            if size > most
        )

    # --- The first steps ---------------------------------------------------------------------------------------------

    def _no_action(self, action: Any) -> SafetyEvent | None:
        expected = (len(self._scale),)
        if not isinstance(action, np.ndarray) or action.shape != expected or action.dtype.kind != "f":
            given = f"{getattr(action, 'dtype', type(action).__name__)} of shape {getattr(action, 'shape', '?')}"
            return SafetyEvent(
                kind="malformed", severity="hold", detail=f"the action is {given}, expected floats {expected}"
            )
        if not np.isfinite(action).all():
            return SafetyEvent(kind="not_finite", severity="hold", detail=f"the action is {action.tolist()}")
        return None

    def _in_units(
        self, action: Float64[np.ndarray, " action_dim"], state: RobotState
    ) -> tuple[Float64[np.ndarray, 3], Float64[np.ndarray, "3 3"], float]:
        """Displacement and rotation vector become a target pose; the gripper's sign becomes ours.

        A simulator that was trained in counts from the measured pose, as training did. A real arm sags under that rule,
        so there the chain counts from its own last target, and the leash keeps it near the arm.
        """
        meaning = self._contract.action
        values = np.clip(action, -1e6, 1e6) * self._scale
        moved, turned = values[:3], matrix_from_rotation_vector(values[3:6])
        is_measured = self._is_lockstep and meaning.delta_reference == "measured"
        position, rotation = (state.position_m, state.rotation) if is_measured else self._steps.last_target(state)
        if meaning.frame == "tool":
            position, rotation = position + rotation @ moved, rotation @ turned
        else:
            position, rotation = position + moved, turned @ rotation
        gripper = float(np.clip(action[-1] * meaning.gripper_closes_at, -1.0, 1.0))
        return position, rotation, gripper
