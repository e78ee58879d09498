"""How many parameters an OpenVLA model has, by formula: what memory estimates rest on, before anything is allocated.

The shapes are those of the published weights (M. Kim et al., OpenVLA, arXiv:2406.09246, section 3.1); LoRA adds
rank x (inputs + outputs) to each map that it adapts (E. Hu et al., LoRA, arXiv:2106.09685, section 4.1).
"""

from __future__ import annotations

from vla_rl.policies.compute import TrainEverything, TrainLora
from vla_rl.policies.openvla.architecture import Architecture, TowerSizes

LinearMap = tuple[int, int]
"""Inputs and outputs."""

PUBLISHED = Architecture.from_config(
    {
        "model_type": "openvla",
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "use_fused_vision_backbone": True,
        "image_sizes": [224, 224],
        "text_config": {"vocab_size": 32064},
        "pad_token_id": 32000,
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
    }
)
"""Sizes of openvla/openvla-7b and of every checkpoint that was trained from it."""


def model_parameters(architecture: Architecture) -> int:
    """Parameters of the model, side modules not included."""
    language = architecture.language
    layer_norms = 2 * language.hidden_dim
    embeddings = language.vocab_size * language.hidden_dim
    return (
        vision_parameters(architecture)
        + sum(map(_with_bias, projector_maps(architecture)))
        + sum(map(_weights, attention_maps(architecture) + mlp_maps(architecture)))
        + language.num_layers * layer_norms
        + language.hidden_dim  # the final norm
        + 2 * embeddings  # input and head
    )


def vision_parameters(architecture: Architecture) -> int:
    """Parameters of both towers, the parts that are never used included."""
    dinov2, siglip = architecture.dinov2, architecture.siglip
    prefix_tokens = 1 + architecture.num_registers
    of_dinov2 = _tower(architecture, dinov2) + prefix_tokens * dinov2.dim + dinov2.depth * 2 * dinov2.dim  # LayerScale
    latent_and_norm = 3 * siglip.dim
    return of_dinov2 + _tower(architecture, siglip) + latent_and_norm + sum(map(_with_bias, _pool_maps(siglip)))


def side_parameters(architecture: Architecture, proprio_dim: int = 0, l1_action_dim: int = 0) -> int:
    """Parameters of the projector of proprioception and of the regression head; a size of 0: there is none."""
    dim = architecture.language.hidden_dim
    count = 0
    if proprio_dim:
        count += _with_bias((proprio_dim, dim)) + _with_bias((dim, dim))
    if l1_action_dim:
        inputs = dim * l1_action_dim
        residual_block = 2 * dim + _with_bias((dim, dim))
        count += (
            2 * inputs + _with_bias((inputs, dim)) + 2 * residual_block + 2 * dim + _with_bias((dim, l1_action_dim))
        )
    return count


def lora_parameters(architecture: Architecture, lora: TrainLora) -> int:
    """Parameters of the adapters."""
    return lora.rank * sum(inputs + outputs for inputs, outputs in lora_maps(architecture, lora))


def trained_parameters(architecture: Architecture, trained: TrainEverything | TrainLora) -> int:
    """Parameters that get gradients, side modules not included."""
    if isinstance(trained, TrainLora):
        return lora_parameters(architecture, trained)
    frozen = vision_parameters(architecture) if trained.freeze_vision else 0
    return model_parameters(architecture) - frozen


def lora_maps(architecture: Architecture, lora: TrainLora) -> list[LinearMap]:
    """The maps that get an adapter."""
    attention = attention_maps(architecture)
    match lora.targets:
        case "attention":
            return attention
        case "language":
            return attention + mlp_maps(architecture) + projector_maps(architecture)
        case "published" | "existing":  # of which the names are not known here: at most these
            language = architecture.language
            head = (language.hidden_dim, language.vocab_size)
            rest = attention + mlp_maps(architecture) + projector_maps(architecture)
            return [*rest, head, *_vision_maps(architecture)]


def projector_maps(architecture: Architecture) -> list[LinearMap]:
    """The maps of the projector."""
    vision_dim, dim = architecture.vision_dim, architecture.language.hidden_dim
    return [(vision_dim, 4 * vision_dim), (4 * vision_dim, dim), (dim, dim)]


def attention_maps(architecture: Architecture) -> list[LinearMap]:
    """Queries, keys, values and outputs of all layers of the language model."""
    language = architecture.language
    dim = language.hidden_dim
    key_dim = dim // language.num_heads * language.num_kv_heads
    return language.num_layers * [(dim, dim), (dim, key_dim), (dim, key_dim), (dim, dim)]


def mlp_maps(architecture: Architecture) -> list[LinearMap]:
    """Gate, up and down of all layers of the language model."""
    language = architecture.language
    dim, mlp_dim = language.hidden_dim, language.mlp_dim
    return language.num_layers * [(dim, mlp_dim), (dim, mlp_dim), (mlp_dim, dim)]


def _vision_maps(architecture: Architecture) -> list[LinearMap]:
    """Patch embeddings, blocks and SigLIP's pool."""
    patch = 3 * architecture.patch_size**2
    towers = (architecture.dinov2, architecture.siglip)
    blocks = [each for tower in towers for each in tower.depth * _block_maps(tower)]
    return [(patch, tower.dim) for tower in towers] + blocks + _pool_maps(architecture.siglip)


def _block_maps(sizes: TowerSizes) -> list[LinearMap]:
    dim, mlp_dim = sizes.dim, sizes.mlp_dim
    return [(dim, 3 * dim), (dim, dim), (dim, mlp_dim), (mlp_dim, dim)]


def _pool_maps(sizes: TowerSizes) -> list[LinearMap]:
    dim, mlp_dim = sizes.dim, sizes.mlp_dim
    return [(dim, dim), (dim, 2 * dim), (dim, dim), (dim, mlp_dim), (mlp_dim, dim)]


def _tower(architecture: Architecture, sizes: TowerSizes) -> int:
    """What both towers have: patches and positions, blocks with two norms, the final norm."""
    patch = 3 * architecture.patch_size**2
    block = sum(map(_with_bias, _block_maps(sizes))) + 4 * sizes.dim
    positions = architecture.num_patches * sizes.dim
    return positions + _with_bias((patch, sizes.dim)) + sizes.depth * block + 2 * sizes.dim


def _weights(linear: LinearMap) -> int:
    inputs, outputs = linear
    return inputs * outputs


def _with_bias(linear: LinearMap) -> int:
    return _weights(linear) + linear[1]
