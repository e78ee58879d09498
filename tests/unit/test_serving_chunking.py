"""The chunk buffer on the time axis. Period 0.05 s; chunks of one entry plus a gripper, worked by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from vla_rl.serving.chunking import ChunkBuffer

PERIOD_S = 0.05


def chunk(first: float, num: int = 8, gripper: float = -1.0) -> np.ndarray:
    """Entries first, first + 1, ...; the gripper constant."""
    return np.stack([first + np.arange(num), np.full(num, gripper)], axis=1)


def test_actions_belong_to_times() -> None:
    buffer = ChunkBuffer(PERIOD_S)
    assert buffer.action_at(0.0) is None
    assert buffer.add(chunk(0.0), 10.0, 10.0) == 0
    for k in range(8):
        assert buffer.remaining(10.0 + k * PERIOD_S) == 8 - k
        assert buffer.action_at(10.0 + k * PERIOD_S).tolist() == [k, -1.0]
    for t in (10.0 + 8 * PERIOD_S, 100.0, 9.9):
        assert buffer.action_at(t) is None
    assert buffer.remaining(10.0 + 8 * PERIOD_S) == 0


@pytest.mark.parametrize("offset_s", [-0.024, 0.0, 0.025, 0.049])
def test_every_period_gets_the_next_action_at_any_phase(offset_s: float) -> None:
    # 2000 periods of 1/30 s do not add up exactly; the half period must not jump between two actions because of it.
    buffer = ChunkBuffer(1 / 30)
    t_obs = 1e5 + 0.5 / 30
    buffer.add(chunk(0.0, 2000), t_obs, t_obs)
    start = buffer.action_at(t_obs + offset_s + 1 / 30)[0]
    t = t_obs + offset_s + 1 / 30
    for k in range(1900):
        assert buffer.action_at(t)[0] == start + k
        t += 1 / 30


@pytest.mark.parametrize(("latency_s", "num_expired"), [(0.0, 0), (0.02, 0), (0.03, 1), (0.05, 1), (0.2, 4), (1.0, 8)])
def test_expired_actions_are_left_out(latency_s: float, num_expired: int) -> None:
    buffer = ChunkBuffer(PERIOD_S)
    assert buffer.add(chunk(0.0), 3.0, 3.0 + latency_s) == num_expired
    action = buffer.action_at(3.0 + latency_s)
    assert (action is None) if num_expired == 8 else (action[0] == num_expired)


def test_expired_actions_follow_the_real_rate() -> None:
    # The same 0.1 s are 3 actions at 30 Hz, 5 at 50 Hz and 10 at 100 Hz.
    assert [ChunkBuffer(1 / rate).add(chunk(0.0, 20), 0.0, 0.1) for rate in (30, 50, 100)] == [3, 5, 10]


def test_the_latest_chunk_takes_over_at_once() -> None:
    buffer = ChunkBuffer(PERIOD_S)
    buffer.add(chunk(0.0), 0.0, 0.0)
    buffer.add(chunk(100.0), 0.2, 0.25)
    assert buffer.action_at(0.25)[0] == 101.0
    assert buffer.remaining(0.25) == 7


def test_a_weighted_seam_is_a_ramp_and_never_blends_the_gripper() -> None:
    buffer = ChunkBuffer(PERIOD_S, blend="weighted", num_blended=4)
    buffer.add(chunk(0.0), 0.0, 0.0)
    buffer.add(chunk(100.0, gripper=1.0), 0.1, 0.15)
    # At 0.15 + j * 0.05 the old chunk says 3 + j, the new one 101 + j: 98 apart; weights 1/5, 2/5, 3/5, 4/5, then 1.
    blended = [buffer.action_at(0.15 + j * PERIOD_S) for j in range(6)]
    np.testing.assert_allclose([a[0] for a in blended], [3 + 19.6, 4 + 39.2, 5 + 58.8, 6 + 78.4, 105.0, 106.0])
    assert [a[1] for a in blended] == [1.0] * 6


def test_a_weighted_seam_ends_with_the_old_chunk() -> None:
    buffer = ChunkBuffer(PERIOD_S, blend="weighted", num_blended=4)
    buffer.add(chunk(0.0, num=4), 0.0, 0.0)
    buffer.add(chunk(100.0), 0.1, 0.1)
    # The old chunk knows 2 and 3 for the first two times.
    np.testing.assert_allclose(
        [buffer.action_at(0.1 + j * PERIOD_S)[0] for j in range(3)], [2 + 98 / 5, 3 + 2 * 98 / 5, 102.0]
    )


def test_a_third_chunk_blends_with_what_would_have_been_executed() -> None:
    buffer = ChunkBuffer(PERIOD_S, blend="weighted", num_blended=1)
    buffer.add(chunk(0.0), 0.0, 0.0)
    buffer.add(chunk(10.0), 0.0, 0.0)  # at 0: (0 + 10) / 2 = 5
    buffer.add(chunk(20.0), 0.0, 0.0)  # at 0: (5 + 20) / 2 = 12.5
    assert buffer.action_at(0.0)[0] == 12.5


def test_the_given_array_is_neither_kept_nor_changed() -> None:
    buffer = ChunkBuffer(PERIOD_S, blend="weighted")
    first, second = chunk(0.0), chunk(100.0)
    buffer.add(first, 0.0, 0.0)
    buffer.add(second, 0.0, 0.0)
    np.testing.assert_array_equal(second, chunk(100.0))
    second[:] = np.nan
    assert np.isfinite(buffer.action_at(0.1)).all()


def test_an_action_comes_back_bit_for_bit() -> None:
    actions = np.random.default_rng(0).standard_normal((8, 7))
    buffer = ChunkBuffer(PERIOD_S)
    buffer.add(actions, 0.0, 0.0)
    assert all(buffer.action_at(k * PERIOD_S).tobytes() == actions[k].tobytes() for k in range(8))


def test_an_older_chunk_never_replaces_a_newer_one() -> None:
    buffer = ChunkBuffer(PERIOD_S)
    buffer.add(chunk(100.0), 0.2, 0.2)
    buffer.add(chunk(0.0), 0.1, 0.25)
    assert buffer.action_at(0.25)[0] == 101.0


def test_after_a_hold_only_fresh_observations_count() -> None:
    buffer = ChunkBuffer(PERIOD_S)
    buffer.add(chunk(0.0), 0.0, 0.0)
    buffer.clear(not_before=0.2)
    assert buffer.action_at(0.05) is None
    buffer.add(chunk(0.0), 0.15, 0.25)  # was under way
    assert buffer.action_at(0.25) is None
    buffer.add(chunk(0.0), 0.2, 0.25)
    assert buffer.action_at(0.25)[0] == 1.0
    buffer.clear()
    assert buffer.remaining(0.25) == 0
    buffer.add(chunk(0.0), 0.1, 0.1)  # nothing is remembered, as a lockstep world begins again
    assert buffer.action_at(0.1)[0] == 0.0


@pytest.mark.parametrize(("t_obs", "now"), [(1.0, 0.9), (math.nan, 0.0), (0.0, math.nan), (0.0, math.inf)])
def test_impossible_times_are_refused(t_obs: float, now: float) -> None:
    with pytest.raises(ValueError, match=r"observed at .* arrived at"):
        ChunkBuffer(PERIOD_S).add(chunk(0.0), t_obs, now)


@pytest.mark.parametrize("arguments", [{"period_s": 0.0}, {"period_s": math.nan}, {"period_s": 0.1, "num_blended": 0}])
def test_impossible_settings_are_refused(arguments: dict) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        ChunkBuffer(**arguments)


def test_the_robots_side_needs_no_torch() -> None:
    code = (
        "import logging, sys; import vla_rl.serving.client, vla_rl.serving.chunking, vla_rl.serving.server;"
        "assert 'torch' not in sys.modules; assert not logging.root.handlers and logging.root.level == logging.WARNING"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
