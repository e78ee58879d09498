"""robosuite tasks in our kernel: robosuite makes the model, the starts and the verdict; we run the physics."""

from __future__ import annotations

import threading
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.adapters.robosuite_envs import SeededEnv, model_arrays
from sim.model import ROBOSUITE_SOLVER_TOLERANCE, OscConfig, SimModel
from sim.world import TaskScene
from vla_rl.types import Start

_PROBE_SEEDS = (0, 1, 2, 3)


class RobosuiteScene(TaskScene):
    """One robosuite task.

    A start's `init` is `qpos` after robosuite's own reset, then the poses of the fixed bodies that the reset moves.
    All worlds share one robosuite environment; its success predicate is asked under a lock, with its data exchanged.

    Args:
        seeded: The environment, made with `hard_reset=False`, so that its model stays the same.
        control_rate_hz: Control steps per second.

    Raises:
        ValueError: The task cannot run in the kernel; see `kernel_obstacle`.
    """

    def __init__(self, seeded: SeededEnv, control_rate_hz: float) -> None:
        self._seeded = seeded
        self._lock = threading.Lock()
        moved = _changes(seeded)["bodies"]
        self.model = SimModel.build(
            seeded.mj_model,
            control_rate_hz=control_rate_hz,
            osc=OscConfig(nullspace_posture=tuple(seeded.env.robots[0].controller.initial_joint)),
            fixtures=[seeded.mj_model.body(i).name for i in moved],
            solver_tolerance=ROBOSUITE_SOLVER_TOLERANCE,
        )

    def initial_state(self, seed: int) -> Float64[np.ndarray, " init"]:
        """What robosuite's reset draws with this seed."""
        with self._lock:
            self._seeded.reset(seed)
            sim, fixtures = self._seeded.env.sim, self.model.fixtures
            poses = np.concatenate([sim.model.body_pos[fixtures], sim.model.body_quat[fixtures]], axis=1)
            return np.concatenate([sim.data.qpos, poses.ravel()])

    def place(self, data: mujoco.MjData, start: Start) -> None:
        """Write qpos.

        Raises:
            ValueError: The start does not belong to this task.
        """
        expected = self.model.mj_model.nq + 7 * len(self.model.fixtures)
        if start.init.shape != (expected,):
            raise ValueError(f"{start.key}: init has shape {start.init.shape}, this task needs ({expected},)")
        data.qpos[:] = start.init[: self.model.mj_model.nq]

    def fixture_poses(self, start: Start) -> Float64[np.ndarray, "fixtures 7"]:
        """Poses of the bodies that robosuite's reset moves."""
        return start.init[self.model.mj_model.nq :].reshape(-1, 7)

    def is_success(self, data: mujoco.MjData) -> bool:
        """The environment's own predicate on this state."""
        with self._lock:
            wrapper = self._seeded.env.sim.data  # everything in the environment reads through it
            own, wrapper._data = wrapper._data, data
            try:
                return bool(self._seeded.env._check_success())
            finally:
                wrapper._data = own


def kernel_obstacle(seeded: SeededEnv) -> str | None:
    """Why an environment with one Panda under OSC_POSE cannot run in the kernel; None if it can.

    Args:
        seeded: The environment, made with `hard_reset=False`.
    """
    env = seeded.env
    for method in ("step", "_pre_action", "_post_action"):
        owner = next(cls for cls in type(env).__mro__ if method in vars(cls))
        if owner.__module__ not in ("robosuite.environments.base", "robosuite.environments.robot_env"):
            return f"{owner.__name__} has a {method} of its own"
    gripper = type(env.robots[0].gripper).__name__
    if gripper != "PandaGripper":
        return f"the hand is a {gripper}"
    if changed := _changes(seeded)["arrays"]:
        return f"its resets change {', '.join(changed)} in the model"
    return None


def _changes(seeded: SeededEnv) -> dict[str, list[Any]]:
    """What differs in the model from reset to reset: ids of the "bodies" that stand elsewhere, and other "arrays"."""
    snapshots = []
    for seed in _PROBE_SEEDS:
        seeded.reset(seed)
        snapshots.append(model_arrays(seeded.mj_model))
    first, others = snapshots[0], snapshots[1:]
    changed = [name for name in first if any(not np.array_equal(first[name], other[name]) for other in others)]
    bodies = {
        int(body)
        for name in ("body_pos", "body_quat")
        for other in others
        for body in np.flatnonzero((first[name] != other[name]).any(axis=1))
    }
    return {"bodies": sorted(bodies), "arrays": [name for name in changed if name not in ("body_pos", "body_quat")]}
