"""How a robot answers to actions, and what to change so that it answers like the training world.

A policy learned what its actions do under the simulator's controller. Copying gains to a real controller does not
reproduce that (robosuite's gains multiply a task-space inertia that changes with the pose); matching the answers does.

Each axis is modelled as a mass on a spring and a damper whose rest position is moved by the actions:

    r[k + 1] = r[k] + scale * action[k]            x'' = omega^2 (r - x) - 2 zeta omega x'

The three numbers are fitted to what was measured, for the robot and for the world, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.linalg import expm
from scipy.optimize import least_squares

from robots.contract import DeploymentContract
from robots.recorder import RecordedEpisode
from robots.rotations import matrix_from_rotation_vector, rotation_vector_from_matrix

AXES = ("x", "y", "z", "rx", "ry", "rz")
_LEAD = 4
"""Control periods until everything runs: the first answer has to arrive."""
_OMEGA_RANGE, _ZETA_RANGE = (0.5, 200.0), (0.05, 5.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResponse:
    """Measured answer of one axis.

    Attributes:
        axis: One of `AXES`.
        actions: As sent, of this axis, one per control period.
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
    """Rest, there, rest, back, rest: the robot ends where it began."""
    rest = np.zeros(num_resting)
    return np.concatenate([rest[:_LEAD], np.full(num_moving, size), rest, np.full(num_moving, -size), rest])


class StepPolicy:
    """Answers like a policy server, once with steps along one axis, then with rest."""

    def __init__(self, contract: DeploymentContract, steps: Float64[np.ndarray, " periods"]) -> None:
        """Prepare.

        Args:
            contract: See `measuring_contract`.
            steps: Actions of the axis, one per control period.
        """
        self._steps = steps
        self._rest = np.zeros((len(steps), len(contract.action.names)))
        self._rest[:, -1] = -contract.action.gripper_closes_at
        self._actions = self._rest

    def begin(self, axis: str) -> None:
        """The next answer has the steps along this axis."""
        self._actions = self._rest.copy()
        self._actions[:, AXES.index(axis)] = self._steps

    def infer(self, observation: dict[str, Any], deadline_s: float) -> Chunk:
        """See `robots.run_types.Infer`."""
        actions, self._actions = self._actions, self._rest
        return Chunk(actions=actions)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Actions by time, as `robots.run_types.Answer`."""

    actions: Float64[np.ndarray, "horizon action_dim"]


def measuring_contract(contract: DeploymentContract, num_periods: int) -> DeploymentContract:
    """The contract of a `StepPolicy`: without pictures, in one chunk, and nobody was trained with its steps."""
    dim = len(contract.action.names)
    action = contract.action.model_copy(update={"low": (-1.0,) * dim, "high": (1.0,) * dim})
    horizons = {"action_horizon": num_periods, "execution_horizon": num_periods}
    return contract.model_copy(update={"action": action, "cameras": (), **horizons})


def response_of(recording: RecordedEpisode, contract: DeploymentContract, axis: str, is_lockstep: bool) -> StepResponse:
    """What a recorded episode says of one axis: what was sent, which is not always what was asked, and what happened.

    Raises:
        ValueError: The robot was not driven without a gap; the recording's events say why.
    """
    index, meaning = AXES.index(axis), contract.action
    is_sent = np.isfinite(recording.sent_position_m[:, 0])
    first = int(np.argmax(is_sent))
    if is_sent[first:].sum() < 2 or not is_sent[first:].all():
        events = "; ".join(event.detail for event in recording.events if event.severity in ("hold", "fault"))
        raise ValueError(
            f"along {axis} the robot was not driven without a gap ({events or recording.info['outcome']}); move it to "
            "the middle of its workspace, or take smaller steps"
        )
    positions, rotations = _measured(recording, contract.state_names)
    positions, rotations = positions[first:], rotations[first:]
    sent = list(zip(recording.sent_position_m[first:], recording.sent_rotation[first:], strict=True))
    if is_lockstep and meaning.delta_reference == "measured":
        references = list(zip(positions, rotations, strict=True))
    else:  # the first action is rest: nothing but the increments is known of where targets were before
        references = [sent[0], *sent[:-1]]
    increments = [_along(index, meaning.frame, *pair) for pair in zip(references, sent, strict=True)]
    begun = positions[0], rotations[0]
    moved = [_along(index, meaning.frame, begun, now) for now in zip(positions, rotations, strict=True)]
    return StepResponse(
        axis=axis,
        actions=np.array(increments[:-1]) / meaning.scale[index],
        moved=np.array(moved),
        period_s=1.0 / contract.control_rate_hz,
    )


def fit_response(response: StepResponse) -> ResponseModel:
    """Least squares over scale, frequency and damping.

    Raises:
        ValueError: The robot did not move.
    """
    total = np.abs(response.moved).max()
    if total < 1e-4:
        raise ValueError(f"the robot did not move along {response.axis}: {total:.2g} m or rad; is it held or braked?")
    if not np.abs(response.actions).max() > 0.0:
        raise ValueError(f"nothing was sent along {response.axis}: the safety chain let no step through")
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


def _measured(
    recording: RecordedEpisode, state_names: Sequence[str]
) -> tuple[Float64[np.ndarray, "ticks 3"], Float64[np.ndarray, "ticks 3 3"]]:
    names = [f"{what}_{axis}" for what in ("eef_pos", "eef_axis_angle") for axis in "xyz"]
    if missing := [name for name in names if name not in state_names]:
        raise ValueError(f"the contract's state lacks {', '.join(missing)}, without which no response can be measured")
    values = recording.measured[:, [list(state_names).index(name) for name in names]]
    return values[:, :3], np.array([matrix_from_rotation_vector(vector) for vector in values[:, 3:]])


_Pose = tuple[Float64[np.ndarray, "3"], Float64[np.ndarray, "3 3"]]


def _along(index: int, frame: str, begun: _Pose, now: _Pose) -> float:
    """Displacement (m) or rotation (rad) about one axis of the base's or the tool's frame."""
    if index < 3:
        moved = now[0] - begun[0]
        return float((begun[1].T @ moved if frame == "tool" else moved)[index])
    turned = begun[1].T @ now[1] if frame == "tool" else now[1] @ begun[1].T
    return float(rotation_vector_from_matrix(turned)[index - 3])


def _discrete(omega: float, zeta: float, period_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Exact solution of the oscillator over a period with a constant rest position: state' = A state + b * rest."""
    continuous = np.array([[0.0, 1.0, 0.0], [-(omega**2), -2 * zeta * omega, omega**2], [0.0, 0.0, 0.0]])
    exact = expm(continuous * period_s)
    return exact[:2, :2], exact[:2, 2]
