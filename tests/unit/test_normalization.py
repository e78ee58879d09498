"""OpenVLA's q01/q99 normalisation by hand, and its statistics file."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from fakes import norm_stats, range_stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_rl.policies.normalization import NormStats, RangeStats

# Three entries: a range of 2, one of 0.5, and a gripper that is left alone.
STATS = range_stats([-0.5, 1.0, -1.0], [1.5, 1.5, 1.0], [True, True, False])


def test_normalize_by_hand() -> None:
    values = np.array([[0.5, 1.125, 0.3], [-0.5, 1.5, -1.0], [1.6, 0.9, 7.0]])
    # First: 2 * 1 / (2 + 1e-8) - 1 = -5e-9 and 2 * 0.125 / (0.5 + 1e-8) - 1 = -0.5 - 1e-8. The last row is clipped.
    expected = [[-5e-9, -0.5 - 1e-8, 0.3], [-1.0, 1.0 - 4e-8, -1.0], [1.0, -1.0, 7.0]]
    np.testing.assert_allclose(STATS.normalize(values), expected, rtol=0, atol=1e-14)


def test_denormalize_by_hand() -> None:
    values = np.array([[0.0, -0.5, 0.3], [-1.0, 1.0, -1.0]])
    # First: 0.5 * 1 * (2 + 1e-8) - 0.5 and 0.5 * 0.5 * (0.5 + 1e-8) + 1.
    expected = [[0.5 + 5e-9, 1.125 + 2.5e-9, 0.3], [-0.5, 1.5 + 1e-8, -1.0]]
    np.testing.assert_allclose(STATS.denormalize(values), expected, rtol=0, atol=1e-14)


@given(arrays(np.float64, (2, 4, 3), elements=st.floats(-1, 1)))
def test_inside_the_range_they_are_inverse(normalized: np.ndarray) -> None:
    np.testing.assert_allclose(STATS.normalize(STATS.denormalize(normalized)), normalized, atol=1e-12)


def test_an_entry_that_never_moves_stays_where_it_is() -> None:
    still = range_stats([0.25], [0.25], [True])
    for value in (0.25, 0.2, 0.3):
        np.testing.assert_allclose(still.denormalize(still.normalize(np.array([value]))), [0.25], atol=2e-8)


def test_statistics_of_data() -> None:
    values = np.stack([np.arange(101.0), 2.0 * np.arange(101.0)], axis=1)  # 0 to 100: quantiles are the values
    stats = RangeStats.from_data(values, np.array([True, False]))
    np.testing.assert_allclose(stats.q01, [1, 2])
    np.testing.assert_allclose(stats.q99, [99, 198])
    np.testing.assert_allclose([stats.min, stats.max, stats.mean], [[0, 0], [100, 200], [50, 100]])
    np.testing.assert_allclose(stats.std, [np.sqrt((101**2 - 1) / 12), 2 * np.sqrt((101**2 - 1) / 12)])
    assert stats.mask.tolist() == [True, False]


def assert_same(one: NormStats, other: NormStats) -> None:
    assert (one.key, one.num_transitions, one.num_trajectories) == (other.key, other.num_transitions, 4)
    for name in ("action", "proprio"):
        for field in fields(RangeStats):
            found, expected = (getattr(getattr(stats, name), field.name) for stats in (one, other))
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_a_file_keeps_every_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stats = replace(norm_stats(), action=RangeStats.from_data(rng.normal(size=(50, 7)), np.arange(7) < 6))
    stats.save(tmp_path)
    assert_same(NormStats.load(tmp_path), stats)
    assert_same(NormStats.load(tmp_path, "made_up"), stats)


def test_the_file_has_the_published_format(tmp_path: Path) -> None:
    norm_stats().save(tmp_path)
    content = json.loads((tmp_path / "dataset_statistics.json").read_text())
    assert list(content) == ["made_up"]
    entry = content["made_up"]
    assert set(entry) == {"action", "proprio", "num_transitions", "num_trajectories"}
    for name, dim in (("action", 7), ("proprio", 8)):
        has_mask = {"mask"} if name == "action" else set()
        assert set(entry[name]) == {"mean", "std", "max", "min", "q01", "q99"} | has_mask
        assert {len(values) for values in entry[name].values()} == {dim}
    assert entry["action"]["mask"] == [True] * 6 + [False]


def write(folder: Path, content: object) -> Path:
    (folder / "dataset_statistics.json").write_text(json.dumps(content))
    return folder


PUBLISHED = {name: [0.5, 1.0] for name in ("mean", "std", "max", "min", "q01", "q99")}
"""Without a mask, as the published proprioception has none."""


def test_a_published_file_is_read_by_key(tmp_path: Path) -> None:
    entry = {"action": {**PUBLISHED, "mask": [True, False]}, "proprio": PUBLISHED}
    write(tmp_path, {"libero_goal_no_noops": entry, "libero_10_no_noops": {**entry, "num_transitions": 101469}})
    stats = NormStats.load(tmp_path, "libero_10_no_noops")
    assert (stats.key, stats.num_transitions, stats.num_trajectories) == ("libero_10_no_noops", 101469, 0)
    assert stats.action.mask.tolist() == [True, False]
    assert stats.proprio.mask.tolist() == [True, True]


@pytest.mark.parametrize("key", [None, "libero_spatial"])
def test_a_missing_or_ambiguous_key_lists_the_candidates(tmp_path: Path, key: str | None) -> None:
    entry = {"action": PUBLISHED, "proprio": PUBLISHED}
    write(tmp_path, {"libero_goal": entry, "libero_10": entry})
    with pytest.raises(ValueError, match=rf"{key!r} is not in .*choose one of \['libero_10', 'libero_goal'\]"):
        NormStats.load(tmp_path, key)


def test_incomplete_statistics_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'x' in .* needs 'action' and 'proprio'; found \['action'\]"):
        NormStats.load(write(tmp_path, {"x": {"action": PUBLISHED}}))
    partial = {name: values for name, values in PUBLISHED.items() if not name.startswith("q")}
    with pytest.raises(ValueError, match=r"lack \['q01', 'q99'\]; found \['max', 'mean', 'min', 'std'\]"):
        NormStats.load(write(tmp_path, {"x": {"action": partial, "proprio": PUBLISHED}}))
