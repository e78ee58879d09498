"""Many worlds, one interface: asynchronous slots. The collector talks to this and to nothing below it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from vla_rl.types import EnvSpec, SlotResult, Start


class VecEnv(Protocol):
    """A fixed number of slots, each running one episode at a time.

    No auto-reset: a slot whose episode is over (or whose world crashed) waits until it is given the next `Start`.
    A slot with a request under way must be waited for before it takes another.
    """

    @property
    def num_slots(self) -> int:
        """Number of slots."""

    @property
    def spec(self) -> EnvSpec:
        """The interface of the suite."""

    def reset(self, slot: int, start: Start, record_frames: bool = False) -> None:
        """Request an episode; its first observation comes from `wait`. Returns at once."""

    def step(self, slot: int, chunk: Float64[np.ndarray, "steps action_dim"]) -> None:
        """Request a chunk; its outcome and the next observation come from `wait`. Returns at once."""

    def wait(self, slots: Collection[int] | None = None, timeout_s: float = 60.0) -> list[SlotResult]:
        """Results in slot order.

        Args:
            slots: Wait for all of these; None waits for at least one and returns every result that is ready.
            timeout_s: Limit for the wait.

        Raises:
            TimeoutError: Names the slots that did not answer.
        """

    def close(self) -> None:
        """Stop the threads and free the renderers. May be called twice."""
