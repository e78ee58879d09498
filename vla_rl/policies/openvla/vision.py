"""The two vision towers of OpenVLA, DINOv2 and SigLIP, as far as its features need them.

Module names are those of the published weights. Three parts are stored there and never used: the last block of each
tower, its final norm, and SigLIP's attention pool; they are built, so that every tensor has its place, not computed.

Sources: A. Dosovitskiy et al., An image is worth 16x16 words, arXiv:2010.11929, eqs. 1-3; M. Oquab et al., DINOv2,
arXiv:2304.07193; T. Darcet et al., Vision transformers need registers, arXiv:2309.16588; H. Touvron et al., Going
deeper with image transformers, arXiv:2103.17239, eq. 4 (LayerScale); X. Zhai et al., SigLIP, arXiv:2303.15343; FiLM in
each block as in M. Kim et al., OpenVLA-OFT, arXiv:2502.19645, section IV-C. Shape letters: B batch, N images, P patches
of an image, T tokens of a tower, D its width, H its heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vla_rl.policies.openvla.architecture import Architecture, TowerSizes

_NORM_EPSILON = 1e-6
_INITIAL_LAYER_SCALE = 0.1  # of towers trained from scratch: what the source takes for up to 18 blocks
_PUBLISHED_LORA_ALPHA = 16  # training scaled the update of rank r by min(r, 16) / r; the file does not say it

Modulation = tuple[torch.Tensor, torch.Tensor]
"""FiLM's scale and shift of one block, (B, 1, D) each."""


def run_block(block: Callable[..., Any], *inputs: Any, recompute: bool) -> torch.Tensor:
    """Output of a block; with `recompute`, the backward pass computes its activations again instead of keeping them."""
    if recompute and torch.is_grad_enabled():
        output: torch.Tensor = checkpoint(block, *inputs, use_reentrant=False)
    else:
        output = block(*inputs)
    return output


class PatchEmbedding(nn.Module):
    """One linear map per patch, row by row."""

    def __init__(self, dim: int, patch_size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, stride=patch_size)

    def forward(self, images: Float[torch.Tensor, "batch 3 height width"]) -> Float[torch.Tensor, "batch patches dim"]:
        """Patch tokens, rows of the image first."""
        maps: torch.Tensor = self.proj(images)
        return maps.flatten(2).transpose(1, 2)


class VisionAttention(nn.Module):
    """Self-attention of all tokens of an image."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Float[torch.Tensor, "batch tokens dim"]) -> Float[torch.Tensor, "batch tokens dim"]:
        """Attended tokens."""
        heads = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1))  # (B, T, 3, H, D / H)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        output: torch.Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    """Two layers with the exact GELU."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)

    def forward(self, tokens: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """Each token by itself."""
        output: torch.Tensor = self.fc2(functional.gelu(self.fc1(tokens)))
        return output


class LayerScale(nn.Module):
    """A learned factor per channel of a residual branch."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), _INITIAL_LAYER_SCALE))

    def forward(self, tokens: Float[torch.Tensor, "batch tokens dim"]) -> Float[torch.Tensor, "batch tokens dim"]:
        """Scaled tokens."""
        return tokens * self.scale_factor


class VisionBlock(nn.Module):
    """Pre-norm transformer block, with FiLM between attention and MLP if asked for."""

    def __init__(self, sizes: TowerSizes, has_layer_scale: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.dim, eps=_NORM_EPSILON)
        self.attn = VisionAttention(sizes.dim, sizes.num_heads)
        self.ls1 = LayerScale(sizes.dim) if has_layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(sizes.dim, eps=_NORM_EPSILON)
        self.mlp = Mlp(sizes.dim, sizes.mlp_dim)
        self.ls2 = LayerScale(sizes.dim) if has_layer_scale else nn.Identity()

    def forward(
        self, tokens: Float[torch.Tensor, "batch tokens dim"], modulation: Modulation | None
    ) -> Float[torch.Tensor, "batch tokens dim"]:
        """Tokens for the next block."""
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens)))
        if modulation is not None:
            scale, shift = modulation
            tokens = tokens * (1 + scale) + shift
        output: torch.Tensor = tokens + self.ls2(self.mlp(self.norm2(tokens)))
        return output


class AttentionPool(nn.Module):
    """Weights of SigLIP's image embedding: they have their place in the published files and are never computed."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.zeros(1, 1, sizes.dim))
        self.q = nn.Linear(sizes.dim, sizes.dim)
        self.kv = nn.Linear(sizes.dim, 2 * sizes.dim)
        self.proj = nn.Linear(sizes.dim, sizes.dim)
        self.norm = nn.LayerNorm(sizes.dim, eps=_NORM_EPSILON)
        self.mlp = Mlp(sizes.dim, sizes.mlp_dim)


class VisionTower(nn.Module):
    """What DINOv2 and SigLIP share: patches with learned positions through all blocks but the last."""

    def __init__(self, sizes: TowerSizes, num_patches: int, patch_size: int, has_layer_scale: bool) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, num_patches, sizes.dim))
        self.patch_embed = PatchEmbedding(sizes.dim, patch_size)
        self.blocks = nn.ModuleList(VisionBlock(sizes, has_layer_scale) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.dim, eps=_NORM_EPSILON)

    def prefix_tokens(self) -> list[nn.Parameter]:
        """Tokens in front of the patches, (1, tokens, D) each; they have no position and are dropped at the end."""
        return []

    def forward(
        self,
        images: Float[torch.Tensor, "images 3 height width"],
        modulations: list[Modulation] | None,
        recompute: bool,
    ) -> Float[torch.Tensor, "images patches dim"]:
        """Patch tokens after the last but one block, without a final norm."""
        tokens = self.patch_embed(images) + self.pos_embed
        prefix = [token.expand(len(images), -1, -1).to(tokens.dtype) for token in self.prefix_tokens()]
        num_prefix = sum(token.shape[1] for token in prefix)
        tokens = torch.cat([*prefix, tokens], dim=1)
        for index, block in enumerate(self.blocks[:-1]):
            modulation = None if modulations is None else modulations[index]
            tokens = run_block(block, tokens, modulation, recompute=recompute)
        return tokens[:, num_prefix:]


class DinoV2(VisionTower):
    """DINOv2 with one class token and registers, and LayerScale."""

    def __init__(self, sizes: TowerSizes, num_patches: int, patch_size: int, num_registers: int) -> None:
        super().__init__(sizes, num_patches, patch_size, has_layer_scale=True)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, sizes.dim))
        self.reg_token = nn.Parameter(0.02 * torch.randn(1, num_registers, sizes.dim))

    def prefix_tokens(self) -> list[nn.Parameter]:
        """Class token, then registers."""
        return [self.cls_token, self.reg_token]


class SigLip(VisionTower):
    """SigLIP's image tower: patches only."""

    def __init__(self, sizes: TowerSizes, num_patches: int, patch_size: int) -> None:
        super().__init__(sizes, num_patches, patch_size, has_layer_scale=False)
        self.attn_pool = AttentionPool(sizes)


class FilmLayer(nn.Module):
    """Scale and shift of the tokens of one block, from the mean embedding of the instruction."""

    def __init__(self, language_dim: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Linear(language_dim, dim)
        self.shift = nn.Linear(language_dim, dim)

    def forward(self, language: Float[torch.Tensor, "batch language_dim"]) -> Modulation:
        """What the block adds, for all of its tokens alike."""
        return self.scale(language).unsqueeze(1), self.shift(language).unsqueeze(1)


class Film(nn.Module):
    """FiLM layers of both towers, one per block (E. Perez et al., arXiv:1709.07871, eq. 2)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        language_dim, dinov2, siglip = architecture.language.hidden_dim, architecture.dinov2, architecture.siglip
        self.featurizer = nn.ModuleList(FilmLayer(language_dim, dinov2.dim) for _ in range(dinov2.depth))
        self.fused_featurizer = nn.ModuleList(FilmLayer(language_dim, siglip.dim) for _ in range(siglip.depth))

    def forward(
        self, language: Float[torch.Tensor, "images language_dim"]
    ) -> tuple[list[Modulation], list[Modulation]]:
        """Modulations of the blocks of DINOv2 and of SigLIP, from the mean embedding of each image's prompt."""
        return [layer(language) for layer in self.featurizer], [layer(language) for layer in self.fused_featurizer]


class FusedVisionBackbone(nn.Module):
    """Both towers side by side: each image goes through both, features are joined patch by patch."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        num_patches, patch_size = architecture.num_patches, architecture.patch_size
        self.featurizer = DinoV2(architecture.dinov2, num_patches, patch_size, architecture.num_registers)
        self.fused_featurizer = SigLip(architecture.siglip, num_patches, patch_size)

    def forward(
        self,
        pixels: Float[torch.Tensor, "batch images 6 height width"],
        modulations: tuple[list[Modulation], list[Modulation]] | None = None,
        recompute: bool = False,
    ) -> Float[torch.Tensor, "batch patches dim"]:
        """Patch features of all images of a row, (B, N * P, D of both towers).

        Args:
            pixels: Normalised for DINOv2 (channels 0-2) and for SigLIP (3-5).
            modulations: From `Film`, for all B * N images.
            recompute: See `run_block`.
        """
        images = pixels.flatten(0, 1).to(self.featurizer.pos_embed.dtype)
        of_dinov2, of_siglip = (None, None) if modulations is None else modulations
        features = [
            self.featurizer(images[:, :3], of_dinov2, recompute),
            self.fused_featurizer(images[:, 3:], of_siglip, recompute),
        ]
        return torch.cat(features, dim=-1).reshape(len(pixels), -1, sum(part.shape[-1] for part in features))


_FILM_KEY = re.compile(r"(featurizer|fused_featurizer)\.blocks\.(\d+)\.((?:scale|shift)\.(?:weight|bias))")


def split_film_weights(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take the side file `vision_backbone--*_checkpoint.pt` apart.

    OpenVLA-OFT writes the backbone as it was trained: each block inside a FiLM wrapper, each linear map and convolution
    possibly with its low-rank update beside it.

    Args:
        tensors: By name, as in the file.

    Returns:
        Weights of a `FusedVisionBackbone`, the low-rank updates added, and those of a `Film`.

    Raises:
        ValueError: A low-rank update has no weight that it belongs to.
    """
    backbone: dict[str, torch.Tensor] = {}
    film: dict[str, torch.Tensor] = {}
    for published, tensor in tensors.items():
        key = published.removeprefix("vision_backbone.")
        if match := _FILM_KEY.fullmatch(key):
            film[".".join(match.groups())] = tensor
        else:
            backbone[re.sub(r"\.blocks\.(\d+)\.block\.", r".blocks.\1.", key)] = tensor
    for key in [key for key in backbone if key.endswith(".lora_A.default.weight")]:
        stem = key.removesuffix(".lora_A.default.weight")
        names = (f"{stem}.base_layer.weight", f"{stem}.lora_B.default.weight")
        if any(name not in backbone for name in names):
            raise ValueError(f"the FiLM file has {key!r} without {names[0]!r} and {names[1]!r}; it is incomplete")
        base, down, up = backbone[names[0]], backbone.pop(key), backbone.pop(names[1])
        rank = len(down)
        update = (up.flatten(1).float() @ down.flatten(1).float()) * (min(rank, _PUBLISHED_LORA_ALPHA) / rank)
        backbone[names[0]] = (base.float() + update.view_as(base)).to(base.dtype)
    return {key.replace(".base_layer.", "."): tensor for key, tensor in backbone.items()}, film
