"""The deployment contract: what a checkpoint needs of a robot, written at training time from the simulator's own facts.

It lies in every checkpoint as `contract.json` and is the first thing that a policy server sends. A robot is matched
against it by name; whatever differs is shown side by side and refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from robots.robot import RobotDescription
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec

CONTRACT_FILE = "contract.json"


class CameraContract(ConfigModel):
    """One picture that the policy wants."""

    name: str
    """Name in the training world, e.g. "agentview"."""
    height: int = Field(ge=1)
    """In pixels."""
    width: int = Field(ge=1)
    """In pixels."""
    orientation: Literal["bottom_up", "top_down"]
    """First row of the picture as the policy takes it; a real camera's pictures are top_down."""
    colour: Literal["rgb"] = "rgb"
    """Order of the channels."""
    centre_crop: bool = False
    """Whether the policy itself cuts out the central 90 %; nobody else may do it again."""


class ActionContract(ConfigModel):
    """What the numbers of an action mean."""

    names: tuple[str, ...]
    """Entries in order."""
    units: tuple[str, ...]
    """Unit of an entry times its scale: m, rad, or 1."""
    space: Literal["ee_delta"]
    """Displacement and rotation vector of the tool, then gripper."""
    frame: Literal["base", "tool"]
    """Axes of displacement and rotation; rotations multiply from the left in the base frame, from the right in the
    tool's."""
    rotation: Literal["axis_angle"] = "axis_angle"
    """Form of the rotation entries."""
    delta_reference: Literal["measured", "commanded"]
    """Pose that a displacement is added to."""
    scale: tuple[float, ...]
    """Size of an action of 1, per entry."""
    low: tuple[float, ...]
    """1 % quantile of the training actions, per entry, in action units: outside of [low, high] something is wrong."""
    high: tuple[float, ...]
    """99 % quantile."""
    gripper_closes_at: Literal[-1, 1]
    """Sign of the gripper entry that closes."""


class DeploymentContract(ConfigModel):
    """Everything that both sides must agree on."""

    version: Literal[1] = 1
    """Of this file's layout."""
    policy: str
    """Class of the policy."""
    action: ActionContract
    """What comes out."""
    state_names: tuple[str, ...]
    """Proprioceptive entries that go in, in order; units m and rad."""
    cameras: tuple[CameraContract, ...]
    """Pictures that go in, in order."""
    control_rate_hz: float = Field(gt=0)
    """Actions per second. A displacement per control step means another speed at another rate: never rescale."""
    action_horizon: int = Field(ge=1)
    """Predicted actions of a chunk."""
    execution_horizon: int = Field(ge=1)
    """Executed actions of a chunk in training."""
    norm_stats_key: str
    """Dataset whose statistics scale actions and state."""
    norm_stats_sha256: str
    """Digest of these statistics."""
    training_robot: str
    """Model of the arm, e.g. "Panda"."""
    training_suite: str
    """Suite that it was trained in."""

    def save(self, folder: Path) -> None:
        """Write `contract.json`."""
        (folder / CONTRACT_FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> DeploymentContract:
        """Read `contract.json`.

        Raises:
            ValueError: There is none, or it is damaged.
        """
        path = folder / CONTRACT_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {CONTRACT_FILE}: it was written by an older version, or its simulator does not say "
                "what actions mean; train or export the policy again, in a suite with an OSC_POSE arm"
            )
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def make_contract(
    spec: EnvSpec,
    *,
    policy: str,
    action_low: Float64[np.ndarray, " action_dim"],
    action_high: Float64[np.ndarray, " action_dim"],
    action_horizon: int,
    execution_horizon: int,
    norm_stats_key: str,
    norm_stats: object,
    centre_crop: bool,
) -> DeploymentContract | None:
    """The contract of a policy; None if the simulator does not say what actions mean.

    Args:
        spec: Interface of the suite.
        policy: Class of the policy.
        action_low: 1 % quantiles of the training actions in the suite's units.
        action_high: 99 % quantiles.
        action_horizon: Predicted actions.
        execution_horizon: Executed actions in training.
        norm_stats_key: Dataset of the statistics.
        norm_stats: JSON-serialisable statistics; their digest is kept.
        centre_crop: Whether the policy crops its pictures.
    """
    meaning = spec.action_meaning
    if meaning is None:
        return None
    units = ("m", "m", "m", "rad", "rad", "rad", "1")
    height, width = spec.image_size
    digest = hashlib.sha256(json.dumps(norm_stats, sort_keys=True).encode()).hexdigest()
    return DeploymentContract(
        policy=policy,
        action=ActionContract(
            names=spec.action_names,
            units=units,
            space=meaning.space,
            frame=meaning.frame,
            delta_reference=meaning.delta_reference,
            scale=meaning.scale,
            low=tuple(action_low.tolist()),
            high=tuple(action_high.tolist()),
            gripper_closes_at=meaning.gripper_closes_at,
        ),
        state_names=spec.proprio_names,
        cameras=tuple(
            CameraContract(
                name=name, height=height, width=width, orientation=spec.image_orientation, centre_crop=centre_crop
            )
            for name in spec.cameras
        ),
        control_rate_hz=spec.control_rate_hz,
        action_horizon=action_horizon,
        execution_horizon=execution_horizon,
        norm_stats_key=norm_stats_key,
        norm_stats_sha256=digest,
        training_robot=meaning.robot,
        training_suite=norm_stats_key,
    )


def compare(contract: DeploymentContract, robot: RobotDescription, camera_names: tuple[str, ...]) -> list[str]:
    """What keeps a robot from running a policy, as lines of a table with both sides; empty if nothing does.

    State entries and cameras are matched by name, in any order.
    """
    rows = [
        ("arm", contract.training_robot, robot.arm, contract.training_robot == robot.arm),
        ("action space", contract.action.space, ", ".join(robot.spaces), contract.action.space in robot.spaces),
        (
            "control rate, Hz",
            f"{contract.control_rate_hz:g}",
            f"{robot.min_rate_hz:g} to {robot.max_rate_hz:g}",
            robot.min_rate_hz <= contract.control_rate_hz <= robot.max_rate_hz,
        ),
        (
            "state",
            ", ".join(contract.state_names),
            ", ".join(robot.state_names),
            set(contract.state_names) <= set(robot.state_names),
        ),
        (
            "cameras",
            ", ".join(camera.name for camera in contract.cameras),
            ", ".join(camera_names) or "none",
            {camera.name for camera in contract.cameras} <= set(camera_names),
        ),
    ]
    return [f"{what}: checkpoint {wanted} | robot {offered}" for what, wanted, offered, fits in rows if not fits]


def require_match(contract: DeploymentContract, robot: RobotDescription, camera_names: tuple[str, ...]) -> None:
    """Refuse a robot that does not fit.

    Raises:
        ValueError: Shows both sides of everything that differs.
    """
    differences = compare(contract, robot, camera_names)
    if differences:
        raise ValueError(
            f"the checkpoint was not made for robot {robot.name!r}:\n  " + "\n  ".join(differences) + "\n"
            "choose the robot and the cameras that the policy was trained with, or train for this one"
        )
