"""Outcome advantages: how much better an episode did than the other episodes of its group. numpy, no critic.

G is the group size; all episodes of a group share one start, so the group's mean reward estimates the start's value.
"""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import numpy as np
from jaxtyping import Float, Int
from pydantic import Field

from vla_rl.config import ConfigModel


class GrpoAdvantage(ConfigModel):
    """Group mean subtracted, divided by the group's standard deviation (GRPO; SimpleVLA-RL)."""

    type: Literal["grpo"] = "grpo"
    """Kind of advantage."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation. SimpleVLA-RL: 1e-6."""


class RlooAdvantage(ConfigModel):
    """Mean of the other members subtracted (leave-one-out)."""

    type: Literal["rloo"] = "rloo"
    """Kind of advantage."""


class DrGrpoAdvantage(ConfigModel):
    """Group mean subtracted, no division: groups near 0 % or 100 % success do not weigh more (Dr. GRPO)."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Kind of advantage."""


AdvantageConfig = Annotated[GrpoAdvantage | RlooAdvantage | DrGrpoAdvantage, Field(discriminator="type")]


def group_advantages(
    rewards: Float[np.ndarray, " episodes"],
    group_indices: Int[np.ndarray, " episodes"],
    config: AdvantageConfig,
) -> Float[np.ndarray, " episodes"]:
    """Advantage of each episode within its group.

    Args:
        rewards: Outcome of each episode; SimpleVLA-RL: 1 for success, else 0.
        group_indices: Equal for members of one group; any order.
        config: Which estimator.

    Returns:
        float64. A group of one member has no baseline: its advantage is its reward.
    """
    advantages = np.empty(len(rewards), dtype=np.float64)
    for group in np.unique(group_indices):
        members = group_indices == group
        advantages[members] = _one_group(rewards[members].astype(np.float64), config)
    return advantages


def _one_group(rewards: Float[np.ndarray, " group"], config: AdvantageConfig) -> Float[np.ndarray, " group"]:
    if len(rewards) == 1:
        return rewards
    match config:
        case GrpoAdvantage(epsilon=epsilon):
            return grpo_advantages(rewards, epsilon)
        case RlooAdvantage():
            return rloo_advantages(rewards)
        case DrGrpoAdvantage():
            return dr_grpo_advantages(rewards)
    assert_never(config)


def grpo_advantages(rewards: Float[np.ndarray, " group"], epsilon: float = 1e-6) -> Float[np.ndarray, " group"]:
    """(R - mean) / (std + epsilon) with the unbiased standard deviation (N - 1), as SimpleVLA-RL computes it.

    Reference:
        Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.2 (outcome supervision); Li et al., "SimpleVLA-RL",
        arXiv 2509.09674. The paper writes the standard deviation without epsilon; the released code adds 1e-6.
    """
    return np.asarray((rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon))


def rloo_advantages(rewards: Float[np.ndarray, " group"]) -> Float[np.ndarray, " group"]:
    """Reward minus the mean of the other members: G / (G - 1) * (R - mean).

    Reference:
        Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv 2402.14740, section 2 (RLOO).
    """
    return np.asarray((rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1)))


def dr_grpo_advantages(rewards: Float[np.ndarray, " group"]) -> Float[np.ndarray, " group"]:
    """Reward minus the group mean.

    Reference:
        Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2 (Dr. GRPO).
    """
    return np.asarray(rewards - rewards.mean())
