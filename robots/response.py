"""How a robot answers to actions, and what to change so that it answers like the training world.

A policy learned what its actions do under the simulator's controller. Copying gains to a real controller does not
reproduce that (robosuite's gains multiply a task-space inertia that changes with the pose); matching the answers does.

Each axis is modelled as a mass on a spring and a damper whose rest position is moved by the actions:

    r[k + 1] = r[k] + scale * action[k]            x'' = omega^2 (r - x) - 2 zeta omega x'

The three numbers are fitted to what was measured, for the robot and for the world, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy.linalg import expm
from scipy.optimize import least_squares

from robots.contract import DeploymentContract
from robots.robot import Robot, RobotError, RobotState
from robots.rotations import rotation_vector_from_matrix
from robots.safety import SafetyChain
from robots.schedule import Schedule

AXES = ("x", "y", "z", "rx", "ry", "rz")
_OMEGA_RANGE, _ZETA_RANGE = (0.5, 200.0), (0.05, 5.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResponse:
    """Measured answer of one axis.

    Attributes:
        axis: One of `AXES`.
        actions: Of this axis, one per control period.
        moved: Displacement (m) or rotation (rad) along the axis since the beginning, before each period and at the end.
        period_s: Control period.
    """

    axis: str
    actions: Float64[np.ndarray, " periods"]
    moved: Float64[np.ndarray, " periods_and_end"]
    period_s: float


@dataclass(frozen=True, kw_only=True)
class ResponseModel:
    """Fitted numbers of one axis.

    Attributes:
        axis: One of `AXES`.
        scale: Movement per action of 1, m or rad.
        omega_rad_s: Natural frequency; its square is stiffness over (effective) mass.
        zeta: Damping ratio; 1 is critical.
        error: Root mean square of what the model does not explain, m or rad.
    """

    axis: str
    scale: float
    omega_rad_s: float
    zeta: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What to multiply a robot's settings with so that an axis answers like the training world's."""

    axis: str
    scale: float
    stiffness: float
    damping: float


def step_actions(size: float, num_moving: int = 10, num_resting: int = 15) -> Float64[np.ndarray, " periods"]:
    """There, rest, back, rest: the robot ends where it began."""
    rest = np.zeros(num_resting)
    return np.concatenate([np.full(num_moving, size), rest, np.full(num_moving, -size), rest])


def measure_response(
    robot: Robot,
    chain: SafetyChain,
    contract: DeploymentContract,
    axis: str,
    actions: Float64[np.ndarray, " periods"],
    on_tick: Callable[[int], None] = lambda tick: None,
) -> StepResponse:
    """Play actions along one axis through the safety chain and record the tool.

    Raises:
        RobotError: The chain refused an action or the robot failed; the robot has been stopped.
    """
    index = AXES.index(axis)
    period_s = 1.0 / contract.control_rate_hz
    schedule = Schedule(0.0 if robot.description.is_lockstep else period_s)
    first = robot.observe()
    chain.resync(first)
    moved = []
    for tick, size in enumerate(actions):
        schedule.begin_tick()
        state = robot.observe()
        moved.append(_moved_along(index, first, state))
        action = np.zeros(len(contract.action.names))
        action[index], action[-1] = size, -contract.action.gripper_closes_at
        decision = chain.review(action, state)
        if decision.command is None:
            robot.stop()
            raise RobotError(
                f"the safety chain refused the step along {axis}: "
                + "; ".join(event.detail for event in decision.events)
                + "; move the robot to the middle of its workspace or take a smaller step"
            )
        robot.command(decision.command)
        on_tick(tick)
    schedule.begin_tick()
    moved.append(_moved_along(index, first, robot.observe()))
    return StepResponse(axis=axis, actions=actions, moved=np.array(moved), period_s=period_s)


def fit_response(response: StepResponse) -> ResponseModel:
    """Least squares over scale, frequency and damping.

    Raises:
        ValueError: The robot did not move.
    """
    total = np.abs(response.moved).max()
    if total < 1e-4:
        raise ValueError(f"the robot did not move along {response.axis}: {total:.2g} m or rad; is it held or braked?")
    guess = np.array([total / np.abs(np.cumsum(response.actions)).max(), 15.0, 1.0])

    def residual(values: Float64[np.ndarray, 3]) -> Float64[np.ndarray, " periods_and_end"]:
        error: Float64[np.ndarray, " periods_and_end"] = (
            simulate(response.actions, response.period_s, *values) - response.moved
        )
        return error

    bounds = ([0.0, _OMEGA_RANGE[0], _ZETA_RANGE[0]], [np.inf, _OMEGA_RANGE[1], _ZETA_RANGE[1]])
    fits = [
        least_squares(residual, [guess[0], omega, zeta], bounds=bounds, x_scale=[guess[0], 10.0, 1.0])
        for omega, zeta in ((5.0, 1.0), (15.0, 1.0), (40.0, 1.0), (15.0, 0.3))
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    scale, omega, zeta = best.x
    error = float(np.sqrt(np.mean(best.fun**2)))
    return ResponseModel(
        axis=response.axis, scale=float(scale), omega_rad_s=float(omega), zeta=float(zeta), error=error
    )


def simulate(
    actions: Float64[np.ndarray, " periods"], period_s: float, scale: float, omega: float, zeta: float
) -> Float64[np.ndarray, " periods_and_end"]:
    """The model's movement before each period and at the end (exact within a period)."""
    transition, drive = _discrete(omega, zeta, period_s)
    rest, state = 0.0, np.zeros(2)
    moved = [0.0]
    for action in actions:
        rest += scale * action
        state = transition @ state + drive * rest
        moved.append(float(state[0]))
    return np.array(moved)


def correction(world: ResponseModel, robot: ResponseModel) -> Correction:
    """What makes the robot's answer the world's: stiffness goes with omega^2, damping with zeta * omega."""
    return Correction(
        axis=world.axis,
        scale=world.scale / robot.scale,
        stiffness=(world.omega_rad_s / robot.omega_rad_s) ** 2,
        damping=(world.zeta * world.omega_rad_s) / (robot.zeta * robot.omega_rad_s),
    )


def response_table(
    world: Sequence[ResponseModel], robot: Sequence[ResponseModel], corrections: Sequence[Correction]
) -> str:
    """Markdown."""
    rows = [
        "| axis | scale, world / robot | omega, rad/s | damping ratio | error | x scale | x stiffness | x damping |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one, other, change in zip(world, robot, corrections, strict=True):
        rows.append(
            f"| {one.axis} | {one.scale:.4f} / {other.scale:.4f} | {one.omega_rad_s:.1f} / {other.omega_rad_s:.1f} | "
            f"{one.zeta:.2f} / {other.zeta:.2f} | {one.error:.2g} / {other.error:.2g} | {change.scale:.2f} | "
            f"{change.stiffness:.2f} | {change.damping:.2f} |"
        )
    return "\n".join(rows)


def _moved_along(index: int, first: RobotState, now: RobotState) -> float:
    if index < 3:
        return float(now.position_m[index] - first.position_m[index])
    return float(rotation_vector_from_matrix(now.rotation @ first.rotation.T)[index - 3])


def _discrete(omega: float, zeta: float, period_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Exact solution of the oscillator over a period with a constant rest position: state' = A state + b * rest."""
    continuous = np.array([[0.0, 1.0, 0.0], [-(omega**2), -2 * zeta * omega, omega**2], [0.0, 0.0, 0.0]])
    exact = expm(continuous * period_s)
    return exact[:2, :2], exact[:2, 2]
