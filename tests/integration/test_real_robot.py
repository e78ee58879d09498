"""`vla-rl run-robot` on a robot that is not a world: LeRobot's factory, cameras, real time, and a person beside it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_lerobot
import numpy as np
import pytest
from fake_lerobot import TwoLinksArm
from typer.testing import CliRunner, Result

from robots.contract import make_contract
from robots.driving import STATE_NAMES
from robots.recorder import finished_episodes, load_episode
from scripts.cli import app
from vla_rl.serving.server import PolicyServer
from vla_rl.types import ActionMeaning, EnvSpec

SPEC = EnvSpec(
    cameras=("agentview",),
    image_size=(16, 16),
    image_orientation="top_down",
    proprio_names=STATE_NAMES,
    action_names=("dx", "dy", "dz", "drx", "dry", "drz", "gripper"),
    control_rate_hz=20.0,
    proprio_units=("m", "m", "m", "rad", "rad", "rad", "m", "m"),
    action_meaning=ActionMeaning(robot="TwoLinks", scale=(0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0)),
)


@dataclass
class Inwards:
    """Moves the tool 1 mm towards the base in every control step, and tells somebody about each request."""

    when_asked: Callable[[int], None] = lambda num: None
    prompts: list[str] = field(default_factory=list)

    @property
    def metadata(self) -> dict[str, Any]:
        contract = make_contract(
            SPEC,
            policy="Inwards",
            action_low=np.full(7, -1.0),
            action_high=np.full(7, 1.0),
            action_horizon=8,
            execution_horizon=8,
            norm_stats_key="made_up",
            norm_stats_sha256="none",
            centre_crop=False,
        )
        assert contract is not None
        return {"contract": contract.model_dump(mode="json")}

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(observation["prompt"])
        self.when_asked(len(self.prompts))
        actions = np.zeros((8, 7))
        actions[:, 0], actions[:, 6] = -0.02, -1.0
        return {"actions": actions}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TwoLinksArm]:
    return fake_lerobot.install(monkeypatch)


@pytest.fixture
def policy() -> Iterator[tuple[Inwards, str]]:
    policy = Inwards()
    with PolicyServer(policy, port=0) as server:
        yield policy, server.url


def words(url: str, folder: Path, *more: str) -> list[str]:
    (folder / "arm.urdf").write_text("<robot/>")
    settings = (
        "robot.lerobot_type=two_links",
        "robot.options.port=nowhere",
        f"robot.urdf={folder / 'arm.urdf'}",
        "robot.arm=TwoLinks",
        "robot.joints=[shoulder, elbow]",
        "robot.joint_lower_rad=[-3.0, 0.0]",
        "robot.joint_upper_rad=[3.0, 3.0]",
        "cameras=[{type: fake, name: agentview}]",
        "safety.workspace_low_m=[0.05, 0.05, -0.1]",
        "safety.workspace_high_m=[0.44, 0.44, 0.1]",
        "robot.reach_m=0.61",
    )
    return ["run-robot", "--server", url, "--robot", "lerobot", *settings, "--out", str(folder / "out"), *more]


def run(url: str, folder: Path, *more: str, typed: str = "\n") -> Result:
    return CliRunner().invoke(app, words(url, folder, "--instruction", "come here", *more), input=typed)


def test_an_arm_of_lerobots_from_a_config(made: list[TwoLinksArm], policy: tuple[Inwards, str], tmp_path: Path) -> None:
    result = run(policy[1], tmp_path, "runtime.max_steps=30", typed="\ny\n")
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    (arm,) = made
    assert arm.config.port == "nowhere"
    assert not arm.is_connected
    (path,) = finished_episodes(tmp_path / "out")
    recording = load_episode(path)
    assert (recording.info["outcome"], recording.info["marked_by"]) == ("success", "operator")
    assert recording.info["robot"] == "TwoLinks"
    moved = recording.measured[-1, :3] - recording.measured[0, :3]
    assert -0.03 < moved[0] < -0.005
    assert np.abs(moved[1:]).max() < 1e-3
    assert set(policy[0].prompts) == {"preflight", "come here"}
    assert "1 of 1 episodes solved" in result.output.replace("\n", " ")


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGINT, "success"), (signal.SIGTERM, "estop")])
def test_an_interrupt_ends_the_episode_and_a_request_to_terminate_is_an_emergency_stop(
    made: list[TwoLinksArm], policy: tuple[Inwards, str], tmp_path: Path, number: signal.Signals, outcome: str
) -> None:
    policy[0].when_asked = lambda num: os.kill(os.getpid(), number) if num == 3 else None
    result = run(policy[1], tmp_path, "--episodes", "1", typed="\ny\n")
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    (path,) = finished_episodes(tmp_path / "out")
    recording = load_episode(path)
    assert recording.info["outcome"] == outcome
    assert len(recording.asked) < 100
    assert not made[0].is_connected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_instruction_nothing_is_made(
    made: list[TwoLinksArm], policy: tuple[Inwards, str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, words(policy[1], tmp_path))
    assert "--instruction" in str(result.exception)
    assert not made


def test_what_is_missing_is_one_clear_message(
    policy: tuple[Inwards, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    result = run(policy[1], tmp_path)
    assert isinstance(result.exception, ImportError)
    assert "pip install lerobot" in str(result.exception)
    fake_lerobot.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "lerobot.model.kinematics", None)
    assert "pip install placo" in str(run(policy[1], tmp_path).exception)
    fake_lerobot.install(monkeypatch)
    assert "which is no file" in str(run(policy[1], tmp_path, "robot.urdf=missing.urdf").exception)
    assert "set it to true" in str(run(policy[1], tmp_path, "robot.options.use_degrees=false").exception)
    assert "it knows two_links" in str(run(policy[1], tmp_path, "robot.lerobot_type=so101_follower").exception)
