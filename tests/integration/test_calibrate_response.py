"""`vla-rl calibrate-response`: the world against itself, and a robot that moves less than it is told, in real time."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from fakes import norm_stats
from typer.testing import CliRunner, Result

from robots.driving import STATE_NAMES
from robots.franka_config import FrankaConfig
from robots.response import AXES
from robots.robot import Command, Robot, RobotDescription, RobotError, RobotLimits, RobotState
from robots.rotations import matrix_from_rotation_vector, rotation_vector_from_matrix
from scripts import calibrate_response
from scripts.calibrate_response import CalibrationConfig, training_suite
from scripts.cli import app
from scripts.robot_config import DeployConfig, SimRobotConfig
from sim.suites import make_suite
from sim.tabletop.suite import TabletopConfig
from vla_rl.config import load_config
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.word_tokenizer import WordTokenizer

SHARE = 0.9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a run whose config.yaml names its suite."""
    suite = make_suite(TabletopConfig(image_size=32))
    config = TinyVLAConfig(hidden_dim=16, num_keypoints=2)
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text("seed: 3\nsuite: {type: tabletop, image_size: 32}\n")
    (folder / "policy").mkdir()
    TinyVLA(config, suite.spec, norm_stats(suite.spec), WordTokenizer.from_instructions(["go"])).save(folder / "policy")
    return folder / "policy"


class ShyRobot:
    """Goes `SHARE` of the way that it is told, at once, and slower than steps ask for: its limits shape them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.position, self.rotation = np.array([0.45, 0.0, 0.3]), np.diag([1.0, -1.0, -1.0])
        self.last: Command | None = None
        self.num_commands = 0
        self.when_commanded: Callable[[int], None] = lambda num: None

    description = RobotDescription(
        name="franka",
        arm="Panda",
        spaces=("ee_delta",),
        state_names=STATE_NAMES,
        min_rate_hz=5.0,
        max_rate_hz=100.0,
        limits=RobotLimits(
            joint_lower_rad=np.zeros(0),
            joint_upper_rad=np.zeros(0),
            joint_speed_rad_s=np.zeros(0),
            linear_speed_m_s=0.1,
            linear_acceleration_m_s2=1.0,
            linear_jerk_m_s3=100.0,
            angular_speed_rad_s=1.0,
            angular_acceleration_rad_s2=10.0,
            angular_jerk_rad_s3=1000.0,
            reach_m=0.9,
        ),
    )

    def connect(self, timeout_s: float) -> None:
        self.calls.append("connect")

    def observe(self) -> RobotState:
        values = [*self.position, *rotation_vector_from_matrix(self.rotation), 0.04, -0.04]
        now = time.monotonic()
        return RobotState(
            time_s=now,
            received_s=now,
            position_m=self.position.copy(),
            rotation=self.rotation.copy(),
            named=dict(zip(STATE_NAMES, map(float, values), strict=True)),
        )

    def command(self, command: Command) -> Command:
        self.num_commands += 1
        self.when_commanded(self.num_commands)
        if self.last is not None:
            self.position = self.position + SHARE * (command.position_m - self.last.position_m)
            turned = rotation_vector_from_matrix(command.rotation @ self.last.rotation.T)
            self.rotation = matrix_from_rotation_vector(SHARE * turned) @ self.rotation
        self.last = command
        return command

    def hold(self) -> None:
        self.last = None

    def stop(self) -> None:
        self.calls.append("stop")
        self.last = None

    def recover(self) -> None:
        self.calls.append("recover")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def robot(monkeypatch: pytest.MonkeyPatch) -> ShyRobot:
    robot = ShyRobot()
    assert isinstance(robot, Robot)
    monkeypatch.setattr(calibrate_response, "real_robot", lambda config: robot)
    return robot


def calibrate(checkpoint: Path, out: Path, *words: str) -> Result:
    command = ["calibrate-response", str(checkpoint), *words, "--size", "0.2", "--out", str(out)]
    return CliRunner().invoke(app, command, input="\n")


FRANKA = ("configs/robots/franka.yaml", "robot.host=nowhere")


@pytest.mark.slow
def test_the_training_world_answers_like_itself(checkpoint: Path, tmp_path: Path) -> None:
    result = calibrate(checkpoint, tmp_path, "configs/robots/sim.yaml", "robot.suite.image_size=32")
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    report = json.loads((tmp_path / "report.json").read_text())
    for change, fit in zip(report["corrections"], report["world"], strict=True):
        assert (change["scale"], change["stiffness"], change["damping"]) == pytest.approx((1.0, 1.0, 1.0))
        assert 0 < fit["scale"] < 0.6
    assert (tmp_path / "response.png").stat().st_size > 10_000
    assert (
        load_config(DeployConfig, [Path("configs/robots/sim.yaml"), tmp_path / "settings.yaml"]).action_scale
        == (1.0,) * 6
    )


@pytest.mark.slow
def test_what_was_sent_is_fitted_and_comes_out_as_settings(checkpoint: Path, tmp_path: Path, robot: ShyRobot) -> None:
    result = calibrate(checkpoint, tmp_path, *FRANKA)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    report = json.loads((tmp_path / "report.json").read_text())
    # The steps asked for 0.2 m/s and 2 rad/s, twice what the limits let through; an action moves 0.9 of its scale.
    for axis, fit in zip(AXES, report["robot"], strict=True):
        assert fit["scale"] == pytest.approx(SHARE * (0.5 if axis.startswith("r") else 0.05), rel=0.02)
    settings = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    for scale, world, own in zip(settings["action_scale"], report["world"], report["robot"], strict=True):
        assert scale == pytest.approx(np.clip(world["scale"] / own["scale"], 0.2, 5.0), abs=1e-4)
    config = load_config(DeployConfig, [Path(FRANKA[0]), tmp_path / "settings.yaml"], [FRANKA[1]])
    assert isinstance(config.robot, FrankaConfig)
    assert config.robot.host == "nowhere"
    assert config.robot.translational_stiffness_n_m != 800.0
    assert config.robot.damping is not None
    assert robot.calls[0] == "connect"
    assert robot.calls[-1] == "close"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_and_stop_the_robot(
    checkpoint: Path, tmp_path: Path, robot: ShyRobot, number: signal.Signals
) -> None:
    robot.when_commanded = lambda num: os.kill(os.getpid(), number) if num == 5 else None
    result = calibrate(checkpoint, tmp_path, *FRANKA)
    outcome = {signal.SIGINT: "stopped", signal.SIGTERM: "estop"}[number]
    assert f"the step along x ended as {outcome}" in str(result.exception)
    assert robot.num_commands <= 6
    assert robot.calls[-1] == "close"
    assert ("stop" in robot.calls) is (number == signal.SIGTERM)


def test_a_robot_that_hangs_is_stopped_by_the_watchdog(checkpoint: Path, tmp_path: Path, robot: ShyRobot) -> None:
    stopped_while_blocked: list[bool] = []

    def block(num: int) -> None:
        if num == 5:
            deadline_s = time.monotonic() + 30.0
            while "stop" not in robot.calls and time.monotonic() < deadline_s:
                time.sleep(0.01)
            stopped_while_blocked.append("stop" in robot.calls)

    robot.when_commanded = block
    assert calibrate(checkpoint, tmp_path, *FRANKA).exit_code != 0
    assert stopped_while_blocked == [True]


def test_a_fault_ends_it_and_nothing_is_cleared(checkpoint: Path, tmp_path: Path, robot: ShyRobot) -> None:
    def fail(num: int) -> None:
        if num == 5:
            raise RobotError("a reflex")

    robot.when_commanded = fail
    assert "ended as fault: a reflex" in str(calibrate(checkpoint, tmp_path, *FRANKA).exception)
    assert "recover" not in robot.calls


def test_the_reference_is_the_world_of_the_training(checkpoint: Path, tmp_path: Path) -> None:
    def config(*words: str) -> CalibrationConfig:
        return load_config(CalibrationConfig, [Path("configs/robots/franka.yaml")], list(words))

    assert training_suite(checkpoint, config()) == TabletopConfig(image_size=32)  # from the run's config.yaml
    named = training_suite(checkpoint, config("world.type=libero", "world.image_size=64"))
    assert (named.type, named.image_size) == ("libero", 64)
    (tmp_path / "alone").mkdir()
    with pytest.raises(ValueError, match=r"name it, e\.g\. world\.type=tabletop"):
        training_suite(tmp_path / "alone", config())
    sim = CalibrationConfig(robot=SimRobotConfig(suite=TabletopConfig(image_size=16)), safety=config().safety)
    assert training_suite(tmp_path / "alone", sim) == TabletopConfig(image_size=16)


def test_another_world_than_the_contracts_and_modes_that_do_not_move_are_refused(
    checkpoint: Path, tmp_path: Path, robot: ShyRobot
) -> None:
    wrong = calibrate(checkpoint, tmp_path, *FRANKA, "world.type=tabletop", "world.image_size=64")
    assert "camera agentview: checkpoint 32, 32, bottom_up | world 64, 64, bottom_up" in str(wrong.exception)
    dry = calibrate(checkpoint, tmp_path, *FRANKA, "runtime.mode=dry_run")
    assert "runtime.mode is dry_run" in str(dry.exception)
    assert robot.calls == []
