"""Chunks at the end of a demonstration, the split by demonstrations, statistics, colour jitter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from vla_rl.data.demos import ChunkDataset, Demonstration, norm_stats, split_held_out


def demonstration(num_steps: int, number: int = 0, task: str = "toy/a") -> Demonstration:
    """Action t is (10 number + t, -1 at odd t else 1), the image full of 100 + t, the proprioception (number, t)."""
    steps = np.arange(num_steps)
    images = np.broadcast_to(100 + steps[:, None, None, None, None], (num_steps, 1, 4, 5, 3)).astype(np.uint8)
    proprio = np.stack([np.full(num_steps, number), steps], axis=1).astype(np.float32)
    actions = np.stack([10.0 * number + steps, (-1.0) ** steps], axis=1)
    return Demonstration(
        task=task, instruction=f"do {number}", images=images, proprio=proprio, actions=actions.astype(np.float64)
    )


def test_every_control_step_is_a_sample_with_the_chunk_that_follows() -> None:
    dataset = ChunkDataset([demonstration(2, number=0), demonstration(4, number=1)], action_horizon=3)
    assert len(dataset) == 6
    batch = dataset.batch(np.array([1, 2, 4, 5, 0]))
    # Rows: last step of the first; then steps 0, 2 and 3 of the second; step 0 of the first.
    assert batch.actions[:, :, 0].tolist() == [[1, 0, 0], [10, 11, 12], [12, 13, 0], [13, 0, 0], [0, 1, 0]]
    assert batch.actions[:, :, 1].tolist() == [[-1, 0, 0], [1, -1, 1], [1, -1, 0], [-1, 0, 0], [1, -1, 0]]
    expected = [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert batch.valid.tolist() == np.array(expected, bool).tolist()
    assert [item.instruction for item in batch.observations] == ["do 0", "do 1", "do 1", "do 1", "do 0"]
    assert [item.proprio.tolist() for item in batch.observations] == [[0, 1], [1, 0], [1, 2], [1, 3], [0, 0]]
    assert [int(item.images.max()) for item in batch.observations] == [101, 100, 102, 103, 100]


def test_there_must_be_demonstrations() -> None:
    with pytest.raises(ValueError, match="no demonstrations; collect some first: vla-rl demos"):
        ChunkDataset([], action_horizon=8)


def test_held_out_are_whole_demonstrations_of_every_task() -> None:
    counts = {"toy/a": 10, "toy/b": 5, "toy/c": 1}
    demos = [demonstration(2, number, task) for task, num in counts.items() for number in range(num)]
    training, held_out = split_held_out(demos, 0.2, np.random.default_rng(0))
    assert Counter(demo.task for demo in held_out) == {"toy/a": 2, "toy/b": 1}
    assert Counter(demo.task for demo in training) == {"toy/a": 8, "toy/b": 4, "toy/c": 1}
    assert {id(demo) for demo in [*training, *held_out]} == {id(demo) for demo in demos}
    again = split_held_out(demos, 0.2, np.random.default_rng(0))
    assert [id(demo) for demo in again[1]] == [id(demo) for demo in held_out]
    other = [split_held_out(demos, 0.2, np.random.default_rng(seed))[1] for seed in range(1, 4)]
    assert any({id(demo) for demo in found} != {id(demo) for demo in held_out} for found in other)


@pytest.mark.parametrize(("fraction", "num_held_out"), [(0.0, 0), (1.0, 4)])
def test_one_demonstration_at_least_is_for_training(fraction: float, num_held_out: int) -> None:
    demos = [demonstration(2, number) for number in range(5)]
    training, held_out = split_held_out(demos, fraction, np.random.default_rng(0))
    assert (len(training), len(held_out)) == (5 - num_held_out, num_held_out)


def test_statistics_are_over_all_control_steps() -> None:
    # Actions 0, 1, 2 and 10, 11, 12, 13.
    stats = norm_stats([demonstration(3, 0), demonstration(4, 1)], "toy", raw_actions=[False, True])
    assert (stats.key, stats.num_transitions, stats.num_trajectories) == ("toy", 7, 2)
    assert stats.action.mask.tolist() == [True, False]
    assert stats.proprio.mask.tolist() == [True, True]
    assert (stats.action.min[0], stats.action.max[0], stats.action.mean[0]) == (0, 13, 7)
    # np.quantile interpolates between sorted values: position 0.01 * 6 = 0.06 and 0.99 * 6 = 5.94.
    np.testing.assert_allclose([stats.action.q01[0], stats.action.q99[0]], [0.06, 12.94])
    assert stats.proprio.max.tolist() == [1, 3]
