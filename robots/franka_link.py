"""The way to a Franka controller: franky's module and exceptions, how it is reached, and what its states mean."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from robots.driving import STATE_NAMES
from robots.franka_arm import tool_from_end_effector, training_rotation_vector
from robots.franka_config import FrankaConfig
from robots.robot import Mode, RobotError, RobotState

_MODES: dict[str, Mode] = {"Idle": "idle", "Move": "moving"}


def import_franky() -> Any:
    """The module.

    Raises:
        ImportError: It is not installed; names the extra.
    """
    try:
        return importlib.import_module("franky")
    except ImportError as error:
        raise ImportError(f"the Franka driver needs franky-control ({error}): pip install 'vla-rl[franka]'") from error


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


def reach(config: FrankaConfig, franky: Any) -> tuple[Any, Any, float]:
    """Connections to arm and hand, and the width of the hand; may block for ever.

    Raises:
        RobotError: The controller refuses; names the address.
    """
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
    except errors_of(franky) as error:
        raise RobotError(f"{config.host}: {error}") from error


def faults_of(state: Any) -> tuple[str, ...]:
    """The controller's words for what keeps it from moving; empty if nothing does."""
    mode = state.robot_mode.name
    words = tuple(json.loads(repr(state.current_errors)))
    return words if mode in _MODES else (*words, f"the controller is in mode {mode}")


def state_of(state: Any, received_s: float, width_m: float, base_in_world_m: Sequence[float]) -> RobotState:
    """A state of the controller as ours.

    Args:
        state: franky's.
        received_s: When this host got it.
        width_m: Of the hand.
        base_in_world_m: Added to the positions that policies read.
    """
    tool = tool_from_end_effector(state.O_T_EE.matrix, state.F_T_EE.matrix)
    joints = np.array(state.q, dtype=np.float64)
    vector = training_rotation_vector(tool[:3, :3], joints)
    values = [*(tool[:3, 3] + base_in_world_m), *vector, width_m / 2, -width_m / 2]
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
        mode=_MODES.get(state.robot_mode.name, "fault"),
        faults=faults_of(state),
    )
