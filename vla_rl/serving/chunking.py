"""Chunks of actions on the time axis: what to do now, however late the policy's answers come.

Action i of a chunk that answers the observation of time t_obs is meant for the control period that begins at
t_obs + i * period. Of an answer that took three periods, the fourth action comes first: expired ones are never run.
"""

from __future__ import annotations

import math
import threading
from typing import Literal

import numpy as np
from jaxtyping import Float64

Blend = Literal["latest", "weighted"]
"""How a new chunk takes over from the one under way: at once, or by a ramp."""
_ROUNDING = 1e-6
"""In periods: times are sums of many periods, and half a period must not be decided by their last bits."""


class ChunkBuffer:
    """The chunk under way. Times are seconds of one monotonic clock; all methods may be called from any thread."""

    def __init__(self, period_s: float, blend: Blend = "latest", num_blended: int = 4) -> None:
        """Begin empty.

        Args:
            period_s: The real control period; the number of expired actions follows from it.
            blend: "latest": the newest chunk holds from its arrival on. "weighted": the first `num_blended` actions
                after its arrival are averages with the old chunk, the new one's weight growing evenly; the last entry,
                the gripper, is always the newest: half open is not between open and closed.
            num_blended: See `blend`.

        Raises:
            ValueError: Not a positive period or number.
        """
        if not 0.0 < period_s < math.inf or num_blended < 1:
            raise ValueError(f"period_s={period_s} and num_blended={num_blended} must be positive")
        self._period_s = period_s
        self._num_blended = num_blended if blend == "weighted" else 0
        self._lock = threading.Lock()
        self._actions: Float64[np.ndarray, "horizon action_dim"] | None = None
        self._t_obs = self._not_before = -math.inf

    def add(self, actions: Float64[np.ndarray, "horizon action_dim"], t_obs: float, now: float) -> int:
        """Take a chunk, unless a newer one is under way, or its observation was made before the last `clear`.

        Args:
            actions: In order.
            t_obs: When its observation was made.
            now: When the chunk arrived.

        Returns:
            How many of its actions have expired.

        Raises:
            ValueError: No actions, or times that cannot be.
        """
        if actions.size == 0 or not math.isfinite(now) or not -math.inf < t_obs <= now:
            raise ValueError(f"a chunk of shape {actions.shape}, observed at {t_obs} s and arrived at {now} s")
        with self._lock:
            num_expired = min(self._index(now, t_obs), len(actions))
            if t_obs >= max(self._t_obs, self._not_before):
                self._actions, self._t_obs = self._blended(actions.copy(), t_obs, num_expired), t_obs
            return num_expired

    def action_at(self, t: float) -> Float64[np.ndarray, " action_dim"] | None:
        """The action for the control period that begins nearest to a time; None if there is none any more, or yet."""
        with self._lock:
            return self._action_at(t)

    def remaining(self, t: float) -> int:
        """Actions left from a time on, the one for this time included."""
        with self._lock:
            if self._actions is None:
                return 0
            return max(0, len(self._actions) - max(0, self._index(t, self._t_obs)))

    def clear(self, not_before: float = -math.inf) -> None:
        """Forget everything, also chunks that are still to come for observations made before a time (after a hold)."""
        with self._lock:
            self._actions, self._t_obs, self._not_before = None, -math.inf, not_before

    def _index(self, t: float, t_obs: float) -> int:
        return math.floor((t - t_obs) / self._period_s + 0.5 + _ROUNDING)

    def _action_at(self, t: float) -> Float64[np.ndarray, " action_dim"] | None:
        if self._actions is None:
            return None
        index = self._index(t, self._t_obs)
        return self._actions[index] if 0 <= index < len(self._actions) else None

    def _blended(
        self, actions: Float64[np.ndarray, "horizon action_dim"], t_obs: float, first: int
    ) -> Float64[np.ndarray, "horizon action_dim"]:
        for i, row in enumerate(actions[first : first + self._num_blended]):
            old = self._action_at(t_obs + (first + i) * self._period_s)
            if old is not None:
                weight = (i + 1) / (self._num_blended + 1)
                row[:-1] = weight * row[:-1] + (1.0 - weight) * old[:-1]
        return actions
