"""How token losses become one number: a weight per token, fixed for a whole minibatch.

The loss is sum(weight * token loss). The weights know the whole minibatch, so however it is split into micro-batches,
the parts add up to the same loss and the same gradient.
"""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import numpy as np
from jaxtyping import Bool, Float64, Int
from pydantic import Field

from vla_rl.config import ConfigModel


class EpisodeMean(ConfigModel):
    """Mean over an episode's tokens, then over episodes (GRPO; SimpleVLA-RL).

    Every episode counts the same, so a token of a short success counts more than one of a long failure.

    Reference:
        Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3; Li et al., "SimpleVLA-RL", arXiv 2509.09674,
        equation 11.
    """

    type: Literal["episode_mean"] = "episode_mean"
    """Kind of denominator."""


class TokenMean(ConfigModel):
    """Mean over all tokens of the minibatch (DAPO).

    Reference:
        Yu et al., "DAPO", arXiv 2503.14476, equation 8 and section 3.3.
    """

    type: Literal["token_mean"] = "token_mean"
    """Kind of denominator."""


class ConstantNorm(ConfigModel):
    """Sum over an episode's tokens divided by a constant, then mean over episodes (Dr. GRPO): no length bias.

    Reference:
        Liu et al., "Understanding R1-Zero-Like Training", arXiv 2503.20783, section 3.2 and appendix A.
    """

    type: Literal["constant"] = "constant"
    """Kind of denominator."""
    num_tokens: int = Field(gt=0)
    """The constant; usually the tokens of an episode that runs to its time limit (max control steps x action_dim)."""


DenominatorConfig = Annotated[EpisodeMean | TokenMean | ConstantNorm, Field(discriminator="type")]


def token_weights(
    mask: Bool[np.ndarray, "batch tokens"],
    episode_ids: Int[np.ndarray, " batch"],
    config: DenominatorConfig,
) -> Float64[np.ndarray, "batch tokens"]:
    """Weight of each token of a minibatch; zero where it was not executed.

    Args:
        mask: Executed tokens of the minibatch's decisions.
        episode_ids: Episode of each decision; episodes must be complete.
        config: Which denominator.
    """
    _, episodes = np.unique(episode_ids, return_inverse=True)
    tokens_of_episode = np.bincount(episodes, weights=mask.sum(axis=1))
    num_episodes = len(tokens_of_episode)
    match config:
        case EpisodeMean():
            denominator = tokens_of_episode[episodes] * num_episodes
        case TokenMean():
            denominator = np.full(len(mask), tokens_of_episode.sum())
        case ConstantNorm(num_tokens=num_tokens):
            denominator = np.full(len(mask), float(num_tokens * num_episodes))
        case _:
            assert_never(config)
    return mask / denominator[:, None]
