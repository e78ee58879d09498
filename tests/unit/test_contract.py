"""The deployment contract: written into every checkpoint, matched by name, refused with both sides shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import POLICY_SPEC, openvla_policy, tiny_policy

from robots.contract import DeploymentContract, compare, require_match
from robots.robot import RobotDescription, RobotLimits
from sim.mujoco_world import ACTION_MEANING
from vla_rl.policies.loading import load_policy
from vla_rl.types import EnvSpec

SPEC = replace(POLICY_SPEC, action_meaning=ACTION_MEANING)
LIMITS = RobotLimits(
    joint_lower_rad=np.zeros(0),
    joint_upper_rad=np.zeros(0),
    joint_speed_rad_s=np.zeros(0),
    linear_speed_m_s=1.0,
    linear_acceleration_m_s2=10.0,
    linear_jerk_m_s3=100.0,
    angular_speed_rad_s=2.0,
    angular_acceleration_rad_s2=20.0,
    angular_jerk_rad_s3=200.0,
    reach_m=0.8,
)
ROBOT = RobotDescription(
    name="made_up",
    arm="Panda",
    spaces=("ee_delta",),
    state_names=tuple(reversed(SPEC.proprio_names)),
    min_rate_hz=1.0,
    max_rate_hz=30.0,
    limits=LIMITS,
)


@pytest.mark.parametrize("make", [tiny_policy, openvla_policy])
def test_a_saved_policy_carries_its_contract(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    policy = make(SPEC)
    policy.execution_horizon = 5
    policy.save(tmp_path)
    contract = DeploymentContract.load(tmp_path)
    assert contract.policy == type(policy).__name__
    assert contract.action.names == SPEC.action_names
    assert contract.action.units == ("m", "m", "m", "rad", "rad", "rad", "1")
    assert contract.action.scale == (0.05, 0.05, 0.05, 0.5, 0.5, 0.5, 1.0)
    assert contract.action.low == (-0.5,) * 6 + (-1.0,)
    assert contract.action.high == (0.8,) * 6 + (1.0,)
    assert contract.state_names == SPEC.proprio_names
    assert [(camera.name, camera.height, camera.width) for camera in contract.cameras] == [("agentview", 24, 32)]
    assert contract.cameras[0].orientation == "bottom_up"
    assert contract.cameras[0].centre_crop is (make is openvla_policy)
    assert (contract.action_horizon, contract.execution_horizon) == (policy.action_horizon, 5)
    assert contract.training_robot == "Panda"
    assert load_policy(tmp_path).execution_horizon == 5


def test_other_statistics_have_another_digest(tmp_path: Path) -> None:
    one, other = tiny_policy(SPEC), tiny_policy(SPEC)
    other.norm_stats = replace(
        other.norm_stats, action=replace(other.norm_stats.action, q99=other.norm_stats.action.q99 + 1e-9)
    )
    first, second = one.contract(), other.contract()
    assert first is not None
    assert second is not None
    assert first.norm_stats_sha256 != second.norm_stats_sha256
    assert first.norm_stats_sha256 == tiny_policy(SPEC).contract().norm_stats_sha256  # type: ignore[union-attr]


def test_a_simulator_that_does_not_say_what_actions_mean_gives_no_contract(tmp_path: Path) -> None:
    tiny_policy(SPEC).save(tmp_path)
    tiny_policy(POLICY_SPEC).save(tmp_path)  # over the old one
    with pytest.raises(ValueError, match=r"has no contract\.json"):
        DeploymentContract.load(tmp_path)


def contract_of(spec: EnvSpec = SPEC) -> DeploymentContract:
    contract = tiny_policy(spec).contract()
    assert contract is not None
    return contract


def test_a_robot_with_the_same_names_in_another_order_fits() -> None:
    assert compare(contract_of(), ROBOT, ("wrist", "agentview")) == []


@pytest.mark.parametrize(
    ("robot", "cameras", "row"),
    [
        (replace(ROBOT, arm="UR5e"), ("agentview",), "arm: checkpoint Panda | robot UR5e"),
        (replace(ROBOT, spaces=("joint_pos",)), ("agentview",), "action space: checkpoint ee_delta | robot joint_pos"),
        (replace(ROBOT, max_rate_hz=15.0), ("agentview",), "control rate, Hz: checkpoint 20 | robot 1 to 15"),
        (replace(ROBOT, state_names=("eef_pos_x",)), ("agentview",), "state: checkpoint x, y, z"),
        (ROBOT, ("front",), "cameras: checkpoint agentview | robot front"),
        (ROBOT, (), "cameras: checkpoint agentview | robot none"),
    ],
)
def test_a_mismatch_shows_both_sides(robot: RobotDescription, cameras: tuple[str, ...], row: str) -> None:
    with pytest.raises(ValueError, match="was not made for robot 'made_up'") as caught:
        require_match(contract_of(), robot, cameras)
    assert row in str(caught.value)
    assert len(compare(contract_of(), robot, cameras)) == 1
