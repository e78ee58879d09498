"""Settings of the Franka driver."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from robots.franka_arm import Arm
from robots.franka_gripper import GripperConfig
from vla_rl.config import ConfigModel

Finite = Annotated[float, Field(allow_inf_nan=False)]
Damping = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class FrankaConfig(ConfigModel):
    """Where the arm is and how it moves. Gains come from `scripts/calibrate_response.py`, not from the simulator."""

    type: Literal["franka"] = "franka"
    """Which robot."""
    host: str = Field(min_length=1)
    """Address of the controller (FCI), e.g. "172.16.0.2"."""
    base_in_world_m: tuple[Finite, Finite, Finite]
    """Where the arm's base stands in the training world, e.g. (-0.56, 0, 0.912) for the tabletop suite: policies read
    positions in that world's axes. No default: a wrong one shifts what the policy sees without an error."""
    arm: Arm = "FR3"
    """Model. PyPI's franky-control is built for the FR3 (server version 10); the Panda needs a build for version 5."""
    translational_stiffness_n_m: float = Field(default=800.0, gt=0, le=3000, allow_inf_nan=False)
    """Of the impedance controller."""
    rotational_stiffness_nm_rad: float = Field(default=40.0, gt=0, le=300, allow_inf_nan=False)
    """Of the impedance controller."""
    damping: tuple[Damping, Damping, Damping, Damping, Damping, Damping] | None = None
    """x, y, z (N s/m), rotations (N m s/rad); None: 2 sqrt(stiffness)."""
    dynamics_factor: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the maker's speed, acceleration and jerk limits that the driver offers to the safety chain."""
    home_dynamics_factor: float = Field(default=0.05, gt=0, le=0.3)
    """Fraction of them that `home` uses."""
    collision_force_n: float = Field(default=40.0, gt=0, le=100, allow_inf_nan=False)
    """The controller's own reflex; the safety chain holds at 0.7 of it, or below (`safety.force_n`)."""
    collision_torque_nm: float = Field(default=40.0, gt=0, le=100, allow_inf_nan=False)
    """Likewise, of the joints."""
    gripper: GripperConfig = GripperConfig()
    """The Franka Hand."""
    realtime: Literal["enforce", "ignore"] = "enforce"
    """"enforce" refuses a kernel without PREEMPT_RT; "ignore" risks communication violations, and is for simulators."""
    max_recoveries: int = Field(default=2, ge=0, le=10)
    """Faults of the controller that `recover` clears before somebody must connect again."""
    recover_timeout_s: float = Field(default=20.0, gt=0, le=120.0, allow_inf_nan=False)
    """Real controllers have taken up to 16 s."""
    rest_speed_rad_s: float = Field(default=0.02, gt=0, le=0.1, allow_inf_nan=False)
    """All joints must be slower before the kind of motion changes; otherwise the controller sees a jump."""
    rest_timeout_s: float = Field(default=3.0, gt=0, le=10.0, allow_inf_nan=False)
    """How long to wait for that."""
    stale_after_s: float = Field(default=0.3, gt=0, le=2.0, allow_inf_nan=False)
    """The connection counts as lost if the controller's clock stands still for so long."""
