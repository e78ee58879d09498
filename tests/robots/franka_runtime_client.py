"""A scripted pick path through policy server, client, runtime and safety chain on a Franka; says in JSON how it went.

The scenario provokes one fault; see `test_franka_runtime.py`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from robots.cameras import FakeCamera, FakeCameraConfig
from robots.contract import make_contract
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.robot import RobotError, RobotState
from robots.run_types import EpisodeReport, InferenceError, RuntimeConfig
from robots.runtime import Runtime
from robots.safety import SafetyChain, SafetyConfig
from robots.watchdog import Watchdog
from vla_rl.serving.chunking import ChunkBuffer
from vla_rl.serving.client import PolicyClient, PolicyError
from vla_rl.serving.server import PolicyServer
from vla_rl.types import ActionMeaning, EnvSpec

RATE_HZ, CHUNK = 20.0, 8
HOME = (0.0, -0.6, 0.0, -2.4, 0.0, 1.8, 0.785)
# Above the cube, down, close, up, over, down, open, up: displacements from the home pose (m), gripper.
PATH = (
    ((0.05, 0.05, -0.05), -1.0),
    ((0.05, 0.05, -0.15), -1.0),
    ((0.05, 0.05, -0.15), 1.0),
    ((0.05, 0.05, -0.02), 1.0),
    ((0.05, -0.10, -0.02), 1.0),
    ((0.05, -0.10, -0.13), 1.0),
    ((0.05, -0.10, -0.13), -1.0),
    ((0.0, 0.0, 0.0), -1.0),
)
# Positions in the base frame: above the cube of `franky_sim_server.py`, down, close, up; it stays there.
PICK = (((0.5, 0.0, 0.18), -1.0), ((0.5, 0.0, 0.02), -1.0), ((0.5, 0.0, 0.02), 1.0), ((0.5, 0.0, 0.25), 1.0))
SPEC = EnvSpec(
    cameras=("agentview",),
    image_size=(64, 64),
    image_orientation="bottom_up",
    proprio_names=(*(f"eef_pos_{a}" for a in "xyz"), *(f"eef_axis_angle_{a}" for a in "xyz"), "finger_1", "finger_2"),
    action_names=("dx", "dy", "dz", "drx", "dry", "drz", "gripper"),
    control_rate_hz=RATE_HZ,
    proprio_units=("m", "m", "m", "rad", "rad", "rad", "m", "m"),
    action_meaning=ActionMeaning(robot="Panda", scale=(0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0)),
)


class ScriptedPolicy:
    """Goes from point to point of the path, by what it sees of the state; `spoil` changes its chunks."""

    def __init__(self, spoil: Callable[[np.ndarray], np.ndarray], latency_s: float, is_picking: bool) -> None:
        self._spoil, self._latency_s, self._is_picking = spoil, latency_s, is_picking
        self._home: np.ndarray | None = None
        self.num_reached, self._waited = 0, 0
        contract = make_contract(
            SPEC,
            policy="ScriptedPolicy",
            action_low=np.full(7, -1.0),
            action_high=np.full(7, 1.0),
            action_horizon=CHUNK,
            execution_horizon=CHUNK,
            norm_stats_key="scripted",
            norm_stats_sha256="none",
            centre_crop=False,
        )
        assert contract is not None
        self.contract = contract

    @property
    def metadata(self) -> dict[str, Any]:
        return {"contract": self.contract.model_dump(mode="json")}

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        if observation["prompt"] != "preflight":
            time.sleep(self._latency_s)
        position = observation["observation/state"][:3].astype(np.float64)
        if self._home is None:
            self._home = position
        if self._is_picking:
            point, gripper = PICK[min(self.num_reached, len(PICK) - 1)]
            target = np.array(point)
        else:
            offset, gripper = PATH[self.num_reached % len(PATH)]
            target = self._home + np.array(offset)
        actions = np.zeros((CHUNK, 7))
        if np.linalg.norm(target - position) < 0.02:
            self._waited += 1
            if self._waited > 3:
                self.num_reached, self._waited = self.num_reached + 1, 0
        for row in actions:  # at most 8 mm per control step, 16 cm/s
            step = np.clip((target - position) * 0.2, -0.008, 0.008)
            position = position + step
            row[:3], row[6] = step / 0.05, gripper
        return {"actions": self._spoil(actions)}


class Watched(FrankaRobot):
    """Keeps every state that it shows."""

    def __init__(self, config: FrankaConfig) -> None:
        super().__init__(config)
        self.states: list[RobotState] = []

    def observe(self) -> RobotState:
        self.states.append(super().observe())
        return self.states[-1]


def spoiler(scenario: str, is_bad: threading.Event) -> Callable[[np.ndarray], np.ndarray]:
    num_chunks = 0

    def spoil(actions: np.ndarray) -> np.ndarray:
        nonlocal num_chunks
        num_chunks += 1
        if not is_bad.is_set():
            return actions
        match scenario:
            case "nan":
                actions[:, 1] = np.nan
            case "too_far":
                actions[:, :3] = (1.0, 1.0, 0.0)
            case "discontinuity":
                actions[:, 0] = 1.0 if num_chunks % 2 else -1.0
        return actions

    return spoil


def inference(client: PolicyClient) -> Callable[[dict[str, Any], float], Any]:
    def infer(observation: dict[str, Any], deadline_s: float) -> Any:
        try:
            return client.infer(observation, deadline_s=deadline_s)
        except PolicyError as error:
            raise InferenceError(str(error)) from error

    return infer


def make_runtime(
    robot: FrankaRobot, camera: FakeCamera, client: PolicyClient, policy: ScriptedPolicy, seconds: float
) -> Runtime:
    safety = SafetyConfig(workspace_low_m=(0.2, -0.35, 0.005), workspace_high_m=(0.75, 0.35, 0.7))
    return Runtime(
        robot,
        [camera],
        inference(client),
        SafetyChain(policy.contract, safety, robot.description),
        ChunkBuffer(1.0 / RATE_HZ, "weighted"),
        policy.contract,
        RuntimeConfig(max_steps=int(seconds * RATE_HZ), inference_deadline_s=1.5, max_hold_s=2.5),
        watchdog=Watchdog(),
    )


def say_how_it_went(report: EpisodeReport, robot: Watched, policy: ScriptedPolicy) -> None:
    num_reflexes = sum(bool(state.faults) for state in robot.states)
    moved = np.array([state.position_m for state in robot.states])
    final = robot.observe()
    result = {
        "event": "done",
        **asdict(report),
        "num_reflexes": num_reflexes,
        "mode": final.mode,
        "largest_joint_speed": float(np.abs(final.joint_velocities_rad_s).max()),
        "travelled_m": float(np.linalg.norm(np.diff(moved, axis=0), axis=1).sum()),
        "points_reached": policy.num_reached,
    }
    print(json.dumps(result), flush=True)


def main() -> None:
    host, scenario, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    is_bad = threading.Event()
    policy = ScriptedPolicy(
        spoiler(scenario, is_bad), {"latency_0.2": 0.2, "latency_1.0": 1.0}.get(scenario, 0.0), scenario == "pick"
    )
    config = FrankaConfig(host=host, base_in_world_m=(0.0, 0.0, 0.0), realtime="ignore", home_dynamics_factor=0.2)
    robot, camera = Watched(config), FakeCamera(FakeCameraConfig(name="agentview", height=64, width=64))
    with PolicyServer(policy, port=0) as server:
        client = PolicyClient(server.url)
        client.connect()
        runtime = make_runtime(robot, camera, client, policy, seconds)
        robot.connect(10.0)
        try:
            robot.home(HOME)
        except RobotError:  # of a busy machine: lost packets while something else was starting
            robot.recover()
            robot.home(HOME)
        robot.close()
        runtime.preflight()
        match scenario:
            case "killed_server":
                threading.Timer(3.0, server.stop).start()
            case "camera_freeze":
                threading.Timer(3.0, camera.freeze).start()
                threading.Timer(3.6, camera.thaw).start()
            case _:
                threading.Timer(3.0, is_bad.set).start()
        print(json.dumps({"event": "running"}), flush=True)
        say_how_it_went(runtime.run_episode("pick up the cube"), robot, policy)
        runtime.close()
        client.close()


if __name__ == "__main__":
    main()
