"""The deployment contract: what a checkpoint needs of a robot, written at training time from the simulator's own facts.

It lies in every checkpoint as `contract.json` and is the first thing that a policy server sends. A robot is matched
against it by name; whatever differs is shown side by side and refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float64
from pydantic import Field, ValidationError, model_validator

from robots.robot import RobotDescription
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec, Unit

CONTRACT_FILE = "contract.json"
LAYOUT = 2
_EE_DELTA_DIM = 7
_GRIPPER_RANGE = (-1.0, 1.0)
"""Of the robots' commands (`robots.robot`); the sign is the contract's."""


def saved_execution_horizon(folder: Path) -> int | None:
    """Executed actions per chunk by the contract in a policy folder, whatever its layout; None if there is none.

    Raises:
        ValueError: It is damaged.
    """
    path = folder / CONTRACT_FILE
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["execution_horizon"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); use another checkpoint") from error


def statistics_digest(statistics: object) -> str:
    """SHA-256 of JSON-serialisable statistics, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(statistics, sort_keys=True).encode()).hexdigest()


def _require_length(what: str, values: Sequence[object], names: Sequence[str]) -> None:
    if len(values) != len(names):
        raise ValueError(f"{what} has {len(values)} entries for {len(names)} names: {', '.join(names)}")


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
    gripper_range: tuple[float, float]
    """Smallest and largest gripper entry."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.names) != _EE_DELTA_DIM:
            raise ValueError(f"space ee_delta has {_EE_DELTA_DIM} entries, but names has {', '.join(self.names)}")
        for name in ("units", "scale", "low", "high"):
            _require_length(name, getattr(self, name), self.names)
        for name in ("scale", "low", "high", "gripper_range"):
            if not all(math.isfinite(value) for value in getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; expected finite numbers")
        if min(self.scale) <= 0:
            raise ValueError(f"scale is {self.scale}; expected positive numbers")
        if any(low > high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.gripper_range[0] >= self.gripper_range[1]:
            raise ValueError(f"gripper_range is {self.gripper_range}; expected the smaller number first")
        return self


class DeploymentContract(ConfigModel):
    """Everything that both sides must agree on."""

    version: Literal[2] = 2
    """Of this file's layout."""
    policy: str
    """Class of the policy."""
    action: ActionContract
    """What comes out."""
    state_names: tuple[str, ...]
    """Proprioceptive entries that go in, in order."""
    state_units: tuple[Unit, ...]
    """Unit of each."""
    cameras: tuple[CameraContract, ...]
    """Pictures that go in, in order."""
    control_rate_hz: float = Field(gt=0, allow_inf_nan=False)
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

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _require_length("state_units", self.state_units, self.state_names)
        for what, names in (("state_names", self.state_names), ("cameras", [camera.name for camera in self.cameras])):
            if len(set(names)) != len(names):
                raise ValueError(f"{what} names an entry twice: {', '.join(names)}")
        if self.execution_horizon > self.action_horizon:
            raise ValueError(
                f"execution_horizon {self.execution_horizon} is above action_horizon {self.action_horizon}"
            )
        return self

    def save(self, folder: Path) -> None:
        """Write `contract.json`."""
        (folder / CONTRACT_FILE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> DeploymentContract:
        """Read `contract.json`.

        Raises:
            ValueError: There is none, it is damaged, or an older version wrote it.
        """
        path = folder / CONTRACT_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {CONTRACT_FILE}: it was written by an older version, or its simulator does not say "
                "what actions mean; train or export the policy again, in a suite with an OSC_POSE arm"
            )
        try:
            return cls.from_document(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_document(cls, document: Any) -> DeploymentContract:
        """The contract of a JSON document, e.g. of a policy server's metadata.

        Raises:
            ValueError: It is damaged, or an older version wrote it.
        """
        version = document.get("version") if isinstance(document, dict) else None
        if version != LAYOUT:
            raise ValueError(
                f"the deployment contract has layout {version}, expected {LAYOUT}: an older or newer version of vla-rl "
                "wrote it (layout 1 does not say units of the state and range of the gripper); use the version that "
                "wrote it, or train or clone the policy again"
            )
        try:
            return cls.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
            raise ValueError(f"the deployment contract is damaged: {'; '.join(problems)}") from error


def make_contract(
    spec: EnvSpec,
    *,
    policy: str,
    action_low: Float64[np.ndarray, " action_dim"],
    action_high: Float64[np.ndarray, " action_dim"],
    action_horizon: int,
    execution_horizon: int,
    norm_stats_key: str,
    norm_stats_sha256: str,
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
        norm_stats_sha256: Their digest (see `statistics_digest`).
        centre_crop: Whether the policy crops its pictures.
    """
    meaning = spec.action_meaning
    if meaning is None or not spec.proprio_units:
        return None
    units = ("m", "m", "m", "rad", "rad", "rad", "1")
    height, width = spec.image_size
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
            gripper_range=meaning.gripper_range,
        ),
        state_names=spec.proprio_names,
        state_units=spec.proprio_units,
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
        norm_stats_sha256=norm_stats_sha256,
        training_robot=meaning.robot,
        training_suite=norm_stats_key,
    )


def compare(contract: DeploymentContract, robot: RobotDescription, camera_names: tuple[str, ...]) -> list[str]:
    """What keeps a robot from running a policy, as lines of a table with both sides; empty if nothing does.

    State entries and cameras are matched by name, in any order.
    """
    rows = [
        ("arm", contract.training_robot, robot.arm, contract.training_robot == robot.arm),
        (
            "gripper range",
            _text(contract.action.gripper_range),
            _text(_GRIPPER_RANGE),
            contract.action.gripper_range == _GRIPPER_RANGE,
        ),
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


def compare_world(contract: DeploymentContract, spec: EnvSpec) -> list[str]:
    """What keeps a world from being the robot of a policy, as `compare` shows it."""
    action, meaning = contract.action, spec.action_meaning
    rows: list[tuple[str, object, object]] = [
        ("arm", contract.training_robot, meaning and meaning.robot),
        ("action entries", action.names, spec.action_names),
        ("action frame", action.frame, meaning and meaning.frame),
        ("delta reference", action.delta_reference, meaning and meaning.delta_reference),
        ("action scale", action.scale, meaning and meaning.scale),
        ("gripper closes at", action.gripper_closes_at, meaning and meaning.gripper_closes_at),
        ("gripper range", action.gripper_range, meaning and meaning.gripper_range),
        ("control rate, Hz", contract.control_rate_hz, spec.control_rate_hz),
        ("state", contract.state_names, spec.proprio_names),
        ("state units", contract.state_units, spec.proprio_units),
        ("cameras", tuple(camera.name for camera in contract.cameras), spec.cameras),
    ]
    picture = (*spec.image_size, spec.image_orientation)
    rows += [(f"camera {one.name}", (one.height, one.width, one.orientation), picture) for one in contract.cameras]
    return [
        f"{what}: checkpoint {_text(wanted)} | world {_text(offered)}"
        for what, wanted, offered in rows
        if wanted != offered
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "not said"
    return "not said" if value is None else str(value)


def require_world(contract: DeploymentContract, spec: EnvSpec) -> None:
    """Refuse a world that does not fit.

    Raises:
        ValueError: Shows both sides of everything that differs.
    """
    if differences := compare_world(contract, spec):
        raise ValueError(
            "the checkpoint was not made for this world:\n  " + "\n  ".join(differences) + "\n"
            "configure the suite as in training: its cameras, image_size and robot"
        )


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
