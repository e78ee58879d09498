"""The generic world: a Panda-like arm under operational-space control in any MuJoCo scene.

What a task adds (model, start, success) comes in as a `TaskScene`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from sim import osc, rendering
from sim.model import SimModel
from sim.model_view import ModelView
from sim.world import TaskScene
from vla_rl.types import ActionMeaning, EnvSpec, Observation, SimError, Start, StepResult, Unit, WorldState

FRAME_SIZE_PX = 256
"""Height and width of recorded frames; they are for people, who need more pixels than a small policy."""


PROPRIO_NAMES = (
    *(f"eef_pos_{axis}" for axis in "xyz"),
    *(f"eef_axis_angle_{axis}" for axis in "xyz"),
    "finger_1",
    "finger_2",
)
PROPRIO_UNITS: tuple[Unit, ...] = ("m", "m", "m", "rad", "rad", "rad", "m", "m")
ACTION_NAMES = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")
"""LIBERO's actions: displacement, rotation vector (world axes), gripper; each in [-1, 1]."""
ACTION_MEANING = ActionMeaning(robot="Panda", scale=(0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0))
"""robosuite's OSC_POSE: the Panda stands upright in its worlds, so that world and base axes are the same."""


@dataclass(kw_only=True, eq=False)
class _Stage:
    """One task, ready to run: its scene, its data and the kernel's view of them."""

    scene: TaskScene
    view: ModelView
    data: mujoco.MjData
    kernel_model: osc.KernelModel
    kernel_data: osc.KernelData
    reset_data: osc.KernelData


class MujocoWorld:
    """One episode at a time of any of a suite's tasks; implements `sim.world.World`.

    Every task's data is made at its first start and then reused, so a reset is a copy of the state.

    An observation shows the state at the end of the control step, with all poses up to date, and so does success. With
    `robosuite_timing` everything happens when robosuite 1.4 and LIBERO do it:

    - observations are sampled after the last but one physics step without a forward pass: poses from the beginning of
      that physics step, finger positions from its end, lamps as they were when the control step began;
    - success refers to the positions at the end, but to the poses and contacts from before the last physics step;
    - at a start the controller remembers the reset pose (`SimModel.reset_data`): it holds that orientation until a
      rotation is commanded, and the first physics step is controlled as if the arm were still there.

    Args:
        scene_of: Scene of a task by its full name; called once per task and world.
        spec: Interface of the suite.
        horizon: Time limit in control steps, of all tasks or by a task's full name.
        robosuite_timing: Act as robosuite and LIBERO do.
    """

    def __init__(
        self,
        scene_of: Callable[[str], TaskScene],
        spec: EnvSpec,
        horizon: int | Callable[[str], int],
        robosuite_timing: bool = False,
    ) -> None:
        self._scene_of = scene_of
        self._spec = spec
        self._horizon_of: Callable[[str], int] = horizon if callable(horizon) else lambda _: horizon
        self._is_robosuite_timing = robosuite_timing
        self._stages: dict[str, _Stage] = {}
        self._stage: _Stage | None = None
        self._start: Start | None = None
        self._memory: Float64[np.ndarray, " memory"] = np.zeros(0)
        self._sample: Float64[np.ndarray, "2 nq"] = np.zeros((2, 0))
        self._is_measured = True  # the controller has seen the present state
        self._site_groups: frozenset[int] = frozenset()  # drawn besides those of the model's options
        self._horizon = 0
        self._num_steps = 0
        self._is_done = False

    @property
    def data(self) -> mujoco.MjData:
        """The running task's MuJoCo data: privileged state for experts and tests, not for policies."""
        return self._stage_now().data

    @property
    def start(self) -> Start:
        """The start of the running episode."""
        if self._start is None:
            raise ValueError("the world has no episode yet; call reset(start) first")
        return self._start

    @property
    def num_steps(self) -> int:
        """Control steps since the start."""
        return self._num_steps

    def reset(self, start: Start) -> None:
        """Begin an episode. Nothing is rendered.

        Raises:
            ValueError: The scene does not know the task, or the start's positions do not fit it.
            SimError: The start is not a valid state.
        """
        stage = self._stage = self._stage_of(start.task)
        self._start = start
        self._horizon = self._horizon_of(start.task)
        if self._horizon < 1:
            raise ValueError(f"the horizon of {start.task} is {self._horizon}; at least one control step is needed")
        if start.snapshot is not None:
            self.restore_state(start.snapshot)
            return
        model, data = stage.scene.model, stage.data
        mujoco.mj_resetData(model.mj_model, data)
        stage.view.place(stage.scene.fixture_poses(start))
        stage.scene.place(data, start)
        stage.view.step1(data)
        self._memory = osc.reset_memory(model, model.reset_data if self._is_robosuite_timing else data)
        self._is_measured = not self._is_robosuite_timing
        self._sample = np.stack([data.qpos, data.qpos])
        self._site_groups = stage.scene.site_groups(data)
        self._num_steps = 0
        self._is_done = False
        if not (np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all() and data.warning.number.sum() == 0):
            raise self._sim_error("the start is not a valid state")

    def step(self, chunk: Float64[np.ndarray, "steps action_dim"], record_frames: bool = False) -> StepResult:
        """Run a chunk of actions; stops inside it at success or at the time limit.

        Raises:
            SimError: The physics became invalid (NaN, divergence).
            ValueError: The chunk has the wrong shape or is not finite, or the episode is over.
        """
        stage = self._running_stage()
        num_steps_before = self._num_steps
        actions = self._checked(chunk)
        frames: list[UInt8[np.ndarray, "height width 3"]] = []
        is_success = False
        for action in actions:
            self._run_control_step(stage, action)
            if record_frames:
                frames.append(self.render(self._spec.cameras[0], FRAME_SIZE_PX, FRAME_SIZE_PX))
            is_success = stage.scene.is_success(stage.data)
            self._is_done = is_success or self._num_steps >= self._horizon
            if self._is_done:
                break
        return StepResult(
            num_steps=self._num_steps - num_steps_before,
            success=is_success,
            truncated=self._is_done and not is_success,
            frames=tuple(frames),
        )

    def _run_control_step(self, stage: _Stage, action: Float64[np.ndarray, " action_dim"]) -> None:
        if self._is_robosuite_timing:
            self._site_groups = stage.scene.site_groups(stage.data)
        is_valid = osc.run_control_step(
            stage.kernel_model,
            stage.kernel_data,
            stage.kernel_data if self._is_measured else stage.reset_data,
            self._memory,
            action,
            self._is_robosuite_timing,
            self._sample,
        )
        self._is_measured = True
        self._num_steps += 1
        if not is_valid:
            self._is_done = True
            raise self._sim_error("the physics became invalid")
        if not self._is_robosuite_timing:
            self._site_groups = stage.scene.site_groups(stage.data)

    def settle(self, action: Float64[np.ndarray, " action_dim"], num_control_steps: int) -> None:
        """Let things come to rest before the episode begins: control steps that count neither as time nor as success.

        Raises:
            SimError: The physics became invalid.
            ValueError: The action has the wrong shape or is not finite, or the episode has begun.
        """
        if self._num_steps:
            raise ValueError(f"the episode of {self.start.key} has begun; settle directly after reset")
        for settling in self._checked(np.tile(action, (num_control_steps, 1))):
            self._run_control_step(self._stage_now(), settling)
        self._num_steps = 0

    def observe(self) -> Observation:
        """Render the cameras of the spec and read the proprioceptive state."""
        stage = self._stage_now()
        height, width = self._spec.image_size
        images = np.empty((len(self._spec.cameras), height, width, 3), dtype=np.uint8)
        data = self._observed_data(stage)
        for camera, image in zip(self._spec.cameras, images, strict=True):
            self._draw(stage, data, camera, image)
        return Observation(images=images, proprio=self._proprio(stage, data), instruction=self.start.instruction)

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """The proprioceptive state of `observe`, without its images."""
        stage = self._stage_now()
        return self._proprio(stage, self._observed_data(stage))

    def render(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """Any camera at any size, in the spec's orientation (videos, debugging)."""
        stage = self._stage_now()
        image = np.empty((height, width, 3), dtype=np.uint8)
        self._draw(stage, self._observed_data(stage), camera, image)
        return image

    def save_state(self) -> WorldState:
        """A copy of the whole state; `restore_state` continues from it bit for bit."""
        stage = self._stage_now()
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(stage.scene.model.mj_model, kind))
        mujoco.mj_getState(stage.scene.model.mj_model, stage.data, physics, kind)
        flags = [float(self._is_measured), *(float(group in self._site_groups) for group in range(mujoco.mjNGROUP))]
        return WorldState(
            physics=physics,
            controller=np.concatenate([self._memory, self._sample.ravel(), flags]),
            fixtures=stage.view.poses.copy(),
            num_steps=self._num_steps,
        )

    def restore_state(self, state: WorldState) -> None:
        """Return to a saved state of the same task.

        Raises:
            ValueError: The state belongs to another model.
        """
        stage = self._stage_now()
        mj_model, kind = stage.scene.model.mj_model, mujoco.mjtState.mjSTATE_INTEGRATION
        num_memory, num_sample = osc.memory_size(stage.scene.model), 2 * mj_model.nq
        expected = (mujoco.mj_stateSize(mj_model, kind), num_memory + num_sample + 1 + mujoco.mjNGROUP)
        given = (len(state.physics), len(state.controller))
        if given != expected:
            raise ValueError(
                f"the saved state has {given} physics and controller entries, but {self.start.task} has {expected}; "
                "restore it with the task that it was saved from"
            )
        stage.view.place(state.fixtures)
        mujoco.mj_resetData(mj_model, stage.data)
        mujoco.mj_setState(mj_model, stage.data, state.physics, kind)
        stage.view.step1(stage.data)
        memory, sample, flags = np.split(state.controller, [num_memory, num_memory + num_sample])
        self._memory, self._sample = memory.copy(), sample.reshape(2, mj_model.nq).copy()
        self._is_measured, self._site_groups = bool(flags[0]), frozenset(np.flatnonzero(flags[1:]).tolist())
        self._num_steps = state.num_steps
        self._is_done = state.num_steps >= self._horizon

    def _stage_of(self, task: str) -> _Stage:
        stage = self._stages.get(task)
        if stage is None:
            scene = self._scene_of(task)
            model = scene.model
            if abs(model.control_rate_hz - self._spec.control_rate_hz) > 1e-6:
                raise ValueError(
                    f"the model of {task} is built for {model.control_rate_hz:g} control steps per second, but the "
                    f"suite's spec says {self._spec.control_rate_hz:g}"
                )
            data, view = mujoco.MjData(model.mj_model), ModelView(model.mj_model, model.fixtures)
            kernel_data = osc.kernel_data(model, data)
            stage = self._stages[task] = _Stage(
                scene=scene,
                view=view,
                data=data,
                kernel_model=osc.kernel_model(model, view),
                kernel_data=kernel_data,
                reset_data=osc.kernel_data(model, model.reset_data) if self._is_robosuite_timing else kernel_data,
            )
        return stage

    def _stage_now(self) -> _Stage:
        if self._stage is None:
            raise ValueError("the world has no episode yet; call reset(start) first")
        return self._stage

    def _running_stage(self) -> _Stage:
        stage = self._stage_now()
        if self._is_done:
            raise ValueError(f"the episode of {self.start.key} is over after {self._num_steps} steps; call reset first")
        return stage

    def _checked(self, chunk: Float64[np.ndarray, "steps action_dim"]) -> Float64[np.ndarray, "steps action_dim"]:
        if chunk.ndim != 2 or chunk.shape[0] < 1 or chunk.shape[1] != self._spec.action_dim:
            raise ValueError(f"a chunk has shape (steps >= 1, {self._spec.action_dim}); got {chunk.shape}")
        if not np.isfinite(chunk).all():
            raise ValueError(f"the chunk for {self.start.key} at step {self._num_steps} is not finite:\n{chunk}")
        return np.ascontiguousarray(chunk, dtype=np.float64)

    def _observed_data(self, stage: _Stage) -> mujoco.MjData:
        """Data that show the observed instant; see the class docstring."""
        if not self._is_robosuite_timing:
            return stage.data
        observed = _scratch_data(stage.scene.model)
        observed.qpos[:] = self._sample[0]
        observed.mocap_pos[:] = stage.data.mocap_pos
        observed.mocap_quat[:] = stage.data.mocap_quat
        stage.view.forward_position(observed)
        return observed

    def _draw(
        self, stage: _Stage, data: mujoco.MjData, camera: str, image: UInt8[np.ndarray, "height width 3"]
    ) -> None:
        camera_id = stage.scene.model.camera_id(camera)
        rendering.render(stage.scene.model, data, camera_id, image, self._site_groups)
        if self._spec.image_orientation == "top_down":
            image[:] = image[::-1].copy()

    def _proprio(self, stage: _Stage, data: mujoco.MjData) -> Float32[np.ndarray, " proprio_dim"]:
        """LIBERO's layout: grip site's position (world, m), hand's rotation vector (rad), finger positions (m)."""
        model = stage.scene.model
        fingers = self._sample[1] if self._is_robosuite_timing else data.qpos
        return np.concatenate(
            [
                data.site_xpos[model.grip_site],
                rotation_vector(data.xquat[model.hand_body]),
                fingers[model.gripper_qpos],
            ]
        ).astype(np.float32)

    def _sim_error(self, cause: str) -> SimError:
        numbers = self._stage_now().data.warning.number
        warnings = [mujoco.mjtWarning(i).name.removeprefix("mjWARN_") for i in np.flatnonzero(numbers)]
        return SimError(
            f"{cause} in {self.start.key} at control step {self._num_steps} "
            f"(MuJoCo warnings: {', '.join(warnings) or 'none'})"
        )


class _ThreadScratch(threading.local):
    """Data of the current thread for poses that are looked at once, by model."""

    def __init__(self) -> None:
        self.by_model: WeakKeyDictionary[SimModel, mujoco.MjData] = WeakKeyDictionary()


_scratch = _ThreadScratch()


def _scratch_data(model: SimModel) -> mujoco.MjData:
    """Data of this thread and model; a world of its own would cost as much memory again."""
    data = _scratch.by_model.get(model)
    if data is None:
        data = _scratch.by_model[model] = mujoco.MjData(model.mj_model)
    return data


def rotation_vector(quaternion: Float64[np.ndarray, " 4"]) -> Float64[np.ndarray, " 3"]:
    """Rotation vector (rad) of a unit quaternion (w, x, y, z), as OpenVLA-OFT computes it from LIBERO's quaternion.

    The quaternion's sign is kept, so the angle lies in [0, 2 pi], not in [0, pi]: policies trained on LIBERO expect it.
    """
    w = min(max(float(quaternion[0]), -1.0), 1.0)
    sine = np.sqrt(1.0 - w * w)
    if sine == 0.0:
        return np.zeros(3)
    rotation: Float64[np.ndarray, " 3"] = quaternion[1:] * (2.0 * np.arccos(w) / sine)
    return rotation
