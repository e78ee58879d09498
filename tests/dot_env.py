"""A Gymnasium environment made for tests: a white dot that is pushed over a grid, seen from above."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

PIXELS = 24
GOAL = np.array([0.75, 0.75])


class DotEnv(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """The dot starts in the middle and moves by a tenth of the action; it is at the goal in the upper right corner.

    Args:
        jitter: Random motion that does not come from the seed of the reset.
        leaves: End the episode, as failed, where the dot leaves the field.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    action_space = gymnasium.spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float64)
    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (PIXELS, PIXELS, 3), np.uint8),
            "position": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )

    def __init__(self, render_mode: str | None = None, jitter: float = 0.0, leaves: bool = False) -> None:
        self.render_mode = render_mode
        self.jitter, self.leaves = jitter, leaves
        self.position = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-0.2, 0.2, 2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        wind = 0.01 * self.np_random.standard_normal(2)  # comes from the seed
        self.position = self.position + 0.1 * (action - [0.0, 2.0]) + wind + self.jitter * np.random.standard_normal(2)
        is_there = bool(np.abs(self.position - GOAL).max() < 0.25)
        has_left = self.leaves and bool(np.abs(self.position).max() > 1.0)
        return self._observe(), float(is_there), is_there or has_left, False, {"is_success": is_there}

    def render(self) -> np.ndarray:
        return self._picture(2 * PIXELS)

    def _observe(self) -> dict[str, np.ndarray]:
        return {"image": self._picture(PIXELS), "position": self.position.astype(np.float32)}

    def _picture(self, size: int) -> np.ndarray:
        image = np.full((size, size, 3), (20, 60, 20), np.uint8)
        x, y = np.clip((self.position + 1.0) * 0.5 * size, 0, size - 1).astype(int)
        image[size - 1 - y, x] = 255
        return image


gymnasium.register("Dot-v0", entry_point=DotEnv, max_episode_steps=60)
