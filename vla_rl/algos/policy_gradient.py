"""One policy-gradient update: a pass over a batch in minibatches, each one optimiser step.

With the defaults this is SimpleVLA-RL's rule: GRPO advantages, ratio clipped to [0.8, 1.28], token mean within an
episode, four optimiser steps per iteration, no KL term, no entropy bonus, no critic.

Shapes: B decisions, L tokens of a decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from pydantic import Field

from vla_rl.algos.advantages import AdvantageConfig, GrpoAdvantage
from vla_rl.algos.batch import RolloutBatch
from vla_rl.algos.denominators import DenominatorConfig, EpisodeMean, token_weights
from vla_rl.algos.surrogates import ClippedSurrogate, clipped_loss, ratio_metrics
from vla_rl.config import ConfigModel
from vla_rl.distributed import accumulate_gradients
from vla_rl.policy import Evaluation
from vla_rl.types import Observation, TrainingError


class AlgoConfig(ConfigModel):
    """The learning rule. Defaults are those of SimpleVLA-RL (arXiv 2509.09674 and its released code)."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per start. SimpleVLA-RL: 8."""
    groups_per_iteration: int = Field(default=64, ge=1)
    """Groups that an update learns from. SimpleVLA-RL: 64, i.e. 512 episodes."""
    temperature: float = Field(default=1.6, gt=0)
    """Softmax temperature of exploration; log-probabilities and ratios are at this temperature. SimpleVLA-RL: 1.6."""
    advantage: AdvantageConfig = GrpoAdvantage()
    """How outcomes become advantages."""
    surrogate: ClippedSurrogate = ClippedSurrogate()
    """Objective of a token."""
    denominator: DenominatorConfig = EpisodeMean()
    """How token losses are averaged."""
    num_minibatches: int = Field(default=4, ge=1)
    """Optimiser steps of one pass over the batch. SimpleVLA-RL: 4."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the batch. SimpleVLA-RL: 1."""
    micro_batch_size: int = Field(default=64, ge=1)
    """Decisions per forward and backward pass; changes memory and speed, never the result (beyond rounding)."""
    ratio_tolerance: float = Field(default=1e-3, gt=0)
    """Largest |ratio - 1| before the first optimiser step. float32 stays below 1e-4; bfloat16 may need about 0.1."""


_Part = tuple[float, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a micro-batch: its share of the loss; log ratio, advantage and entropy of its executed tokens, detached."""


@runtime_checkable
class Evaluator(Protocol):
    """The part of a `Policy` that an update needs."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What is trained."""

    def evaluate(
        self, observations: Sequence[Observation], sample: Shaped[np.ndarray, "batch ..."], temperature: float
    ) -> Evaluation:
        """Log-probabilities and entropies of a given sample, with gradients."""


@runtime_checkable
class GradientStep(Protocol):
    """The part of an optimiser that an update needs (see `vla_rl.train.optim.Optimizer`)."""

    def step(self) -> float:
        """Clip the accumulated gradient, apply and clear it; returns its norm before clipping."""


def update(
    policy: Evaluator,
    optimizer: GradientStep,
    batch: RolloutBatch,
    config: AlgoConfig,
    generator: np.random.Generator,
    num_threads: int = 1,
) -> dict[str, float]:
    """Improve the policy on a batch.

    Args:
        policy: Gradients accumulate in its parameters; they must be clear on entry and are clear on return.
        optimizer: Owns the policy's parameters.
        batch: What to learn from.
        config: The learning rule.
        generator: Shuffles the episodes into minibatches.
        num_threads: Micro-batches that are worked on at the same time (CPU only); changes speed, never the result.

    Returns:
        Metrics named "update/...": means over minibatches (maxima where the name ends in "_max").

    Raises:
        TrainingError: The policy's `evaluate` disagrees with the log-probabilities recorded by `act`.
        FloatingPointError: A log-probability or the loss is not finite.
    """
    rows_of: list[dict[str, float]] = []
    for epoch in range(config.num_epochs):
        for index, rows in enumerate(batch.minibatches(config.num_minibatches, generator)):
            check_ratio = epoch == 0 and index == 0
            rows_of.append(_update_minibatch(policy, optimizer, batch, rows, config, check_ratio, num_threads))
    metrics = {name: _summarise(name, [row[name] for row in rows_of]) for name in rows_of[0]}
    metrics["num_optimizer_steps"] = float(len(rows_of))
    metrics["num_tokens"] = float(batch.num_tokens)
    metrics["off_policy_fraction"] = float(1 - batch.is_on_policy.mean())
    metrics["zero_advantage_fraction"] = float((batch.advantages == 0).mean())
    return {f"update/{name}": value for name, value in metrics.items()}


def _summarise(name: str, values: Sequence[float]) -> float:
    return float(np.max(values) if name.endswith("_max") else np.mean(values))


def _update_minibatch(
    policy: Evaluator,
    optimizer: GradientStep,
    batch: RolloutBatch,
    rows: Int[np.ndarray, " rows"],
    config: AlgoConfig,
    check_ratio: bool,
    num_threads: int,
) -> dict[str, float]:
    """Accumulate the gradient of one minibatch over its micro-batches, then step."""
    weights = np.zeros(batch.mask.shape)
    weights[rows] = token_weights(batch.mask[rows], batch.episode_ids[rows], config.denominator)

    def part(micro: Int[np.ndarray, " micro"]) -> tuple[torch.Tensor, _Part]:
        evaluation = policy.evaluate(
            [batch.observations[row] for row in micro], batch.sample[micro], float(batch.temperatures[micro[0]])
        )
        return _micro_batch_loss(evaluation, batch, micro, weights[micro], config, check_ratio)

    parts = accumulate_gradients(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        [partial(part, micro) for micro in batch.micro_batches(rows, config.micro_batch_size)],
        num_threads,
    )
    grad_norm = optimizer.step()
    log_ratio, advantages, entropy = (torch.cat(column) for column in zip(*(part[1:] for part in parts), strict=True))
    return {
        "loss": sum(part[0] for part in parts),
        "grad_norm": grad_norm,
        "entropy": entropy.mean().item(),
        **ratio_metrics(log_ratio, advantages, config.surrogate),
    }


def _micro_batch_loss(
    evaluation: Evaluation,
    batch: RolloutBatch,
    micro: Int[np.ndarray, " micro"],
    weights: Float64[np.ndarray, "micro tokens"],
    config: AlgoConfig,
    check_ratio: bool,
) -> tuple[Float[torch.Tensor, ""], _Part]:
    """The micro-batch's share of the loss, and what the metrics need of it."""
    device = evaluation.logprobs.device
    mask = torch.from_numpy(batch.mask[micro]).to(device)
    old_logprobs = torch.from_numpy(batch.old_logprobs[micro]).to(device)
    advantages = torch.from_numpy(batch.advantages[micro]).to(device)
    # Tokens that were not executed take no part, whatever their values: not even NaN or an overflowing ratio.
    logprobs = torch.where(mask, evaluation.logprobs.float(), old_logprobs.new_zeros(()))
    old_logprobs = torch.where(mask, old_logprobs, old_logprobs.new_zeros(()))
    _require_finite("logprobs of evaluate", logprobs)
    _require_finite("old_logprobs of act", old_logprobs)
    log_ratio = (logprobs - old_logprobs).detach()
    if check_ratio:
        _check_ratio(log_ratio[torch.from_numpy(batch.is_on_policy[micro]).to(device)], config.ratio_tolerance)
    losses = clipped_loss(logprobs, old_logprobs, advantages, config.surrogate)
    loss = (losses * torch.from_numpy(weights).to(device=device, dtype=losses.dtype)).sum()
    _require_finite("policy-gradient loss", loss)
    entropy = evaluation.entropy.detach().float()
    return loss, (loss.item(), log_ratio[mask], advantages[:, None].expand_as(mask)[mask], entropy[mask])


def _require_finite(name: str, tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise FloatingPointError(f"{name}: {bad} of {tensor.numel()} values are not finite; nothing was applied.")


def _check_ratio(log_ratio: Float[torch.Tensor, "batch tokens"], tolerance: float) -> None:
    """Before the first optimiser step, old and new policy are the same, so each ratio must be 1."""
    if log_ratio.numel() == 0:
        return
    deviation = float(torch.expm1(log_ratio).abs().max())
    if deviation > tolerance:
        raise TrainingError(
            f"before the first optimiser step max |ratio - 1| is {deviation:.3g}, above ratio_tolerance={tolerance:g}: "
            "the log-probabilities of the policy's evaluate() disagree with those of its act(). Usual causes: dropout "
            "or another train-mode layer, a temperature applied in one of them only, different preprocessing, or "
            "low-precision arithmetic (then raise algo.ratio_tolerance)."
        )
