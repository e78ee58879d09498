"""Which starts a run draws. Positions in the stream are integers, so a resumed run goes on where it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from vla_rl.run import seed_sequence
from vla_rl.types import Split, Start


@runtime_checkable
class StartPool(Protocol):
    """The part of a suite that sources need."""

    @property
    def tasks(self) -> Sequence[str]:
        """Full task names."""

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name."""


class TrainStarts:
    """An endless stream of training starts: every task once per round, in shuffled order, each time from a new start.

    Start number g is a function of (seed, g) alone.
    """

    def __init__(self, pool: StartPool, seed: int, num_starts_per_task: int | None = None) -> None:
        """Set up.

        Args:
            pool: Where the starts come from.
            seed: Seed of the run.
            num_starts_per_task: Draw from this many different starts per task; None: never the same start twice.
        """
        self._pool = pool
        self._seed = seed
        self._num_starts = num_starts_per_task

    def start(self, group_index: int) -> Start:
        """The start of a group."""
        num_tasks = len(self._pool.tasks)
        round_index, position = divmod(group_index, num_tasks)
        rng = np.random.default_rng(seed_sequence(self._seed, "tasks", round_index))
        task = self._pool.tasks[rng.permutation(num_tasks)[position]]
        index = round_index
        if self._num_starts is not None:
            shuffle = np.random.default_rng(seed_sequence(self._seed, task, "starts", round_index // self._num_starts))
            index = int(shuffle.permutation(self._num_starts)[round_index % self._num_starts])
        return self._pool.start(task, "train", index)


def evaluation_starts(pool: StartPool, split: Split, num_per_task: int) -> list[Start]:
    """Each (task, index) exactly once, the tasks interleaved so that a batch is mixed."""
    return [pool.start(task, split, index) for index in range(num_per_task) for task in pool.tasks]
