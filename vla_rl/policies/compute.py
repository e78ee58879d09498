"""How a policy is computed and which of its weights are trained; nothing of this is part of the policy itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vla_rl.config import ConfigModel

Precision = Literal["float32", "bfloat16", "mixed"]


class TrainEverything(ConfigModel):
    """Full fine-tuning."""

    type: Literal["full"] = "full"
    """Which weights are trained."""
    freeze_vision: bool = False
    """Whether the vision towers keep their weights."""


class TrainLora(ConfigModel):
    """Low-rank adapters (E. Hu et al., LoRA, arXiv:2106.09685) through the PEFT library."""

    type: Literal["lora"] = "lora"
    """Which weights are trained."""
    rank: int = Field(default=32, ge=1)
    """Rank of the update of each weight matrix. OpenVLA-OFT: 32."""
    alpha: int = Field(default=16, ge=1)
    """The update is scaled by alpha / rank. OpenVLA-OFT: 16."""
    targets: Literal["published", "language", "attention", "existing"] = "language"
    """"published": every linear map and the patch embeddings, as OpenVLA-OFT's code reaches them, the unused ones too.
    "language": those of the language model and the projector; the vision towers stay as they are, so that their
    features can be kept. "attention": the attention of the language model only. "existing": whatever layers the
    checkpoint's adapters are at (policy.adapter, or a run's own)."""


class ComputeConfig(ConfigModel):
    """Precision, memory and what is trained."""

    precision: Precision = "float32"
    """"bfloat16": weights and arithmetic; train adapters, or everything with `optim.offload`. "mixed": float32 weights,
    bfloat16 matrix products."""
    activation_checkpointing: bool = False
    """Whether the backward pass computes the activations of a layer again instead of keeping them."""
    compile: bool = False
    """Whether layers are compiled (torch.compile); pays off after some minutes on a GPU."""
    vision_cache_gb: float = Field(default=0.0, ge=0)
    """Host memory for the features of frozen vision towers, so that the update need not compute again what the rollout
    has computed. 1.1 MB per decision of the 7B model in bfloat16."""
    trained: Annotated[TrainEverything | TrainLora, Field(discriminator="type")] = TrainEverything()
    """Which weights are trained."""
