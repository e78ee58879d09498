"""Intervals and tests of success rates against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rl.evaluation.intervals import exact_mcnemar, paired_difference_interval, wilson_interval


def test_wilson_matches_the_hand_worked_half() -> None:
    # p = 1/2, n = 16, and a confidence whose quantile is z = 2 (Phi(2) - Phi(-2) = erf(2 / sqrt 2)):
    # centre = 1/2 by symmetry; half width = 1/(1 + 4/16) * 2 * sqrt(1/64 + 4/1024) = 1.6 * sqrt(5/256) = sqrt(5)/10.
    interval = wilson_interval(8, 16, confidence=math.erf(math.sqrt(2)))
    assert interval.low == pytest.approx(0.5 - math.sqrt(5) / 10, abs=1e-9)
    assert interval.high == pytest.approx(0.5 + math.sqrt(5) / 10, abs=1e-9)


def test_wilson_matches_the_hand_worked_zero_and_all() -> None:
    # No success in n: the upper end solves p = z * sqrt(p (1 - p) / n), so p = z^2 / (n + z^2); z = 1.959964, n = 10.
    z_squared = 1.959963984540054**2
    none, all_ = wilson_interval(0, 10), wilson_interval(10, 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(z_squared / (10 + z_squared))
    assert all_.low == pytest.approx(10 / (10 + z_squared))
    assert all_.high == 1.0


@given(num_trials=st.integers(1, 500), data=st.data())
def test_wilson_ends_solve_the_score_equation(num_trials: int, data: st.DataObject) -> None:
    num_successes = data.draw(st.integers(0, num_trials))
    interval = wilson_interval(num_successes, num_trials)
    assert 0.0 <= interval.low <= num_successes / num_trials <= interval.high <= 1.0
    for end in (interval.low, interval.high):
        # (p_hat - p)^2 = z^2 p (1 - p) / n defines both ends.
        left = (num_successes / num_trials - end) ** 2
        assert left == pytest.approx(1.959963984540054**2 * end * (1 - end) / num_trials, abs=1e-9)


@pytest.mark.parametrize("counts", [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="successes"):
        wilson_interval(*counts)


def test_wilson_refuses_a_percentage() -> None:
    with pytest.raises(ValueError, match="confidence=95"):
        wilson_interval(1, 2, confidence=95)


def test_mcnemar_matches_hand_worked_tails() -> None:
    # 1 against 5: 2 * (C(6,0) + C(6,1)) / 2^6 = 14 / 64.
    assert exact_mcnemar(1, 5) == pytest.approx(14 / 64)
    assert exact_mcnemar(5, 1) == pytest.approx(14 / 64)
    # 0 against 8: 2 / 2^8.
    assert exact_mcnemar(0, 8) == pytest.approx(1 / 128)
    # Equal counts: twice the lower half exceeds 1, so 1. No disagreement at all: 1.
    assert exact_mcnemar(3, 3) == 1.0
    assert exact_mcnemar(0, 0) == 1.0


def test_mcnemar_survives_large_counts() -> None:
    assert 0.0 < exact_mcnemar(900, 1100) < 1e-4


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="negative"):
        exact_mcnemar(-1, 2)


def test_paired_difference_without_correlation_is_the_root_of_squares() -> None:
    # 4 starts of each kind: both rates 1/2, correlation (4*4 - 4*4) = 0, so the half width is sqrt(2) * Wilson's,
    # sqrt(2) * sqrt(5) / 10 = sqrt(10) / 10 at z = 2.
    interval = paired_difference_interval(4, 4, 4, 4, confidence=math.erf(math.sqrt(2)))
    assert interval.low == pytest.approx(-math.sqrt(10) / 10, abs=1e-9)
    assert interval.high == pytest.approx(math.sqrt(10) / 10, abs=1e-9)


def test_paired_difference_is_narrowed_by_agreement() -> None:
    # 8 both, 8 neither: margins (8*8)*(8*8), excess 64 - 16/2 = 56, correlation 56/64 = 7/8.
    # Half width: Wilson's w = sqrt(5)/10; sqrt(w^2 (2 - 2 * 7/8)) = w / 2.
    interval = paired_difference_interval(8, 0, 0, 8, confidence=math.erf(math.sqrt(2)))
    assert interval.high == pytest.approx(math.sqrt(5) / 20, abs=1e-9)
    assert interval.low == pytest.approx(-interval.high)


def test_paired_difference_is_second_minus_first() -> None:
    better = paired_difference_interval(40, 2, 30, 8)
    worse = paired_difference_interval(40, 30, 2, 8)
    assert 0 < better.low < 28 / 80 < better.high
    assert (worse.low, worse.high) == pytest.approx((-better.high, -better.low))


def test_paired_difference_at_a_constant_rate_is_defined() -> None:
    # The second solves every start: its rate has no variance and the correlation is undefined, taken as zero.
    interval = paired_difference_interval(5, 0, 5, 0)
    assert interval.low < 0.5 < interval.high
