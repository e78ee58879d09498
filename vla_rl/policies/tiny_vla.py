"""A VLA small enough to learn on two CPU cores: images of 64-128 px, instruction, proprioception -> action tokens.

A convolutional stem, modulated by the instruction (FiLM), ends in spatial soft-argmax keypoints; keypoints, instruction
and proprioception go through a residual MLP that emits all tokens of the chunk at once. The 256 logits of a token are a
mixture of 32 Gaussian bumps over the bins, so that neighbouring bins share evidence: bins are ordinal, and a free
256-way head lost its greedy mode under RL in our study while this one did not.

Sources: E. Perez et al., FiLM, arXiv:1709.07871, eq. 1; C. Finn et al., Deep spatial autoencoders, arXiv:1509.06113,
section IV (soft-argmax). Shape letters: B batch, C cameras, D channels, K action_horizon, A action_dim, L = K * A
tokens, V bins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, UInt8
from pydantic import Field, model_validator
from safetensors.torch import load_file, save_file
from torch import nn

from vla_rl.config import ConfigModel
from vla_rl.policies.action_tokens import NUM_BINS
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.types import EnvSpec, Observation


class TinyVLAConfig(ConfigModel):
    """Architecture of the tiny policy."""

    type: Literal["tiny_vla"] = "tiny_vla"
    """Which policy."""
    action_horizon: int = Field(default=8, ge=1, le=64)
    """Predicted control steps of a chunk (LIBERO recipes: 8)."""
    channels: tuple[int, ...] = Field(default=(16, 16), min_length=1)
    """Channels of the convolutions (the first has a 5x5 kernel, the others 3x3)."""
    strides: tuple[int, ...] = (2, 1)
    """Strides of the convolutions; the soft-argmax works at image_size / prod(strides).

    Resolution matters more than depth: with maps of 32 x 32 the same demonstrations gave 59 % success, with 16 x 16
    8 %."""
    num_keypoints: int = Field(default=16, ge=1)
    """Soft-argmax keypoints per camera."""
    instruction_dim: int = Field(default=64, ge=8)
    """Width of the instruction embedding."""
    hidden_dim: int = Field(default=256, ge=16)
    """Width of the residual MLP."""
    num_blocks: int = Field(default=2, ge=0)
    """Residual blocks of the MLP."""
    num_bumps: int = Field(default=32, ge=2, le=NUM_BINS)
    """Gaussian bumps that span the 256 bins of a token."""
    use_proprio: bool = True
    """Whether the policy reads the proprioceptive state."""

    @model_validator(mode="after")
    def _one_stride_per_convolution(self) -> Self:
        if len(self.strides) != len(self.channels):
            raise ValueError(f"strides {self.strides} and channels {self.channels} must have the same length")
        return self


class TinyVLA(TokenPolicy):
    """See the module's docstring. Build with `create`, read back with `load`."""

    def __init__(self, config: TinyVLAConfig, spec: EnvSpec, norm_stats: NormStats, tokenizer: WordTokenizer) -> None:
        super().__init__(config.action_horizon, spec, norm_stats)
        self.config = config
        self.tokenizer = tokenizer
        self.instruction = _InstructionEncoder(tokenizer.vocab_size, config.instruction_dim)
        self.stem = _KeypointStem(config, len(spec.cameras))
        proprio_dim = spec.proprio_dim if config.use_proprio else 0
        features = self.stem.output_dim + config.instruction_dim + proprio_dim
        self.trunk = nn.Sequential(
            nn.Linear(features, config.hidden_dim),
            nn.SiLU(),
            *[_ResidualBlock(config.hidden_dim) for _ in range(config.num_blocks)],
            nn.LayerNorm(config.hidden_dim),
        )
        self.head = _BumpHead(config.hidden_dim, config.action_horizon * spec.action_dim, config.num_bumps)

    def draw_augmentation(self, generator: np.random.Generator, batch: int) -> Float64[np.ndarray, "batch parameters"]:
        """Contrast and brightness of each row, one draw for all cameras.

        Positions are left alone on purpose: at 64 px a shift of two pixels is two centimetres of label noise.
        """
        return generator.uniform([0.8, -20.0], [1.2, 20.0], size=(batch, 2))

    def logits(
        self,
        observations: Sequence[Observation],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> Float[torch.Tensor, "batch tokens bins"]:
        """See `TokenPolicy.logits`.

        Raises:
            ValueError: The images do not have the cameras and the size that the policy was made for.
        """
        expected = (len(self.spec.cameras), *self.spec.image_size, 3)
        for observation in observations:
            if observation.images.shape != expected:
                raise ValueError(
                    f"images have shape {observation.images.shape} (cameras, height, width, rgb), the policy was made "
                    f"for {expected} with cameras {self.spec.cameras}; set the suite's cameras and image_size "
                    "accordingly"
                )
        device = self.device
        instruction = self._encode_instructions([observation.instruction for observation in observations])
        images = torch.from_numpy(_images(observations, augmentation)).to(device)
        parts = [self.stem(images, instruction), instruction]
        if self.config.use_proprio:
            proprio = np.stack([observation.proprio for observation in observations]).astype(np.float64)
            normalized = self.norm_stats.proprio.normalize(proprio).astype(np.float32)
            parts.append(torch.from_numpy(normalized).to(device))
        logits: torch.Tensor = self.head(self.trunk(torch.cat(parts, dim=-1)))
        return logits

    def greedy_bins(self, logits: Float[torch.Tensor, "batch tokens bins"]) -> Int64[torch.Tensor, "batch tokens"]:
        """The mean bin of each token, at temperature 1.

        Bins are ordinal and the tiny policy's distributions broad: their peak is a ragged estimate of where they are.
        In one run the same weights solved 91 % of 256 validation starts with mean bins and 82 % with the most likely
        ones after RL, 54 % and 43 % before. An undecided gripper follows the likelier side, since only its sign counts.
        """
        bins = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
        return (torch.softmax(logits.float(), dim=-1) @ bins).round().long()

    def _encode_instructions(self, instructions: list[str]) -> Float[torch.Tensor, "batch instruction_dim"]:
        # A batch holds few different sentences: each is encoded once.
        unique = sorted(set(instructions))
        encoded = self.instruction(torch.from_numpy(self.tokenizer.encode(unique)).to(self.device))
        rows: torch.Tensor = encoded[[unique.index(instruction) for instruction in instructions]]
        return rows

    def save(self, folder: Path) -> None:
        """Write weights, configuration, interface, vocabulary and normalisation statistics."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / "model.safetensors"
        )
        description = {"policy": self.config.model_dump(mode="json"), "env_spec": asdict(self.spec)}
        (folder / "config.json").write_text(json.dumps(description, indent=2))
        self.tokenizer.save(folder)
        self.norm_stats.save(folder)
        self.save_contract(folder)

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read a folder written by `save`."""
        description = json.loads((folder / "config.json").read_text())
        policy = cls(
            TinyVLAConfig(**description["policy"]),
            EnvSpec.from_dict(description["env_spec"]),
            NormStats.load(folder),
            WordTokenizer.load(folder),
        )
        policy.load_state_dict(load_file(folder / "model.safetensors"))
        return policy.to(device)


def _images(
    observations: Sequence[Observation], augmentation: Float64[np.ndarray, "batch 2"] | None
) -> UInt8[np.ndarray, "batch cameras height width 3"]:
    if augmentation is None:
        return np.stack([observation.images for observation in observations])
    return np.stack(
        [jitter_colours(observation.images, *row) for observation, row in zip(observations, augmentation, strict=True)]
    )


def jitter_colours(
    images: UInt8[np.ndarray, "*shape"], contrast: float, brightness: float
) -> UInt8[np.ndarray, "*shape"]:
    """Scale the distance from middle grey by `contrast`, then add `brightness` (in levels); clipped."""
    table = np.clip((np.arange(256.0) - 127.5) * contrast + 127.5 + brightness, 0, 255).astype(np.uint8)
    jittered: UInt8[np.ndarray, "*shape"] = table[images]
    return jittered


class _InstructionEncoder(nn.Module):
    """Word embeddings, one convolution over word triples (word order matters: "red on blue"), masked mean."""

    def __init__(self, vocab_size: int, output_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, output_dim, padding_idx=0)
        self.triples = nn.Conv1d(output_dim, output_dim, kernel_size=3, padding=1)
        self.output = nn.Linear(output_dim, output_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_word = (ids != 0).unsqueeze(-1)  # (B, W, 1)
        hidden = nn.functional.silu(self.triples(self.embedding(ids).transpose(1, 2))).transpose(1, 2)
        pooled = (hidden * is_word).sum(dim=1) / is_word.sum(dim=1)
        output: torch.Tensor = self.output(pooled)
        return output


class _KeypointStem(nn.Module):
    """Convolutions with FiLM, then per keypoint map the soft-argmax position and how peaked the map is."""

    def __init__(self, config: TinyVLAConfig, num_cameras: int) -> None:
        super().__init__()
        self.num_cameras = num_cameras
        widths = (3, *config.channels)
        kernels = (5, *[3] * (len(config.channels) - 1))
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, kernel_size=kernel, stride=stride, padding=kernel // 2)
            for a, b, kernel, stride in zip(widths[:-1], widths[1:], kernels, config.strides, strict=True)
        )
        # 2-3x faster on CPU than the default layout. (torch's annotations lack this overload.)
        self.convs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.camera = nn.Embedding(num_cameras, config.instruction_dim)
        self.films = nn.ModuleList(nn.Linear(config.instruction_dim, 2 * width) for width in config.channels)
        self.maps = nn.Conv2d(widths[-1], config.num_keypoints, kernel_size=1)
        # Maps are standardised, then sharpened by this: keypoints are distinct and move from the first update on. Raw
        # maps start almost flat, all keypoints sit in the middle, and the MLP learns the demonstrations by heart.
        self.sharpness = nn.Parameter(torch.full((config.num_keypoints, 1), 3.0))
        self.output_dim = num_cameras * config.num_keypoints * 3

    def forward(self, images: torch.Tensor, instruction: torch.Tensor) -> torch.Tensor:
        batch, cameras = images.shape[:2]
        hidden = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1.0  # (B*C, 3, H, W)
        condition = (instruction.unsqueeze(1) + self.camera.weight).flatten(0, 1)  # (B*C, E)
        for conv, film in zip(self.convs, self.films, strict=True):
            scale, shift = film(condition)[:, :, None, None].chunk(2, dim=1)
            hidden = nn.functional.relu(torch.addcmul(shift, conv(hidden), 1.0 + scale))
        maps = self.maps(hidden)  # (B*C, D, h, w)
        height, width = maps.shape[2:]
        flat = self.sharpness * nn.functional.layer_norm(maps.flatten(2), (height * width,))
        weights = torch.softmax(flat, dim=-1)
        ys = torch.linspace(-1.0, 1.0, height, device=maps.device).repeat_interleave(width)
        xs = torch.linspace(-1.0, 1.0, width, device=maps.device).repeat(height)
        positions = weights @ torch.stack([xs, ys], dim=-1)  # (B*C, D, 2)
        peak = (weights * flat).sum(dim=-1, keepdim=True)
        return torch.cat([positions, 0.1 * peak], dim=-1).reshape(batch, cameras * maps.shape[1] * 3)


class _ResidualBlock(nn.Module):
    """Pre-norm two-layer MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = hidden + self.net(hidden)
        return output


class _BumpHead(nn.Module):
    """Logits of each token as a combination of Gaussian bumps over the bins."""

    def __init__(self, input_dim: int, num_tokens: int, num_bumps: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.coefficients = nn.Linear(input_dim, num_tokens * num_bumps)
        spacing = (NUM_BINS - 1) / (num_bumps - 1)
        offsets = torch.arange(NUM_BINS).unsqueeze(0) - spacing * torch.arange(num_bumps).unsqueeze(1)
        self.register_buffer("bumps", torch.exp(-0.5 * (offsets / spacing) ** 2), persistent=False)  # (bumps, V)
        self.bumps: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        coefficients: torch.Tensor = self.coefficients(hidden).reshape(len(hidden), self.num_tokens, -1)
        return coefficients @ self.bumps
