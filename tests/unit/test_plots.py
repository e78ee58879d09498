"""The learning curve: smoothing by hand, and a picture from complete, sparse and single rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vla_rl.evaluation.plots import plot_learning_curve, smooth


def make_rows(num_rows: int, has_time: bool = True) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for i in range(num_rows):
        row = {"iteration": i, "rollout/success": i / num_rows, "update/entropy": 2.0, "groups/kept_fraction": 0.5}
        if has_time:
            row["time/train_minutes"] = 0.1 * (i + 1)
        if i % 2:
            row |= {"eval/success": 0.5, "eval/num_starts": 64.0}
        rows.append(row)
    return rows


def ink(path: Path) -> int:
    """Number of pixels that are not white."""
    with Image.open(path) as image:
        return int((np.asarray(image.convert("L")) < 255).sum())


def test_smoothing_looks_back_only() -> None:
    # Window 2: 4, (4+2)/2, (2+0)/2, (0+6)/2.
    np.testing.assert_allclose(smooth(np.array([4.0, 2.0, 0.0, 6.0]), 2), [4.0, 3.0, 1.0, 3.0])
    np.testing.assert_allclose(smooth(np.array([4.0, 2.0]), 10), [4.0, 3.0])


@pytest.mark.parametrize("rows", [make_rows(30), make_rows(1), make_rows(4, has_time=False)], ids=len)
def test_a_picture_is_written(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    path = tmp_path / "new" / "curve.png"
    plot_learning_curve(rows, path, title="run")
    assert ink(path) > 1000
    assert [file.name for file in path.parent.iterdir()] == ["curve.png"]


def test_validation_points_leave_ink(tmp_path: Path) -> None:
    rows = make_rows(10)
    plot_learning_curve(rows, tmp_path / "with.png", title="run")
    bare = [{name: value for name, value in row.items() if "eval/" not in name} for row in rows]
    plot_learning_curve(bare, tmp_path / "without.png", title="run")
    assert ink(tmp_path / "with.png") > ink(tmp_path / "without.png") + 200


def test_rows_without_success_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rows of an RL run"):
        plot_learning_curve([{"iteration": 0, "sft/loss": 1.0}], tmp_path / "curve.png", title="run")
