"""The seam between the policies and everything else. The trainer never looks inside a sample.

Shapes: B batch, K action_horizon, A action_dim, L elements of a sample with a log-probability (token policies: K*A).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Shaped

from vla_rl.types import Observation


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How actions are chosen.

    Attributes:
        mode: "sample" draws at the temperature. "greedy" is the policy's deterministic choice (most likely bin, or what
            the policy's class says) and draws nothing from the generators.
        temperature: Of the softmax; the reported log-probabilities are at this temperature in both modes.
    """

    mode: Literal["sample", "greedy"] = "sample"
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class ActOutput:
    """What `act` returns, all on the host.

    Attributes:
        actions: Chunks in the suite's action units; (B, K, A) float64.
        sample: What was drawn; first axis B.
        logprobs: At the sampling temperature; (B, L) float32.
    """

    actions: Float64[np.ndarray, "batch horizon action_dim"]
    sample: Shaped[np.ndarray, "batch ..."]
    logprobs: Float32[np.ndarray, "batch tokens"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Log-probabilities (with gradients) of a given sample, and the entropy of its distribution; (B, L)."""

    logprobs: Float[torch.Tensor, "batch tokens"]
    entropy: Float[torch.Tensor, "batch tokens"]


@runtime_checkable
class Policy(Protocol):
    """Anything that can act, be evaluated and be cloned from demonstrations."""

    @property
    def action_horizon(self) -> int:
        """Predicted control steps K of a chunk."""

    @property
    def action_dim(self) -> int:
        """Entries A of one action. Element l of a sample belongs to control step l // (L // K)."""

    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        """Draw a chunk for each observation, row i with the random stream `generators[i]`; no gradients."""

    def evaluate(
        self, observations: Sequence[Observation], sample: Shaped[np.ndarray, "batch ..."], temperature: float
    ) -> Evaluation:
        """Log-probabilities of samples at a temperature, with gradients; agrees with `act` to 1e-5."""

    def bc_loss(
        self,
        observations: Sequence[Observation],
        actions: Float64[np.ndarray, "batch horizon action_dim"],
        valid: Bool[np.ndarray, "batch horizon"],
        augmentation: Float64[np.ndarray, "batch parameters"] | None = None,
    ) -> torch.Tensor:
        """Behaviour-cloning loss of demonstrated chunks; steps with `valid` False do not count. Scalar.

        With `augmentation` (from `draw_augmentation`), each row's images are changed by its parameters.
        """

    def draw_augmentation(self, generator: np.random.Generator, batch: int) -> Float64[np.ndarray, "batch parameters"]:
        """Random parameters of an image augmentation; what they mean is the policy's own business."""

    def save(self, folder: Path) -> None:
        """Write a folder that is enough to evaluate, serve or run a robot."""

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read such a folder."""
