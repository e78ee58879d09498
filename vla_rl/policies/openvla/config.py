"""What a user may say about an OpenVLA policy; everything else is read from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from vla_rl.config import ConfigModel
from vla_rl.policies.openvla.architecture import Architecture, LanguageSizes, TowerSizes
from vla_rl.types import EnvSpec

NANO_TEXT_VOCAB_SIZE = 768
"""Text vocabulary of a small model's own tokenizer: words and fillers, then the 256 action tokens."""
_NUM_PADDING_ROWS = 64


class NanoSizes(ConfigModel):
    """Sizes of an OpenVLA model that is trained from scratch; the defaults have 3.5 million parameters."""

    image_size: int = Field(default=112, ge=28, multiple_of=14)
    """Height and width of the images that the towers see."""
    vision_dim: int = Field(default=96, ge=8)
    """Width of each vision tower."""
    vision_depth: int = Field(default=4, ge=2)
    """Blocks of each vision tower; the last one is never used, as in OpenVLA."""
    vision_heads: int = Field(default=4, ge=1)
    """Attention heads of each vision tower."""
    language_dim: int = Field(default=192, ge=8)
    """Width of the language model."""
    language_layers: int = Field(default=4, ge=1)
    """Layers of the language model."""
    language_heads: int = Field(default=6, ge=1)
    """Attention heads of the language model."""

    @model_validator(mode="after")
    def _heads_divide_widths(self) -> Self:
        for part, dim, heads in (
            ("vision", self.vision_dim, self.vision_heads),
            ("language", self.language_dim, self.language_heads),
        ):
            if dim % heads or (part == "language" and dim // heads % 2):
                raise ValueError(
                    f"{part}_dim is {dim} with {part}_heads {heads}: the width must be a multiple of the number of "
                    "heads (for the language model, of twice that number)"
                )
        return self

    def architecture(self) -> Architecture:
        """All sizes."""
        tower = TowerSizes(
            dim=self.vision_dim, depth=self.vision_depth, num_heads=self.vision_heads, mlp_dim=4 * self.vision_dim
        )
        language = LanguageSizes(
            hidden_dim=self.language_dim,
            mlp_dim=8 * self.language_dim // 3,
            num_layers=self.language_layers,
            num_heads=self.language_heads,
            num_kv_heads=self.language_heads,
            vocab_size=NANO_TEXT_VOCAB_SIZE + _NUM_PADDING_ROWS,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
        )
        return Architecture(
            image_size=self.image_size,
            dinov2=tower,
            siglip=tower,
            language=language,
            pad_token_id=NANO_TEXT_VOCAB_SIZE,
            num_padding_rows=_NUM_PADDING_ROWS,
            num_bins=256,
        )


class OpenVLAConfig(ConfigModel):
    """An OpenVLA or OpenVLA-OFT policy. The defaults are those of OpenVLA-OFT and SimpleVLA-RL on LIBERO."""

    type: Literal["openvla"] = "openvla"
    """Which policy."""
    checkpoint: str | None = None
    """Where cloning starts: a folder, or a hub id whose files are in the local cache, in the published format; null:
    random weights with the sizes below. (Reinforcement learning starts from `--checkpoint`.)"""
    adapter: str | None = None
    """Folder of a LoRA adapter that is not yet merged into the published checkpoint: it is trained on if
    `compute.trained` is lora, else merged when the weights are read. Checkpoints of vla-rl bring their own."""
    sizes: NanoSizes = NanoSizes()
    """Sizes of a model with random weights."""
    action_horizon: int = Field(default=8, ge=1, le=64)
    """Predicted control steps of a chunk; the published files do not say it. LIBERO: 8, ALOHA: 25."""
    decoding: Literal["parallel", "autoregressive"] = "parallel"
    """"parallel": OpenVLA-OFT. "autoregressive": the original OpenVLA, one action, evaluation only; the published
    files do not tell them apart."""
    action_head: Literal["tokens", "l1"] = "tokens"
    """What cloning trains: discrete action tokens (needed for reinforcement learning) or OpenVLA-OFT's regression head.
    A checkpoint that has a regression or a diffusion head uses it."""
    num_denoising_steps: int = Field(default=50, ge=1, le=50)
    """Passes of a diffusion head through the model. OpenVLA-OFT: 50."""
    use_proprio: bool = False
    """Whether cloning adds the proprioceptive state as one more token. A checkpoint that has a projector for it uses
    it."""
    norm_key: str | None = None
    """Which entry of `dataset_statistics.json` scales the actions, and the name of the entry that cloning makes; null:
    the suite's."""
    normalization: Literal["q99", "min_max"] = "q99"
    """Range that the bins span: 1 % to 99 % quantiles (LIBERO, Bridge) or minimum to maximum (ALOHA)."""
    use_jpeg: bool = True
    """Whether images make the round trip through JPEG that the published training data made."""
    centre_crop: bool = True
    """Whether the policy sees the central 90 % of the image, as policies that were trained with random crops must."""

    @model_validator(mode="after")
    def _sizes_are_used(self) -> Self:
        if self.checkpoint is not None and self.sizes != NanoSizes():
            raise ValueError("policy.sizes is of models with random weights; policy.checkpoint has sizes of its own")
        return self


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a published checkpoint does not say about its policy.

    Attributes:
        config: The user's settings.
        spec: Interface of the suite.
        suites: Names of the suites of the tasks, which name the normalisation statistics.
    """

    config: OpenVLAConfig
    spec: EnvSpec
    suites: Sequence[str]
