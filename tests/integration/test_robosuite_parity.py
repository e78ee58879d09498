"""Our one-pass physics loop against robosuite 1.4.0's own, on its Lift task: same model, same start, same actions."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sim.robosuite_reference import LiftReference


@pytest.fixture
def lift() -> LiftReference:
    return LiftReference(seed=2)


def random_actions(num_control_steps: int) -> np.ndarray:
    """Random in all directions, but down on average: the gripper meets the cube and the table."""
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (num_control_steps, 7))
    actions[:, 2] -= 0.5
    actions[::10, 3:6] = 0.0  # keeps the previous orientation goal
    return actions


def gripper_touches(lift: LiftReference) -> bool:
    """Whether anything but the table touches the cube, or anything but the cube the table."""
    things = {lift.model.mj_model.geom(name).id for name in ("table_collision", "cube_g0")}
    return any(len(things & set(pair)) == 1 for pair in lift.data.contact.geom.tolist())


def test_same_trajectory_as_robosuite(lift: LiftReference) -> None:
    # robosuite's extra forward passes warm-start the solver differently; contacts amplify the last digits without end.
    lift.model.mj_model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_WARMSTART
    num_touching, errors = 0, []
    for action in random_actions(100):
        lift.step_reference(action)
        assert lift.step(action)
        errors.append(np.abs(lift.reference_data.qpos - lift.data.qpos).max())
        num_touching += gripper_touches(lift)
    assert lift.model.num_substeps == 25
    assert num_touching > 20, "the actions must bring the gripper into contact"
    assert max(errors[:50]) < 1e-10  # free motion, cube at rest on the table
    assert max(errors) < 1e-6  # metres and radians; the gripper has pushed the cube


def test_single_control_steps_agree_to_rounding(lift: LiftReference) -> None:
    for action in random_actions(40):
        lift.copy_state()
        lift.step_reference(action)
        assert lift.step(action)
        np.testing.assert_allclose(lift.data.qpos, lift.reference_data.qpos, rtol=0, atol=1e-8)
        np.testing.assert_allclose(lift.data.ctrl, lift.reference_data.ctrl, rtol=0, atol=1e-4)
        goal = lift.env.robots[0].controller.goal_ori.ravel()
        np.testing.assert_allclose(lift.memory[:9], goal, rtol=0, atol=1e-8)


def test_lagged_observations_show_liberos_instant(lift: LiftReference) -> None:
    """The sampled instant is the one of robosuite's observables; the end of the control step is not."""
    lift.env._get_observations(force_update=True)  # as LIBERO's set_init_state does; moves the sampling clock by one
    shown = mujoco.MjData(lift.model.mj_model)
    for action in random_actions(10):
        observables = lift.step_reference(action)
        assert lift.step(action)
        shown.qpos[:] = lift.sample[0]
        mujoco.mj_kinematics(lift.model.mj_model, shown)
        position = shown.site_xpos[lift.model.grip_site]
        quaternion_xyzw = np.roll(shown.xquat[lift.model.hand_body], -1)
        fingers = lift.sample[1][lift.model.gripper_qpos]
        np.testing.assert_allclose(position, observables["robot0_eef_pos"], rtol=0, atol=1e-7)
        np.testing.assert_allclose(quaternion_xyzw, observables["robot0_eef_quat"], rtol=0, atol=1e-7)
        np.testing.assert_allclose(fingers, observables["robot0_gripper_qpos"], rtol=0, atol=1e-7)
        assert np.abs(lift.data.site_xpos[lift.model.grip_site] - observables["robot0_eef_pos"]).max() > 1e-6
