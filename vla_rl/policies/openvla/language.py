"""OpenVLA's language model, Llama 2, for parallel decoding: attention in both directions, read at few positions.

Module names are those of the published weights and each linear map is an `nn.Linear`, so that PEFT can adapt it.

What makes it cheap: the last layer computes queries and MLP at the read-out positions only (every other position serves
as key and value there), as does the final norm; the head computes only the rows of the vocabulary that are asked for.

Sources: H. Touvron et al., Llama 2, arXiv:2307.09288, section 2.2; B. Zhang, R. Sennrich, RMSNorm, arXiv:1910.07467,
eq. 4; J. Su et al., RoFormer, arXiv:2104.09864, eq. 34; N. Shazeer, GLU variants, arXiv:2002.05202, eq. 6; J. Ainslie
et al., GQA, arXiv:2305.13245; attention in both directions as in OpenVLA-OFT, arXiv:2502.19645, section IV-A. Shape
letters: B batch, S positions, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import nn
from torch.nn import functional

from vla_rl.policies.openvla.architecture import LanguageSizes
from vla_rl.policies.openvla.vision import run_block

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of each position, (B or 1, S, D / H) float32 each."""


def rotary_tables(positions: Int64[torch.Tensor, "rows positions"], head_dim: int, theta: float) -> Rotation:
    """RoPE's angles, computed on the spot in float32: a stored table would lose its precision in `.to(bfloat16)`."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.unsqueeze(-1).float() / theta**exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    heads: Float[torch.Tensor, "batch heads positions head_dim"], rotation: Rotation
) -> Float[torch.Tensor, "batch heads positions head_dim"]:
    """Turn the pairs (i, i + head_dim / 2) of queries or keys by the angles of their positions."""
    cos, sin = (table.unsqueeze(1).to(heads.dtype) for table in rotation)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


class KeyValueCache:
    """Keys and values of one layer at the positions so far, (B, heads, S, D / H)."""

    def __init__(self) -> None:
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None

    def extend(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new positions; returns all."""
        if self._stored is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self._stored, (key, value), strict=True))
        self._stored = (key, value)
        return key, value


class RMSNorm(nn.Module):
    """Normalised in float32, rounded to the input's dtype, then weighted."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, hidden: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """Rows of root mean square 1, times the weight."""
        return self.weight * functional.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)


class LlamaAttention(nn.Module):
    """Attention with rotary positions; several query heads may share a key head."""

    def __init__(self, sizes: LanguageSizes) -> None:
        super().__init__()
        self.head_dim = sizes.hidden_dim // sizes.num_heads
        self.shares_keys = sizes.num_kv_heads != sizes.num_heads
        self.q_proj = nn.Linear(sizes.hidden_dim, sizes.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_dim, sizes.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_dim, sizes.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * self.head_dim, sizes.hidden_dim, bias=False)

    def forward(
        self,
        hidden: Float[torch.Tensor, "batch positions dim"],
        rotation: Rotation,
        mask: Bool[torch.Tensor, "masks 1 mask_rows keys"] | None,
        rows: slice,
        cache: KeyValueCache | None,
    ) -> Float[torch.Tensor, "batch queries dim"]:
        """Attended values at `rows`; see `LlamaLayer.forward`."""
        query = self._split(self.q_proj(hidden[:, rows]))
        key, value = self._split(self.k_proj(hidden)), self._split(self.v_proj(hidden))
        cos, sin = rotation
        query, key = rotate(query, (cos[:, rows], sin[:, rows])), rotate(key, rotation)
        if cache is not None:
            key, value = cache.extend(key, value)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=self.shares_keys
        )
        output: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def _split(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.view(*projected.shape[:2], -1, self.head_dim).transpose(1, 2)


class LlamaMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LanguageSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_dim, sizes.mlp_dim, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_dim, sizes.mlp_dim, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_dim, sizes.hidden_dim, bias=False)

    def forward(self, hidden: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """Each position by itself."""
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class LlamaLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, sizes: LanguageSizes) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(sizes)
        self.mlp = LlamaMlp(sizes)
        self.input_layernorm = RMSNorm(sizes.hidden_dim, sizes.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_dim, sizes.rms_norm_eps)

    def forward(
        self,
        hidden: Float[torch.Tensor, "batch positions dim"],
        rotation: Rotation,
        mask: Bool[torch.Tensor, "masks 1 mask_rows keys"] | None,
        rows: slice,
        cache: KeyValueCache | None,
    ) -> Float[torch.Tensor, "batch queries dim"]:
        """Hidden states for the next layer.

        Args:
            hidden: Of all positions.
            rotation: Of all positions.
            mask: True where a query sees a key; None: everywhere.
            rows: Positions whose states are wanted; the others are keys and values only.
            cache: Holds the positions before these; gets these appended.
        """
        attended = self.self_attn(self.input_layernorm(hidden), rotation, mask, rows, cache)
        hidden = hidden[:, rows] + attended
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class LlamaDecoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, sizes: LanguageSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_dim)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.num_layers))
        self.norm = RMSNorm(sizes.hidden_dim, sizes.rms_norm_eps)

    def forward(
        self,
        embeddings: Float[torch.Tensor, "batch positions dim"],
        positions: Int64[torch.Tensor, "rows positions"],
        key_mask: Bool[torch.Tensor, "batch keys"] | None,
        *,
        rows: slice,
        causal: bool = False,
        caches: list[KeyValueCache] | None = None,
        recompute: bool = False,
    ) -> Float[torch.Tensor, "batch queries dim"]:
        """Normalised hidden states at `rows`.

        Args:
            embeddings: Inputs, already embedded.
            positions: For RoPE; one row if all rows count alike.
            key_mask: True where a position is real, past positions of the caches included; None: all are.
            rows: Read-out positions.
            causal: Whether a position sees only those up to its own (original OpenVLA) instead of all (OpenVLA-OFT).
                With positions in the caches, pass the new ones one by one.
            caches: One per layer.
            recompute: See `run_block`.
        """
        sizes = self.sizes
        rotation = rotary_tables(positions, sizes.hidden_dim // sizes.num_heads, sizes.rope_theta)
        mask = None if key_mask is None else key_mask[:, None, None, :]
        last_mask = mask
        if causal:
            length = embeddings.shape[1]
            past = torch.ones(length, length, dtype=torch.bool, device=embeddings.device).tril()[None, None]
            mask = past if mask is None else past & mask
            last_mask = mask[:, :, rows]
        hidden = embeddings
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            cache = None if caches is None else caches[index]
            inputs = (last_mask, rows, cache) if index == last else (mask, slice(None), cache)
            hidden = run_block(layer, hidden, rotation, *inputs, recompute=recompute)
        output: torch.Tensor = self.norm(hidden)
        return output


class LanguageModel(nn.Module):
    """Llama with its head."""

    def __init__(self, sizes: LanguageSizes) -> None:
        super().__init__()
        self.model = LlamaDecoder(sizes)
        self.lm_head = nn.Linear(sizes.hidden_dim, sizes.vocab_size, bias=False)


def linear_rows(
    module: nn.Module, hidden: Float[torch.Tensor, "*batch dim"], rows: slice
) -> Float[torch.Tensor, "*batch rows"]:
    """Some outputs of a linear map, at the cost of these only.

    Args:
        module: An `nn.Linear`, or one that PEFT has wrapped in a plain LoRA layer (arXiv:2106.09685, eq. 3).
        hidden: Inputs.
        rows: Which outputs.
    """
    layer: Any = module
    base = getattr(layer, "base_layer", layer)
    output = functional.linear(hidden, base.weight[rows], None if base.bias is None else base.bias[rows])
    if base is layer or layer.disable_adapters or layer.merged:
        return output
    for name in layer.active_adapters:
        if name in layer.lora_A:
            down, up = layer.lora_A[name], layer.lora_B[name].weight[rows]
            low = down(layer.lora_dropout[name](hidden.to(down.weight.dtype)))
            output = output + layer.scaling[name] * functional.linear(low, up).to(output.dtype)
    return output
