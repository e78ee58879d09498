"""Which groups are kept, what is carried over, that every drop is counted, and that carried groups survive a file."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tabular import decision, episode

from vla_rl.rollout.episode_files import load_groups, save_groups
from vla_rl.rollout.filters import GroupBuffer, GroupFilterConfig, judge_group
from vla_rl.types import Episode, Start, WorldState

PAPER = GroupFilterConfig()


def group(num_successes: int, size: int = 8, *, crashed: int = 0, index: int = 0, version: int = 0) -> list[Episode]:
    """Successes first, then failures, then crashed episodes."""
    members = [
        episode(success=member < num_successes, group=index, version=version) for member in range(size - crashed)
    ]
    return members + [episode(crashed=True, group=index, version=version) for _ in range(crashed)]


@pytest.mark.parametrize(
    ("num_successes", "size", "verdict"),
    [
        (0, 8, "too_few_successes"),
        (1, 8, "kept"),
        (7, 8, "kept"),
        (8, 8, "too_many_successes"),
        # Beyond ten members the bounds also drop groups that are barely mixed: 1/12 < 0.1.
        (1, 12, "too_few_successes"),
        (2, 12, "kept"),
        (11, 12, "too_many_successes"),
        (1, 10, "kept"),
    ],
)
def test_bounds(num_successes: int, size: int, verdict: str) -> None:
    members = group(num_successes, size)
    assert judge_group(members, PAPER) == (verdict, members)


def test_disabled_filter_keeps_uniform_groups() -> None:
    config = GroupFilterConfig(enabled=False)
    assert [judge_group(group(k), config)[0] for k in (0, 4, 8)] == ["kept"] * 3
    assert judge_group(group(1, size=1), config)[0] == "kept"


@pytest.mark.parametrize(
    ("num_successes", "num_crashed", "verdict"),
    [(1, 6, "kept"), (2, 6, "too_many_successes"), (0, 1, "too_few_successes"), (1, 7, "crashed"), (0, 8, "crashed")],
)
def test_crashed_episodes_are_no_members(num_successes: int, num_crashed: int, verdict: str) -> None:
    everyone = group(num_successes, crashed=num_crashed)
    assert judge_group(everyone, PAPER) == (verdict, everyone[: 8 - num_crashed])


def test_crashes_drop_a_group_even_if_the_filter_is_disabled() -> None:
    assert judge_group(group(1, crashed=7), GroupFilterConfig(enabled=False))[0] == "crashed"


def test_bounds_that_exclude_each_other_are_rejected() -> None:
    with pytest.raises(ValidationError, match="no group could be kept"):
        GroupFilterConfig(min_success_rate=0.6, max_success_rate=0.5)


def test_every_finished_group_is_accounted_for() -> None:
    buffer = GroupBuffer(PAPER)
    buffer.begin_iteration(policy_version=0)
    for index, num_successes in enumerate([0, 3, 8, 8, 5, 1]):
        buffer.add(group(num_successes, index=index))
    buffer.add(group(1, crashed=7))
    assert [taken[0].group_index for taken in buffer.take(2)] == [1, 4]
    metrics = buffer.metrics()
    expected = {
        "finished": 7,
        "kept": 3,
        "taken": 2,
        "surplus": 1,
        "carried": 0,
        "crashed_episodes": 7,
        "dropped_too_few_successes": 1,
        "dropped_too_many_successes": 2,
        "dropped_crashed": 1,
        "dropped_too_old": 0,
        "dropped_surplus": 0,
    }
    assert {name: metrics[f"groups/{name}"] for name in expected} == expected
    assert metrics["groups/kept_fraction"] == pytest.approx(3 / 7)
    assert metrics["groups/success_rate"] == pytest.approx((0 + 3 + 8 + 8 + 5 + 1 + 8) / 8 / 7)


def test_surplus_is_used_first_and_ages_out() -> None:
    buffer = GroupBuffer(GroupFilterConfig(max_carry_age=1))
    buffer.begin_iteration(policy_version=0)
    for index in range(5):
        buffer.add(group(4, index=index, version=0))
    buffer.take(2)
    buffer.begin_iteration(policy_version=1)
    assert buffer.metrics()["groups/carried"] == 3
    buffer.add(group(4, index=5, version=1))
    assert [taken[0].group_index for taken in buffer.take(2)] == [2, 3]
    # Group 4 is two versions old now, group 5 only one.
    buffer.begin_iteration(policy_version=2)
    assert buffer.metrics()["groups/dropped_too_old"] == 1
    assert [taken[0].group_index for taken in buffer.take(9)] == [5]


def test_surplus_is_bounded_and_the_newest_stay() -> None:
    buffer = GroupBuffer(GroupFilterConfig(max_carried_groups=2))
    buffer.begin_iteration(policy_version=0)
    for index in range(5):
        buffer.add(group(4, index=index))
    buffer.begin_iteration(policy_version=1)
    assert buffer.metrics()["groups/dropped_surplus"] == 3
    assert [members[0].group_index for members in buffer.groups] == [3, 4]


def test_no_carry_over() -> None:
    buffer = GroupBuffer(GroupFilterConfig(max_carry_age=0))
    buffer.begin_iteration(policy_version=0)
    buffer.add(group(4))
    buffer.begin_iteration(policy_version=1)
    assert buffer.num_groups == 0
    assert buffer.metrics()["groups/dropped_too_old"] == 1


def test_carried_groups_survive_a_file(tmp_path: Path) -> None:
    branched = Start(
        task="toy/reach",
        instruction="reach",
        split="train",
        index=3,
        init=np.array([0.1, 0.2, 0.3]),
        seed=2**40,
        snapshot=WorldState(physics=np.array([1.0, 2.0]), controller=np.array([0.5]), num_steps=16),
    )
    first = [
        episode([decision([1, 2], [-0.1, -2.5], 1, state=4), decision([0, 1], [-1.0, -3.0], 2, temperature=1.6)]),
        episode([decision([2, 2], [-0.7, -0.8], 2)], success=False, version=3),
    ]
    second = Episode(
        start=branched,
        episode_index=11,
        group_index=5,
        policy_version=3,
        decisions=[decision([1, 1], [-0.25, -0.125], 2, state=7)],
        truncated=True,
    )
    save_groups(tmp_path / "groups.npz", [first, [second]])
    restored = GroupBuffer(PAPER)
    restored.restore(load_groups(tmp_path / "groups.npz"))
    assert [len(members) for members in restored.groups] == [2, 1]
    originals = [*first, second]
    for found, original in zip([item for members in restored.groups for item in members], originals, strict=True):
        for name in ("episode_index", "group_index", "policy_version", "success", "truncated", "num_steps"):
            assert getattr(found, name) == getattr(original, name)
        assert (found.start.key, found.start.seed) == (original.start.key, original.start.seed)
        np.testing.assert_array_equal(found.start.init, original.start.init)
        for one, other in zip(found.decisions, original.decisions, strict=True):
            np.testing.assert_array_equal(one.sample, other.sample)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            np.testing.assert_array_equal(one.observation.images, other.observation.images)
            np.testing.assert_array_equal(one.observation.proprio, other.observation.proprio)
            assert one.observation.instruction == other.observation.instruction
            assert one.temperature == other.temperature
    snapshot = restored.groups[1][0].start.snapshot
    assert snapshot is not None
    assert snapshot.num_steps == 16
    np.testing.assert_array_equal(snapshot.physics, [1.0, 2.0])


def test_no_groups_survive_a_file(tmp_path: Path) -> None:
    save_groups(tmp_path / "groups.npz", [])
    assert load_groups(tmp_path / "groups.npz") == []


def test_damaged_and_pickled_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "groups.npz"
    save_groups(path, [group(4)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"groups\.npz' is not a readable file of episodes"):
        load_groups(path)
    np.savez(path, header=np.array({"an": "object"}, dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a readable file of episodes"):
        load_groups(path)
