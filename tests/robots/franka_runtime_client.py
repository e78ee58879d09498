"""Runs an episode on a Franka with the policy server at an address; says in JSON lines how it went.

Unlike `vla-rl run-robot`, it homes the arm first, keeps every state, and has a camera that can freeze.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from robots.cameras import FakeCamera, FakeCameraConfig
from robots.contract import DeploymentContract
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.recorder import finished_episodes, load_episode
from robots.robot import RobotError, RobotState
from robots.run_types import EpisodeReport, RuntimeConfig
from robots.safety import SafetyConfig
from scripts.robot_config import DeployConfig
from scripts.run_robot import make_inference, make_recorder, make_runtime
from vla_rl.serving.client import PolicyClient

HOME = (0.0, -0.6, 0.0, -2.4, 0.0, 1.8, 0.785)
FREEZE_AFTER_S, FREEZE_S = 3.0, 0.3


class Watched(FrankaRobot):
    """Keeps every state that it shows."""

    def __init__(self, config: FrankaConfig) -> None:
        super().__init__(config)
        self.states: list[RobotState] = []

    def observe(self) -> RobotState:
        self.states.append(super().observe())
        return self.states[-1]


class FreezingCamera(FakeCamera):
    """Shows the same picture for `FREEZE_S`, once."""

    def freeze_later(self) -> None:
        threading.Timer(FREEZE_AFTER_S, self._freeze_once).start()

    def _freeze_once(self) -> None:
        self.freeze()
        say(event="frozen", time_s=time.monotonic())
        time.sleep(FREEZE_S)
        self.thaw()


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def say_how_it_went(report: EpisodeReport, robot: Watched, recordings: Path) -> None:
    moved = np.array([state.position_m for state in robot.states])
    final = robot.observe()
    first: dict[str, float] = {}
    for event in load_episode(finished_episodes(recordings)[-1]).events:
        if event.tick > 20:  # the hold at the beginning, before the first answer, is none of the fault's
            first.setdefault(event.kind, event.time_s)
    say(
        event="done",
        **asdict(report),
        first_s=first,
        ended_s=time.monotonic(),
        num_reflexes=sum(bool(state.faults) for state in robot.states),
        faults=sorted({fault for state in robot.states for fault in state.faults}),
        mode=final.mode,
        largest_joint_speed=float(np.abs(final.joint_velocities_rad_s).max()),
        travelled_m=float(np.linalg.norm(np.diff(moved, axis=0), axis=1).sum()),
    )


def main() -> None:
    host, url, scenario, seconds, folder = *sys.argv[1:4], float(sys.argv[4]), Path(sys.argv[5])
    franka = FrankaConfig(host=host, base_in_world_m=(0.0, 0.0, 0.0), realtime="ignore", home_dynamics_factor=0.2)
    config = DeployConfig(
        robot=franka,
        safety=SafetyConfig(workspace_low_m=(0.2, -0.35, 0.005), workspace_high_m=(0.75, 0.35, 0.7)),
        runtime=RuntimeConfig(
            max_steps=int(20.0 * seconds), inference_deadline_s=1.5, max_hold_s=2.5, max_camera_age_s=0.2
        ),
        blend="weighted",
    )
    robot, camera = Watched(franka), FreezingCamera(FakeCameraConfig(name="agentview", height=64, width=64))
    client = PolicyClient(url)
    contract = DeploymentContract.from_document(client.connect()["contract"])
    infer, recorder = make_inference(client, config.action_scale), make_recorder(folder, contract)
    runtime = make_runtime(config, contract, infer, robot, [camera], recorder)
    robot.connect(10.0)
    try:
        robot.home(HOME)
    except RobotError as error:  # of a busy machine: lost packets while something else was starting
        say(event="home failed", words=str(error))
        robot.recover()
        robot.home(HOME)
    robot.close()
    runtime.preflight()
    if scenario == "camera_freeze":
        camera.freeze_later()
    say(event="running")
    report = runtime.run_episode("pick up the cube")
    say_how_it_went(report, robot, folder)
    runtime.close()
    client.close()


if __name__ == "__main__":
    main()
