"""Compute resources of this process: how many CPU threads torch may use at the moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def num_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Run a block with this many torch threads.

    Torch's idle workers spin for a while after each operation: beside busy simulation threads that costs more than the
    extra threads bring (a study saw throughput collapse), so rollouts use one and updates use all.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
