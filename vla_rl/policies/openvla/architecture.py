"""Sizes of an OpenVLA model, from the `config.json` of a checkpoint in the published format.

The published file names its vision towers by their timm ids and stores only what differs from the defaults of a Llama
configuration; both are resolved here, once. Small models of the same family say the sizes of their towers themselves,
in the extra entry `vision_towers`, because timm knows no id for them.

Sources: M. Kim et al., OpenVLA, arXiv:2406.09246, section 3.1; M. Oquab et al., DINOv2, arXiv:2304.07193; T. Darcet et
al., Vision transformers need registers, arXiv:2309.16588; X. Zhai et al., SigLIP, arXiv:2303.15343; H. Touvron et al.,
Llama 2, arXiv:2307.09288.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DINOV2_ID = "vit_large_patch14_reg4_dinov2.lvd142m"
SIGLIP_ID = "vit_so400m_patch14_siglip_224"


@dataclass(frozen=True, kw_only=True)
class TowerSizes:
    """A vision transformer.

    Attributes:
        dim: Width of its tokens.
        depth: Blocks; the last one is stored but never used.
        num_heads: Attention heads; not to be seen in the weights.
        mlp_dim: Hidden width of the MLPs.
    """

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int


@dataclass(frozen=True, kw_only=True)
class LanguageSizes:
    """A Llama decoder."""

    hidden_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """All sizes of the model.

    Attributes:
        image_size: Height and width of the square images that both towers see, in pixels.
        patch_size: Height and width of a patch, in pixels.
        dinov2: The first tower: one class token, `num_registers` registers, LayerScale.
        siglip: The second tower: no prefix tokens; its attention pool is stored but never used.
        num_registers: Register tokens of the first tower.
        language: The language model.
        pad_token_id: Token that pads prompts.
        num_padding_rows: Rows of the embedding beyond the tokenizer's vocabulary.
        num_bins: Action bins: the last ones of the vocabulary.
    """

    image_size: int
    patch_size: int = 14
    dinov2: TowerSizes
    siglip: TowerSizes
    num_registers: int = 4
    language: LanguageSizes
    pad_token_id: int
    num_padding_rows: int
    num_bins: int

    @property
    def num_patches(self) -> int:
        """Patch tokens of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def vision_dim(self) -> int:
        """Width of a patch feature: both towers side by side."""
        return self.dinov2.dim + self.siglip.dim

    @property
    def first_action_id(self) -> int:
        """Token id of bin 0; the action tokens are the `num_bins` ids from here on (31744..31999 in the 7B model)."""
        return self.language.vocab_size - self.num_padding_rows - self.num_bins

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """The sizes that a published `config.json` describes.

        Raises:
            ValueError: Incomplete, or no OpenVLA model with the fused DINOv2 and SigLIP towers; says what was found.
        """
        if config.get("model_type") != "openvla":
            raise ValueError(f"config.json has model_type {config.get('model_type')!r}; expected 'openvla'")
        _refuse_other_models(config)
        if not isinstance(config["image_sizes"], list) or len(sizes := set(config["image_sizes"])) != 1:
            raise ValueError(f"config.json has image_sizes {config['image_sizes']}; expected the same for both towers")
        dinov2, siglip = (TowerSizes(**entry) for entry in config.get("vision_towers", _PUBLISHED_TOWERS))
        return cls(
            image_size=sizes.pop(),
            dinov2=dinov2,
            siglip=siglip,
            language=_language_sizes(config["text_config"]),
            pad_token_id=config["pad_token_id"],
            num_padding_rows=config["pad_to_multiple_of"],
            num_bins=config["n_action_bins"],
        )

    def to_config(self) -> dict[str, Any]:
        """The entries of a published `config.json` that `from_config` reads."""
        language = self.language
        entries: dict[str, Any] = {
            "model_type": "openvla",
            "architectures": ["OpenVLAForActionPrediction"],
            "arch_specifier": "no-align+fused-gelu-mlp",
            "vision_backbone_id": "dinosiglip-vit-so-224px",
            "use_fused_vision_backbone": True,
            "timm_model_ids": [DINOV2_ID, SIGLIP_ID],
            "timm_override_act_layers": [None, None],
            "image_sizes": [self.image_size, self.image_size],
            "image_resize_strategy": "resize-naive",
            "llm_backbone_id": "llama2-7b-pure",
            "hf_llm_id": "meta-llama/Llama-2-7b-hf",
            "llm_max_length": 2048,
            "n_action_bins": self.num_bins,
            "pad_token_id": self.pad_token_id,
            "pad_to_multiple_of": self.num_padding_rows,
            "output_projector_states": False,
            "text_config": {
                "model_type": "llama",
                "hidden_size": language.hidden_dim,
                "intermediate_size": language.mlp_dim,
                "num_hidden_layers": language.num_layers,
                "num_attention_heads": language.num_heads,
                "num_key_value_heads": language.num_kv_heads,
                "vocab_size": language.vocab_size,
                "rms_norm_eps": language.rms_norm_eps,
                "rope_theta": language.rope_theta,
                "pad_token_id": self.pad_token_id,
            },
        }
        towers = [asdict(self.dinov2), asdict(self.siglip)]
        return entries if towers == _PUBLISHED_TOWERS else entries | {"vision_towers": towers}


_NEEDED = ("image_sizes", "text_config", "pad_token_id", "pad_to_multiple_of", "n_action_bins")
_SUPPORTED: dict[str, Any] = {
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "image_resize_strategy": "resize-naive",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "timm_override_act_layers": [None, None],
}
"""Entries of which there are variants that change what the model computes, and the one that all OpenVLA-7B share."""
_PLAIN_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "sliding_window": None,
}
_PUBLISHED_TOWERS: list[dict[str, int]] = [
    {"dim": 1024, "depth": 24, "num_heads": 16, "mlp_dim": 4096},
    {"dim": 1152, "depth": 27, "num_heads": 16, "mlp_dim": 4304},
]


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    missing = [name for name in _NEEDED if name not in config]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}; it is not that of a complete OpenVLA checkpoint")
    ids = config.get("timm_model_ids")
    if ids != [DINOV2_ID, SIGLIP_ID] or not config.get("use_fused_vision_backbone"):
        raise ValueError(
            f"config.json has timm_model_ids {ids} (vision_backbone_id {config.get('vision_backbone_id')!r}); only "
            f"the fused backbone of [{DINOV2_ID!r}, {SIGLIP_ID!r}] is supported, as in all OpenVLA-7B checkpoints"
        )
    if config["pad_token_id"] >= config["text_config"].get("vocab_size", 32000):
        raise ValueError(f"config.json has pad_token_id {config['pad_token_id']}, which is beyond its vocabulary")
    others = [
        f"{name} {config[name]!r}, not {usual!r}"
        for name, usual in _SUPPORTED.items()
        if config.get(name, usual) != usual
    ]
    if others:
        raise ValueError(f"config.json has {'; '.join(others)}; other models than OpenVLA-7B's are not supported")


def _language_sizes(text: Mapping[str, Any]) -> LanguageSizes:
    """What the file leaves out has the defaults of Llama's configuration class, hence rms_norm_eps 1e-6."""
    num_heads = text.get("num_attention_heads", 32)
    hidden_dim = text.get("hidden_size", 4096)
    rope = {"rope_theta": text.get("rope_theta", 10000.0)} | (text.get("rope_parameters") or {})  # transformers 5
    plain = _PLAIN_LLAMA | {"head_dim": hidden_dim // num_heads}
    unsupported = [f"{name} {text[name]!r}" for name, usual in plain.items() if text.get(name, usual) != usual]
    unsupported += [] if rope.get("rope_type", "default") == "default" else [f"rope_parameters {rope}"]
    if unsupported:
        raise ValueError(f"config.json has a text_config that is no plain Llama 2: {', '.join(unsupported)}")
    return LanguageSizes(
        hidden_dim=hidden_dim,
        mlp_dim=text.get("intermediate_size", 11008),
        num_layers=text.get("num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads", num_heads),
        vocab_size=text.get("vocab_size", 32000),
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=rope["rope_theta"],
    )
