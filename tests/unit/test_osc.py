"""The controller against its textbook formula, hand-worked numbers and a step-by-step drive of the physics."""

from __future__ import annotations

from typing import NamedTuple

import mujoco
import numpy as np
import pytest
from toy_suite import POSTURE, toy_model, toy_xml

from sim import model as sim_model
from sim import osc
from sim.model import OscConfig, RobotNames, SimModel, substeps_per_control_step
from sim.model_view import ModelView
from sim.small_matrices import solve

HOLD = np.zeros(7)


class Rig(NamedTuple):
    """A model with data in the toy's posture and everything that the kernel takes."""

    model: SimModel
    data: mujoco.MjData
    kernel_model: osc.KernelModel
    kernel_data: osc.KernelData
    memory: np.ndarray

    def run(self, *action: float, num_control_steps: int = 1) -> None:
        sample = np.zeros((2, self.model.mj_model.nq))
        for _ in range(num_control_steps):
            assert osc.run_control_step(
                self.kernel_model,
                self.kernel_data,
                self.kernel_data,
                self.memory,
                np.array(action, dtype=float),
                False,
                sample,
            )

    @property
    def position(self) -> np.ndarray:
        return self.data.site_xpos[self.model.grip_site].copy()

    @property
    def rotation(self) -> np.ndarray:
        return self.data.site_xmat[self.model.grip_site].reshape(3, 3).copy()


@pytest.fixture
def rig() -> Rig:
    return make_rig()


def make_rig(timestep: float = 0.005) -> Rig:
    model = toy_model(timestep)
    data = mujoco.MjData(model.mj_model)
    data.qpos[model.arm_qpos] = POSTURE
    mujoco.mj_step1(model.mj_model, data)
    kernel_model = osc.kernel_model(model, ModelView(model.mj_model, model.fixtures))
    return Rig(model, data, kernel_model, osc.kernel_data(model, data), osc.reset_memory(model, data))


def reference_torque(rig: Rig, goal_position: np.ndarray, goal_rotation: np.ndarray) -> np.ndarray:
    """Khatib's formula written out with explicit inverses, in the order of the textbook."""
    model, data = rig.model.mj_model, rig.data
    jacobian = np.zeros((6, model.nv))
    mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], rig.model.grip_site)
    full = np.zeros((model.nv, model.nv))
    mujoco.mj_fullM(model, full, data.qM)
    dofs = rig.model.arm_dofs
    velocity = jacobian @ data.qvel
    jacobian, inertia = jacobian[:, dofs], full[np.ix_(dofs, dofs)]
    inverse = np.linalg.inv(inertia)
    current = rig.rotation
    rotation_error = 0.5 * sum(np.cross(current[:, i], goal_rotation[:, i]) for i in range(3))
    kp, kd = 150.0, 2.0 * np.sqrt(150.0)
    force = kp * (goal_position - rig.position) - kd * velocity[:3]
    moment = kp * rotation_error - kd * velocity[3:]
    position_inertia = np.linalg.inv(jacobian[:3] @ inverse @ jacobian[:3].T)
    rotation_inertia = np.linalg.inv(jacobian[3:] @ inverse @ jacobian[3:].T)
    wrench = np.concatenate([position_inertia @ force, rotation_inertia @ moment])
    task_inertia = np.linalg.inv(jacobian @ inverse @ jacobian.T)
    nullspace = np.eye(len(dofs)) - inverse @ jacobian.T @ task_inertia @ jacobian
    posture_error = np.array(POSTURE) - data.qpos[rig.model.arm_qpos]
    posture_torque = inertia @ (10.0 * posture_error - 2.0 * np.sqrt(10.0) * data.qvel[dofs])
    torque = jacobian.T @ wrench + data.qfrc_bias[dofs] + nullspace.T @ posture_torque
    return np.clip(torque, -80.0, 80.0)


def test_torques_follow_khatibs_formula(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    rig.data.qpos[rig.model.arm_qpos] += rng.uniform(-0.2, 0.2, 7)
    rig.data.qvel[rig.model.arm_dofs] = rng.uniform(-0.3, 0.3, 7)
    mujoco.mj_step1(rig.model.mj_model, rig.data)
    goal_position = rig.position + np.array([0.01, -0.02, 0.015])
    goal_rotation = osc._rotation_matrix(np.array([0.0, 0.1, 0.0]), 0.1) @ rig.rotation
    rig.memory[:9] = goal_rotation.ravel()
    osc._set_arm_torques(rig.kernel_model, rig.kernel_data, rig.kernel_data, rig.memory, goal_position)
    torque = rig.data.ctrl[rig.model.arm_actuators]
    np.testing.assert_allclose(torque, reference_torque(rig, goal_position, goal_rotation), rtol=1e-9, atol=1e-9)
    assert np.abs(torque).max() < 80.0


def test_torques_stay_within_the_motors_limits(rig: Rig) -> None:
    goal_position = rig.position + np.array([5.0, 0.0, 5.0])
    osc._set_arm_torques(rig.kernel_model, rig.kernel_data, rig.kernel_data, rig.memory, goal_position)
    torque = rig.data.ctrl[rig.model.arm_actuators]
    assert np.abs(torque).max() == 80.0
    np.testing.assert_allclose(torque, reference_torque(rig, goal_position, rig.rotation), rtol=1e-9, atol=1e-9)


def test_holding_still_compensates_gravity(rig: Rig) -> None:
    position, rotation = rig.position, rig.rotation
    rig.run(*HOLD, num_control_steps=20)
    np.testing.assert_allclose(rig.position, position, atol=1e-6)
    np.testing.assert_allclose(rig.rotation, rotation, atol=1e-6)


def test_the_goal_starts_from_the_achieved_pose_and_is_scaled(rig: Rig) -> None:
    goal = np.zeros(3)
    osc._set_goal(rig.kernel_model, rig.kernel_data, rig.memory, np.array([1.0, -0.5, 9.0, 0, 0, 0, 0]), goal)
    np.testing.assert_allclose(goal - rig.position, [0.05, -0.025, 0.05], atol=1e-12)


def test_only_a_rotation_command_moves_the_orientation_goal(rig: Rig) -> None:
    before = rig.memory.copy()
    rig.run(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, num_control_steps=3)
    np.testing.assert_array_equal(rig.memory[:9], before[:9])
    rotation = rig.rotation
    rig.run(0.0, 0.0, 0.0, 0.0, 0.0, 0.4, 0.0)
    # 0.4 of 0.5 rad about the world's z axis, on top of the orientation that was reached (not of the previous goal)
    cos, sin = np.cos(0.2), np.sin(0.2)
    turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    np.testing.assert_allclose(rig.memory[:9].reshape(3, 3), turn @ rotation, atol=1e-6)


def test_rotation_matrix_of_a_quarter_turn() -> None:
    matrix = osc._rotation_matrix(np.array([np.pi / 2, 0.0, 0.0]), np.pi / 2)
    np.testing.assert_allclose(matrix, [[1, 0, 0], [0, 0, -1], [0, 1, 0]], atol=1e-6)


@pytest.mark.parametrize("axis", range(3))
def test_the_site_moves_along_the_commanded_axis(rig: Rig, axis: int) -> None:
    action = np.zeros(7)
    action[axis] = 0.5
    before = rig.position
    rig.run(*action, num_control_steps=8)
    moved = rig.position - before
    assert moved[axis] > 0.03
    assert np.abs(np.delete(moved, axis)).max() < 0.5 * moved[axis]


@pytest.mark.parametrize("timestep", [0.002, 0.005])
def test_gripper_moves_a_quarter_of_its_half_range_per_control_step(timestep: float) -> None:
    rig = make_rig(timestep)
    # 0.01 per 2 ms is 0.25 per 50 ms, from the middle (0.02 m) and for any positive command
    rig.run(0, 0, 0, 0, 0, 0, 0.3)
    np.testing.assert_allclose(rig.memory[9:], [-0.25, 0.25], atol=1e-12)
    np.testing.assert_allclose(rig.data.ctrl[rig.model.gripper_actuators], [0.015, -0.015], atol=1e-12)
    rig.run(0, 0, 0, 0, 0, 0, 0.0)  # no command: stay
    np.testing.assert_allclose(rig.memory[9:], [-0.25, 0.25], atol=1e-12)
    rig.run(0, 0, 0, 0, 0, 0, -1.0, num_control_steps=7)  # opens past its limit
    np.testing.assert_array_equal(rig.memory[9:], [1.0, -1.0])
    np.testing.assert_allclose(rig.data.ctrl[rig.model.gripper_actuators], [0.04, -0.04], atol=1e-12)


@pytest.mark.parametrize("is_robosuite_timing", [False, True])
def test_a_control_step_is_controller_and_physics_in_turn(rig: Rig, is_robosuite_timing: bool) -> None:
    """Drives MuJoCo through its Python functions; also checks the sampled instants and that the data is up to date."""
    other = make_rig()
    model, data = other.model.mj_model, other.data
    action = np.array([0.3, -0.6, -1.0, 0.0, 0.2, -0.1, 1.0])
    goal, positions = np.zeros(3), []
    for substep in range(10):
        positions.append(data.qpos.copy())
        mujoco.mj_step1(model, data)
        if substep == 0:
            osc._set_goal(other.kernel_model, other.kernel_data, other.memory, action, goal)
        osc._set_arm_torques(other.kernel_model, other.kernel_data, other.kernel_data, other.memory, goal)
        osc._move_gripper(other.kernel_model, other.kernel_data, other.memory, action[6])
        mujoco.mj_step2(model, data)
    sample = np.zeros((2, model.nq))
    is_valid = osc.run_control_step(
        rig.kernel_model, rig.kernel_data, rig.kernel_data, rig.memory, action, is_robosuite_timing, sample
    )
    assert is_valid
    np.testing.assert_array_equal(rig.data.qpos, data.qpos)
    np.testing.assert_array_equal(rig.data.qvel, data.qvel)
    np.testing.assert_array_equal(rig.memory, other.memory)
    assert rig.data.time == pytest.approx(0.05)
    if is_robosuite_timing:
        np.testing.assert_array_equal(sample, [positions[8], positions[9]])
    else:
        mujoco.mj_kinematics(model, data)
    np.testing.assert_array_equal(rig.data.xpos, data.xpos)  # robosuite leaves the poses one physics step behind


def test_invalid_physics_is_reported(rig: Rig) -> None:
    rig.data.qvel[rig.model.arm_dofs[0]] = 1e12
    sample = np.zeros((2, rig.model.mj_model.nq))
    assert not osc.run_control_step(rig.kernel_model, rig.kernel_data, rig.kernel_data, rig.memory, HOLD, False, sample)


def test_the_first_physics_step_is_controlled_from_what_was_measured_before(rig: Rig) -> None:
    elsewhere = make_rig()
    elsewhere.data.qpos[elsewhere.model.arm_qpos] += 0.1
    mujoco.mj_step1(elsewhere.model.mj_model, elsewhere.data)
    action = np.array([0.3, -0.6, -1.0, 0.0, 0.2, -0.1, 1.0])
    goal, memory = np.zeros(3), rig.memory.copy()
    osc._set_goal(rig.kernel_model, rig.kernel_data, memory, action, goal)
    osc._set_arm_torques(rig.kernel_model, rig.kernel_data, elsewhere.kernel_data, memory, goal)
    seen, bias = elsewhere.data.ctrl[:7].copy(), elsewhere.data.qfrc_bias[elsewhere.model.arm_dofs]
    osc._set_arm_torques(rig.kernel_model, rig.kernel_data, rig.kernel_data, memory, goal)
    own_bias = rig.data.qfrc_bias[rig.model.arm_dofs]
    np.testing.assert_allclose(seen - bias, rig.data.ctrl[:7] - own_bias, atol=1e-9)
    assert np.abs(bias - own_bias).max() > 0.1
    one_substep = elsewhere.kernel_model._replace(num_substeps=1)
    sample = np.zeros((2, rig.model.mj_model.nq))
    osc.run_control_step(one_substep, elsewhere.kernel_data, rig.kernel_data, rig.memory, action, True, sample)
    np.testing.assert_array_equal(elsewhere.data.ctrl[:7], seen)


def test_solve_agrees_with_numpy() -> None:
    rng = np.random.default_rng(1)
    root, right = rng.normal(size=(7, 7)), rng.normal(size=(7, 6))
    matrix = root @ root.T + np.eye(7)
    np.testing.assert_allclose(solve(matrix, right), np.linalg.solve(matrix, right), rtol=1e-10)


def test_solve_gives_no_force_where_there_is_no_mobility() -> None:
    matrix = np.array([[2.0, 0.0], [0.0, 0.0]])
    np.testing.assert_allclose(solve(matrix, np.array([[4.0], [3.0]])), [[2.0], [0.0]], atol=1e-12)


@pytest.mark.parametrize(("timestep", "expected"), [(0.002, 25), (0.005, 10), (0.05, 1)])
def test_substeps_per_control_step(timestep: float, expected: int) -> None:
    assert substeps_per_control_step(timestep, 20.0) == expected
    assert SimModel.build(mujoco.MjModel.from_xml_string(toy_xml(timestep))).num_substeps == expected


def test_timestep_must_divide_the_control_period() -> None:
    with pytest.raises(ValueError, match="50 ms is not a multiple of the physics timestep of 3 ms"):
        substeps_per_control_step(0.003, 20.0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (RobotNames(arm_joints=("elbow",) * 7), "no joint named elbow.*robot0_joint1"),
        (RobotNames(gripper_actuators=("squeeze", "squeeze")), "no actuator named squeeze.*robot0_torq_j1"),
        (RobotNames(grip_site="tip"), "no site named tip.*gripper0_grip_site"),
        (RobotNames(hand_body="paw"), "no body named paw.*robot0_right_hand"),
        (RobotNames(arm_actuators=("robot0_torq_j1",)), "1 arm actuators given, 7 expected"),
    ],
)
def test_names_must_fit_the_model(names: RobotNames, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimModel.build(mujoco.MjModel.from_xml_string(toy_xml()), names=names)


@pytest.mark.parametrize(
    ("osc_config", "message"),
    [
        (OscConfig(nullspace_posture=(0.0,)), "1 entries of nullspace_posture given, 7 expected"),
        (OscConfig(gripper_signs=(1.0,)), "1 entries of gripper_signs given, 2 expected"),
    ],
)
def test_constants_must_fit_the_model(osc_config: OscConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimModel.build(mujoco.MjModel.from_xml_string(toy_xml()), osc=osc_config)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<option ", '<option integrator="RK4" ', "RK4"),
        ('ctrlrange="-80 80" ctrllimited="true"', "", "without a ctrlrange: robot0_torq_j1"),
    ],
)
def test_unsuitable_models_are_refused(old: str, new: str, message: str) -> None:
    assert old in toy_xml()
    with pytest.raises(ValueError, match=message):
        SimModel.build(mujoco.MjModel.from_xml_string(toy_xml().replace(old, new)))


def test_another_mujoco_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_model.mujoco, "__version__", "3.4.0")
    with pytest.raises(ImportError, match=r"mujoco 3\.4\.0 is installed.*exactly 3\.3\.2"):
        sim_model.check_mujoco_version.__wrapped__()
