"""A scripted policy behind a policy server, as a process of its own; says in JSON lines where it is.

The scenario spoils its answers from a time on; see `test_franka_runtime.py`. Times are of the machine's monotonic
clock, which all processes share.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from robots.contract import make_contract
from vla_rl.serving.server import PolicyServer, wait_for_signal
from vla_rl.types import ActionMeaning, EnvSpec

RATE_HZ, CHUNK = 20.0, 8
GOOD_S = 3.0
LATENCIES_S = {"latency_0.2": 0.2, "latency_1.0": 1.0}
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
    """Goes from point to point of the path, by what it sees of the state; after `GOOD_S` its chunks are spoilt."""

    def __init__(self, scenario: str) -> None:
        self._scenario, self._latency_s = scenario, LATENCIES_S.get(scenario, 0.0)
        self._begun_s: float | None = None
        self._num_chunks = 0
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
            self._begun_s = self._begun_s or time.monotonic()
        position = observation["observation/state"][:3].astype(np.float64)
        if self._home is None:
            self._home = position
        if self._scenario == "pick":
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
                say(event="reached", num=self.num_reached)
        for row in actions:  # at most 8 mm per control step, 16 cm/s
            step = np.clip((target - position) * 0.2, -0.008, 0.008)
            position = position + step
            row[:3], row[6] = step / 0.05, gripper
        is_spoilt = self._begun_s is not None and time.monotonic() - self._begun_s > GOOD_S
        return {"actions": self._spoilt(actions) if is_spoilt else actions}

    def _spoilt(self, actions: np.ndarray) -> np.ndarray:
        self._num_chunks += 1
        match self._scenario:
            case "nan":
                actions[:, 1] = np.nan
            case "too_far":
                actions[:, :3] = (1.0, 1.0, 0.0)
            case "discontinuity":
                actions[:, 0] = 1.0 if self._num_chunks % 2 else -1.0
        if self._num_chunks == 1:
            say(event="spoilt", time_s=time.monotonic())
        return actions


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    with PolicyServer(ScriptedPolicy(sys.argv[1]), port=0) as server:
        say(event="serving", url=server.url)
        wait_for_signal()


if __name__ == "__main__":
    main()
