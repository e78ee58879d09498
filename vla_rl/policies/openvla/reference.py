"""The same policy computed as usual, on transformers' Llama: what ours is checked against and measured against.

Float32 pixels are made on the host; sequences are padded on the right behind </s> and get a mask of the size of the
attention matrix; every row of a batch is computed, equal or not; the head scores the whole vocabulary at every
position, and the action tokens are cut out of that. All weights are the given policy's own, adapters included.

Sources: M. Kim et al., OpenVLA-OFT, arXiv:2502.19645, and H. Li et al., SimpleVLA-RL, arXiv:2509.09674, whose released
code computes so. Shape letters: B batch, C cameras, S sequence, L action tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64

from vla_rl.policies.images import normalize_pixels
from vla_rl.policies.openvla.architecture import LanguageSizes
from vla_rl.policies.openvla.model import BOS_ID, EOS_ID, OpenVLAModel
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.types import Observation


class PlainOpenVLA(OpenVLAPolicy):
    """See the module's docstring; only the way to the logits differs from `OpenVLAPolicy`."""

    def __init__(self, policy: OpenVLAPolicy) -> None:
        """Share everything with a policy.

        Args:
            policy: Predicts action tokens in parallel, without FiLM.

        Raises:
            ImportError: The package transformers is not installed.
        """
        super().__init__(
            policy.model,
            policy.config,
            policy.spec,
            policy.norm_stats,
            policy.tokenizer,
            policy.compute,
            policy.published_config,
        )
        self.llama = _transformers_llama(policy.model)
        self._pixels_of: WeakKeyDictionary[Observation, torch.Tensor] = WeakKeyDictionary()

    def keep_pixels(self, observations: Sequence[Observation]) -> None:
        """Make the pixels of these observations once, and keep them in host memory as long as the observations live."""
        for observation in observations:
            self._pixels_of[observation] = self._pixels(observation)

    def logits(
        self,
        observations: Sequence[Observation],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> Float32[torch.Tensor, "batch tokens bins"]:
        """See `TokenPolicy.logits`; nothing is augmented.

        Raises:
            ValueError: An augmentation was given.
        """
        if augmentation is not None:
            raise ValueError("the reference implementation does not augment images; pass augmentation=None")
        self._check_images(observations)
        kept = [self._pixels_of.get(observation) for observation in observations]
        pixels = torch.stack(
            [self._pixels(o) if known is None else known for o, known in zip(observations, kept, strict=True)]
        )
        with self._autocast():
            embeddings, mask, first = self._sequence(self.model.vision_features(pixels.to(self.device)), observations)
            logits = self.llama(inputs_embeds=embeddings, attention_mask=_additive(mask, embeddings), use_cache=False)
        rows = first[:, None] + torch.arange(self.num_slots, device=first.device)
        at_slots = logits.logits[torch.arange(len(rows), device=first.device)[:, None], rows]
        bins = self.model.architecture.first_action_id
        scores: torch.Tensor = at_slots[..., bins : bins + self.model.architecture.num_bins]
        return scores.float()

    def _pixels(self, observation: Observation) -> Float32[torch.Tensor, "cameras 6 height width"]:
        images = torch.from_numpy(np.stack(self._images([observation], None)))
        return normalize_pixels(images, torch.float32)[0]

    def _sequence(
        self, features: Float[torch.Tensor, "batch patches vision_dim"], observations: Sequence[Observation]
    ) -> tuple[
        Float[torch.Tensor, "batch positions dim"],
        Bool[torch.Tensor, "batch positions"],
        Int64[torch.Tensor, " batch"],
    ]:
        """Embeddings, which of them are real, and the position of the last prompt token of each row."""
        embed, device = self.model.language_model.model.embed_tokens, features.device
        prompts = [self.tokenizer.ids(observation.instruction)[1:] for observation in observations]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max()) + self.num_slots + 1
        ids = torch.full((len(prompts), width), self.tokenizer.pad_token_id)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
            row[len(prompt) + self.num_slots] = EOS_ID
        behind_prompt = torch.arange(width) - lengths[:, None]
        is_slot = ((behind_prompt >= 0) & (behind_prompt < self.num_slots)).to(device)
        text = embed(ids.to(device)).masked_fill(is_slot.unsqueeze(-1), 0.0)
        parts = [embed(torch.full((len(prompts), 1), BOS_ID, device=device)), self.model.projector(features)]
        proprio = self.proprio(observations)
        if proprio is not None and self.model.proprio_projector is not None:
            parts.append(self.model.proprio_projector(proprio).unsqueeze(1))
        num_before = sum(part.shape[1] for part in parts)
        embeddings = torch.cat([*(part.to(text.dtype) for part in parts), text], dim=1)
        mask = torch.nn.functional.pad(behind_prompt <= self.num_slots, (num_before, 0), value=True)
        return embeddings, mask.to(device), (num_before + lengths - 1).to(device)


def _additive(
    mask: Bool[torch.Tensor, "batch positions"], like: torch.Tensor
) -> Float[torch.Tensor, "batch 1 positions positions"]:
    """Zero where a key is real, for every query: without it, transformers would make attention causal."""
    lowest = torch.finfo(like.dtype).min
    return torch.where(mask, 0.0, lowest).to(like.dtype)[:, None, None].expand(-1, 1, mask.shape[1], -1).contiguous()


def _transformers_llama(model: OpenVLAModel) -> Any:
    """A `LlamaForCausalLM` whose linear maps and embedding are the model's, and whose norms have the model's weights.

    Raises:
        ImportError: The package transformers is not installed.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError as error:
        raise ImportError(
            f"the reference implementation of OpenVLA needs the package transformers ({error}); run: pip install "
            "'vla-rl[openvla]'"
        ) from error
    config = LlamaConfig(**_llama_settings(model.architecture.language))
    with torch.device("meta"):
        llama: Any = LlamaForCausalLM(config)
    ours = model.language_model
    for name, module in list(llama.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            setattr(llama.get_submodule(parent), child, ours.get_submodule(name))
        elif hasattr(module, "weight"):
            module.weight = ours.get_submodule(name).weight
    llama.model.rotary_emb = LlamaRotaryEmbedding(config).to(ours.model.norm.weight.device)  # float32 at all times
    return llama


def _llama_settings(sizes: LanguageSizes) -> dict[str, Any]:
    """Arguments of `LlamaConfig`."""
    return {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_dim,
        "intermediate_size": sizes.mlp_dim,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
        "attn_implementation": "sdpa",
    }
