"""The learning curve of a run as a picture, from the rows of its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vla_rl.evaluation.intervals import wilson_interval
from vla_rl.run import atomic_path

Rows = Sequence[Mapping[str, float]]

SAMPLED_SUCCESS = "rollout/success"
VALIDATION_SUCCESS = "eval/success"
VALIDATION_STARTS = "eval/num_starts"
ENTROPY = "update/entropy"
KEPT_GROUPS = "groups/kept_fraction"
TRAIN_MINUTES = "time/train_minutes"

SMOOTHING_ITERATIONS = 10
_BLUE, _ORANGE, _GRAY = "#3b6fb6", "#d9722b", "#6b6b6b"


def plot_learning_curve(rows: Rows, path: Path, title: str) -> None:
    """Draw success (sampled in training, greedy in validation), entropy and kept groups over the iterations as a PNG.

    Args:
        rows: Rows of `metrics.jsonl` in order, each with "iteration"; other names may be missing in some rows.
            Validation rates are drawn with 95 % Wilson intervals; the top axis shows "time/train_minutes", the wall
            time without validation.
        path: Ends in ".png"; its folder is created if needed. It appears under its name only when it is complete.
        title: Stands above the picture.

    Raises:
        ValueError: There is nothing to draw.
    """
    if not any(SAMPLED_SUCCESS in row or VALIDATION_SUCCESS in row for row in rows):
        raise ValueError(
            f"none of the {len(rows)} rows has {SAMPLED_SUCCESS!r} or {VALIDATION_SUCCESS!r}; give rows of an RL run"
        )
    figure = Figure(figsize=(8, 6), layout="constrained")
    success, entropy, kept = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1.3, 1.3])
    figure.align_ylabels()
    _draw_success(success, rows)
    _draw_series(entropy, rows, ENTROPY, "entropy\n(nat)")
    _draw_series(kept, rows, KEPT_GROUPS, "groups\nkept")
    kept.set_ylim(0, 1)
    kept.set_xlabel("iteration")
    _add_time_axis(success, rows)
    success.set_title(title)
    for axes in (success, entropy, kept):
        axes.grid(alpha=0.25)
        axes.spines["right"].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def smooth(values: Float64[np.ndarray, " time"], window: int) -> Float64[np.ndarray, " time"]:
    """Mean over the last `window` values (over all so far at the beginning): never looks ahead."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


def _series(rows: Rows, name: str) -> tuple[Float64[np.ndarray, " time"], Float64[np.ndarray, " time"]]:
    """Iterations and values of the rows that have the metric."""
    points = [(row["iteration"], row[name]) for row in rows if name in row]
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _draw_success(axes: Axes, rows: Rows) -> None:
    iterations, sampled = _series(rows, SAMPLED_SUCCESS)
    if len(sampled):
        axes.plot(iterations, sampled, color=_BLUE, alpha=0.25, linewidth=1)
        label = f"sampled, training starts (mean of {SMOOTHING_ITERATIONS} iterations)"
        axes.plot(iterations, smooth(sampled, SMOOTHING_ITERATIONS), color=_BLUE, linewidth=2, label=label)
    validated = [row for row in rows if VALIDATION_SUCCESS in row]
    if validated:
        rates = np.array([row[VALIDATION_SUCCESS] for row in validated])
        num_starts = [round(row[VALIDATION_STARTS]) for row in validated]
        intervals = [wilson_interval(round(rate * n), n) for rate, n in zip(rates, num_starts, strict=True)]
        # Rates are rounded to whole successes for the interval; max keeps rounding from making a bar negative.
        below = [max(rate - interval.low, 0.0) for rate, interval in zip(rates, intervals, strict=True)]
        above = [max(interval.high - rate, 0.0) for rate, interval in zip(rates, intervals, strict=True)]
        label = f"greedy, {max(num_starts)} held-out starts (95 % interval)"
        at = [row["iteration"] for row in validated]
        axes.errorbar(at, rates, [below, above], fmt="o", color=_ORANGE, markersize=5, capsize=3, label=label)
    axes.set_ylim(0, 1)
    axes.set_ylabel("success")
    axes.legend(loc="lower right", frameon=False)


def _draw_series(axes: Axes, rows: Rows, name: str, label: str) -> None:
    iterations, values = _series(rows, name)
    if len(values):
        axes.plot(iterations, values, color=_GRAY, alpha=0.3, linewidth=1)
        axes.plot(iterations, smooth(values, SMOOTHING_ITERATIONS), color=_GRAY, linewidth=1.5)
    axes.spines["top"].set_visible(False)
    axes.set_ylabel(label)


def _add_time_axis(axes: Axes, rows: Rows) -> None:
    """Minutes of training along the top, if they were logged."""
    iterations, minutes = _series(rows, TRAIN_MINUTES)
    if len(minutes) < 2:
        axes.spines["top"].set_visible(False)
        return
    ticks = MaxNLocator(nbins=8).tick_values(0.0, minutes[-1])
    ticks = ticks[(ticks >= minutes[0]) & (ticks <= minutes[-1])]
    top = axes.secondary_xaxis("top")
    top.set_xticks(np.interp(ticks, minutes, iterations), [f"{tick:g}" for tick in ticks])
    top.set_xlabel("training time (min)")
