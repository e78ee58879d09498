"""What the runtime is configured with, what it is in, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64
from pydantic import Field

from robots.contract import DeploymentContract
from robots.robot import CameraFrame, RobotDescription, RobotError, RobotState
from robots.schedule import CadenceReport, Schedule
from vla_rl.config import ConfigModel


class RunState(Enum):
    """Where the runtime is."""

    INIT = "init"
    PREFLIGHT = "preflight"
    READY = "ready"
    RUNNING = "running"
    HOLD = "hold"
    FAULT = "fault"
    ESTOP = "estop"


class RuntimeConfig(ConfigModel):
    """How a policy is run on a robot."""

    mode: Literal["live", "dry_run", "shadow", "slow"] = "live"
    """"dry_run": everything but sending. "shadow": somebody else moves the robot, the policy is only recorded. "slow":
    live, at a fraction of the rate, for first runs."""
    slow_factor: float = Field(default=0.25, gt=0, le=1, allow_inf_nan=False)
    """Rate of mode "slow" relative to the contract's; the robot's slowest rate bounds it."""
    max_steps: int = Field(default=400, ge=1)
    """Control periods of an episode, at most."""
    inference_deadline_s: float = Field(default=1.0, gt=0, le=60.0, allow_inf_nan=False)
    """An answer later than this is never used."""
    max_hold_s: float = Field(default=3.0, gt=0, le=60.0, allow_inf_nan=False)
    """A hold that lasts longer ends the episode."""
    max_recoveries: int = Field(default=2, ge=0, le=10)
    """Faults of the controller that are cleared per episode, each followed by new observations; then it ends."""
    max_camera_age_s: float = Field(default=0.25, gt=0, le=2.0, allow_inf_nan=False)
    """A frame older than this holds the robot."""
    estop_file: Path | None = None
    """The robot stops for good as soon as this file exists."""

    @property
    def is_moving(self) -> bool:
        """Whether the robot is moved, held, stopped and recovered; otherwise it is only looked at."""
        return self.mode in ("live", "slow")


class InferenceError(RobotError):
    """The policy has no answer, or none in time."""


class StaleError(RobotError):
    """What the robot or a camera shows is too old to act on."""


@runtime_checkable
class Answer(Protocol):
    """What inference returns."""

    @property
    def actions(self) -> Float64[np.ndarray, "horizon action_dim"]:
        """A chunk in the contract's units."""


@runtime_checkable
class ActionBuffer(Protocol):
    """Actions by time (see `vla_rl.serving.chunking.ChunkBuffer`)."""

    def add(self, actions: Float64[np.ndarray, "horizon action_dim"], t_obs: float, now: float) -> int:
        """A chunk whose first action belongs to the time of its observation."""

    def action_at(self, t: float) -> Float64[np.ndarray, " action_dim"] | None:
        """The action of a control period; None if there is none."""

    def remaining(self, t: float) -> int:
        """Actions that are left from a time on."""

    def clear(self) -> None:
        """Forget everything."""


Infer = Callable[[dict[str, Any], float], Answer]
"""From an observation and a deadline in seconds to an answer; raises in time, and never returns a late answer."""


@dataclass(frozen=True, kw_only=True)
class EpisodeReport:
    """How an episode went.

    Attributes:
        outcome: "success", "failure" (time limit or the world's own end), "stopped" (by a person), "fault" or "estop".
        num_steps: Control periods.
        events: Number of events by kind.
        cadence: How regular the periods were.
        detail: Why it ended.
    """

    outcome: str
    num_steps: int
    events: dict[str, int]
    cadence: CadenceReport
    detail: str = ""


@dataclass(kw_only=True, eq=False)
class Run:
    """Books of the running episode."""

    instruction: str
    schedule: Schedule
    events: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    num_recoveries: int = 0
    hold_since_s: float | None = None
    is_first_chunk: bool = True
    pending: Future[Answer] | None = None
    pending_t_obs: float = 0.0
    outcome: str | None = None
    detail: str = ""


def require_rate(contract: DeploymentContract, robot: RobotDescription, config: RuntimeConfig) -> None:
    """Refuse a slow mode that is slower than the robot can be driven; one that waits for its commands does not mind.

    Raises:
        ValueError: Says which factor would do.
    """
    rate_hz = 1.0 / control_period_s(contract, config)
    if not robot.is_lockstep and rate_hz < robot.min_rate_hz * (1.0 - 1e-9):
        raise ValueError(
            f"mode slow means {rate_hz:g} Hz (runtime.slow_factor {config.slow_factor:g} of "
            f"{contract.control_rate_hz:g} Hz), but robot {robot.name!r} needs {robot.min_rate_hz:g} Hz at least; set "
            f"runtime.slow_factor to {robot.min_rate_hz / contract.control_rate_hz:g} or more"
        )


def control_period_s(contract: DeploymentContract, config: RuntimeConfig) -> float:
    """Time between two commands: the contract's, or longer in slow mode."""
    return 1.0 / (contract.control_rate_hz * (config.slow_factor if config.mode == "slow" else 1.0))


def recording_facts(
    instruction: str, robot: RobotDescription, is_simulated: bool, contract: DeploymentContract
) -> dict[str, Any]:
    """What a recording says of its episode before it begins."""
    return {
        "instruction": instruction,
        "robot": robot.arm,
        "is_simulated": is_simulated,
        "contract": contract.model_dump(mode="json"),
    }


def preflight_lines(
    robot: RobotDescription,
    config: RuntimeConfig,
    contract: DeploymentContract,
    state: RobotState,
    frames: Mapping[str, CameraFrame],
    answer: Answer,
    answered_s: float,
) -> list[str]:
    """What will happen, for people."""
    position = ", ".join(f"{value:.3f}" for value in state.position_m)
    return [
        f"robot: {robot.name} ({robot.arm}), mode {config.mode}",
        f"tool at ({position}) m, gripper {1e3 * state.gripper_width_m:.0f} mm, {state.mode}",
        f"rate: {1 / control_period_s(contract, config):g} Hz; chunks of {len(answer.actions)} actions, "
        f"{contract.execution_horizon} executed in training",
        *(f"camera {name}: {frame.image.shape[1]} x {frame.image.shape[0]}" for name, frame in frames.items()),
        f"policy: {contract.policy}, trained in {contract.training_suite}",
        f"first answer after {1e3 * answered_s:.0f} ms",
    ]
