"""Starts that are only a seed: what a foreign environment gets to know when it is reset."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import get_args

import numpy as np

from vla_rl.types import Split


def start_seed(task: str, tasks: Sequence[str], split: Split, index: int) -> int:
    """The seed of the start with this name, in [0, 2^31). Splits never share a random stream.

    Args:
        task: Full task name.
        tasks: Full names of the suite's tasks.
        split: Pool of the start.
        index: Position in the pool.

    Raises:
        ValueError: Unknown task or split, or a negative index.
    """
    if task not in tasks:
        raise ValueError(f"unknown task {task!r}; this suite has: {', '.join(tasks)}")
    if split not in get_args(Split) or index < 0:
        raise ValueError(f"no start {split!r}/{index}; splits: {', '.join(get_args(Split))}, indices from 0")
    entropy = [zlib.crc32(task.encode()), zlib.crc32(split.encode()), index]
    return int(np.random.default_rng(np.random.SeedSequence(entropy)).integers(2**31))
