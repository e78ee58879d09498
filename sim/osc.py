"""Operational-space control and physics of a control step in one call that holds no Python lock.

The controller is robosuite 1.4.0's OSC_POSE with fixed gains, delta actions and decoupled position and orientation.
robosuite runs three forward passes per physics step; here the torque is computed between `mj_step1` and `mj_step2` from
what MuJoCo has just computed anyway, and the trajectory is the same up to rounding.

After a control step the data is brought up to date once more (`mj_step1`), so that positions, poses, velocities and
contacts belong to the same instant. That pass is the first one of the next control step, so it costs nothing.

robosuite leaves that pass out: whatever looks at the data after a control step finds new positions beside the poses and
contacts from before the last physics step. With `is_robosuite_timing` so does this loop, because LIBERO's success
predicates are defined on that state.

MuJoCo's functions are called by symbol in the library that the `mujoco` package has loaded, so the compiled kernel can
be cached on disk. A fatal MuJoCo error (`mju_error`, e.g. stack overflow) ends the process, as it does in C programs.

Reference: O. Khatib, "A Unified Approach for Motion and Force Control of Robot Manipulators: The Operational Space
Formulation", IEEE Journal of Robotics and Automation, 1987, eqs. (19), (48) and (61).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, no_type_check

import mujoco
import numpy as np
from jaxtyping import Float64, Int32, Int64
from numba import cfunc, njit, types

from sim.model import SimModel
from sim.model_view import LIBRARY, ModelView
from sim.small_matrices import product, solve

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

ARM_ACTION_DIM = 6
GOAL_ROTATION = 9
"""Entries of the memory that hold the orientation goal; the gripper command follows."""

_compiled = njit(nogil=True, cache=True)

_mj_step1 = types.ExternalFunction("mj_step1", types.void(types.intp, types.intp))
_mj_step2 = types.ExternalFunction("mj_step2", types.void(types.intp, types.intp))
_mj_jac_site = types.ExternalFunction(
    "mj_jacSite", types.void(types.intp, types.intp, types.intp, types.intp, types.int32)
)


@cfunc(types.void(types.intp))
@no_type_check
def _ignore_warning(_message: int) -> None:
    """MuJoCo's default handler prints and writes a log file; worlds report warnings as `SimError` instead."""


ctypes.c_void_p.in_dll(LIBRARY, "mju_user_warning").value = _ignore_warning.address


class KernelModel(NamedTuple):
    """What the kernel needs to know about a model; n arm joints, f fingers."""

    address: int
    num_substeps: int
    grip_site: int
    arm_qpos: Int64[np.ndarray, " n"]
    arm_dofs: Int64[np.ndarray, " n"]
    arm_actuators: Int64[np.ndarray, " n"]
    gripper_actuators: Int64[np.ndarray, " f"]
    dof_parent: Int32[np.ndarray, " nv"]
    dof_inertia: Int32[np.ndarray, " nv"]
    torque_min: Float64[np.ndarray, " n"]
    torque_max: Float64[np.ndarray, " n"]
    gripper_middle: Float64[np.ndarray, " f"]
    gripper_half_range: Float64[np.ndarray, " f"]
    gripper_step: Float64[np.ndarray, " f"]
    nullspace_posture: Float64[np.ndarray, " n"]
    kp: float
    kd: float
    position_max_m: float
    rotation_max_rad: float
    nullspace_kp: float
    nullspace_kd: float


class KernelData(NamedTuple):
    """Views of one `MjData` and the kernel's scratch space."""

    address: int
    qpos: Float64[np.ndarray, " nq"]
    qvel: Float64[np.ndarray, " nv"]
    ctrl: Float64[np.ndarray, " nu"]
    bias: Float64[np.ndarray, " nv"]
    inertia: Float64[np.ndarray, " nm"]
    site_position: Float64[np.ndarray, "nsite 3"]
    site_rotation: Float64[np.ndarray, "nsite 9"]
    warnings: Int32[np.ndarray, " kinds"]
    jacobian: Float64[np.ndarray, "6 nv"]


def kernel_model(model: SimModel, view: ModelView) -> KernelModel:
    """Collect a model's constants; stays valid as long as the view lives."""
    mj, osc = model.mj_model, model.osc
    torque_range = mj.actuator_ctrlrange[model.arm_actuators]
    gripper_range = mj.actuator_ctrlrange[model.gripper_actuators]
    return KernelModel(
        address=view.address,
        num_substeps=model.num_substeps,
        grip_site=model.grip_site,
        arm_qpos=model.arm_qpos,
        arm_dofs=model.arm_dofs,
        arm_actuators=model.arm_actuators,
        gripper_actuators=model.gripper_actuators,
        dof_parent=mj.dof_parentid.copy(),
        dof_inertia=mj.dof_Madr.copy(),
        torque_min=torque_range[:, 0].copy(),
        torque_max=torque_range[:, 1].copy(),
        gripper_middle=0.5 * (gripper_range[:, 1] + gripper_range[:, 0]),
        gripper_half_range=0.5 * (gripper_range[:, 1] - gripper_range[:, 0]),
        gripper_step=np.array(osc.gripper_signs) * (osc.gripper_rate * mj.opt.timestep),
        nullspace_posture=model.nullspace_posture,
        kp=osc.kp,
        kd=2.0 * np.sqrt(osc.kp) * osc.damping_ratio,
        position_max_m=osc.position_max_m,
        rotation_max_rad=osc.rotation_max_rad,
        nullspace_kp=osc.nullspace_kp,
        nullspace_kd=2.0 * np.sqrt(osc.nullspace_kp),
    )


def kernel_data(model: SimModel, data: mujoco.MjData) -> KernelData:
    """Collect views of `data`; they stay valid as long as it lives."""
    return KernelData(
        address=data._address,
        qpos=data.qpos,
        qvel=data.qvel,
        ctrl=data.ctrl,
        bias=data.qfrc_bias,
        inertia=data.qM,
        site_position=data.site_xpos,
        site_rotation=data.site_xmat,
        warnings=data.warning.number,
        jacobian=np.zeros((6, model.mj_model.nv)),
    )


def memory_size(model: SimModel) -> int:
    """Length of the controller's memory."""
    return GOAL_ROTATION + len(model.gripper_actuators)


def reset_memory(model: SimModel, data: mujoco.MjData) -> Float64[np.ndarray, " memory"]:
    """The controller's memory at the start of an episode: hold the present orientation, fingers commanded to mid-range.

    Args:
        model: The model.
        data: Up-to-date data (`mj_step1` or `mj_forward` has run).

    Returns:
        Goal rotation matrix (9, world frame, row by row), then one normalised command in [-1, 1] per finger.
    """
    return np.concatenate([data.site_xmat[model.grip_site], np.zeros(len(model.gripper_actuators))])


@_compiled
@no_type_check
def run_control_step(
    model: KernelModel,
    data: KernelData,
    measured: KernelData,
    memory: Float64[np.ndarray, " memory"],
    action: Float64[np.ndarray, " 7"],
    is_robosuite_timing: bool,
    sample: Float64[np.ndarray, "2 nq"],
) -> bool:
    """Run one control step: `num_substeps` times controller and physics.

    Args:
        model: Constants of the model.
        data: Up-to-date data (after `mj_step1`, `mj_forward` or this function).
        measured: The state that the controller sees in the first physics step: `data`, but after a start that was
            written into the state behind its back robosuite's controller still acts on its last measurement.
        memory: From `reset_memory`; changed in place.
        action: Displacement, rotation vector (world axes) and gripper; clipped to [-1, 1].
        is_robosuite_timing: Do not bring `data` up to date at the end (but at the beginning), and take the sample.
        sample: Receives `qpos` before (row 0) and after (row 1) the last but one physics step, which is when
            robosuite's sensors read.

    Returns:
        Whether the state is still valid: finite, and no MuJoCo warning but those of the renderer.
    """
    goal_position = np.empty(3)
    for substep in range(model.num_substeps):
        is_sampled = is_robosuite_timing and substep == max(model.num_substeps - 2, 0)
        if substep > 0 or is_robosuite_timing:
            _mj_step1(model.address, data.address)
        if substep == 0:
            _set_goal(model, measured, memory, action, goal_position)
            _set_arm_torques(model, measured, data, memory, goal_position)
        else:
            _set_arm_torques(model, data, data, memory, goal_position)
        _move_gripper(model, data, memory, action[ARM_ACTION_DIM])
        if is_sampled:
            sample[0] = data.qpos
        _mj_step2(model.address, data.address)
        if is_sampled:
            sample[1] = data.qpos
    if not is_robosuite_timing:
        _mj_step1(model.address, data.address)
    return _is_valid(data)


@_compiled
@no_type_check
def _is_valid(data: KernelData) -> bool:
    num_warnings = data.warnings.sum() - data.warnings[3]  # 3: too many geoms to draw, raised by the renderer only
    return num_warnings == 0 and np.isfinite(data.qpos.sum()) and np.isfinite(data.qvel.sum())


@_compiled
@no_type_check
def _set_goal(model: KernelModel, data: KernelData, memory: Vector, action: Vector, goal_position: Vector) -> None:
    """Goals relative to the achieved pose; without a rotation command the previous orientation goal stays."""
    vector = np.empty(3)
    for i in range(3):
        goal_position[i] = data.site_position[model.grip_site, i] + _clip(action[i], 1.0) * model.position_max_m
        vector[i] = _clip(action[3 + i], 1.0) * model.rotation_max_rad
    angle = np.sqrt(vector[0] ** 2 + vector[1] ** 2 + vector[2] ** 2)
    if angle == 0.0:
        return
    rotation = _rotation_matrix(vector, angle)
    for row in range(3):
        for column in range(3):
            memory[3 * row + column] = 0.0
            for k in range(3):
                memory[3 * row + column] += rotation[row, k] * data.site_rotation[model.grip_site, 3 * k + column]


@_compiled
@no_type_check
def _clip(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


@_compiled
@no_type_check
def _rotation_matrix(vector: Vector, angle: float) -> Matrix:
    """Rotation by `angle` about `vector`, rounded to single precision where robosuite does (contacts amplify it)."""
    q = np.empty(4, dtype=np.float32)
    q[0] = np.cos(angle / 2.0)
    for i in range(3):
        q[1 + i] = vector[i] / angle * np.sin(angle / 2.0)
    norm = 0.0
    for i in range(4):
        norm += q[i] * q[i]
    scale = np.sqrt(2.0 / np.float32(norm))
    for i in range(4):
        q[i] = q[i] * scale
    ww, xx, yy, zz = q[0], q[1], q[2], q[3]
    matrix = np.empty((3, 3))
    matrix[0, 0], matrix[0, 1], matrix[0, 2] = 1.0 - yy * yy - zz * zz, xx * yy - zz * ww, xx * zz + yy * ww
    matrix[1, 0], matrix[1, 1], matrix[1, 2] = xx * yy + zz * ww, 1.0 - xx * xx - zz * zz, yy * zz - xx * ww
    matrix[2, 0], matrix[2, 1], matrix[2, 2] = xx * zz - yy * ww, yy * zz + xx * ww, 1.0 - xx * xx - yy * yy
    return matrix


@_compiled
@no_type_check
def _move_gripper(model: KernelModel, data: KernelData, memory: Vector, command: float) -> None:
    """Move each finger's normalised command at a fixed rate towards the sign of `command`."""
    for i in range(len(model.gripper_actuators)):
        position = _clip(memory[GOAL_ROTATION + i] + model.gripper_step[i] * np.sign(command), 1.0)
        memory[GOAL_ROTATION + i] = position
        data.ctrl[model.gripper_actuators[i]] = model.gripper_middle[i] + model.gripper_half_range[i] * position


@_compiled
@no_type_check
def _set_arm_torques(
    model: KernelModel, measured: KernelData, data: KernelData, memory: Vector, goal_position: Vector
) -> None:
    """Task-space PD torque with gravity compensation, plus posture torque in the nullspace, within the motors' limits.

    Everything is computed from `measured` but gravity and Coriolis forces, which are those of `data`.

    With joint inertia M, site Jacobian J and task inertia L = (J M^-1 J^T)^-1, the posture torque M a is projected by
    (I - J^T L J M^-1), which gives M a - J^T L J a: no matrix has to be inverted explicitly.
    """
    n = len(model.arm_dofs)
    velocity = np.zeros(6)
    jacobian = _site_jacobian(model, measured, velocity)
    acceleration = _pose_acceleration(model, measured, memory, goal_position, velocity)
    inertia, transposed = _arm_inertia(model, measured), jacobian.T.copy()
    mobility = product(jacobian, solve(inertia, transposed))
    posture = np.empty((n, 1))
    for i in range(n):
        error = model.nullspace_posture[i] - measured.qpos[model.arm_qpos[i]]
        posture[i, 0] = model.nullspace_kp * error - model.nullspace_kd * measured.qvel[model.arm_dofs[i]]

    decoupled = mobility.copy()
    for i in range(3):
        for j in range(3):
            decoupled[i, 3 + j] = decoupled[3 + i, j] = 0.0
    wrench = solve(decoupled, acceleration)
    posture_wrench = solve(mobility, product(jacobian, posture))
    for i in range(6):
        wrench[i, 0] -= posture_wrench[i, 0]

    task_torque, posture_torque = product(transposed, wrench), product(inertia, posture)
    for i in range(n):
        torque = task_torque[i, 0] + posture_torque[i, 0] + data.bias[model.arm_dofs[i]]
        data.ctrl[model.arm_actuators[i]] = min(max(torque, model.torque_min[i]), model.torque_max[i])


@_compiled
@no_type_check
def _site_jacobian(model: KernelModel, data: KernelData, velocity: Vector) -> Matrix:
    """Arm columns of the site's Jacobian (6, n), translation first; adds the site's velocity to `velocity`."""
    full, nv = data.jacobian, data.jacobian.shape[1]
    _mj_jac_site(model.address, data.address, full.ctypes.data, full.ctypes.data + 3 * nv * 8, model.grip_site)
    jacobian = np.empty((6, len(model.arm_dofs)))
    for row in range(6):
        for dof in range(nv):
            velocity[row] += full[row, dof] * data.qvel[dof]
        for i in range(len(model.arm_dofs)):
            jacobian[row, i] = full[row, model.arm_dofs[i]]
    return jacobian


@_compiled
@no_type_check
def _pose_acceleration(
    model: KernelModel, data: KernelData, memory: Vector, goal_position: Vector, velocity: Vector
) -> Matrix:
    """Desired acceleration (6, 1) of the site; the orientation error is half the sum of the axes' cross products."""
    rotation = data.site_rotation[model.grip_site]
    acceleration = np.empty((6, 1))
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        error = 0.0
        for axis in range(3):
            row_j, row_k = 3 * j + axis, 3 * k + axis
            error += 0.5 * (rotation[row_j] * memory[row_k] - rotation[row_k] * memory[row_j])
        position_error = goal_position[i] - data.site_position[model.grip_site, i]
        acceleration[i, 0] = model.kp * position_error - model.kd * velocity[i]
        acceleration[3 + i, 0] = model.kp * error - model.kd * velocity[3 + i]
    return acceleration


@_compiled
@no_type_check
def _arm_inertia(model: KernelModel, data: KernelData) -> Matrix:
    """Arm block (n, n) of the joint-space inertia, from MuJoCo's sparse rows (each dof with its ancestors)."""
    n = len(model.arm_dofs)
    inertia = np.zeros((n, n))
    for i in range(n):
        dof, entry = model.arm_dofs[i], model.dof_inertia[model.arm_dofs[i]]
        while dof >= 0:
            for j in range(i + 1):
                if model.arm_dofs[j] == dof:
                    inertia[i, j] = data.inertia[entry]
                    inertia[j, i] = data.inertia[entry]
            dof = model.dof_parent[dof]
            entry += 1
    return inertia
