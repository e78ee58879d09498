"""The values that travel between the worlds, the policies and the trainer. numpy only.

An *episode* begins at a `Start`, is a list of `Decision`s (one policy call, one executed chunk of actions each), and
ends in success, at the time limit, or with a crash of its world. Array shapes use C cameras, H image height, W image
width, P proprio_dim, K executed control steps, A action_dim, L action tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float32, Float64, Shaped, UInt8

Split = Literal["train", "validation", "test"]
"""Which pool a start comes from. Pools are disjoint by construction: RL and demonstrations use `train` only."""


class TrainingError(RuntimeError):
    """A run cannot go on as configured; the message says why and what to change."""


class SimError(RuntimeError):
    """A world failed (NaN, unstable physics, crashed renderer). The message names the task, the start and the cause."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WorldState:
    """Everything needed to continue a world bit for bit.

    Attributes:
        physics: MuJoCo's `mjSTATE_INTEGRATION` vector (time, qpos, qvel, act, warm start, controls, mocap, user data).
        controller: The controller's own memory (orientation goal, gripper command, ...), float64.
        num_steps: Control steps since the episode's start.
        fixtures: Poses of the furniture that this start has put somewhere (m; quaternion w, x, y, z).
    """

    physics: Float64[np.ndarray, " physics_dim"]
    controller: Float64[np.ndarray, " controller_dim"]
    num_steps: int
    fixtures: Float64[np.ndarray, "fixtures 7"] = field(default_factory=lambda: np.zeros((0, 7)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """What fixes the beginning of an episode. All members of a group share one start.

    Attributes:
        task: Full task name, "<suite>/<task>", e.g. "tabletop/pick_up_red_cube".
        instruction: The sentence that the policy is given.
        split: The pool that the start belongs to.
        index: Position within (task, split); the pair (task, split, index) names the start for ever.
        init: Initial generalised positions of the world (robot and objects), as the suite's worlds understand them.
        seed: Seed of whatever randomness the world itself draws during the episode.
        snapshot: If given, the world starts from this state instead of `init` (branching).
    """

    task: str
    instruction: str
    split: Split
    index: int
    init: Float64[np.ndarray, " init_dim"]
    seed: int
    snapshot: WorldState | None = None

    @property
    def key(self) -> str:
        """A stable name, e.g. "tabletop/pick_up_red_cube/test/17"."""
        return f"{self.task}/{self.split}/{self.index}"


Unit = Literal["m", "rad", "1"]
"""Of an entry of the proprioceptive state."""


@dataclass(frozen=True, kw_only=True)
class ActionMeaning:
    """What an action of 1 does, in SI units: what a deployment needs to know about the simulated controller.

    Attributes:
        robot: Model of the arm, e.g. "Panda".
        space: "ee_delta": displacement and rotation vector of the tool, then gripper.
        frame: Axes of displacement and rotation; "base" also where the simulator's world has the same axes.
        delta_reference: Pose that a displacement is added to: the "measured" one (robosuite) or the last "commanded".
        scale: Size of an action of 1, per entry: m for displacements, rad for rotations, 1 for the gripper.
        gripper_closes_at: Sign of the gripper entry that closes.
        gripper_range: Smallest and largest gripper entry, fully open and fully closed or the other way round.
    """

    robot: str
    space: Literal["ee_delta"] = "ee_delta"
    frame: Literal["base", "tool"] = "base"
    delta_reference: Literal["measured", "commanded"] = "measured"
    scale: tuple[float, ...]
    gripper_closes_at: Literal[-1, 1] = 1
    gripper_range: tuple[float, float] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What a policy may know about a suite: the interface, never the task.

    Attributes:
        cameras: Camera names in the order of `Observation.images`.
        image_size: Height and width in pixels.
        image_orientation: "bottom_up" as robosuite and LIBERO return images (row 0 is the bottom), or "top_down".
        proprio_names: One name per proprio entry, e.g. of the end effector's position, its axis-angle, the fingers.
        action_names: One name per action entry; LIBERO: dx dy dz drx dry drz in [-1, 1], gripper -1 open ... +1 closed.
        control_rate_hz: Control steps per simulated second.
        action_meaning: What actions do; None where the simulator does not say. Only what says this and
            the units of the state can be deployed.
        proprio_units: "m", "rad" or "1", one per proprio entry; empty where the simulator does not say.
    """

    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    image_orientation: Literal["bottom_up", "top_down"]
    proprio_names: tuple[str, ...]
    action_names: tuple[str, ...]
    control_rate_hz: float
    action_meaning: ActionMeaning | None = None
    proprio_units: tuple[Unit, ...] = ()

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`, also after a passage through JSON."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}
        if (meaning := values.get("action_meaning")) is not None:
            entries: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in meaning.items()}
            values["action_meaning"] = ActionMeaning(**entries)
        return cls(**values)

    @property
    def action_dim(self) -> int:
        """Number of entries of one action."""
        return len(self.action_names)

    @property
    def proprio_dim(self) -> int:
        """Number of entries of the proprioceptive state."""
        return len(self.proprio_names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What the policy sees at a decision. Images are raw uint8, in the orientation of the `EnvSpec`."""

    images: UInt8[np.ndarray, "cameras height width 3"]
    proprio: Float32[np.ndarray, " proprio_dim"]
    instruction: str


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """Outcome of one chunk.

    Attributes:
        num_steps: Control steps that really ran; fewer than the chunk's length if the episode ended inside it.
        success: The task was solved at the last of these steps (terminated).
        truncated: The time limit was reached without success.
        frames: Images of the first camera, one per control step, only if the episode is recorded; (H, W, 3) each.
    """

    num_steps: int
    success: bool
    truncated: bool
    frames: tuple[UInt8[np.ndarray, "height width 3"], ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the episode is over."""
        return self.success or self.truncated


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotResult:
    """What a `VecEnv` slot answers to a reset (`step` is None) or to a chunk.

    Attributes:
        slot: Index of the slot.
        observation: The next observation; None if the episode is over or the world crashed.
        step: Outcome of the chunk.
        error: Set if the world crashed; the slot is usable again after its next reset.
        physics_s: Seconds spent in physics and control.
        render_s: Seconds spent in rendering.
    """

    slot: int
    observation: Observation | None
    step: StepResult | None
    error: SimError | None = None
    physics_s: float = 0.0
    render_s: float = 0.0


@dataclass(kw_only=True, eq=False)
class Decision:
    """One policy call and what became of it.

    Attributes:
        observation: What the policy saw.
        sample: What the policy drew, opaque to the trainer (token policies: integer bins, shape (L,)).
        logprobs: Log-probability of each element of the sample at the sampling temperature; (L,).
        temperature: Sampling temperature.
        num_steps: Control steps of the chunk that were executed.
    """

    observation: Observation
    sample: Shaped[np.ndarray, "*sample"]
    logprobs: Float32[np.ndarray, " tokens"]
    temperature: float
    num_steps: int = 0


@dataclass(kw_only=True, eq=False)
class Episode:
    """One rollout from one start.

    Attributes:
        start: Where it began.
        episode_index: Number of the episode within the run; with the run's seed it fixes every random draw.
        group_index: Number of the group within the run (episodes of a group share the start).
        policy_version: Number of updates that the acting policy had seen.
        decisions: In order.
        success: Solved.
        truncated: Ran into the time limit.
        frames: Recorded images of the first camera, one per control step, if asked for.
    """

    start: Start
    episode_index: int
    group_index: int
    policy_version: int
    decisions: list[Decision] = field(default_factory=list)
    success: bool = False
    truncated: bool = False
    frames: list[UInt8[np.ndarray, "height width 3"]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Control steps executed."""
        return sum(decision.num_steps for decision in self.decisions)
