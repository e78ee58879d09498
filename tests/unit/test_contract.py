"""The deployment contract: written into every checkpoint, matched by name, refused with both sides shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import POLICY_SPEC, openvla_policy, tiny_policy

from robots.contract import CONTRACT_FILE, DeploymentContract, compare, compare_world, require_match, require_world
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
    assert (contract.action.gripper_range, contract.action.gripper_closes_at) == ((-1.0, 1.0), 1)
    assert contract.state_names == SPEC.proprio_names
    assert contract.state_units == ("m", "m", "m", "rad", "rad", "rad", "m", "m")
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


@pytest.mark.parametrize("unsaid", [{"action_meaning": None}, {"proprio_units": ()}])
def test_a_simulator_that_does_not_say_what_numbers_mean_gives_no_contract(unsaid: dict, tmp_path: Path) -> None:
    tiny_policy(SPEC).save(tmp_path)
    tiny_policy(replace(SPEC, **unsaid)).save(tmp_path)  # over the old one
    with pytest.raises(ValueError, match=r"has no contract\.json"):
        DeploymentContract.load(tmp_path)


def test_a_contract_of_an_older_layout_can_be_evaluated_but_not_deployed(tmp_path: Path) -> None:
    policy = tiny_policy(SPEC)
    policy.execution_horizon = 3
    policy.save(tmp_path)
    document = json.loads((tmp_path / CONTRACT_FILE).read_text())
    del document["state_units"], document["action"]["gripper_range"]
    (tmp_path / CONTRACT_FILE).write_text(json.dumps({**document, "version": 1}))
    assert load_policy(tmp_path).execution_horizon == 3
    with pytest.raises(ValueError, match=r"contract\.json: .* layout 1, expected 2.*units of the state"):
        DeploymentContract.load(tmp_path)
    with pytest.raises(ValueError, match="layout None"):
        DeploymentContract.from_document({"name": "formula"})


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("action.scale", [0.05] * 6, "scale has 6 entries for 7 names: dx, dy"),
        ("action.scale", [0.05] * 6 + [0.0], "expected positive"),
        ("action.low", [float("nan")] + [-1.0] * 6, "low is .*nan.*finite"),
        ("action.high", [float("inf")] + [1.0] * 6, "high is .*inf.*finite"),
        ("action.low", [2.0] * 7, "is above high"),
        ("action.units", ["m"], "units has 1 entries"),
        ("action.names", ["dx", "dy"], "ee_delta has 7 entries, but names has dx, dy"),
        ("action.gripper_range", [1.0, -1.0], "smaller number first"),
        ("action.gripper_range", [-1.0, float("nan")], "finite"),
        ("state_units", ["m"] * 7, "state_units has 7 entries for 8 names"),
        ("state_units", ["deg"] * 8, "state_units.0: Input should be 'm', 'rad' or '1'"),
        ("state_names", ["x"] * 8, "names an entry twice"),
        ("control_rate_hz", float("inf"), "control_rate_hz"),
        ("execution_horizon", 99, "execution_horizon 99 is above"),
    ],
)
def test_a_damaged_contract_says_where(where: str, value: object, message: str, tmp_path: Path) -> None:
    tiny_policy(SPEC).save(tmp_path)
    document = json.loads((tmp_path / CONTRACT_FILE).read_text())
    *path, last = where.split(".")
    block = document
    for name in path:
        block = block[name]
    block[last] = value
    (tmp_path / CONTRACT_FILE).write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        DeploymentContract.load(tmp_path)


def contract_of(spec: EnvSpec = SPEC) -> DeploymentContract:
    contract = tiny_policy(spec).contract()
    assert contract is not None
    return contract


def test_a_robot_with_the_same_names_in_another_order_fits() -> None:
    assert compare(contract_of(), ROBOT, ("wrist", "agentview")) == []


def test_a_world_must_be_like_the_one_of_training() -> None:
    require_world(contract_of(), SPEC)
    meaning = replace(ACTION_MEANING, gripper_closes_at=-1, frame="tool")
    other = replace(SPEC, action_meaning=meaning, image_size=(32, 32), cameras=("front",))
    with pytest.raises(ValueError, match="was not made for this world") as caught:
        require_world(contract_of(), other)
    for row in (
        "action frame: checkpoint base | world tool",
        "gripper closes at: checkpoint 1 | world -1",
        "cameras: checkpoint agentview | world front",
        "camera agentview: checkpoint 24, 32, bottom_up | world 32, 32, bottom_up",
    ):
        assert row in str(caught.value)
    assert "arm: checkpoint Panda | world not said" in compare_world(contract_of(), POLICY_SPEC)


def test_a_gripper_in_another_range_is_refused() -> None:
    contract = contract_of(replace(SPEC, action_meaning=replace(ACTION_MEANING, gripper_range=(0.0, 1.0))))
    assert compare(contract, ROBOT, ("agentview",)) == ["gripper range: checkpoint 0.0, 1.0 | robot -1.0, 1.0"]


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
