"""Per-token objectives on the probability ratio, and what to watch about them.

Shapes: B decisions, L tokens of a decision, T executed tokens of a minibatch (flat).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field

from vla_rl.config import ConfigModel


class ClippedSurrogate(ConfigModel):
    """PPO's clipped objective with separate bounds ("clip-higher")."""

    type: Literal["clip"] = "clip"
    """Kind of objective."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio may fall to 1 - clip_low. SimpleVLA-RL: 0.2."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio may rise to 1 + clip_high. SimpleVLA-RL and DAPO: 0.28; equal to clip_low: plain PPO."""


def clipped_loss(
    logprobs: Float[torch.Tensor, "batch tokens"],
    old_logprobs: Float[torch.Tensor, "batch tokens"],
    advantages: Float[torch.Tensor, " batch"],
    config: ClippedSurrogate,
) -> Float[torch.Tensor, "batch tokens"]:
    """Loss of each token: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old_logprobs).

    A token's gradient is zero where the ratio has already left the range on the side that the advantage pushes to:
    above it for A > 0, below it for A < 0. There is no second bound for A < 0 (no "dual clip").

    Args:
        logprobs: Under the current policy, with gradients, at the temperature of `old_logprobs`.
        old_logprobs: Under the policy that drew the sample.
        advantages: One per decision.
        config: The bounds.

    Reference:
        Schulman et al., "Proximal Policy Optimization", arXiv 1707.06347, equation 7; separate bounds: Yu et al.,
        "DAPO", arXiv 2503.14476, equation 8 and section 3.1; so used by Li et al., "SimpleVLA-RL", arXiv 2509.09674.
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain = advantages[:, None]
    return torch.maximum(-gain * ratio, -gain * clipped)


def ratio_metrics(
    log_ratio: Float[torch.Tensor, " executed"],
    advantages: Float[torch.Tensor, " executed"],
    config: ClippedSurrogate,
) -> dict[str, float]:
    """Statistics of the probability ratio over executed tokens.

    `clip_fraction_low` / `_high` count tokens whose gradient the clip has removed (ratio too low with A < 0, too high
    with A > 0). `kl_k1` and `kl_k3` estimate KL(old || new) from the old policy's samples: -log r (unbiased, may be
    negative) and r - 1 - log r (unbiased, never negative).

    Reference:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
    """
    ratio = log_ratio.exp()
    low = (ratio < 1 - config.clip_low) & (advantages < 0)
    high = (ratio > 1 + config.clip_high) & (advantages > 0)
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "clip_fraction_low": low.float().mean().item(),
        "clip_fraction_high": high.float().mean().item(),
        "kl_k1": -log_ratio.mean().item(),
        "kl_k3": (ratio - 1 - log_ratio).mean().item(),
    }
