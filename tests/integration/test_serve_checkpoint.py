"""A checkpoint behind the server: what it answers, what it refuses, and which checkpoints are not served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import POLICY_SPEC, openvla_policy, random_observations, tiny_policy
from typer.testing import CliRunner

from robots.contract import DeploymentContract
from scripts.cli import app
from scripts.serve import make_server
from sim.mujoco_world import ACTION_MEANING
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Sampling
from vla_rl.serving.client import PolicyClient
from vla_rl.serving.inference import PolicyInference

SPEC = replace(POLICY_SPEC, action_meaning=ACTION_MEANING)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_policy(SPEC, hidden_dim=16, num_keypoints=2).save(folder)
    return folder


def wire_observation(index: int = 0) -> dict:
    (observation,) = random_observations(SPEC, 1, seed=index)
    return {
        "observation/images/agentview": observation.images[0],
        "observation/state": observation.proprio,
        "prompt": observation.instruction,
    }


def test_a_served_checkpoint_acts_as_in_process(checkpoint: Path) -> None:
    policy = tiny_policy(SPEC, hidden_dim=16, num_keypoints=2)
    with make_server(checkpoint, port=0) as server:
        client = PolicyClient(server.url)
        metadata = client.connect()
        assert DeploymentContract.from_document(metadata["contract"]) == DeploymentContract.load(checkpoint)
        assert metadata["policy"] == "TinyVLA"
        assert metadata["server"].startswith("vla-rl ")
        for index in range(3):
            (observation,) = random_observations(SPEC, 1, seed=index)
            expected = policy.act([observation], Sampling(mode="greedy"), [np.random.default_rng(0)]).actions[0]
            actions = client.infer(wire_observation(index), deadline_s=60.0).actions
            assert actions.tobytes() == expected.tobytes()
        client.close()


WRONG = {
    "no image": ({"observation/images/agentview": None}, "observation/images/agentview is NoneType, not uint8"),
    "float image": (
        {"observation/images/agentview": np.zeros((24, 32, 3))},
        r"agentview is float64 of shape \(24, 32, 3\), not uint8 of shape \(24, 32, 3\)",
    ),
    "transposed image": (
        {"observation/images/agentview": np.zeros((3, 24, 32), dtype=np.uint8)},
        r"uint8 of shape \(3, 24, 32\), not uint8 of shape \(24, 32, 3\)",
    ),
    "short state": (
        {"observation/state": np.zeros(7, dtype=np.float32)},
        r"state is float32 of shape \(7,\), not float32 of shape \(8,\): x, y, z, rx, ry, rz, finger_1, finger_2",
    ),
    "double state": ({"observation/state": np.zeros(8)}, r"state is float64 of shape \(8,\), not float32"),
    "NaN": ({"observation/state": np.array([0, np.nan] * 4, dtype=np.float32)}, "not finite in y, rx, rz, finger_2"),
    "no text": ({"prompt": " "}, "prompt is ' ', not an instruction"),
    "unknown": ({"observation/image": 1}, "'observation/image' is unknown"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_observation_is_explained(checkpoint: Path, name: str) -> None:
    change, message = WRONG[name]
    contract = DeploymentContract.load(checkpoint)
    with pytest.raises(ValueError, match=message):
        PolicyInference(tiny_policy(SPEC), contract).infer({**wire_observation(), **change})


def test_everything_that_is_missing_is_named(checkpoint: Path) -> None:
    inference = PolicyInference(tiny_policy(SPEC), DeploymentContract.load(checkpoint))
    with pytest.raises(ValueError, match=r"agentview is missing; observation/state is missing; prompt is missing; exp"):
        inference.infer({})


def test_a_checkpoint_without_a_contract_is_not_served(tmp_path: Path) -> None:
    tiny_policy(hidden_dim=16, num_keypoints=2).save(tmp_path)  # of a suite that does not say what actions mean
    with pytest.raises(ValueError, match=r"has no contract\.json"):
        make_server(tmp_path)
    result = CliRunner().invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 1
    assert "contract.json" in str(result.exception)


def test_statistics_that_are_not_the_contracts_are_not_served(checkpoint: Path, tmp_path: Path) -> None:
    policy = tiny_policy(SPEC, hidden_dim=16, num_keypoints=2)
    stats = policy.norm_stats
    policy.norm_stats = replace(stats, action=replace(stats.action, q99=stats.action.q99 * 2))
    policy.save(tmp_path)
    theirs = DeploymentContract.load(checkpoint)
    theirs.save(tmp_path)  # a contract from another checkpoint
    with pytest.raises(ValueError, match="does not scale actions as its contract") as caught:
        make_server(tmp_path)
    assert f"contract {theirs.norm_stats_sha256} | loaded {policy.statistics_digest}" in str(caught.value)


@pytest.mark.parametrize("make", [tiny_policy, openvla_policy])
def test_statistics_survive_saving_to_the_last_bit(make: Callable[..., TokenPolicy], tmp_path: Path) -> None:
    policy = make(SPEC)
    stats = policy.norm_stats
    policy.norm_stats = replace(stats, action=replace(stats.action, q01=stats.action.q01 / 3))
    policy.save(tmp_path)
    make_server(tmp_path, port=0)


def test_the_command_refuses_an_open_address(checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(checkpoint), "--host", "0.0.0.0"])
    assert "can be reached from other machines" in str(result.exception)
    (tmp_path / "key").write_text("\n")
    result = CliRunner().invoke(app, ["serve", str(checkpoint), "--api-key-file", str(tmp_path / "key")])
    assert "the API key must be" in str(result.exception)
