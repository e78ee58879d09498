"""robosuite's Lift task beside our kernel on the very same model: the peer of the parity test and of the benchmark."""

from __future__ import annotations

import warnings
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float64

from sim import osc
from sim.model import OscConfig, SimModel
from sim.model_view import ModelView
from sim.rendering import ensure_gl_backend


class LiftReference:
    """One robosuite Lift environment (Panda, OSC_POSE, 20 Hz, no images) and one world state of ours.

    Args:
        seed: Where the cube lies.
    """

    def __init__(self, seed: int) -> None:
        self.env = _make_lift(seed)
        controller = self.env.robots[0].controller
        # robosuite's first torque would use the inertia from before the gripper was placed.
        controller.new_update = True
        mj_model = self.env.sim.model._model
        self.model = SimModel.build(mj_model, osc=OscConfig(nullspace_posture=tuple(controller.initial_joint)))
        self.data = mujoco.MjData(mj_model)
        self.sample: Float64[np.ndarray, "2 nq"] = np.zeros((2, mj_model.nq))
        self._view = ModelView(mj_model, self.model.fixtures)
        self._kernel_model = osc.kernel_model(self.model, self._view)
        self._kernel_data = osc.kernel_data(self.model, self.data)
        self.copy_state()
        self.memory = osc.reset_memory(self.model, self.data)

    @property
    def reference_data(self) -> mujoco.MjData:
        """Data of the robosuite environment."""
        return self.env.sim.data._data

    def copy_state(self) -> None:
        """Put our data into robosuite's state; the controllers' memories stay as they are."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model.mj_model, kind))
        mujoco.mj_getState(self.model.mj_model, self.reference_data, state, kind)
        mujoco.mj_setState(self.model.mj_model, self.data, state, kind)
        mujoco.mj_step1(self.model.mj_model, self.data)

    def step_reference(self, action: Float64[np.ndarray, " 7"]) -> dict[str, Any]:
        """One control step in robosuite; returns its observables."""
        observables: dict[str, Any] = self.env.step(action)[0]
        return observables

    def step(self, action: Float64[np.ndarray, " 7"]) -> bool:
        """One control step in our kernel, sampled after the last but one physics step; whether the state is valid."""
        is_valid: bool = osc.run_control_step(
            self._kernel_model, self._kernel_data, self._kernel_data, self.memory, action, True, self.sample
        )
        return is_valid


def _make_lift(seed: int) -> Any:
    ensure_gl_backend()  # before the import: robosuite would choose for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in robosuite's own code
        import robosuite

        env = robosuite.make(
            "Lift",
            robots="Panda",
            controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
            has_renderer=False,
            has_offscreen_renderer=False,
            use_camera_obs=False,
            control_freq=20,
            ignore_done=True,
            initialization_noise=None,
        )
        np.random.seed(seed)  # robosuite draws from the global generator
        env.reset()
    return env
