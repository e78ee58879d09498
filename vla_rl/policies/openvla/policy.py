"""OpenVLA-OFT as a policy: images and an instruction in, a chunk of action tokens out, all tokens at once.

The work is kept small where that changes nothing: the head is applied at the action positions and to the 256 action
tokens only; equal observations of a batch (the copies of a group at its start) are computed once; images travel as
uint8; features of frozen vision towers can be kept from the rollout for the update.

Sources: M. Kim et al., OpenVLA-OFT, arXiv:2502.19645; H. Li et al., SimpleVLA-RL, arXiv:2509.09674, section 3.
Shape letters: B batch, C cameras, K action_horizon, A action_dim, L = K * A tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt8

from vla_rl.policies.action_tokens import encode_actions
from vla_rl.policies.compute import ComputeConfig
from vla_rl.policies.images import augment_image, draw_augmentation, normalize_pixels, prepare_images
from vla_rl.policies.normalization import NormStats, RangeStats
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.conventions import from_published_actions, to_published_actions
from vla_rl.policies.openvla.model import EOS_ID, OpenVLAModel, PromptBatch
from vla_rl.policies.openvla.prompt import PromptTokenizer
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.types import EnvSpec, Observation


class OpenVLAPolicy(TokenPolicy):
    """See the module's docstring. `vla_rl.policies.openvla.loading` makes them."""

    def __init__(
        self,
        model: OpenVLAModel,
        config: OpenVLAConfig,
        spec: EnvSpec,
        norm_stats: NormStats,
        tokenizer: PromptTokenizer,
        compute: ComputeConfig,
        published_config: dict[str, Any],
    ) -> None:
        """Put the parts together.

        Args:
            model: With its weights and side modules.
            config: What the published files do not say.
            spec: Interface of the suite.
            norm_stats: In the published convention (see `conventions`).
            tokenizer: Of the checkpoint.
            compute: Precision and memory.
            published_config: Content of the checkpoint's `config.json`, written back by `save`.
        """
        super().__init__(config.action_horizon, spec, norm_stats)
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.compute = compute
        self.published_config = published_config
        self._features_of: WeakKeyDictionary[Observation, torch.Tensor] = WeakKeyDictionary()
        # From the rollout for the update: the image chain takes milliseconds, its uint8 result less than the frame.
        self._prepared_of: WeakKeyDictionary[Observation, np.ndarray] = WeakKeyDictionary()

    @property
    def head_name(self) -> str:
        """Kind of the action head, for people."""
        return "parallel tokens"

    @property
    def has_centre_crop(self) -> bool:
        """See `TokenPolicy.has_centre_crop`."""
        return self.config.centre_crop

    @property
    def num_slots(self) -> int:
        """Action tokens L of a chunk."""
        return self.action_horizon * self.action_dim

    def logits(
        self,
        observations: Sequence[Observation],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> Float[torch.Tensor, "batch tokens bins"]:
        """See `TokenPolicy.logits`."""
        if augmentation is not None:
            different, where = list(observations), np.arange(len(observations))
        else:
            different, where = _different(observations)
        hidden = self.hidden(different, augmentation)
        with self._autocast():
            logits = self.model.action_logits(hidden)
        return logits if len(different) == len(observations) else logits[torch.from_numpy(where).to(logits.device)]

    def hidden(
        self,
        observations: Sequence[Observation],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
        *,
        include_stop: bool = False,
    ) -> Float[torch.Tensor, "batch slots hidden"]:
        """Hidden states that the action tokens are read from, and with `include_stop` the stop token after them.

        Raises:
            ValueError: The images do not have the cameras and the size that the policy was made for.
        """
        self._check_images(observations)
        with self._autocast():
            return self.model.action_hidden(
                self.features(observations, augmentation),
                self.prompts(observations),
                num_slots=self.num_slots,
                proprio=self.proprio(observations),
                num_readout=self.num_slots + include_stop,
            )

    def prompts(self, observations: Sequence[Observation]) -> PromptBatch:
        """Token ids of the instructions, on the host: whether any are padded decides about the attention mask."""
        ids, mask = self.tokenizer.batch([observation.instruction for observation in observations])
        return PromptBatch(ids=ids, mask=mask)

    def proprio(self, observations: Sequence[Observation]) -> Float[torch.Tensor, "batch proprio_dim"] | None:
        """Normalised proprioceptive state; None if the model has no projector for it."""
        if self.model.proprio_projector is None:
            return None
        rows = np.stack([observation.proprio for observation in observations]).astype(np.float64)
        normalized = self._range(self.norm_stats.proprio).normalize(rows).astype(np.float32)
        return torch.from_numpy(normalized).to(self.device)

    def features(
        self, observations: Sequence[Observation], augmentation: Float64[np.ndarray, "batch parameters"] | None = None
    ) -> Float[torch.Tensor, "batch patches vision_dim"]:
        """Patch features of both vision towers.

        Raises:
            ValueError: A model with FiLM was to be trained.
        """
        if self.model.film is not None and torch.is_grad_enabled():
            raise ValueError("a model whose vision towers are modulated (FiLM) can be evaluated, not trained")
        is_frozen = not any(weight.requires_grad for weight in self.model.vision_backbone.parameters())
        if not is_frozen:
            return self._vision(observations, augmentation)
        # Features that are kept take part in later backward passes, which tensors of the inference mode must not.
        with torch.inference_mode(mode=False), torch.no_grad():
            if augmentation is not None or self.compute.vision_cache_gb == 0:
                return self._vision(observations, augmentation)
            missing = [observation for observation in observations if observation not in self._features_of]
            fresh = dict(zip(missing, self._vision(missing, None), strict=True)) if missing else {}
            for observation, features in fresh.items():
                if self._has_room_for(features):
                    self._features_of[observation] = features.cpu()
            return torch.stack([self._kept_or(fresh, observation) for observation in observations])

    def _kept_or(self, fresh: dict[Observation, torch.Tensor], observation: Observation) -> torch.Tensor:
        return fresh[observation] if observation in fresh else self._features_of[observation].to(self.device)

    def _has_room_for(self, features: torch.Tensor) -> bool:
        num_bytes = (len(self._features_of) + 1) * features.numel() * features.element_size()
        return num_bytes <= self.compute.vision_cache_gb * 1e9

    def _vision(
        self, observations: Sequence[Observation], augmentation: Float64[np.ndarray, "batch parameters"] | None
    ) -> torch.Tensor:
        images = torch.from_numpy(np.stack(self._images(observations, augmentation))).to(self.device)
        prompt = None if self.model.film is None else self.prompts(observations)
        return self.model.vision_features(normalize_pixels(images, self.model.dtype), prompt)

    def _images(
        self, observations: Sequence[Observation], augmentation: Float64[np.ndarray, "batch parameters"] | None
    ) -> list[UInt8[np.ndarray, "cameras size size 3"]]:
        """What the towers see; random crops take the place of the central one."""
        if augmentation is None:
            return [self._prepared(observation) for observation in observations]
        prepared = [self._prepare(observation, centre_crop=False) for observation in observations]
        parameters = augmentation.reshape(len(observations), len(self.spec.cameras), -1)
        return [
            np.stack([augment_image(image, row) for image, row in zip(images, rows, strict=True)])
            for images, rows in zip(prepared, parameters, strict=True)
        ]

    def _prepared(self, observation: Observation) -> UInt8[np.ndarray, "cameras size size 3"]:
        known = self._prepared_of.get(observation)
        if known is None:
            known = self._prepared_of[observation] = self._prepare(observation, self.config.centre_crop)
        return known

    def _prepare(self, observation: Observation, centre_crop: bool) -> UInt8[np.ndarray, "cameras size size 3"]:
        return prepare_images(
            observation.images,
            orientation=self.spec.image_orientation,
            image_size=self.model.architecture.image_size,
            use_jpeg=self.config.use_jpeg,
            centre_crop=centre_crop,
        )

    def draw_augmentation(self, generator: np.random.Generator, batch: int) -> Float64[np.ndarray, "batch parameters"]:
        """Random crop and colours of each camera, as OpenVLA was trained with."""
        return draw_augmentation(generator, batch, len(self.spec.cameras)).reshape(batch, -1)

    def decode(self, bins: Int64[np.ndarray, "batch tokens"]) -> Float64[np.ndarray, "batch horizon action_dim"]:
        """See `TokenPolicy.decode`."""
        return from_published_actions(super().decode(bins), self.spec)

    def normalized_actions(
        self, actions: Float64[np.ndarray, "batch horizon action_dim"]
    ) -> Float64[np.ndarray, "batch horizon action_dim"]:
        """Actions in the suite's units as the model is to predict them."""
        return self.action_range.normalize(to_published_actions(actions, self.spec))

    @property
    def action_range(self) -> RangeStats:
        """See `TokenPolicy.action_range`."""
        return self._range(self.norm_stats.action)

    def _range(self, stats: RangeStats) -> RangeStats:
        return stats.over_extremes() if self.config.normalization == "min_max" else stats

    def bc_loss(
        self,
        observations: Sequence[Observation],
        actions: Float64[np.ndarray, "batch horizon action_dim"],
        valid: Bool[np.ndarray, "batch horizon"],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> torch.Tensor:
        """OpenVLA's loss: cross-entropy over the whole vocabulary at the action tokens and the stop token.

        The stop token weighs as much as one action token of a whole chunk, and less where a chunk is cut short.
        """
        bins = encode_actions(self.normalized_actions(actions)).reshape(len(actions), -1)
        ids = np.concatenate([self.model.architecture.first_action_id + bins, np.full((len(bins), 1), EOS_ID)], axis=1)
        weights = np.repeat(valid, self.action_dim, axis=1).astype(np.float32)
        weights = np.concatenate([weights, weights.mean(axis=1, keepdims=True)], axis=1)
        hidden = self.hidden(observations, augmentation, include_stop=True)
        with self._autocast():
            logits = self.model.full_logits(hidden)
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(ids).to(logits.device).flatten(), reduction="none"
        )
        scale = torch.from_numpy(weights).to(losses).flatten()
        return (losses * scale).sum() / scale.sum()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute.precision == "mixed":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _check_images(self, observations: Sequence[Observation]) -> None:
        expected = (len(self.spec.cameras), *self.spec.image_size, 3)
        for observation in observations:
            if observation.images.shape != expected:
                raise ValueError(
                    f"images have shape {observation.images.shape} (cameras, height, width, 3); the policy was made "
                    f"for {expected} with cameras {self.spec.cameras}; set the suite's cameras and image_size "
                    "accordingly"
                )

    def save(self, folder: Path) -> None:
        """Write a checkpoint in the published format, with what it does not say in `vla_rl.json`."""
        from vla_rl.policies.openvla.exporting import save_policy

        save_policy(self, folder)

    def restore(self, folder: Path) -> None:
        """See `TokenPolicy.restore`."""
        from vla_rl.policies.openvla.loading import load_openvla

        self.load_state_dict(load_openvla(folder, str(self.device), self.compute).state_dict())

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read a folder written by `save`."""
        from vla_rl.policies.openvla.loading import load_openvla

        policy = load_openvla(folder, device)
        if not isinstance(policy, cls):
            raise ValueError(f"{folder} holds a policy of class {type(policy).__name__}, not {cls.__name__}")
        return policy


def _different(observations: Sequence[Observation]) -> tuple[list[Observation], Int64[np.ndarray, " batch"]]:
    """The observations without repetitions, and where among them each row is."""
    index: dict[tuple[bytes, bytes, str], int] = {}
    different: list[Observation] = []
    where = np.zeros(len(observations), dtype=np.int64)
    for row, observation in enumerate(observations):
        key = (observation.images.tobytes(), observation.proprio.tobytes(), observation.instruction)
        if key not in index:
            index[key] = len(different)
            different.append(observation)
        where[row] = index[key]
    return different, where
