"""What every policy with a discrete action head shares: logits over 256 bins -> actions, log-probs, cloning loss.

A subclass only maps observations to logits; sampling, decoding, normalisation and log-probs are this one code path, for
the tiny policy as for OpenVLA-OFT. Shape letters: B batch, K action_horizon, A action_dim, L = K * A tokens, V bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import nn

from robots.contract import CONTRACT_FILE, DeploymentContract, make_contract, statistics_digest
from vla_rl.policies.action_tokens import decode_bins, encode_actions, sample_bins, token_entropy, token_logprobs
from vla_rl.policies.normalization import NormStats, RangeStats
from vla_rl.policy import ActOutput, Evaluation, Sampling
from vla_rl.types import EnvSpec, Observation


class TokenPolicy(nn.Module, ABC):
    """Parallel decoding: given the observation, the L tokens are independent (OpenVLA-OFT, arXiv:2502.19645)."""

    def __init__(self, action_horizon: int, spec: EnvSpec, norm_stats: NormStats) -> None:
        super().__init__()
        self.action_horizon = action_horizon
        self.execution_horizon = action_horizon  # a run that executes less of each chunk says so here
        self.action_dim = spec.action_dim
        self.spec = spec
        self.norm_stats = norm_stats

    def check_spec(self, spec: EnvSpec) -> None:
        """Refuse a suite with another interface than the one that the policy was made for.

        Raises:
            ValueError: Names every difference.
        """
        differences = [
            f"{field.name}: policy {getattr(self.spec, field.name)}, suite {getattr(spec, field.name)}"
            for field in fields(EnvSpec)
            if getattr(self.spec, field.name) != getattr(spec, field.name)
            # What one side does not say is no difference: older policies do not know it.
            and not (
                field.name in ("action_meaning", "proprio_units")
                and not (getattr(self.spec, field.name) and getattr(spec, field.name))
            )
        ]
        if differences:
            raise ValueError(
                f"the policy was made for another interface than the suite offers ({'; '.join(differences)}); "
                "configure the suite's cameras, image_size or tasks as in the policy's training run"
            )

    def contract(self) -> DeploymentContract | None:
        """What a robot must offer to run this policy; None if the simulator does not say what actions mean."""
        gripper = np.array([name == "gripper" for name in self.spec.action_names])
        return make_contract(
            self.spec,
            policy=type(self).__name__,
            # Statistics of the gripper may be in another convention; its range is known.
            action_low=np.where(gripper, -1.0, self.action_range.q01),
            action_high=np.where(gripper, 1.0, self.action_range.q99),
            action_horizon=self.action_horizon,
            execution_horizon=self.execution_horizon,
            norm_stats_key=self.norm_stats.key,
            norm_stats_sha256=self.statistics_digest,
            centre_crop=self.has_centre_crop,
        )

    @property
    def statistics_digest(self) -> str:
        """What the contract knows the statistics by that scale actions and state."""
        return statistics_digest(
            {"action": self.norm_stats.action.to_dict(), "proprio": self.norm_stats.proprio.to_dict()}
        )

    @property
    def has_centre_crop(self) -> bool:
        """Whether the policy cuts out the middle of its images itself."""
        return False

    def save_contract(self, folder: Path) -> None:
        """Write the deployment contract beside the weights, if there is one."""
        (folder / CONTRACT_FILE).unlink(missing_ok=True)
        if contract := self.contract():
            contract.save(folder)

    @abstractmethod
    def logits(
        self,
        observations: Sequence[Observation],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> Float[torch.Tensor, "batch tokens bins"]:
        """Scores over the 256 bins of each action token, ordered control step first, then action entry."""

    @abstractmethod
    def draw_augmentation(self, generator: np.random.Generator, batch: int) -> Float64[np.ndarray, "batch parameters"]:
        """See `Policy.draw_augmentation`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """See `Policy.save`."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """See `Policy.load`."""

    def restore(self, folder: Path) -> None:
        """Take the weights of a folder that `save` wrote in the same run."""
        self.load_state_dict(type(self).load(folder).state_dict())

    @property
    def action_range(self) -> RangeStats:
        """What the bins span."""
        return self.norm_stats.action

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def greedy_bins(self, logits: Float[torch.Tensor, "batch tokens bins"]) -> Int64[torch.Tensor, "batch tokens"]:
        """The deterministic choice: the most likely bin of each token (OpenVLA, SimpleVLA-RL)."""
        return logits.argmax(dim=-1)

    @torch.inference_mode()
    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        """See `Policy.act`."""
        logits = self.logits(observations)
        if sampling.mode == "greedy":
            bins = self.greedy_bins(logits)
        else:
            uniforms = np.stack([generator.random(logits.shape[1], dtype=np.float32) for generator in generators])
            bins = sample_bins(logits, sampling.temperature, uniforms)
        logprobs = token_logprobs(logits, bins, sampling.temperature)
        host_bins = bins.cpu().numpy()
        return ActOutput(actions=self.decode(host_bins), sample=host_bins, logprobs=logprobs.cpu().numpy())

    def decode(self, bins: Int64[np.ndarray, "batch tokens"]) -> Float64[np.ndarray, "batch horizon action_dim"]:
        """Chunks in the suite's units from (B, L) bins."""
        normalized = decode_bins(bins).reshape(len(bins), self.action_horizon, self.action_dim)
        return self.action_range.denormalize(normalized)

    def evaluate(
        self, observations: Sequence[Observation], sample: Int64[np.ndarray, "batch tokens"], temperature: float
    ) -> Evaluation:
        """See `Policy.evaluate`."""
        logits = self.logits(observations)
        bins = torch.from_numpy(sample).to(logits.device)
        return Evaluation(
            logprobs=token_logprobs(logits, bins, temperature), entropy=token_entropy(logits, temperature)
        )

    def bc_loss(
        self,
        observations: Sequence[Observation],
        actions: Float64[np.ndarray, "batch horizon action_dim"],
        valid: Bool[np.ndarray, "batch horizon"],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> torch.Tensor:
        """Cross-entropy of the demonstrated tokens at temperature 1, averaged over the valid ones."""
        logits = self.logits(observations, augmentation)
        bins = encode_actions(self.action_range.normalize(actions)).reshape(len(actions), -1)
        logprobs = token_logprobs(logits, torch.from_numpy(bins).to(logits.device), 1.0)
        weights = torch.from_numpy(np.repeat(valid, self.action_dim, axis=1)).to(logprobs)
        return -(logprobs * weights).sum() / weights.sum()
