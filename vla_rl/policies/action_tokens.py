"""Action tokens: 256 bins per action dimension, exactly as OpenVLA numbers them, and the log-probs that RL needs.

OpenVLA puts 256 edges on [-1, 1] (255 intervals) and gives an action in interval d = digitize(a, edges) in 1..256 the
token `vocab_size - d`. Here a *bin* is that token's row in the slice of the last 256 tokens: bin = 256 - d, so bin 255
is the most negative action, bin 1 the most positive interval, and bin 0 (only an action of exactly +1) decodes to the
same centre as bin 1.

Source: M. Kim et al., OpenVLA, arXiv:2406.09246, section 3.2; log-probs over the 256-bin slice at the sampling
temperature as in SimpleVLA-RL, arXiv:2509.09674, section 3.1. Shape letters: B batch, L tokens, V bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64

NUM_BINS = 256
_EDGES = np.linspace(-1.0, 1.0, NUM_BINS)
_CENTRES = (_EDGES[:-1] + _EDGES[1:]) / 2.0
_CENTRE_OF_BIN = _CENTRES[np.clip(NUM_BINS - 1 - np.arange(NUM_BINS), 0, NUM_BINS - 2)]


def encode_actions(normalized: Float64[np.ndarray, "*shape"]) -> Int64[np.ndarray, "*shape"]:
    """Bins of normalised actions; values outside [-1, 1] are clipped."""
    return np.asarray(NUM_BINS - np.digitize(np.clip(normalized, -1.0, 1.0), _EDGES), dtype=np.int64)


def decode_bins(bins: Int64[np.ndarray, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """Normalised action at the centre of each bin."""
    centres: np.ndarray[Any, np.dtype[np.float64]] = _CENTRE_OF_BIN[bins]
    return centres


def token_logprobs(
    logits: Float[torch.Tensor, "batch tokens bins"], bins: Int64[torch.Tensor, "batch tokens"], temperature: float
) -> Float[torch.Tensor, "batch tokens"]:
    """Logarithm of softmax(logits / temperature) at the given bins, in float32."""
    scaled = logits.float() / temperature
    return scaled.gather(-1, bins.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, dim=-1)


def token_entropy(
    logits: Float[torch.Tensor, "batch tokens bins"], temperature: float
) -> Float[torch.Tensor, "batch tokens"]:
    """Entropy in nats of softmax(logits / temperature)."""
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)


def sample_bins(
    logits: Float[torch.Tensor, "batch tokens bins"], temperature: float, uniforms: Float32[np.ndarray, "batch tokens"]
) -> Int64[torch.Tensor, "batch tokens"]:
    """Draw bins from softmax(logits / temperature) by inverting the cumulative distribution.

    Args:
        logits: Unnormalised scores over the bins.
        temperature: Sampling temperature, > 0.
        uniforms: One number in [0, 1) per token. The caller draws them from the episode's own stream, so that what an
            episode does never depends on which other episodes share its batch.
    """
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    cumulative = probs.cumsum(dim=-1)
    # Scaling by the last entry absorbs the rounding of the sum, so that a uniform below 1 always finds a bin.
    targets = torch.from_numpy(uniforms).to(cumulative.device).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
