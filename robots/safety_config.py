"""Limits of the safety chain: what a user must give, what may be tightened, and what is refused."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from robots.robot import RobotDescription, RobotLimits
from vla_rl.config import ConfigModel

Finite = Annotated[float, Field(allow_inf_nan=False)]
Vector = tuple[Finite, Finite, Finite]
_FAR = 2.0
"""A side of the box that is further away than so many reaches is a mistake of units or a placeholder."""


class KeepOutPlane(ConfigModel):
    """The tool stays on the side that the normal points to."""

    point_m: Vector
    """Any point of the plane, base frame."""
    normal: Vector
    """Points to where the tool may be; any length but 0."""

    @field_validator("normal")
    @classmethod
    def _has_a_direction(cls, normal: Vector) -> Vector:
        if math.hypot(*normal) < 1e-9:
            raise ValueError(f"the normal {normal} of a keep-out plane has no direction")
        return normal


class SafetyConfig(ConfigModel):
    """Limits, base frame, SI units. Null means the driver's own limit; nothing can be wider than that."""

    workspace_low_m: Vector
    """Lowest corner of the box that the tool stays in. No default: a box that always fits never protects."""
    workspace_high_m: Vector
    """Highest corner."""
    keep_out: tuple[KeepOutPlane, ...] = ()
    """Further planes, e.g. a table's surface."""
    leash_m: float = Field(default=0.04, gt=0, le=0.2, allow_inf_nan=False)
    """Largest distance between target and measured tool."""
    leash_rad: float = Field(default=0.2, gt=0, le=1.0, allow_inf_nan=False)
    """Largest angle between target and measured orientation."""
    joint_margin_rad: float = Field(default=0.1, gt=0, le=1.0, allow_inf_nan=False)
    """Distance to a joint's limit within which it may only move inwards."""
    linear_speed_m_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    linear_acceleration_m_s2: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    linear_jerk_m_s3: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    angular_speed_rad_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    angular_acceleration_rad_s2: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    angular_jerk_rad_s3: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Of the tool."""
    force_n: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """External force at which the robot holds."""
    torque_nm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """External torque at which the robot holds."""
    ramp_in_s: float = Field(default=0.5, ge=0.1, le=5.0, allow_inf_nan=False)
    """After a start or a hold, the caps per control period grow from a tenth to their full size over this time."""
    range_margin: float = Field(default=0.5, ge=0, le=10.0, allow_inf_nan=False)
    """How far the first chunk may leave the range of the training actions, in widths of that range."""

    @model_validator(mode="after")
    def _box_is_a_box(self) -> Self:
        low, high = self.workspace_low_m, self.workspace_high_m
        if not all(a < b for a, b in zip(low, high, strict=True)):
            raise ValueError(f"the workspace from {low} to {high} is no box; each low must be below its high")
        return self


def effective_limits(config: SafetyConfig, description: RobotDescription) -> RobotLimits:
    """The driver's limits, tightened by the user's.

    Raises:
        ValueError: A user's limit is wider than the driver's, or the workspace cannot be reached or is all that can be.
    """
    tightened: dict[str, Any] = {}
    for field in fields(RobotLimits):
        wanted, bearable = getattr(config, field.name, None), getattr(description.limits, field.name)
        if wanted is None:
            continue
        if wanted > bearable:
            raise ValueError(
                f"safety.{field.name} is {wanted:g}, wider than the {bearable:g} that robot {description.name!r} can "
                "bear; limits can only be tightened"
            )
        tightened[field.name] = wanted
    _check_workspace(config, description)
    return replace(description.limits, **tightened)


def _check_workspace(config: SafetyConfig, description: RobotDescription) -> None:
    low, high, reach = np.array(config.workspace_low_m), np.array(config.workspace_high_m), description.limits.reach_m
    nearest = np.linalg.norm(np.clip(np.zeros(3), low, high))
    if nearest >= reach:
        raise ValueError(
            f"the workspace begins {nearest:.2f} m from the base, but the robot reaches {reach:.2f} m; the box is in "
            "the base's frame and in metres"
        )
    for axis, a, b in zip("xyz", low, high, strict=True):
        if min(a, -b) < -_FAR * reach:
            raise ValueError(
                f"the workspace runs from {a:g} to {b:g} m along {axis}, but the robot reaches {reach:.2f} m: that "
                "protects nothing; give the box in which the task happens, in the base's frame and in metres"
            )
    if np.all(low <= -reach) and np.all(high >= reach):
        raise ValueError(
            f"the workspace holds everything that the robot reaches ({reach:.2f} m), so it protects nothing; give the "
            "box in which the task happens"
        )
