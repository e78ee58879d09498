"""Worlds of simulators that can only be reset and stepped.

What such an environment remembers is its own affair: poses that lag behind, counters, Python objects. So a saved state
is the way that leads there, the seed and the actions since, and restoring it walks that way again. This is exact for
every environment whose randomness comes from the seed, and it is checked at the end of each replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from sim.mujoco_world import FRAME_SIZE_PX
from vla_rl.types import EnvSpec, Observation, SimError, Start, StepResult, WorldState


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one control step.

    Attributes:
        success: The task is solved.
        is_over: The environment ends the episode, for whatever reason.
        fault: Why the state is invalid; None if it is valid.
    """

    success: bool
    is_over: bool
    fault: str | None = None


@runtime_checkable
class SteppedEnv(Protocol):
    """A simulator behind its own reset and step functions. Only `reset` may be called first."""

    def reset(self, task: str, seed: int) -> None:
        """Begin an episode; the same arguments always lead to the same state."""

    def step(self, action: Float64[np.ndarray, " action_dim"]) -> Outcome:
        """Run one control step; all entries are in [-1, 1]."""

    def image(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """The picture of a camera at a size, in the spec's orientation; changes nothing.

        Raises:
            ValueError: No such camera; lists those that exist.
        """

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """The proprioceptive state of the spec."""

    def fingerprint(self) -> Float64[np.ndarray, " entries"]:
        """The state, or numbers that differ when the state does."""

    def mujoco_data(self) -> mujoco.MjData:
        """The simulator's MuJoCo data.

        Raises:
            ValueError: It has none.
        """


class ReplayWorld:
    """One episode at a time of a `SteppedEnv`; implements `sim.world.World`.

    An episode that the environment ends without success counts as truncated: the policy cannot act any more. A saved
    state holds the fingerprint (`physics`), and the seed and all actions since (`controller`).

    Args:
        env: The simulator.
        spec: Interface of the suite.
        horizon: Time limit in control steps.
    """

    def __init__(self, env: SteppedEnv, spec: EnvSpec, horizon: int) -> None:
        self._env = env
        self._spec = spec
        self._horizon = horizon
        self._start: Start | None = None
        self._seed = 0
        self._actions: list[Float64[np.ndarray, " action_dim"]] = []
        self._is_done = False

    @property
    def data(self) -> mujoco.MjData:
        """The simulator's MuJoCo data: privileged state for experts and tests, not for policies.

        Raises:
            ValueError: The simulator has none, or there is no episode yet.
        """
        return self._running_env().mujoco_data()

    @property
    def start(self) -> Start:
        """The start of the running episode."""
        if self._start is None:
            raise ValueError("the world has no episode yet; call reset(start) first")
        return self._start

    @property
    def num_steps(self) -> int:
        """Control steps since the start."""
        return len(self._actions)

    def reset(self, start: Start) -> None:
        """Begin an episode. Nothing is rendered.

        Raises:
            SimError: The start's snapshot cannot be reached again.
        """
        self._start = start
        if start.snapshot is None:
            self._begin(start.seed)
        else:
            self.restore_state(start.snapshot)

    def step(self, chunk: Float64[np.ndarray, "steps action_dim"], record_frames: bool = False) -> StepResult:
        """Run a chunk of actions; stops inside it at success, at the time limit, or where the environment ends.

        Entries beyond [-1, 1] are clipped.

        Raises:
            SimError: The physics became invalid.
            ValueError: The chunk has the wrong shape or is not finite, or the episode is over.
        """
        self._running_env()
        if self._is_done:
            raise ValueError(f"the episode of {self.start.key} is over after {self.num_steps} steps; call reset first")
        num_steps_before = self.num_steps
        frames: list[UInt8[np.ndarray, "height width 3"]] = []
        is_success = False
        for action in self._checked(chunk):
            is_success = self._apply(action)
            if record_frames:
                frames.append(self.render(self._spec.cameras[0], FRAME_SIZE_PX, FRAME_SIZE_PX))
            if self._is_done:
                break
        return StepResult(
            num_steps=self.num_steps - num_steps_before,
            success=is_success,
            truncated=self._is_done and not is_success,
            frames=tuple(frames),
        )

    def observe(self) -> Observation:
        """Draw the cameras of the spec and read the proprioceptive state."""
        env = self._running_env()
        images = [env.image(camera, *self._spec.image_size) for camera in self._spec.cameras]
        return Observation(images=np.stack(images), proprio=env.proprio(), instruction=self.start.instruction)

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """The proprioceptive state of `observe`, without its images."""
        return self._running_env().proprio()

    def render(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """A camera's picture at any size, in the spec's orientation (videos, debugging).

        Raises:
            ValueError: No such camera; lists those that exist.
        """
        return self._running_env().image(camera, height, width)

    def save_state(self) -> WorldState:
        """The way to the present state; `restore_state` walks it again, and then continues bit for bit."""
        physics = self._running_env().fingerprint()
        controller = np.concatenate([[float(self._seed)], *self._actions])
        return WorldState(physics=physics, controller=controller, num_steps=self.num_steps)

    def restore_state(self, state: WorldState) -> None:
        """Return to a saved state of the same task; takes as long as the episode took to get there.

        Raises:
            ValueError: The state belongs to another kind of world.
            SimError: The replay led elsewhere.
        """
        expected = 1 + state.num_steps * self._spec.action_dim
        if len(state.controller) != expected:
            raise ValueError(
                f"the saved state has {len(state.controller)} controller entries, but {state.num_steps} control steps "
                f"of {self.start.task} have {expected}; restore it with the task that it was saved from"
            )
        self._begin(int(state.controller[0]))
        for action in state.controller[1:].reshape(state.num_steps, self._spec.action_dim):
            self._apply(action)
        if not np.array_equal(self._env.fingerprint(), state.physics):
            self._is_done = True
            raise SimError(
                f"replaying {state.num_steps} control steps of {self.start.key} led to another state than the saved "
                "one. Either it was saved from another task, or the environment has randomness that does not come "
                "from the seed of its reset; then it cannot be branched"
            )

    def _begin(self, seed: int) -> None:
        self._env.reset(self.start.task, seed)
        self._seed = seed
        self._actions = []
        self._is_done = False

    def _apply(self, action: Float64[np.ndarray, " action_dim"]) -> bool:
        """One control step; whether it solved the task."""
        outcome = self._env.step(action)
        self._actions.append(action.copy())
        self._is_done = outcome.success or outcome.is_over or self.num_steps >= self._horizon
        if outcome.fault is not None:
            self._is_done = True
            raise SimError(f"{outcome.fault} in {self.start.key} at control step {self.num_steps}")
        return outcome.success

    def _running_env(self) -> SteppedEnv:
        if self._start is None:
            raise ValueError("the world has no episode yet; call reset(start) first")
        return self._env

    def _checked(self, chunk: Float64[np.ndarray, "steps action_dim"]) -> Float64[np.ndarray, "steps action_dim"]:
        if chunk.ndim != 2 or chunk.shape[0] < 1 or chunk.shape[1] != self._spec.action_dim:
            raise ValueError(f"a chunk has shape (steps >= 1, {self._spec.action_dim}); got {chunk.shape}")
        if not np.isfinite(chunk).all():
            raise ValueError(f"the chunk for {self.start.key} at step {self.num_steps} is not finite:\n{chunk}")
        return np.clip(chunk.astype(np.float64), -1.0, 1.0)


def mujoco_fault(data: mujoco.MjData) -> str | None:
    """What MuJoCo complains about: warnings and numbers that are not finite; None if all is well."""
    numbers = data.warning.number.copy()
    numbers[mujoco.mjtWarning.mjWARN_VGEOMFULL] = 0  # too many geoms to draw, raised by renderers only
    if numbers.any():
        warnings = [mujoco.mjtWarning(i).name.removeprefix("mjWARN_") for i in np.flatnonzero(numbers)]
        return f"the physics became invalid (MuJoCo warnings: {', '.join(warnings)})"
    if not (np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()):
        return "the physics became invalid (positions or velocities are not finite)"
    return None


def integration_state(data: mujoco.MjData) -> Float64[np.ndarray, " entries"]:
    """MuJoCo's `mjSTATE_INTEGRATION` vector."""
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind))
    mujoco.mj_getState(data.model, data, state, kind)
    return state
