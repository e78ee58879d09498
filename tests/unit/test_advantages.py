"""Outcome advantages against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.algos.advantages import DrGrpoAdvantage, GrpoAdvantage, RlooAdvantage, group_advantages

# G = 8 with k successes: mean k/8, unbiased variance k (8 - k) / 56.
# E.g. k = 2: mean 0.25, std sqrt(12 / 56) = 0.46291; (1 - 0.25) / 0.46291 = 1.6202, -0.25 / 0.46291 = -0.5401.
GRPO_OF_EIGHT = [
    (1, 2.4749, -0.3536),
    (2, 1.6202, -0.5401),
    (3, 1.2076, -0.7246),
    (4, 0.9354, -0.9354),
    (5, 0.7246, -1.2076),
    (6, 0.5401, -1.6202),
    (7, 0.3536, -2.4749),
]


@pytest.mark.parametrize(("num_successes", "of_success", "of_failure"), GRPO_OF_EIGHT)
def test_grpo_of_eight_episodes(num_successes: int, of_success: float, of_failure: float) -> None:
    rewards = np.array([1.0] * num_successes + [0.0] * (8 - num_successes))
    advantages = group_advantages(rewards, np.zeros(8, dtype=int), GrpoAdvantage())
    assert advantages[:num_successes] == pytest.approx(of_success, abs=5e-5)
    assert advantages[num_successes:] == pytest.approx(of_failure, abs=5e-5)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # The others of a success have rewards 0, 0, 1: mean 1/3; the others of a failure 1, 0, 1: mean 2/3.
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), np.zeros(4, dtype=int), RlooAdvantage())
    assert advantages == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_dr_grpo_subtracts_the_mean_only() -> None:
    advantages = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, dtype=int), DrGrpoAdvantage())
    assert advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("config", [GrpoAdvantage(), RlooAdvantage(), DrGrpoAdvantage()])
def test_groups_are_separate_and_may_interleave(config: GrpoAdvantage) -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    groups = np.array([3, 7, 3, 7, 3, 7])
    advantages = group_advantages(rewards, groups, config)
    for group in (3, 7):
        alone = group_advantages(rewards[groups == group], np.zeros(3, dtype=int), config)
        assert advantages[groups == group] == pytest.approx(alone)
    assert advantages[0] > 0 > advantages[2]


@pytest.mark.parametrize("config", [GrpoAdvantage(), RlooAdvantage(), DrGrpoAdvantage()])
def test_a_uniform_group_has_no_advantage_and_a_group_of_one_no_baseline(config: GrpoAdvantage) -> None:
    advantages = group_advantages(np.array([1.0, 1.0, 1.0, 1.0]), np.array([0, 0, 0, 1]), config)
    assert advantages == pytest.approx([0.0, 0.0, 0.0, 1.0])


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=16), st.floats(0.5, 10))
def test_grpo_sums_to_zero_and_ignores_the_scale_of_the_reward(rewards: list[float], scale: float) -> None:
    groups = np.zeros(len(rewards), dtype=int)
    advantages = group_advantages(np.array(rewards), groups, GrpoAdvantage())
    assert advantages.sum() == pytest.approx(0.0, abs=1e-9)
    assert group_advantages(scale * np.array(rewards), groups, GrpoAdvantage()) == pytest.approx(advantages, abs=1e-4)
