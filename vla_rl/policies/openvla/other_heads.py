"""Policies of the OpenVLA family without parallel action tokens: they act and are cloned, but give no probabilities.

Reinforcement learning needs probabilities of discrete tokens: SimpleVLA-RL starts from checkpoints that were cloned
with them. These here are for evaluation and deployment, the regression head also for cloning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float64, Shaped

from vla_rl.policies.action_tokens import decode_bins
from vla_rl.policies.openvla.conventions import from_published_actions
from vla_rl.policies.openvla.heads import DiffusionActionHead, L1ActionHead
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policy import ActOutput, Evaluation, Sampling
from vla_rl.types import Observation


class _WithoutProbabilities(OpenVLAPolicy):
    def evaluate(
        self, observations: Sequence[Observation], sample: Shaped[np.ndarray, "batch ..."], temperature: float
    ) -> Evaluation:
        """Not possible.

        Raises:
            ValueError: Always; says what can be trained instead.
        """
        self._refuse("evaluate")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what}: a policy with the head {self.head_name!r} has no probabilities of actions; reinforcement "
            "learning needs a checkpoint that was cloned with discrete tokens, for example "
            "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"
        )

    def _output(
        self, normalized: Float64[np.ndarray, "batch horizon action_dim"], actions: Float64[np.ndarray, ...]
    ) -> ActOutput:
        actions = from_published_actions(actions, self.spec)
        return ActOutput(actions=actions, sample=normalized, logprobs=np.zeros((len(actions), 0), np.float32))


class ContinuousOpenVLA(_WithoutProbabilities):
    """OpenVLA-OFT with a regression (L1) or a diffusion head."""

    @property
    def head_name(self) -> str:
        """Kind of the action head."""
        return "diffusion" if isinstance(self.model.action_head, DiffusionActionHead) else "l1"

    @torch.inference_mode()
    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        """Chunks; the diffusion head draws its noise from the generators, the regression head draws nothing.

        Raises:
            ValueError: A regression head was to sample.
        """
        if isinstance(self.model.action_head, DiffusionActionHead):
            shape = (self.action_horizon, self.action_dim)
            noise = np.stack([generator.standard_normal(shape, dtype=np.float32) for generator in generators])
            self._check_images(observations)
            with self._autocast():
                actions = self.model.denoise_actions(
                    self.features(observations),
                    self.prompts(observations),
                    torch.from_numpy(noise).to(self.device),
                    num_steps=self.config.num_denoising_steps,
                    proprio=self.proprio(observations),
                )
        elif sampling.mode == "sample":
            self._refuse("sampling")
        else:
            actions = self._regress(observations)
        normalized = actions.double().cpu().numpy()
        return self._output(normalized, self.action_range.denormalize(normalized))

    def bc_loss(
        self,
        observations: Sequence[Observation],
        actions: Float64[np.ndarray, "batch horizon action_dim"],
        valid: Bool[np.ndarray, "batch horizon"],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> torch.Tensor:
        """Mean absolute error of normalised actions, over the valid control steps.

        Raises:
            ValueError: A diffusion head.
        """
        if not isinstance(self.model.action_head, L1ActionHead):
            raise ValueError(
                "a diffusion head can be evaluated, not cloned; start from a checkpoint without the files "
                "action_head--* and noisy_action_projector--*"
            )
        predicted = self._regress(observations, augmentation)
        targets = torch.from_numpy(self.normalized_actions(actions)).to(predicted)
        weights = torch.from_numpy(valid).to(predicted)
        errors = (predicted - targets).abs().mean(dim=-1)
        return (errors * weights).sum() / weights.sum()

    def _regress(
        self, observations: Sequence[Observation], augmentation: Float64[np.ndarray, "batch parameters"] | None = None
    ) -> torch.Tensor:
        hidden = self.hidden(observations, augmentation)
        with self._autocast():
            actions: torch.Tensor = self.model.action_head(hidden)  # type: ignore[misc]
        return actions


class AutoregressiveOpenVLA(_WithoutProbabilities):
    """The original OpenVLA (arXiv:2406.09246): one action, token by token, each the most likely one."""

    head_name = "autoregressive tokens"

    @torch.inference_mode()
    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        """Greedy actions, one control step.

        Raises:
            ValueError: Sampling was asked for.
        """
        if sampling.mode == "sample":
            self._refuse("sampling")
        self._check_images(observations)
        with self._autocast():
            ids, _ = self.model.generate_greedy(
                self.features(observations), self.prompts(observations), self.action_dim
            )
        # Other tokens than the action tokens decode to the nearest of them, as published.
        bins = (ids.cpu().numpy() - self.model.architecture.first_action_id).clip(0, 255)
        normalized = decode_bins(bins)[:, None]
        return self._output(normalized, self.action_range.denormalize(normalized, epsilon=0.0))

    def bc_loss(
        self,
        observations: Sequence[Observation],
        actions: Float64[np.ndarray, "batch horizon action_dim"],
        valid: Bool[np.ndarray, "batch horizon"],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> torch.Tensor:
        """Not possible.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "autoregressive OpenVLA is for evaluation; clone with policy.decoding=parallel, from the same checkpoint"
        )
