"""The safety chain: each step by hand, its order, and what no policy can do, whatever it says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import POLICY_SPEC, tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import ValidationError
from ruckig import RuckigError

from robots.contract import DeploymentContract
from robots.robot import RobotDescription, RobotError, RobotLimits, RobotState
from robots.rotations import (
    angle_between,
    matrix_from_rotation_vector,
)
from robots.safety import SafetyChain, SafetyConfig
from robots.shaping import Shaper
from sim.mujoco_world import ACTION_MEANING

RATE_HZ = 20.0
CONTRACT = tiny_policy(replace(POLICY_SPEC, action_meaning=ACTION_MEANING)).contract()
assert isinstance(CONTRACT, DeploymentContract)
HOME = np.array([0.45, 0.0, 0.3])
BOX = {"workspace_low_m": (0.3, -0.2, 0.1), "workspace_high_m": (0.6, 0.2, 0.5)}
LIMITS = RobotLimits(
    joint_lower_rad=np.full(7, -2.8),
    joint_upper_rad=np.full(7, 2.8),
    joint_speed_rad_s=np.full(7, 2.0),
    linear_speed_m_s=1.0,
    linear_acceleration_m_s2=5.0,
    linear_jerk_m_s3=100.0,
    angular_speed_rad_s=2.0,
    angular_acceleration_rad_s2=10.0,
    angular_jerk_rad_s3=200.0,
    reach_m=0.85,
    force_n=30.0,
    torque_nm=10.0,
)
ARM = RobotDescription(
    name="arm",
    arm="Panda",
    spaces=("ee_delta",),
    state_names=POLICY_SPEC.proprio_names,
    min_rate_hz=5.0,
    max_rate_hz=100.0,
    limits=LIMITS,
)
SIM = replace(ARM, name="sim", is_lockstep=True)


def state(position: np.ndarray = HOME, rotation: np.ndarray | None = None, **more: object) -> RobotState:
    return RobotState(
        time_s=0.0,
        received_s=0.0,
        position_m=np.array(position),
        rotation=np.eye(3) if rotation is None else rotation,
        joint_positions_rad=np.zeros(7),
        joint_velocities_rad_s=np.zeros(7),
        **more,  # type: ignore[arg-type]
    )


def chain(
    description: RobotDescription = ARM, contract: DeploymentContract = CONTRACT, **config: object
) -> SafetyChain:
    """At home, its ramp behind it."""
    made = SafetyChain(contract, SafetyConfig(**{**BOX, "ramp_in_s": 0.1, **config}), description)  # type: ignore[arg-type]
    for _ in range(3):
        made.review(np.zeros(7), state())
    return made


def action(*values: float) -> np.ndarray:
    return np.array([*values, *[0.0] * (7 - len(values))])


def kinds(decision) -> list[str]:  # type: ignore[no-untyped-def]
    return [event.kind for event in decision.events]


# --- Step by step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        np.array([np.nan] + [0.0] * 6),
        np.array([0.0] * 6 + [np.inf]),
        np.zeros(6),
        np.zeros((1, 7)),
        np.zeros(7, dtype=np.int64),
        np.array([None] * 7),
        [0.0] * 7,
        None,
    ],
)
def test_1_what_is_no_action_is_never_sent(bad: object) -> None:
    decision = chain().review(bad, state())  # type: ignore[arg-type]
    assert decision.command is None
    assert decision.events[0].severity == "hold"


def test_1_a_state_that_is_not_finite_is_a_fault() -> None:
    decision = chain().review(action(), state(position=np.array([np.nan, 0.0, 0.3])))
    assert (decision.command, decision.events[0].severity) == (None, "fault")


def test_2_units_and_the_left_handed_rotation_of_the_base_frame() -> None:
    turned = matrix_from_rotation_vector(np.array([0.0, 0.0, np.pi / 2]))
    asked = action(0.2, 0.0, -0.1, 0.1, 0.0, 0.0, 1.0)
    command = chain(SIM).review(asked, state(rotation=turned)).command
    assert command is not None
    np.testing.assert_allclose(command.position_m, HOME + np.array([0.01, 0.0, -0.005]))
    expected = matrix_from_rotation_vector(np.array([0.05, 0.0, 0.0])) @ turned
    np.testing.assert_allclose(command.rotation, expected, atol=1e-12)
    assert command.gripper == 1.0
    assert command.action is asked


def test_2_the_tool_frame_multiplies_from_the_right() -> None:
    turned = matrix_from_rotation_vector(np.array([0.0, 0.0, np.pi / 2]))
    tool = CONTRACT.model_copy(update={"action": CONTRACT.action.model_copy(update={"frame": "tool"})})
    command = chain(SIM, tool).review(action(0.2, 0.0, 0.0, 0.1), state(rotation=turned)).command
    assert command is not None
    np.testing.assert_allclose(command.position_m, HOME + np.array([0.0, 0.01, 0.0]), atol=1e-12)
    np.testing.assert_allclose(
        command.rotation, turned @ matrix_from_rotation_vector(np.array([0.05, 0, 0])), atol=1e-12
    )


@pytest.mark.parametrize(
    ("closes_at", "asked", "sent"), [(1, 1.0, 1.0), (1, -1.0, -1.0), (-1, 1.0, -1.0), (1, 7.0, 1.0)]
)
def test_2_the_grippers_sign_is_the_contracts(closes_at: int, asked: float, sent: float) -> None:
    other = CONTRACT.model_copy(update={"action": CONTRACT.action.model_copy(update={"gripper_closes_at": closes_at})})
    command = chain(SIM, other).review(action(0, 0, 0, 0, 0, 0, asked), state()).command
    assert command is not None
    assert command.gripper == sent


def test_3_targets_stay_in_the_box_and_on_their_side_of_planes() -> None:
    plane = {"point_m": (0.0, 0.0, 0.25), "normal": (0.0, 0.0, 2.0)}
    made = chain(SIM, keep_out=[plane])
    decision = made.review(action(0.0, 0.0, -1.0), state(position=np.array([0.45, 0.0, 0.27])))
    assert decision.command is not None
    assert decision.command.position_m[2] == pytest.approx(0.25)
    assert decision.command.action is None
    assert kinds(decision) == ["clipped_workspace"]
    decision = made.review(action(1.0), state(position=np.array([0.59, 0.0, 0.3])))
    assert decision.command is not None
    assert decision.command.position_m[0] == 0.6


def test_3_a_target_is_never_left_beyond_another_oblique_plane() -> None:
    # A roof whose sides meet along x = 0.45, z = 0.3; the last plane alone pushes targets beyond the first.
    roof = [{"point_m": (0.45, 0.0, 0.3), "normal": (sign * 0.5, 0.0, -np.sqrt(0.75))} for sign in (-1.0, 1.0)]
    made = chain(SIM, keep_out=roof)
    decision = made.review(action(0.0, 0.0, 1.0), state(position=np.array([0.45, 0.0, 0.29])))
    assert decision.command is not None
    for plane in roof:
        assert np.dot(plane["normal"], decision.command.position_m - np.array(plane["point_m"])) >= -1e-9
    apart = [{"point_m": (0.0, 0.0, z), "normal": (0.0, 0.0, sign)} for z, sign in ((0.4, 1.0), (0.2, -1.0))]
    decision = chain(SIM, keep_out=apart).review(action(), state())
    assert (decision.command, kinds(decision)) == (None, ["no_workspace"])


def test_3_a_shaped_way_does_not_cut_corners_of_oblique_planes() -> None:
    """Each axis is shaped for itself, so ways are curved: without another look this one leads 11 mm beyond the wall."""
    slow = replace(ARM, limits=replace(LIMITS, linear_acceleration_m_s2=2.0, linear_jerk_m_s3=20.0))
    normal = np.array([0.624, -0.781, 0.0])
    wall = {"point_m": tuple(HOME - 0.03 * normal), "normal": tuple(normal)}
    made, rng = chain(slow, keep_out=[wall], leash_m=0.2), np.random.default_rng(3)
    position, deepest, asked, seen = HOME.copy(), 0.0, action(), set()
    for _ in range(200):
        if rng.random() < 0.25:
            asked = action(*rng.choice([-1.0, 0.0, 1.0], 2))
        decision = made.review(asked, state(position=position))
        seen.update(kinds(decision))
        if decision.command is None:
            made.resync(state(position=position))
            continue
        position = decision.command.position_m
        deepest = max(deepest, float(normal @ (np.array(wall["point_m"]) - position)))
    assert "no_workspace" in seen
    assert deepest <= 1e-3 + 1e-9


def test_4_and_5_caps_and_leash() -> None:
    made = chain(linear_speed_m_s=0.2, linear_jerk_m_s3=99.0)  # 10 mm per tick
    decision = made.review(action(1.0), state())
    assert "capped_translation" in kinds(decision)
    assert decision.command is not None
    assert 0 < decision.command.position_m[0] - HOME[0] <= 0.01 + 1e-9
    fast = chain(replace(ARM, limits=replace(LIMITS, linear_acceleration_m_s2=1e4, linear_jerk_m_s3=1e7)))
    for _ in range(20):  # the arm does not move at all
        decision = fast.review(action(0.5), state())
    assert decision.command is not None
    assert "leash_translation" in kinds(decision)
    assert decision.command.position_m[0] - HOME[0] == pytest.approx(0.04)


def test_4_the_first_actions_ramp_in() -> None:
    quick = replace(ARM, limits=replace(LIMITS, linear_acceleration_m_s2=1e4, linear_jerk_m_s3=1e7))
    made = SafetyChain(CONTRACT, SafetyConfig(**BOX, ramp_in_s=0.5), quick)  # type: ignore[arg-type]
    position = HOME.copy()
    steps = []
    for _ in range(12):
        command = made.review(action(1.0), state(position=position)).command
        assert command is not None
        steps.append(command.position_m[0] - position[0])
        position = command.position_m
        if position[0] > 0.55:
            position = HOME.copy()
            made.resync(state())
            break
    assert steps[0] == pytest.approx(0.1 * 1.0 / RATE_HZ)
    assert np.all(np.diff(steps) > 0)


def test_6_a_joint_that_runs_into_its_limit_holds() -> None:
    speeds = np.zeros(7)
    speeds[2] = 0.5
    near, outwards = state(), np.zeros(7)
    outwards[2] = 2.77
    decision = chain().review(action(), replace(near, joint_positions_rad=outwards, joint_velocities_rad_s=speeds))
    assert decision.command is None
    assert kinds(decision) == ["joint_limit"]
    inwards = replace(near, joint_positions_rad=outwards, joint_velocities_rad_s=-speeds)
    assert chain().review(action(), inwards).command is not None


@pytest.mark.parametrize(("angle", "speed", "kind"), [(2.82, 0.0, "joint_beyond"), (-2.82, 0.5, "joint_beyond")])
def test_6_a_joint_beyond_its_limit_is_a_fault(angle: float, speed: float, kind: str) -> None:
    angles, speeds = np.zeros(7), np.zeros(7)
    angles[4], speeds[4] = angle, speed
    measured = replace(state(), joint_positions_rad=angles, joint_velocities_rad_s=speeds)
    decision = chain().review(action(), measured)
    assert (decision.command, kinds(decision)) == (None, [kind])
    assert decision.events[0].severity == "fault"
    bare = RobotState(time_s=0.0, received_s=0.0, position_m=HOME, rotation=np.eye(3), joint_positions_rad=angles)
    assert kinds(chain().review(action(), bare)) == [kind]


@pytest.mark.parametrize(
    ("angle", "speed", "is_held"),
    [
        (2.72, 0.1, True),  # inside the margin of 0.1, outwards
        (2.79, 0.02, True),
        (2.79, 0.005, False),  # stands still: noise
        (2.79, -0.5, False),  # inwards
        (2.65, 1.0, False),  # 0.15 left: may go sqrt(0.5) = 0.71 of 2 rad/s
        (2.65, 1.5, True),
        (2.5, 1.9, False),
    ],
)
def test_6_within_the_margin_a_joint_only_moves_inwards(angle: float, speed: float, is_held: bool) -> None:
    angles, speeds = np.zeros(7), np.zeros(7)
    for sign in (1.0, -1.0):
        angles[1], speeds[1] = sign * angle, sign * speed
        decision = chain().review(action(), replace(state(), joint_positions_rad=angles, joint_velocities_rad_s=speeds))
        assert (decision.command is None) is is_held
        assert kinds(decision) == ["joint_limit"] * is_held


def test_7_the_stream_of_commands_is_smooth_whatever_is_asked() -> None:
    made, rng = chain(leash_m=0.2), np.random.default_rng(0)
    position, positions = HOME.copy(), [HOME.copy()]
    for _ in range(200):
        command = made.review(action(*rng.uniform(-1, 1, 3)), state(position=position)).command
        assert command is not None
        position = command.position_m
        positions.append(position)
    period = 1.0 / RATE_HZ
    speed = np.diff(positions, axis=0) / period
    acceleration = np.diff(speed, axis=0) / period
    assert np.linalg.norm(speed, axis=1).max() <= LIMITS.linear_speed_m_s + 1e-6
    assert np.linalg.norm(acceleration, axis=1).max() <= LIMITS.linear_acceleration_m_s2 + 1e-6


def test_8_forces_hold_and_9_a_runaway_is_a_fault() -> None:
    pressed = state(wrench=np.array([0.0, 0.0, -31.0, 0.0, 0.0, 0.0]))
    assert kinds(chain().review(action(), pressed)) == ["force"]
    assert kinds(chain(force_n=10.0).review(action(), state(wrench=np.array([11.0, 0, 0, 0, 0, 0])))) == ["force"]
    assert chain().review(action(), state(wrench=np.zeros(6))).command is not None
    wild = replace(state(), joint_velocities_rad_s=np.full(7, 3.1))
    decision = chain().review(action(), wild)
    assert decision.command is None
    assert "fault" in [event.severity for event in decision.events]


@pytest.mark.parametrize(
    "change",
    [
        {"position_m": np.array([0.4, np.inf, 0.3])},
        {"rotation": np.full((3, 3), np.nan)},
        {"rotation": np.zeros((3, 3))},
        {"rotation": -np.eye(3)},
        {"joint_velocities_rad_s": np.full(7, np.nan)},
        {"wrench": np.full(6, np.nan)},
    ],
)
def test_a_state_that_cannot_be_is_a_fault_and_nothing_counts_from_it(change: dict) -> None:
    measured = replace(state(), **change)
    decision = chain().review(action(), measured)
    assert (decision.command, decision.events[0].severity) == (None, "fault")
    assert chain().check_start(measured)[0].severity == "fault"
    with pytest.raises(RobotError, match="the measured"):
        chain().resync(measured)


@pytest.mark.parametrize("error", [RuckigError, np.linalg.LinAlgError])
def test_what_a_library_cannot_compute_is_held(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    made = chain()

    def fail(*_: object) -> None:
        raise error("no way")

    if error is RuckigError:
        made._steps._linear._generator = SimpleNamespace(update=fail)
    else:
        monkeypatch.setattr("robots.safety_steps.rotation_vector_from_matrix", fail)
    decision = made.review(action(0.1), state())
    assert (decision.command, kinds(decision)) == (None, ["no_trajectory"])


def test_after_a_resync_nothing_of_the_old_target_is_left() -> None:
    made = chain()
    for _ in range(5):
        made.review(action(1.0), state())
    made.resync(state(position=HOME - 0.05))
    command = made.review(action(), state(position=HOME - 0.05)).command
    assert command is not None
    np.testing.assert_allclose(command.position_m, HOME - 0.05, atol=1e-9)


def test_a_real_arm_that_sags_is_not_followed_down() -> None:
    """Counting from the measured pose, ten actions in x of an arm that hangs 5 mm low sank it further each time."""
    made = chain(leash_m=0.2)
    for _ in range(10):
        made.review(action(0.1), state(position=HOME - np.array([0.0, 0.0, 0.005])))
    command = made.review(action(0.1), state(position=HOME - np.array([0.0, 0.0, 0.005]))).command
    assert command is not None
    assert command.position_m[2] == pytest.approx(HOME[2])


# --- Configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"linear_speed_m_s": 1.5}, "safety.linear_speed_m_s is 1.5, wider than the 1 that robot 'arm' can bear"),
        ({"force_n": 100.0}, "safety.force_n is 100, wider than the 30"),
        ({"workspace_low_m": (2.0, 0, 0), "workspace_high_m": (3.0, 1, 1)}, "begins 2.00 m from the base"),
        ({"workspace_low_m": (-1.0,) * 3, "workspace_high_m": (1.0,) * 3}, "protects nothing"),
        ({"workspace_low_m": (0.3, -100.0, 0.1), "workspace_high_m": (0.6, 100.0, 0.5)}, "from -100 to 100 m along y"),
        ({"workspace_high_m": (0.6, 0.2, 500.0)}, "from 0.1 to 500 m along z"),
    ],
)
def test_limits_that_do_not_limit_are_refused(config: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        chain(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"leash_m": float("nan")},
        {"leash_m": -0.01},
        {"leash_m": 0.0},
        {"linear_speed_m_s": float("inf")},
        {"workspace_low_m": (0.6, -0.2, 0.1)},
        {"workspace_high_m": (float("nan"), 0.2, 0.5)},
        {"keep_out": [{"point_m": (0, 0, 0), "normal": (0, 0, 0)}]},
        {"keep_out": [{"point_m": (0, 0, float("nan")), "normal": (0, 0, 1)}]},
        {"keep_out": [{"point_m": (0, 0, 0), "normal": (0, float("inf"), 1)}]},
        {"workspace_high_m": (float("inf"), 0.2, 0.5)},
        {"ramp_in_s": 0.0},
        {"max_relative_target": 5},
    ],
)
def test_settings_that_would_disable_a_limit_are_refused(config: dict) -> None:
    with pytest.raises(ValidationError):
        SafetyConfig(**{**BOX, **config})  # type: ignore[arg-type]


def test_there_is_no_default_workspace() -> None:
    with pytest.raises(ValidationError, match="workspace_low_m"):
        SafetyConfig()  # type: ignore[call-arg]


def test_a_first_chunk_unlike_training_is_a_fault() -> None:
    made = chain()
    usual = np.random.default_rng(0).uniform(-0.5, 0.8, (8, 7)) * np.array([1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 1.0])
    assert made.check_first_chunk(usual, state()) == ()
    (event,) = made.check_first_chunk(10 * usual, state())
    assert (event.kind, event.severity) == ("unlike_training", "fault")
    assert "dx is" in event.detail
    usual[3, 2] = np.nan
    assert made.check_first_chunk(usual, state())[0].severity == "fault"


@pytest.mark.parametrize("description", [ARM, SIM])
def test_an_episode_begins_inside_the_workspace_or_not_at_all(description: RobotDescription) -> None:
    made = chain(description, keep_out=[{"point_m": (0.0, 0.0, 0.25), "normal": (0.0, 0.0, 1.0)}])
    assert made.check_start(state()) == ()
    (event,) = made.check_start(state(position=np.array([0.65, 0.0, 0.3])))
    assert (event.kind, event.severity) == ("start_outside", "fault")
    assert "at (0.650, 0.000, 0.300) m, x is 50.0 mm outside of the workspace, 0.3 to 0.6 m" in event.detail
    (event,) = made.check_start(state(position=np.array([0.45, 0.0, 0.2])))
    assert "50.0 mm beyond keep-out plane 0" in event.detail


def test_a_first_action_is_held_against_where_the_tool_is() -> None:
    # Leash 40 mm and 50 mm in a control period at 1 m/s; an action of 1 is 50 mm, so (1, 1, 1) is 86.6 mm.
    made, chunk = chain(), np.zeros((8, 7))
    chunk[0, :3] = 1.0
    assert made.check_first_chunk(chunk, state()) == ()
    (event,) = chain(leash_m=0.03).check_first_chunk(chunk, state())
    assert (event.kind, event.severity) == ("first_action_too_far", "fault")
    assert "leads 0.087 m away" in event.detail
    assert "allow 0.080 m" in event.detail
    assert chain(SIM, leash_m=0.03).check_first_chunk(chunk, state()) == ()
    outside = made.check_first_chunk(np.zeros((8, 7)), state(position=np.array([0.45, 0.0, 0.05])))
    assert [event.kind for event in outside] == ["start_outside"]


# --- Whatever the policy says ----------------------------------------------------------------------------------------

anything = npst.arrays(np.float64, 7, elements=st.floats(allow_nan=True, allow_infinity=True, width=64)) | npst.arrays(
    np.float64, 7, elements=st.floats(-1, 1)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(anything, min_size=1, max_size=12))
def test_no_policy_gets_the_tool_out_of_the_box_or_faster_than_allowed(actions: list[np.ndarray]) -> None:
    made, position, rotation = chain(), HOME.copy(), np.eye(3)
    for asked in actions:
        decision = made.review(asked, state(position=position, rotation=rotation))
        if decision.command is None:
            made.resync(state(position=position, rotation=rotation))
            continue
        command = decision.command
        assert np.isfinite(command.position_m).all()
        assert np.all(command.position_m >= np.array(BOX["workspace_low_m"]) - 1e-9)
        assert np.all(command.position_m <= np.array(BOX["workspace_high_m"]) + 1e-9)
        assert np.linalg.norm(command.position_m - position) <= 0.05 + 1e-9
        assert angle_between(command.rotation, rotation) <= 0.1 + 1e-9
        assert -1.0 <= command.gripper <= 1.0
        np.testing.assert_allclose(command.rotation @ command.rotation.T, np.eye(3), atol=1e-9)
        position, rotation = command.position_m, command.rotation


@settings(max_examples=60, deadline=None)
@given(npst.arrays(np.float64, 7, elements=st.floats(-1, 1)))
def test_in_the_training_simulator_an_action_in_range_passes_to_the_bit(asked: np.ndarray) -> None:
    decision = chain(SIM).review(asked, state())
    assert decision.command is not None
    assert decision.command.action is asked
    assert decision.events == ()


def test_a_shaped_step_comes_to_rest_at_its_target_without_overshoot() -> None:
    shaper = Shaper(0.05, speed=1.0, acceleration=5.0, jerk=100.0)
    shaper.reset(np.zeros(3))
    path = np.array([shaper.follow(np.array([0.1, 0.0, 0.0])) for _ in range(30)])[:, 0]
    assert path[-1] == pytest.approx(0.1)
    assert path.max() <= 0.1 + 1e-9
    assert np.all(np.diff(path) >= -1e-12)
    assert path[0] < 0.01  # it begins gently
