"""Demonstrations in memory, and batches of action chunks cut from them.

Shapes: T control steps of a demonstration, C cameras, P proprio_dim, A action_dim, K action_horizon, B batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt8

from vla_rl.policies.normalization import NormStats, RangeStats
from vla_rl.types import Observation


@dataclass(frozen=True, kw_only=True, eq=False)
class Demonstration:
    """One solved episode. `actions[t]` is the demonstrator's intention at the observation t, in the suite's units.

    The executed actions may have carried noise on top (DART), so that the observations show states off the ideal path
    while the labels stay clean.
    """

    task: str
    instruction: str
    images: UInt8[np.ndarray, "steps cameras height width 3"]
    proprio: Float32[np.ndarray, "steps proprio_dim"]
    actions: Float64[np.ndarray, "steps action_dim"]

    @property
    def num_steps(self) -> int:
        """Control steps T."""
        return len(self.actions)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkBatch:
    """What cloning learns from: observations, the next K demonstrated actions, and which of them exist."""

    observations: Sequence[Observation]
    actions: Float64[np.ndarray, "batch horizon action_dim"]
    valid: Bool[np.ndarray, "batch horizon"]


class ChunkDataset:
    """Every control step of every demonstration is a sample: the observation there and the chunk that follows."""

    def __init__(self, demonstrations: Sequence[Demonstration], action_horizon: int) -> None:
        if not demonstrations:
            raise ValueError("there are no demonstrations; collect some first: vla-rl demos")
        self._demonstrations = list(demonstrations)
        self._horizon = action_horizon
        self._index = np.array(
            [(i, t) for i, demo in enumerate(self._demonstrations) for t in range(demo.num_steps)], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self._index)

    def batch(self, rows: Int64[np.ndarray, " batch"]) -> ChunkBatch:
        """The samples with these numbers below `len(self)`."""
        observations = []
        actions = np.zeros((len(rows), self._horizon, self._demonstrations[0].actions.shape[1]))
        valid = np.zeros((len(rows), self._horizon), dtype=bool)
        for row, (i, t) in enumerate(self._index[rows]):
            demo = self._demonstrations[i]
            observations.append(
                Observation(images=demo.images[t], proprio=demo.proprio[t], instruction=demo.instruction)
            )
            chunk = demo.actions[t : t + self._horizon]
            actions[row, : len(chunk)] = chunk
            valid[row, : len(chunk)] = True
        return ChunkBatch(observations=observations, actions=actions, valid=valid)


def split_held_out(
    demonstrations: Sequence[Demonstration], fraction: float, rng: np.random.Generator
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split whole demonstrations into (training, held-out), the same fraction of each task; at least one trains."""
    training: list[Demonstration] = []
    held_out: list[Demonstration] = []
    for task in sorted({demo.task for demo in demonstrations}):
        of_task = [demo for demo in demonstrations if demo.task == task]
        order = rng.permutation(len(of_task))
        num_held_out = min(round(fraction * len(of_task)), len(of_task) - 1)
        held_out += [of_task[i] for i in order[:num_held_out]]
        training += [of_task[i] for i in order[num_held_out:]]
    return training, held_out


def norm_stats(demonstrations: Sequence[Demonstration], key: str, raw_actions: Sequence[bool]) -> NormStats:
    """Statistics of demonstrations in the published format.

    Args:
        demonstrations: What the policy will be cloned from.
        key: Name of the dataset.
        raw_actions: Which action entries are left unnormalised (the gripper).
    """
    actions = np.concatenate([demo.actions for demo in demonstrations])
    proprio = np.concatenate([demo.proprio for demo in demonstrations]).astype(np.float64)
    return NormStats(
        key=key,
        action=RangeStats.from_data(actions, ~np.asarray(raw_actions, dtype=bool)),
        proprio=RangeStats.from_data(proprio, np.ones(proprio.shape[1], dtype=bool)),
        num_transitions=len(actions),
        num_trajectories=len(demonstrations),
    )
