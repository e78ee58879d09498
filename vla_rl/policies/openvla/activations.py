"""How many bytes the model's activations take, by formula: those kept for the backward pass, and those of acting.

What a layer keeps per token, for width D and MLP width M, with every weight trained:

    language layer   inputs of both norms, both normalised (4 D); inputs of q/k/v and of gate/up (2 D); queries, keys,
                     values, attended values (4 D); gate, silu(gate), up, their product (4 M)
    vision block     inputs of both norms (2 D); inputs of qkv and of the MLP (2 D); queries, keys, values, attended
                     values (4 D); LayerScale, DINOv2 only (2 D); before and after the GELU (2 M)

A frozen map need not keep its input. An adapter keeps its own: in float32 where the model is bfloat16, a copy for each
map, which is why adapters without activation checkpointing can take more memory than full fine-tuning. The last
language layer has queries and MLP at the action positions only; the last block of each tower is never computed.
With activation checkpointing only the inputs of the layers are kept, and one layer at a time is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

from vla_rl.policies.compute import ComputeConfig, TrainEverything, TrainLora
from vla_rl.policies.openvla.architecture import Architecture, TowerSizes

FLOAT32, BFLOAT16 = 4, 2
_LOGIT_COPIES = 4
"""Logits over the bins, their log-softmax, probabilities for the entropy, and their gradient; float32 each."""
_VOCABULARY_BYTES = BFLOAT16 + 4 * FLOAT32
"""Per logit of cloning: as computed, as float32, log-softmax, and the gradients of the latter two."""
_EMBEDDING_GRADIENTS = 3
"""Dense gradients of embedding-sized matrices under way at once: BOS, prompt and </s> are looked up one by one."""


@dataclass(frozen=True, kw_only=True)
class SampleSize:
    """How long the sequence of one sample is.

    Attributes:
        num_images: Cameras N.
        prompt_tokens: Prompt without BOS.
        num_slots: Action tokens L of a chunk.
        has_proprio: Whether proprioception is one more token.
    """

    num_images: int
    prompt_tokens: int
    num_slots: int
    has_proprio: bool = False

    def num_patches(self, architecture: Architecture) -> int:
        """Patch tokens of all images."""
        return self.num_images * architecture.num_patches

    def length(self, architecture: Architecture) -> int:
        """Positions S of the language model: BOS, patches, proprioception, prompt, slots, </s>."""
        return 1 + self.num_patches(architecture) + self.has_proprio + self.prompt_tokens + self.num_slots + 1


@dataclass(frozen=True)
class _Widths:
    """Bytes per element under a precision.

    Attributes:
        stream: Of the residual stream and the norms.
        product: Of inputs and outputs of matrix products.
        adapter: Of the input that a LoRA adapter keeps.
        shares_inputs: Whether maps with the same input keep it only once.
        adapters_share_inputs: The same for the adapters.
    """

    stream: int
    product: int
    adapter: int
    shares_inputs: bool
    adapters_share_inputs: bool


_WIDTHS = {
    "float32": _Widths(FLOAT32, FLOAT32, FLOAT32, shares_inputs=True, adapters_share_inputs=True),
    "bfloat16": _Widths(BFLOAT16, BFLOAT16, FLOAT32, shares_inputs=True, adapters_share_inputs=False),
    "mixed": _Widths(FLOAT32, BFLOAT16, BFLOAT16, shares_inputs=False, adapters_share_inputs=False),
}


def weight_bytes(compute: ComputeConfig) -> int:
    """Bytes of a weight."""
    return BFLOAT16 if compute.precision == "bfloat16" else FLOAT32


def update_bytes(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    """Activations of one sample at the beginning of the backward pass, logits not included."""
    if compute.activation_checkpointing:
        return _checkpointed_bytes(architecture, compute, size)
    language = architecture.language
    layers = (language.num_layers - 1) * _language_layer(architecture, compute, size.length(architecture))
    layers += _last_language_layer(architecture, compute, size)
    return layers + _projector(architecture, compute, size) + _vision(architecture, compute, size)


def one_layer_bytes(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    """Gradients of the activations of one sample in a layer of the language model while they are computed."""
    language = architecture.language
    product = _WIDTHS[compute.precision].product
    per_token = (3 * language.mlp_dim + 2 * language.hidden_dim) * product
    if isinstance(compute.trained, TrainLora):
        per_token += (language.mlp_dim + language.hidden_dim) * FLOAT32
    return size.length(architecture) * per_token


def embedding_gradient_bytes(architecture: Architecture, compute: ComputeConfig) -> int:
    """Of the dense gradients of input embedding and head, before they are added up."""
    if isinstance(compute.trained, TrainLora):
        return 0
    language = architecture.language
    return _EMBEDDING_GRADIENTS * language.vocab_size * language.hidden_dim * weight_bytes(compute)


def bin_logit_bytes(architecture: Architecture, size: SampleSize) -> int:
    """Logits of one sample in reinforcement learning: over the bins, at the action positions."""
    return _LOGIT_COPIES * FLOAT32 * size.num_slots * architecture.num_bins


def vocabulary_logit_bytes(architecture: Architecture, size: SampleSize) -> int:
    """Logits of one sample in cloning: over the vocabulary, at the action positions and the stop token."""
    return _VOCABULARY_BYTES * (size.num_slots + 1) * architecture.language.vocab_size


def acting_bytes(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    """Activations of one observation while the policy acts: the widest layer, features and pixels."""
    language, widths = architecture.language, _WIDTHS[compute.precision]
    layer = size.length(architecture) * (
        3 * language.hidden_dim * widths.stream + 3 * language.mlp_dim * widths.product
    )
    features = size.num_patches(architecture) * architecture.vision_dim * widths.stream
    pixels = size.num_images * 3 * architecture.image_size**2 * (1 + 2 * weight_bytes(compute))
    return layer + features + pixels + bin_logit_bytes(architecture, size)


def feature_bytes(architecture: Architecture, compute: ComputeConfig, num_images: int) -> int:
    """Features of the vision towers of one observation, as they are kept."""
    return num_images * architecture.num_patches * architecture.vision_dim * weight_bytes(compute)


def _checkpointed_bytes(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    language, widths = architecture.language, _WIDTHS[compute.precision]
    length = size.length(architecture)
    inputs = language.num_layers * length * language.hidden_dim * widths.stream
    if _trains_vision(compute.trained):
        inputs += sum(
            (tower.depth - 1) * tokens * tower.dim * widths.stream for tower, tokens in _towers(architecture, size)
        )
    widest = max(
        _language_layer(architecture, compute, length),
        *(_vision_block(tower, compute, tokens, False) for tower, tokens in _towers(architecture, size)),
    )
    return inputs + widest + _projector(architecture, compute, size)


def _language_layer(architecture: Architecture, compute: ComputeConfig, length: int) -> int:
    return length * (_attention_inputs(architecture, compute) + _after_attention(architecture, compute))


def _last_language_layer(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    """Queries and MLP at the action positions only; then the final norm."""
    everywhere = size.length(architecture) * _attention_inputs(architecture, compute)
    return everywhere + size.num_slots * _after_attention(architecture, compute)


def _attention_inputs(architecture: Architecture, compute: ComputeConfig) -> int:
    """What every position keeps: norm, the input of q/k/v, keys and values."""
    language, widths = architecture.language, _WIDTHS[compute.precision]
    dim = language.hidden_dim
    key_dim = dim // language.num_heads * language.num_kv_heads
    return dim * widths.stream + 2 * key_dim * widths.product + _norm_and_inputs(dim, 3, "attention", compute)


def _after_attention(architecture: Architecture, compute: ComputeConfig) -> int:
    """What positions with a query keep: query, attended value, the other norm and the MLP."""
    language, widths = architecture.language, _WIDTHS[compute.precision]
    dim, mlp_dim = language.hidden_dim, language.mlp_dim
    kept = 2 * dim * widths.product + dim * widths.stream + 3 * mlp_dim * widths.product
    kept += _norm_and_inputs(dim, 2, "mlp", compute)
    match compute.trained:
        case TrainEverything():
            return kept + mlp_dim * widths.product
        case TrainLora(targets="attention", rank=rank):
            return kept + (dim + rank) * widths.adapter
        case TrainLora(rank=rank):
            return kept + (dim + mlp_dim + 2 * rank) * widths.adapter


def _norm_and_inputs(dim: int, num_maps: int, part: str, compute: ComputeConfig) -> int:
    """Of a norm and the maps that read it: the normalised values, their weighted form, and what adapters keep."""
    widths = _WIDTHS[compute.precision]
    match compute.trained:
        case TrainEverything():
            return dim * widths.stream + dim * widths.product * (1 if widths.shares_inputs else num_maps)
        case TrainLora(targets="attention") if part == "mlp":
            return 0
        case TrainLora(rank=rank):
            copies = 1 if widths.adapters_share_inputs else num_maps
            return (copies * dim + num_maps * rank) * widths.adapter


def _projector(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    vision_dim, dim = architecture.vision_dim, architecture.language.hidden_dim
    widths, patches = _WIDTHS[compute.precision], size.num_patches(architecture)
    before_gelu = (4 * vision_dim + dim) * widths.product
    match compute.trained:
        case TrainEverything():
            return patches * (before_gelu + (5 * vision_dim + dim) * widths.product)
        case TrainLora(targets="attention"):
            return 0
        case TrainLora(rank=rank):
            return patches * (before_gelu + (5 * vision_dim + dim + 3 * rank) * widths.adapter)


def _vision(architecture: Architecture, compute: ComputeConfig, size: SampleSize) -> int:
    if not _trains_vision(compute.trained):
        return 0
    dinov2, siglip = _towers(architecture, size)
    return sum(
        (tower.depth - 1) * _vision_block(tower, compute, tokens, has_layer_scale)
        for (tower, tokens), has_layer_scale in ((dinov2, True), (siglip, False))
    )


def _vision_block(tower: TowerSizes, compute: ComputeConfig, tokens: int, has_layer_scale: bool) -> int:
    if not _trains_vision(compute.trained):
        return 0
    widths = _WIDTHS[compute.precision]
    dim, mlp_dim = tower.dim, tower.mlp_dim
    kept = 2 * dim * widths.stream + (4 * dim + mlp_dim) * widths.product
    if isinstance(compute.trained, TrainLora):
        return tokens * (kept + (3 * dim + mlp_dim + 4 * compute.trained.rank) * widths.adapter)
    scaled = 2 * dim if has_layer_scale else 0
    return tokens * (kept + (2 * dim + mlp_dim + scaled) * widths.product)


def _towers(architecture: Architecture, size: SampleSize) -> tuple[tuple[TowerSizes, int], tuple[TowerSizes, int]]:
    """Both towers with their tokens."""
    patches = size.num_patches(architecture)
    prefix = size.num_images * (1 + architecture.num_registers)
    return (architecture.dinov2, patches + prefix), (architecture.siglip, patches)


def _trains_vision(trained: TrainEverything | TrainLora) -> bool:
    return trained.targets == "published" if isinstance(trained, TrainLora) else not trained.freeze_vision
