"""OpenVLA and OpenVLA-OFT: images and prompt in one sequence through Llama, read out at the action slots.

Layout of a row: BOS, patches of all images, proprioception and noise level (if the model has them), prompt with its
padding on the left, action slots, </s>. Published code pads on the right; here the padding lies between patches and
prompt, hidden from attention and not counted by the positions, so that every real token sees what it sees there and
the slots of all rows are at the same place.

Sources: M. Kim et al., OpenVLA, arXiv:2406.09246, section 3.1; OpenVLA-OFT, arXiv:2502.19645, sections IV-A to IV-C.
Shape letters: B batch, N images, P patches of an image, L prompt tokens, K action_horizon, A action_dim, S sequence,
D hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import nn
from torch.nn import functional

from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.heads import (
    DiffusionActionHead,
    L1ActionHead,
    NoisyActionProjector,
    ProprioProjector,
    denoise,
    timestep_embedding,
)
from vla_rl.policies.openvla.language import KeyValueCache, LanguageModel, linear_rows
from vla_rl.policies.openvla.vision import Film, FusedVisionBackbone

BOS_ID = 1
EOS_ID = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptBatch:
    """Prompts of a batch.

    Attributes:
        ids: Token ids after BOS, padded on the left; the last one is that of the lone space mark.
        mask: True at real tokens. Best kept on the host: whether anything is padded is decided there, without waiting
            for a GPU.
    """

    ids: Int64[torch.Tensor, "batch tokens"]
    mask: Bool[torch.Tensor, "batch tokens"]


class Projector(nn.Module):
    """From patch features to embeddings of the language model."""

    def __init__(self, vision_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, hidden_dim)
        self.fc3 = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, features: Float[torch.Tensor, "*batch vision_dim"]) -> Float[torch.Tensor, "*batch dim"]:
        """Each patch by itself."""
        hidden = functional.gelu(self.fc2(functional.gelu(self.fc1(features))))
        output: torch.Tensor = self.fc3(hidden)
        return output


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddedSequence:
    """What the language model reads.

    Attributes:
        embeddings: Of every position.
        positions: For RoPE, counting real tokens; one row if nothing is padded.
        mask: True at real tokens; None if nothing is padded.
        readout_start: Position of the last prompt token, whose output is the first that is read.
    """

    embeddings: Float[torch.Tensor, "batch positions dim"]
    positions: Int64[torch.Tensor, "rows positions"]
    mask: Bool[torch.Tensor, "batch positions"] | None
    readout_start: int


class OpenVLAModel(nn.Module):
    """The model without tokenizer, image chain and normalisation.

    `state_dict` has exactly the published names, as long as no side module is attached. These are attributes that stay
    None until a loader sets them, after the main weights:

    Attributes:
        architecture: Sizes.
        proprio_projector: Reads proprioception; its token follows the patches.
        noisy_action_projector: Reads the noisy actions of a diffusion head.
        action_head: For continuous actions.
        film: Modulates the vision towers by the prompt; its file replaces the weights of the towers, too.
        activation_checkpointing: Whether the backward pass computes the activations of each block again.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.activation_checkpointing = False
        self.vision_backbone = FusedVisionBackbone(architecture)
        self.projector = Projector(architecture.vision_dim, architecture.language.hidden_dim)
        self.language_model = LanguageModel(architecture.language)
        self.proprio_projector: ProprioProjector | None = None
        self.noisy_action_projector: NoisyActionProjector | None = None
        self.action_head: L1ActionHead | DiffusionActionHead | None = None
        self.film: Film | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.language_model.model.norm.weight.dtype

    def compile_blocks(self) -> None:
        """Have the blocks of the towers and the layers of the language model compiled at their first use."""
        towers = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        for block in (*(block for tower in towers for block in tower.blocks), *self.language_model.model.layers):
            block.compile()

    def vision_features(
        self, pixels: Float[torch.Tensor, "batch images 6 height width"], prompt: PromptBatch | None = None
    ) -> Float[torch.Tensor, "batch patches vision_dim"]:
        """Features of the patches of all images, (B, N * P, vision_dim).

        Args:
            pixels: Normalised for DINOv2 (channels 0-2) and for SigLIP (3-5).
            prompt: Read by models with FiLM only.

        Raises:
            ValueError: A model with FiLM got no prompt.
        """
        modulations = None
        if self.film is not None:
            if prompt is None:
                raise ValueError("this model modulates its vision towers by the prompt (FiLM); pass the prompt, too")
            modulations = self.film(self._mean_embedding(prompt).repeat_interleave(pixels.shape[1], dim=0))
        features: torch.Tensor = self.vision_backbone(pixels, modulations, recompute=self.activation_checkpointing)
        return features

    def action_hidden(
        self,
        features: Float[torch.Tensor, "batch patches vision_dim"],
        prompt: PromptBatch,
        *,
        num_slots: int,
        proprio: Float[torch.Tensor, "batch proprio_dim"] | None = None,
        noisy_actions: Float[torch.Tensor, "batch horizon action_dim"] | None = None,
        timestep: int | None = None,
        num_readout: int | None = None,
    ) -> Float[torch.Tensor, "batch slots dim"]:
        """Hidden states after the final norm that predict the action slots, one position ahead of each.

        Args:
            features: From `vision_features`.
            prompt: On any device.
            num_slots: K * A.
            proprio: Normalised; goes with a proprioception projector.
            noisy_actions: Fill the slots; go with a diffusion head. Otherwise the slots are zero.
            timestep: Noise level of the noisy actions.
            num_readout: `num_slots`, or one more for the state that predicts </s>, which supervised training needs.

        Raises:
            ValueError: Inputs and side modules do not go together.
        """
        slots = self._slots(features, num_slots, noisy_actions)
        extra = self._extra_tokens(len(features), proprio, timestep)
        sequence = self.embed_sequence(features, prompt, extra=extra, slots=slots)
        start = sequence.readout_start
        hidden: torch.Tensor = self.language_model.model(
            sequence.embeddings,
            sequence.positions,
            sequence.mask,
            rows=slice(start, start + (num_slots if num_readout is None else num_readout)),
            recompute=self.activation_checkpointing,
        )
        return hidden

    def action_logits(
        self, hidden: Float[torch.Tensor, "batch slots dim"]
    ) -> Float32[torch.Tensor, "batch slots bins"]:
        """Scores over the action bins only."""
        first = self.architecture.first_action_id
        return linear_rows(
            self.language_model.lm_head, hidden, slice(first, first + self.architecture.num_bins)
        ).float()

    def full_logits(self, hidden: Float[torch.Tensor, "batch slots dim"]) -> Float32[torch.Tensor, "batch slots vocab"]:
        """Scores over the whole vocabulary."""
        logits: torch.Tensor = self.language_model.lm_head(hidden)
        return logits.float()

    def denoise_actions(
        self,
        features: Float[torch.Tensor, "batch patches vision_dim"],
        prompt: PromptBatch,
        noise: Float32[torch.Tensor, "batch horizon action_dim"],
        *,
        num_steps: int,
        proprio: Float[torch.Tensor, "batch proprio_dim"] | None = None,
    ) -> Float32[torch.Tensor, "batch horizon action_dim"]:
        """Normalised actions of a diffusion head.

        Args:
            features: From `vision_features`.
            prompt: On any device.
            noise: Standard normal start.
            num_steps: Denoising steps; each passes the language model once.
            proprio: Normalised; goes with a proprioception projector.

        Raises:
            ValueError: The model has no diffusion head.
        """
        head = self.action_head
        if not isinstance(head, DiffusionActionHead):
            raise ValueError("this model has no diffusion head; its actions are not denoised")

        def predict_noise(actions: torch.Tensor, timestep: int) -> torch.Tensor:
            hidden = self.action_hidden(
                features,
                prompt,
                num_slots=actions[0].numel(),
                proprio=proprio,
                noisy_actions=actions,
                timestep=timestep,
            )
            predicted: torch.Tensor = head(hidden)
            return predicted

        return denoise(predict_noise, noise, num_steps)

    @torch.inference_mode()
    def generate_greedy(
        self, features: Float[torch.Tensor, "batch patches vision_dim"], prompt: PromptBatch, num_tokens: int
    ) -> tuple[Int64[torch.Tensor, "batch tokens"], Float32[torch.Tensor, "batch tokens vocab"]]:
        """Original OpenVLA: one token after the other, each the most likely, with causal attention.

        Returns:
            Token ids, and the scores that they are the maximum of.
        """
        sequence = self.embed_sequence(features, prompt)
        decoder = self.language_model.model
        caches = [KeyValueCache() for _ in decoder.layers]
        hidden = decoder(
            sequence.embeddings,
            sequence.positions,
            sequence.mask,
            rows=slice(sequence.readout_start, None),
            causal=True,
            caches=caches,
        )
        positions, mask = sequence.positions[:, -1:], sequence.mask
        scores = [self.full_logits(hidden)]
        while len(scores) < num_tokens:
            positions = positions + 1
            mask = None if mask is None else functional.pad(mask, (0, 1), value=True)
            embeddings = decoder.embed_tokens(scores[-1].argmax(-1))
            scores.append(self.full_logits(decoder(embeddings, positions, mask, rows=slice(None), caches=caches)))
        logits = torch.cat(scores, dim=1)
        return logits.argmax(-1), logits

    def embed_sequence(
        self,
        features: Float[torch.Tensor, "batch patches vision_dim"],
        prompt: PromptBatch,
        *,
        extra: Float[torch.Tensor, "batch extra dim"] | None = None,
        slots: Float[torch.Tensor, "batch slots dim"] | None = None,
    ) -> EmbeddedSequence:
        """Put a batch in the order of the module's docstring; without slots it ends with the prompt.

        Args:
            features: From `vision_features`.
            prompt: On any device.
            extra: Embedded tokens between patches and prompt.
            slots: Embedded slots; </s> follows them.
        """
        embed = self.language_model.model.embed_tokens
        device, batch = features.device, len(features)
        parts = [embed(torch.full((batch, 1), BOS_ID, device=device)), self.projector(features)]
        parts += [] if extra is None else [extra]
        num_before = sum(part.shape[1] for part in parts)
        parts.append(embed(prompt.ids.to(device)))
        num_after = 0
        if slots is not None:
            parts += [slots, embed(torch.full((batch, 1), EOS_ID, device=device))]
            num_after = slots.shape[1] + 1
        embeddings = torch.cat([part.to(parts[0].dtype) for part in parts], dim=1)
        length, mask = embeddings.shape[1], None
        positions = torch.arange(length, device=device)[None]
        if not prompt.mask.all():
            mask = functional.pad(prompt.mask.to(device), (num_before, num_after), value=True)
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return EmbeddedSequence(
            embeddings=embeddings, positions=positions, mask=mask, readout_start=length - num_after - 1
        )

    def _slots(
        self, features: torch.Tensor, num_slots: int, noisy_actions: torch.Tensor | None
    ) -> Float[torch.Tensor, "batch slots dim"]:
        if (noisy_actions is None) != (self.noisy_action_projector is None):
            raise ValueError(_mismatch("noisy actions", "projector for them", noisy_actions is not None))
        if noisy_actions is None or self.noisy_action_projector is None:
            return features.new_zeros(len(features), num_slots, self.architecture.language.hidden_dim)
        slots: torch.Tensor = self.noisy_action_projector(noisy_actions.flatten(1).unsqueeze(-1))
        if slots.shape[1] != num_slots:
            raise ValueError(f"{slots.shape[1]} noisy actions cannot fill {num_slots} slots")
        return slots

    def _extra_tokens(
        self, batch: int, proprio: torch.Tensor | None, timestep: int | None
    ) -> Float[torch.Tensor, "batch extra dim"] | None:
        """Proprioception, then noise level."""
        tokens = []
        if (proprio is None) != (self.proprio_projector is None):
            raise ValueError(_mismatch("proprioception", "projector for it", proprio is not None))
        if (timestep is None) != (self.noisy_action_projector is None):
            raise ValueError(_mismatch("a noise level", "diffusion head", timestep is not None))
        if proprio is not None and self.proprio_projector is not None:
            tokens.append(self.proprio_projector(proprio))
        if timestep is not None:
            device = self.language_model.model.norm.weight.device
            token = timestep_embedding(timestep, self.architecture.language.hidden_dim, device).to(self.dtype)
            tokens.append(token.expand(batch, -1))
        return torch.stack(tokens, dim=1) if tokens else None

    def _mean_embedding(self, prompt: PromptBatch) -> Float[torch.Tensor, "batch dim"]:
        """Mean over BOS, prompt and </s>, summed in float32."""
        embed = self.language_model.model.embed_tokens
        device = embed.weight.device
        mask = prompt.mask.to(device)
        ends = embed(torch.tensor([BOS_ID, EOS_ID], device=device)).float().sum(dim=0)
        total = (embed(prompt.ids.to(device)).float() * mask.unsqueeze(-1)).sum(dim=1) + ends
        mean: torch.Tensor = total / (mask.sum(dim=1, keepdim=True) + 2)
        return mean.to(embed.weight.dtype)


def _mismatch(given: str, module: str, is_given: bool) -> str:
    """Message about an input without its module, or a module without its input."""
    if is_given:
        return f"the model was given {given}, but has no {module}; leave it out"
    return f"the model has a {module}, but was given no {given}; pass it"
