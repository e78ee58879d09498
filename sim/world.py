"""The worlds' contract. A world is one simulated episode at a time; a suite makes worlds and starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from vla_rl.types import EnvSpec, Observation, Split, Start, StepResult, WorldState

if TYPE_CHECKING:
    from sim.model import SimModel


@runtime_checkable
class World(Protocol):
    """One simulated robot with its scene. Not thread-safe; any thread may use it, one at a time."""

    def reset(self, start: Start) -> None:
        """Begin an episode. Nothing is rendered."""

    def step(self, chunk: Float64[np.ndarray, "steps action_dim"], record_frames: bool = False) -> StepResult:
        """Run a chunk of actions; stops inside it at success or at the time limit.

        Raises:
            SimError: The physics became invalid (NaN, divergence).
            ValueError: The chunk has the wrong shape or is not finite.
        """

    def observe(self) -> Observation:
        """Render the cameras of the spec and read the proprioceptive state."""

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """The proprioceptive state of `observe`, without its images."""

    def render(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """Any camera at any size, in the spec's orientation (videos, debugging)."""

    def save_state(self) -> WorldState:
        """A copy of the whole state; `restore_state` continues from it bit for bit."""

    def restore_state(self, state: WorldState) -> None:
        """Return to a saved state of the same task."""

    @property
    def data(self) -> mujoco.MjData:
        """The running task's MuJoCo data: privileged state for experts and tests, not for policies."""

    @property
    def start(self) -> Start:
        """The start of the running episode."""

    @property
    def num_steps(self) -> int:
        """Control steps since the start."""


@runtime_checkable
class Expert(Protocol):
    """A scripted demonstrator on privileged state; asked anew at every control step."""

    def act(self, data: mujoco.MjData) -> Float64[np.ndarray, " action_dim"]:
        """The action for this state, in the suite's units."""


@runtime_checkable
class TaskScene(Protocol):
    """What a task adds to the generic world: its compiled model, where things stand at a start, when it is solved.

    Scenes inherit from it, for the methods that have a default.
    """

    model: SimModel
    """The compiled model, shared by all worlds of the task."""

    def place(self, data: mujoco.MjData, start: Start) -> None:
        """Write the start's `init` into freshly reset data (qpos, and whatever else the task keeps)."""

    def is_success(self, data: mujoco.MjData) -> bool:
        """Whether the task is solved in this state; called after every control step, so it must be cheap."""

    def fixture_poses(self, start: Start) -> Float64[np.ndarray, "fixtures 7"]:
        """Where the start puts the model's fixtures: position (m) and quaternion (w, x, y, z) in the parent's frame."""
        return np.zeros((0, 7))

    def site_groups(self, data: mujoco.MjData) -> frozenset[int]:
        """Site groups that are drawn in this state besides those of the model's `RenderOptions` (lamps that are on)."""
        return frozenset()


@runtime_checkable
class Suite(Protocol):
    """A family of tasks with one interface (`spec`)."""

    @property
    def name(self) -> str:
        """E.g. "tabletop"."""

    @property
    def spec(self) -> EnvSpec:
        """What a policy may know."""

    @property
    def tasks(self) -> Sequence[str]:
        """Full names ("<suite>/<task>") of the selected tasks."""

    @property
    def horizon(self) -> int:
        """Time limit of an episode in control steps; the longest one, if tasks differ."""

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name; the same arguments always give the same start."""

    def make_world(self) -> World:
        """A world that can run any of the suite's tasks (it follows `Start.task`)."""

    def make_expert(self, task: str, rng: np.random.Generator) -> Expert:
        """A demonstrator of one task; `rng` gives each its own style."""
