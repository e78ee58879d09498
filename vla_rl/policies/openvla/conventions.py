"""Between the actions of our suites and those of the published LIBERO checkpoints, which differ in the gripper.

The suites (robosuite, LIBERO) command -1 to open and +1 to close. The published training data has 1 for open and 0 for
closed, unnormalised; at evaluation OpenVLA-OFT binarises 2 g - 1 and changes its sign.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from vla_rl.types import EnvSpec

GRIPPER = "gripper"


def to_published_actions(
    actions: Float64[np.ndarray, "*rows action_dim"], spec: EnvSpec
) -> Float64[np.ndarray, "*rows action_dim"]:
    """Gripper commands -1 (open) ... +1 (close) become 1 ... 0; negative ones count as open."""
    published = np.array(actions, dtype=np.float64)
    for index in _grippers(spec):
        published[..., index] = 1.0 - np.clip(published[..., index], 0.0, 1.0)
    return published


def from_published_actions(
    actions: Float64[np.ndarray, "*rows action_dim"], spec: EnvSpec
) -> Float64[np.ndarray, "*rows action_dim"]:
    """Gripper values above 0.5 become -1 (open), others +1 (close)."""
    ours = np.array(actions, dtype=np.float64)
    for index in _grippers(spec):
        ours[..., index] = np.where(ours[..., index] > 0.5, -1.0, 1.0)
    return ours


def _grippers(spec: EnvSpec) -> list[int]:
    return [index for index, name in enumerate(spec.action_names) if name == GRIPPER]
