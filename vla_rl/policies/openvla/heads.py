"""Side modules of OpenVLA-OFT: projectors of further inputs, and heads for continuous actions.

Module names are those of the published side files.

Sources: M. Kim et al., OpenVLA-OFT, arXiv:2502.19645, sections IV-B and IV-C, appendix A; J. Song et al., DDIM,
arXiv:2010.02502, eq. 12; A. Nichol, P. Dhariwal, Improved DDPM, arXiv:2102.09672, eq. 17 (cosine schedule). Shape
letters: B batch, K action_horizon, A action_dim, D hidden width of the language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from jaxtyping import Float, Float32
from torch import nn
from torch.nn import functional

NUM_TRAINING_STEPS = 50
"""Noise levels that the published diffusion heads were trained with."""
_MAX_BETA = 0.999
_COSINE_OFFSET = 0.008
_NUM_BLOCKS = 2


class ProprioProjector(nn.Module):
    """Turns the normalised proprioceptive state into one token."""

    def __init__(self, input_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, values: Float[torch.Tensor, "*batch input_dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """One token for each row of values."""
        output: torch.Tensor = self.fc2(functional.gelu(self.fc1(values.to(self.fc1.weight.dtype))))
        return output


class NoisyActionProjector(ProprioProjector):
    """Turns each single noisy action value into one token."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__(1, hidden_dim)


class ResidualBlock(nn.Module):
    """LayerNorm, linear map and ReLU beside the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, values: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """Values plus their update."""
        output: torch.Tensor = values + self.ffn(values)
        return output


class ResidualMlp(nn.Module):
    """From the hidden states of one control step, side by side, to its action."""

    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(_NUM_BLOCKS))
        self.layer_norm2 = nn.LayerNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, output_dim)

    def forward(self, values: Float[torch.Tensor, "*batch input_dim"]) -> Float[torch.Tensor, "*batch output_dim"]:
        """Outputs for each row."""
        values = functional.relu(self.fc1(self.layer_norm1(values.to(self.fc1.weight.dtype))))
        for block in self.mlp_resnet_blocks:
            values = block(values)
        output: torch.Tensor = self.fc2(self.layer_norm2(values))
        return output


class L1ActionHead(nn.Module):
    """Regresses normalised actions; trained with the mean absolute error."""

    def __init__(self, hidden_dim: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMlp(hidden_dim * action_dim, hidden_dim, action_dim)

    def forward(
        self, hidden: Float[torch.Tensor, "batch slots dim"]
    ) -> Float32[torch.Tensor, "batch horizon action_dim"]:
        """Normalised actions from the states of the K * A slots; not clipped."""
        actions: torch.Tensor = self.model(_by_step(hidden, self.action_dim))
        return actions.float()


class NoisePredictor(nn.Module):
    """Level of module names between the published diffusion head and its MLP."""

    def __init__(self, hidden_dim: int, action_dim: int) -> None:
        super().__init__()
        self.mlp_resnet = ResidualMlp(hidden_dim * action_dim, hidden_dim, action_dim)


class DiffusionActionHead(nn.Module):
    """Predicts the noise in the actions that went into the slots."""

    def __init__(self, hidden_dim: int, action_dim: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.noise_predictor = NoisePredictor(hidden_dim, action_dim)

    def forward(
        self, hidden: Float[torch.Tensor, "batch slots dim"]
    ) -> Float32[torch.Tensor, "batch horizon action_dim"]:
        """Noise from the states of the K * A slots."""
        noise: torch.Tensor = self.noise_predictor.mlp_resnet(_by_step(hidden, self.action_dim))
        return noise.float()


def _by_step(hidden: torch.Tensor, action_dim: int) -> torch.Tensor:
    """(B, K * A, D) -> (B, K, A * D): slots are ordered control step first."""
    return hidden.reshape(len(hidden), -1, action_dim * hidden.shape[-1])


def timestep_embedding(timestep: int, dim: int, device: torch.device) -> Float32[torch.Tensor, " dim"]:
    """Sinusoids of a noise level: sines, then cosines, of frequencies from 1 down to 1e-4."""
    half = dim // 2
    exponents = torch.arange(half, device=device, dtype=torch.float32) * (-math.log(10000.0) / (half - 1))
    angles = timestep * exponents.exp()
    return torch.cat([angles.sin(), angles.cos()])


def cumulative_alphas() -> Float32[torch.Tensor, " levels"]:
    """Share of the signal that is left at each of the `NUM_TRAINING_STEPS` levels: squared cosine schedule."""
    bars = [
        math.cos((step / NUM_TRAINING_STEPS + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * math.pi / 2) ** 2
        for step in range(NUM_TRAINING_STEPS + 1)
    ]
    betas = [min(1 - after / before, _MAX_BETA) for before, after in pairwise(bars)]
    return torch.cumprod(1.0 - torch.tensor(betas, dtype=torch.float32), dim=0)


def denoise(
    predict_noise: Callable[[torch.Tensor, int], torch.Tensor],
    noise: Float32[torch.Tensor, "batch horizon action_dim"],
    num_steps: int,
) -> Float32[torch.Tensor, "batch horizon action_dim"]:
    """Sample actions by DDIM, without further noise (eta 0).

    Args:
        predict_noise: From noisy actions (B, K, A) and their noise level to the noise in them.
        noise: Standard normal start.
        num_steps: Levels that are visited, evenly spaced from 0 on.

    Raises:
        ValueError: More steps than there are levels, or none.
    """
    if not 1 <= num_steps <= NUM_TRAINING_STEPS:
        raise ValueError(f"num_steps is {num_steps}; diffusion needs 1 to {NUM_TRAINING_STEPS} steps")
    alphas = cumulative_alphas().tolist()
    stride = NUM_TRAINING_STEPS // num_steps
    actions = noise
    for timestep in reversed(range(0, num_steps * stride, stride)):
        alpha, next_alpha = alphas[timestep], alphas[timestep - stride] if timestep >= stride else 1.0
        predicted = predict_noise(actions, timestep)
        clean = ((actions - math.sqrt(1 - alpha) * predicted) / math.sqrt(alpha)).clamp(-1.0, 1.0)
        actions = math.sqrt(next_alpha) * clean + math.sqrt(1 - next_alpha) * predicted
    return actions
