"""vla-rl calibrate-response: make a robot answer to actions as the training world does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import numpy as np
import typer

from robots.contract import DeploymentContract
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.response import (
    AXES,
    Correction,
    ResponseModel,
    StepResponse,
    correction,
    fit_response,
    measure_response,
    response_table,
    simulate,
    step_actions,
)
from robots.robot import Robot
from robots.safety import SafetyChain, SafetyConfig
from robots.sim_robot import SimRobot
from scripts.progress import console
from scripts.robot_config import DeployConfig, SimRobotConfig
from sim.suites import make_suite
from vla_rl.config import load_config
from vla_rl.train.checkpoint import resolve_checkpoint


def calibrate(
    config: DeployConfig, world: SimRobotConfig, contract: DeploymentContract, size: float, folder: Path
) -> list[Correction]:
    """Play the same steps in the training world and on the robot, fit both, and write the report.

    Args:
        config: The robot and its limits.
        world: The training world.
        contract: Of the checkpoint, which says what actions mean.
        size: Of the steps, in action units.
        folder: Of the report.
    """
    actions = step_actions(size)
    console.print("steps in the training world")
    reference = [_play(_world(world, contract), contract, config.safety, axis, actions, world) for axis in AXES]
    console.print("steps on the robot")
    match config.robot:
        case SimRobotConfig():
            measured = [
                _play(_world(config.robot, contract), contract, config.safety, axis, actions, config.robot)
                for axis in AXES
            ]
        case FrankaConfig():
            with closing(FrankaRobot(config.robot)) as robot:
                robot.connect(10.0)
                measured = [_play(robot, contract, config.safety, axis, actions) for axis in AXES]
    fits = [(fit_response(one), fit_response(other)) for one, other in zip(reference, measured, strict=True)]
    corrections = [correction(one, other) for one, other in fits]
    _write(folder, reference, measured, fits, corrections)
    return corrections


def _world(config: SimRobotConfig, contract: DeploymentContract) -> SimRobot:
    return SimRobot(make_suite(config.suite).make_world(), contract, is_lockstep=True)


def _play(
    robot: Robot,
    contract: DeploymentContract,
    safety: SafetyConfig,
    axis: str,
    actions: np.ndarray,
    world: SimRobotConfig | None = None,
) -> StepResponse:
    if isinstance(robot, SimRobot) and world is not None:
        suite = make_suite(world.suite)
        robot.begin(suite.start(suite.tasks[0], world.split, 0))
    chain = SafetyChain(contract, safety, robot.description)
    return measure_response(robot, chain, contract, axis, actions)


def _write(
    folder: Path,
    reference: Sequence[StepResponse],
    measured: Sequence[StepResponse],
    fits: Sequence[tuple[ResponseModel, ResponseModel]],
    corrections: Sequence[Correction],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    for axis, one, other, (world_fit, robot_fit) in zip(axes.flat, reference, measured, fits, strict=True):
        times = one.period_s * np.arange(len(one.moved))
        for response, fit, colour, label in ((one, world_fit, "C0", "world"), (other, robot_fit, "C1", "robot")):
            axis.plot(times, response.moved, ".", color=colour, label=label)
            model = simulate(response.actions, response.period_s, fit.scale, fit.omega_rad_s, fit.zeta)
            axis.plot(times, model, "-", color=colour, linewidth=1)
        axis.set_title(one.axis)
        axis.set_ylabel("m" if one.axis in "xyz" else "rad")
    axes[0, 0].legend()
    axes[1, 1].set_xlabel("seconds (points: measured, lines: fitted)")
    figure.savefig(folder / "response.png", dpi=120)
    plt.close(figure)
    table = response_table([one for one, _ in fits], [other for _, other in fits], corrections)
    (folder / "report.md").write_text(
        "# Response of the robot and of the training world to the same actions\n\n"
        f"{table}\n\nMultiply the action scale, the controller's stiffness and its damping by the last three columns, "
        "then measure again.\n\n![responses](response.png)\n"
    )
    document = {
        "world": [asdict(one) for one, _ in fits],
        "robot": [asdict(other) for _, other in fits],
        "corrections": [asdict(change) for change in corrections],
    }
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE.yaml ...] [KEY=VALUE ...]", help="Robot and safety.", show_default=False),
    ] = None,
    size: Annotated[float, typer.Option("--size", help="Size of the steps, in action units.", min=0.05, max=1.0)] = 0.4,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report.")] = Path("runs/response"),
) -> None:
    """Play step actions on a robot and in the training world; report what makes both answer alike."""
    words = arguments or []
    config = load_config(
        DeployConfig, [Path(word) for word in words if "=" not in word], [word for word in words if "=" in word]
    )
    contract = DeploymentContract.load(resolve_checkpoint(checkpoint))
    world = config.robot if isinstance(config.robot, SimRobotConfig) else SimRobotConfig()
    calibrate(config, world, contract, size, out)
    console.print((out / "report.md").read_text())
    console.print(f"report.md, report.json and response.png are in {out}")


if __name__ == "__main__":
    typer.run(main)
