"""vla-rl calibrate-response: make a robot answer to actions as the training world does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import typer
import yaml

from robots.contract import DeploymentContract, require_world
from robots.franka_config import FrankaConfig
from robots.lerobot_factory import LeRobotArmConfig
from robots.recorder import finished_episodes, load_episode
from robots.response import (
    AXES,
    Correction,
    ResponseModel,
    StepPolicy,
    StepResponse,
    correction,
    fit_response,
    measuring_contract,
    response_of,
    response_table,
    simulate,
    step_actions,
)
from robots.robot import Robot
from robots.safety import SafetyConfig
from robots.sim_robot import SimRobot
from scripts.progress import console
from scripts.robot_config import DeployConfig, SimRobotConfig, corrected_settings, real_robot
from scripts.robot_operator import Operator
from scripts.run_robot import make_recorder, make_runtime
from sim.suites import SuiteConfig, make_suite
from sim.world import Suite
from vla_rl.config import ConfigModel, load_config
from vla_rl.train.checkpoint import resolve_checkpoint

_WORLD_BOX_M = 0.5
"""Half the workspace of a simulated arm about its start; nothing can break there."""


class CalibrationConfig(DeployConfig):
    """A robot, and the world that it should answer like."""

    world: SuiteConfig | None = None
    """Suite of the training; null: as the checkpoint's run says."""


class _TrainingRun(ConfigModel, extra="ignore"):
    """What a run's config.yaml says of its world."""

    suite: SuiteConfig


def calibrate(
    config: DeployConfig, world: SuiteConfig, contract: DeploymentContract, size: float, folder: Path
) -> list[Correction]:
    """Play the same steps in the training world and on the robot, fit both, and write the report.

    Args:
        config: The robot and its limits.
        world: Suite of the training.
        contract: Of the checkpoint, which says what actions mean.
        size: Of the steps, in action units.
        folder: Of the report, the settings and the recordings.

    Raises:
        ValueError: The world is not the contract's, or the robot was not driven without a gap.
    """
    if config.runtime.mode != "live":
        raise ValueError(f"runtime.mode is {config.runtime.mode}, but a response is measured live")
    actions = step_actions(size)
    suite = make_suite(world)
    require_world(contract, suite.spec)
    console.print("steps in the training world")
    reference = _play_world(suite, config, contract, actions, folder / "world")
    console.print("steps on the robot")
    match config.robot:
        case SimRobotConfig():
            other = make_suite(config.robot.suite)
            measured = _play_world(other, config, contract, actions, folder / "robot")
        case FrankaConfig() | LeRobotArmConfig():
            typer.prompt("hands off the robot; press Enter to move it", default="", show_default=False)
            measured = _play(real_robot(config.robot), config, contract, actions, folder / "robot")
    fits = [(fit_response(one), fit_response(other)) for one, other in zip(reference, measured, strict=True)]
    corrections = [correction(one, other) for one, other in fits]
    settings, notes = corrected_settings(config.robot, corrections)
    _write(folder, reference, measured, fits, corrections, notes)
    _write_settings(folder, settings)
    return corrections


def training_suite(checkpoint: Path, config: CalibrationConfig) -> SuiteConfig:
    """The suite that the settings name, else that of the checkpoint's run, else that of a simulated robot.

    Raises:
        ValueError: None of them says it.
    """
    if config.world is not None:
        return config.world
    for folder in (checkpoint, *checkpoint.resolve().parents[:3]):
        if (folder / "config.yaml").is_file():
            document = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
            return _TrainingRun.model_validate_json(json.dumps(document)).suite
    if isinstance(config.robot, SimRobotConfig):
        return config.robot.suite
    raise ValueError(f"nothing near {checkpoint} says its suite; name it, e.g. world.type=tabletop")


def _play_world(
    suite: Suite, config: DeployConfig, contract: DeploymentContract, actions: np.ndarray, folder: Path
) -> list[StepResponse]:
    """In a simulator, without the robot's limits: those are not the world's."""
    robot = SimRobot(suite.make_world(), contract, is_lockstep=True)
    start = suite.start(suite.tasks[0], "train", 0)
    robot.begin(start)
    middle = robot.observe().position_m
    safety = SafetyConfig.model_validate(
        {"workspace_low_m": tuple(middle - _WORLD_BOX_M), "workspace_high_m": tuple(middle + _WORLD_BOX_M)}
    )
    limitless = config.model_copy(update={"safety": safety})
    return _play(robot, limitless, contract, actions, folder, lambda: robot.begin(start))


def _play(
    robot: Robot,
    config: DeployConfig,
    contract: DeploymentContract,
    actions: np.ndarray,
    folder: Path,
    begin: Callable[[], None] = lambda: None,
) -> list[StepResponse]:
    """One episode per axis on the way that policies take, watchdog and operator included; no fault is cleared."""
    asked = measuring_contract(contract, len(actions))
    once = config.runtime.model_copy(update={"max_steps": len(actions), "max_recoveries": 0})
    config = config.model_copy(update={"runtime": once})
    policy = StepPolicy(asked, actions)
    runtime = make_runtime(config, asked, policy.infer, robot, [], make_recorder(folder, asked))
    operator = Operator(runtime, sys.stdin)
    responses = []
    with operator.attending():
        runtime.preflight()
        for axis in AXES:
            begin()
            policy.begin(axis)
            report = operator.run_episode(f"step along {axis}")
            if report.outcome != "failure":  # of the time limit, which is the end of the steps
                raise ValueError(f"the step along {axis} ended as {report.outcome}: {report.detail}")
            recording = load_episode(finished_episodes(folder)[-1])
            responses.append(response_of(recording, asked, axis, robot.description.is_lockstep))
    return responses


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "settings.yaml").write_text(
        "# Written by vla-rl calibrate-response; give it to vla-rl run-robot after the robot's own file.\n" + text
    )


def _write(
    folder: Path,
    reference: Sequence[StepResponse],
    measured: Sequence[StepResponse],
    fits: Sequence[tuple[ResponseModel, ResponseModel]],
    corrections: Sequence[Correction],
    notes: Sequence[str],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    for axis, one, other, (world_fit, robot_fit) in zip(axes.flat, reference, measured, fits, strict=True):
        for response, fit, colour, label in ((one, world_fit, "C0", "world"), (other, robot_fit, "C1", "robot")):
            times = response.period_s * np.arange(len(response.moved))
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
        f"{table}\n\nsettings.yaml holds the robot's settings with the last three columns applied: give it to "
        "run-robot, and to calibrate-response to measure again. Scales are of what the safety chain let through.\n\n"
        + "".join(f"- {note}\n" for note in notes)
        + "\n"
        "![responses](response.png)\n"
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
        CalibrationConfig, [Path(word) for word in words if "=" not in word], [word for word in words if "=" in word]
    )
    contract = DeploymentContract.load(resolve_checkpoint(checkpoint))
    calibrate(config, training_suite(checkpoint, config), contract, size, out)
    console.print((out / "report.md").read_text())
    console.print(f"report.md, report.json, response.png and settings.yaml are in {out}")


if __name__ == "__main__":
    typer.run(main)
