"""Confidence intervals of success rates. Every success rate that leaves this project carries one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Interval:
    """A confidence interval; both ends belong to it.

    Attributes:
        low: Lower end.
        high: Upper end.
    """

    low: float
    high: float


def wilson_interval(num_successes: int, num_trials: int, confidence: float = 0.95) -> Interval:
    """Wilson score interval of a success rate; stays inside [0, 1] and is honest at 0 % and 100 %.

    Args:
        num_successes: Successes, 0 ... `num_trials`.
        num_trials: Episodes, at least 1.
        confidence: Coverage, in (0, 1).

    Raises:
        ValueError: The counts or the confidence are out of range.

    Reference: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if num_trials < 1 or not 0 <= num_successes <= num_trials:
        raise ValueError(
            f"got {num_successes} successes in {num_trials} trials; expected at least one trial and "
            "0 <= successes <= trials: was anything evaluated?"
        )
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"got confidence={confidence}; expected a number between 0 and 1, e.g. 0.95")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = num_successes / num_trials
    shrink = 1 / (1 + z**2 / num_trials)
    center = shrink * (rate + z**2 / (2 * num_trials))
    half_width = shrink * z * math.sqrt(rate * (1 - rate) / num_trials + z**2 / (4 * num_trials**2))
    # At 0 and at n successes the ends are exactly 0 and 1; rounding would miss them by 1e-17.
    low = 0.0 if num_successes == 0 else center - half_width
    high = 1.0 if num_successes == num_trials else center + half_width
    return Interval(low, high)


def paired_difference_interval(
    num_both: int, num_only_first: int, num_only_second: int, num_neither: int, confidence: float = 0.95
) -> Interval:
    """Interval of the difference of two success rates (second minus first) measured on the same starts.

    Wilson limits of the two rates are combined with their estimated correlation: the more often the two agree on a
    start, the narrower the interval.

    Args:
        num_both: Starts that both solved.
        num_only_first: Starts that only the first solved.
        num_only_second: Starts that only the second solved.
        num_neither: Starts that neither solved.
        confidence: Coverage, in (0, 1).

    Raises:
        ValueError: The counts or the confidence are out of range.

    Reference: R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on
    paired data", Statistics in Medicine 17 (1998), method 10 (a positive correlation is corrected for continuity).
    """
    num_starts = num_both + num_only_first + num_only_second + num_neither
    first, second = num_both + num_only_first, num_both + num_only_second
    interval_first = wilson_interval(first, num_starts, confidence)
    interval_second = wilson_interval(second, num_starts, confidence)
    rate_first, rate_second = first / num_starts, second / num_starts
    margins = first * (num_starts - first) * second * (num_starts - second)
    correlation = 0.0
    if margins > 0:
        excess: float = num_both * num_neither - num_only_first * num_only_second
        if excess > 0:
            excess = max(excess - num_starts / 2, 0.0)
        correlation = excess / math.sqrt(margins)

    def distance(toward_first: float, toward_second: float) -> float:
        covariance = 2 * correlation * toward_first * toward_second
        return math.sqrt(max(toward_first**2 - covariance + toward_second**2, 0.0))

    difference = rate_second - rate_first
    down = distance(interval_first.high - rate_first, rate_second - interval_second.low)
    up = distance(rate_first - interval_first.low, interval_second.high - rate_second)
    return Interval(difference - down, difference + up)


def exact_mcnemar(num_only_first: int, num_only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test: do the two differ on the starts where they disagree?

    Under the null hypothesis each disagreement favours either with probability 1/2, so the p-value is twice the
    binomial tail at the smaller count, at most 1.

    Args:
        num_only_first: Starts that only the first solved.
        num_only_second: Starts that only the second solved.

    Raises:
        ValueError: A count is negative.

    Reference: Q. McNemar, "Note on the sampling error of the difference between correlated proportions or percentages",
    Psychometrika 12 (1947); exact version: binomial test on the discordant pairs.
    """
    if num_only_first < 0 or num_only_second < 0:
        raise ValueError(f"got {num_only_first} and {num_only_second} disagreements; counts cannot be negative")
    num_discordant = num_only_first + num_only_second
    tail = sum(math.comb(num_discordant, k) for k in range(min(num_only_first, num_only_second) + 1))
    # Whole numbers until the last division: a float 2.0**n overflows beyond 1,023 disagreements.
    return min(1.0, 2 * tail / (1 << num_discordant))
