"""One compiled MuJoCo model with everything a world needs to know about it, shared by all worlds of a task.

Compiling is slow (up to seconds), so it happens once per task; worlds only own an `MjData` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import mujoco
import numpy as np
from jaxtyping import Float64, Int64

PINNED_MUJOCO = "3.3.2"

ROBOSUITE_SOLVER_TOLERANCE = 1e-14
"""Reaches in one pass what robosuite reaches with MuJoCo's 1e-8 in the three passes that it runs per physics step, each
begun at the last one's contact forces. At impacts the first pass alone is off by 1e-6 m and more."""


@cache
def check_mujoco_version() -> None:
    """Refuse any other MuJoCo than the pinned one.

    Raises:
        ImportError: Another version is installed.
    """
    if mujoco.__version__ != PINNED_MUJOCO:
        raise ImportError(
            f"mujoco {mujoco.__version__} is installed, but the simulation needs exactly {PINNED_MUJOCO}: later "
            "versions change contacts (a bowl slides off its ramekin in a LIBERO-Spatial task), rendered colours (from "
            f"3.3.3) and C functions (from 3.4). Run: pip install mujoco=={PINNED_MUJOCO}"
        )


@dataclass(frozen=True, kw_only=True)
class RobotNames:
    """Names of the robot's parts in the model; the defaults are robosuite's for its first Panda.

    Attributes:
        arm_joints: Hinge joints from base to hand.
        arm_actuators: One torque motor per arm joint, same order.
        gripper_joints: Finger slides, in the order of the proprioceptive state.
        gripper_actuators: One position actuator per finger.
        grip_site: Site between the finger tips; the controller moves its pose.
        hand_body: Body whose orientation is the end effector's in the proprioceptive state.
    """

    arm_joints: tuple[str, ...] = tuple(f"robot0_joint{i}" for i in range(1, 8))
    arm_actuators: tuple[str, ...] = tuple(f"robot0_torq_j{i}" for i in range(1, 8))
    gripper_joints: tuple[str, ...] = ("gripper0_finger_joint1", "gripper0_finger_joint2")
    gripper_actuators: tuple[str, ...] = ("gripper0_gripper_finger_joint1", "gripper0_gripper_finger_joint2")
    grip_site: str = "gripper0_grip_site"
    hand_body: str = "robot0_right_hand"


@dataclass(frozen=True, kw_only=True)
class OscConfig:
    """Constants of the operational-space controller; the defaults are robosuite 1.4.0's OSC_POSE and Panda gripper.

    Attributes:
        kp: Stiffness of position (1/s^2) and orientation (1/s^2), before the task-space inertia.
        damping_ratio: 1 is critical damping.
        position_max_m: Goal displacement at action 1.
        rotation_max_rad: Goal rotation at action 1.
        nullspace_kp: Stiffness of the pull towards `nullspace_posture` (1/s^2), critically damped.
        nullspace_posture: Arm joint angles in rad, one per arm joint; None takes the model's `qpos0`.
        gripper_rate: Change of a finger's normalised command per second; robosuite: 0.01 per 2 ms.
        gripper_signs: Direction of each finger's normalised command when the gripper action is positive (close).
    """

    kp: float = 150.0
    damping_ratio: float = 1.0
    position_max_m: float = 0.05
    rotation_max_rad: float = 0.5
    nullspace_kp: float = 10.0
    nullspace_posture: tuple[float, ...] | None = None
    gripper_rate: float = 5.0
    gripper_signs: tuple[float, ...] = (-1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What costs time in software rendering. LIBERO's pictures need the defaults; light suites switch things off.

    Attributes:
        samples: Anti-aliasing samples per pixel; 0 switches it off.
        shadows: Draw shadows.
        reflections: Draw reflections.
        geom_groups: Visible geom groups. robosuite draws group 1 (visual) and hides group 0 (collision).
        site_groups: Visible site groups.
    """

    samples: int = 4
    shadows: bool = True
    reflections: bool = True
    geom_groups: tuple[int, ...] = (1, 2)
    site_groups: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class SimModel:
    """A compiled model and its indices. Nothing may change it after construction: threads share it.

    Attributes:
        mj_model: The compiled model.
        names: Names that the indices belong to.
        osc: Controller constants.
        render: Drawing options.
        num_substeps: Physics steps per control step.
        arm_qpos: Positions of the arm joints in `qpos`.
        arm_dofs: Positions of the arm joints in `qvel`.
        arm_actuators: Actuator ids of the arm.
        gripper_qpos: Positions of the finger joints in `qpos`.
        gripper_actuators: Actuator ids of the fingers.
        grip_site: Site id.
        hand_body: Body id.
        nullspace_posture: Arm posture that the nullspace torque pulls to, rad.
        camera_ids: Name -> id of every camera.
        fixtures: Ids of the fixed bodies that a start may place elsewhere.
    """

    mj_model: mujoco.MjModel
    names: RobotNames
    osc: OscConfig
    render: RenderOptions
    num_substeps: int
    arm_qpos: Int64[np.ndarray, " arm"]
    arm_dofs: Int64[np.ndarray, " arm"]
    arm_actuators: Int64[np.ndarray, " arm"]
    gripper_qpos: Int64[np.ndarray, " fingers"]
    gripper_actuators: Int64[np.ndarray, " fingers"]
    grip_site: int
    hand_body: int
    nullspace_posture: Float64[np.ndarray, " arm"]
    camera_ids: dict[str, int]
    fixtures: Int64[np.ndarray, " fixtures"]

    @classmethod
    def build(
        cls,
        mj_model: mujoco.MjModel,
        *,
        control_rate_hz: float = 20.0,
        names: RobotNames = RobotNames(),
        osc: OscConfig = OscConfig(),
        render: RenderOptions = RenderOptions(),
        fixtures: Sequence[str] = (),
        solver_tolerance: float | None = None,
    ) -> SimModel:
        """Look up every name once and check the model.

        Args:
            mj_model: A compiled model; its anti-aliasing setting is overwritten by `render.samples`.
            control_rate_hz: Control steps per second; the physics timestep must divide the control period.
            names: Names of the robot's parts.
            osc: Controller constants.
            render: Drawing options.
            fixtures: Names of the fixed bodies that a start may place elsewhere.
            solver_tolerance: Replaces the model's; see `ROBOSUITE_SOLVER_TOLERANCE`.

        Raises:
            ValueError: A name is missing, or the timestep, the integrator or a constant does not fit.
        """
        check_mujoco_version()
        if mj_model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4:
            raise ValueError(
                "the model uses the RK4 integrator; use Euler or an implicit one (steps are split at the controls)"
            )
        arm = _ids(mj_model, mujoco.mjtObj.mjOBJ_JOINT, names.arm_joints)
        fingers = _ids(mj_model, mujoco.mjtObj.mjOBJ_JOINT, names.gripper_joints)
        arm_actuators = _ids(mj_model, mujoco.mjtObj.mjOBJ_ACTUATOR, names.arm_actuators)
        gripper_actuators = _ids(mj_model, mujoco.mjtObj.mjOBJ_ACTUATOR, names.gripper_actuators)
        arm_qpos = mj_model.jnt_qposadr[arm].astype(np.int64)
        posture = mj_model.qpos0[arm_qpos] if osc.nullspace_posture is None else np.array(osc.nullspace_posture)
        _check_lengths(names, osc, posture)
        _check_limits(mj_model, names.arm_actuators, arm_actuators)
        _check_limits(mj_model, names.gripper_actuators, gripper_actuators)
        mj_model.vis.quality.offsamples = render.samples
        if solver_tolerance is not None:
            mj_model.opt.tolerance = solver_tolerance
        return cls(
            mj_model=mj_model,
            names=names,
            osc=osc,
            render=render,
            num_substeps=substeps_per_control_step(mj_model.opt.timestep, control_rate_hz),
            arm_qpos=arm_qpos,
            arm_dofs=mj_model.jnt_dofadr[arm].astype(np.int64),
            arm_actuators=arm_actuators,
            gripper_qpos=mj_model.jnt_qposadr[fingers].astype(np.int64),
            gripper_actuators=gripper_actuators,
            grip_site=int(_ids(mj_model, mujoco.mjtObj.mjOBJ_SITE, (names.grip_site,))[0]),
            hand_body=int(_ids(mj_model, mujoco.mjtObj.mjOBJ_BODY, (names.hand_body,))[0]),
            nullspace_posture=posture.astype(np.float64),
            camera_ids={mj_model.camera(i).name: i for i in range(mj_model.ncam)},
            fixtures=_ids(mj_model, mujoco.mjtObj.mjOBJ_BODY, fixtures),
        )

    @cached_property
    def reset_data(self) -> mujoco.MjData:
        """Up-to-date data with the arm in its nullspace posture and all else as in `qpos0`; only to be read."""
        data = mujoco.MjData(self.mj_model)
        data.qpos[self.arm_qpos] = self.nullspace_posture
        mujoco.mj_step1(self.mj_model, data)
        return data

    @property
    def control_rate_hz(self) -> float:
        """Control steps per simulated second."""
        return 1.0 / float(self.num_substeps * self.mj_model.opt.timestep)

    def camera_id(self, name: str) -> int:
        """Id of a camera.

        Raises:
            ValueError: No such camera; lists those that exist.
        """
        if name not in self.camera_ids:
            raise ValueError(f"no camera {name!r} in the model; cameras: {', '.join(self.camera_ids) or 'none'}")
        return self.camera_ids[name]


def substeps_per_control_step(timestep_s: float, control_rate_hz: float) -> int:
    """Physics steps per control step, e.g. 25 for 2 ms at 20 Hz.

    Raises:
        ValueError: The timestep does not divide the control period.
    """
    ratio = 1.0 / (control_rate_hz * timestep_s)
    num_substeps = round(ratio)
    if num_substeps < 1 or abs(ratio - num_substeps) > 1e-6:
        raise ValueError(
            f"a control period of {1000.0 / control_rate_hz:g} ms is not a multiple of the physics timestep of "
            f"{1000.0 * timestep_s:g} ms; change the model's timestep"
        )
    return num_substeps


def _ids(model: mujoco.MjModel, kind: mujoco.mjtObj, names: Sequence[str]) -> Int64[np.ndarray, " names"]:
    """Ids of named elements; the error lists the names that the model has."""
    ids = [mujoco.mj_name2id(model, kind, name) for name in names]
    missing = [name for name, index in zip(names, ids, strict=True) if index < 0]
    if missing:
        counts = {"joint": model.njnt, "actuator": model.nu, "site": model.nsite, "body": model.nbody}
        label = kind.name.removeprefix("mjOBJ_").lower()
        present = [mujoco.mj_id2name(model, kind, i) or f"(unnamed {i})" for i in range(counts[label])]
        raise ValueError(f"no {label} named {', '.join(missing)} in the model; it has: {', '.join(present)}")
    return np.array(ids, dtype=np.int64)


def _check_lengths(names: RobotNames, osc: OscConfig, posture: Float64[np.ndarray, " joints"]) -> None:
    num_joints, num_fingers = len(names.arm_joints), len(names.gripper_joints)
    for what, given, expected in (
        ("arm actuators", len(names.arm_actuators), num_joints),
        ("entries of nullspace_posture", len(posture), num_joints),
        ("gripper actuators", len(names.gripper_actuators), num_fingers),
        ("entries of gripper_signs", len(osc.gripper_signs), num_fingers),
    ):
        if given != expected:
            raise ValueError(f"{given} {what} given, {expected} expected (one per joint)")


def _check_limits(model: mujoco.MjModel, names: Sequence[str], ids: Int64[np.ndarray, " names"]) -> None:
    unlimited = [name for name, index in zip(names, ids, strict=True) if not model.actuator_ctrllimited[index]]
    if unlimited:
        raise ValueError(f"actuators without a ctrlrange: {', '.join(unlimited)}; the controller needs their limits")
