"""Behaviour cloning: supervised fine-tuning of a policy on demonstrated action chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import Field

from vla_rl.config import ConfigModel
from vla_rl.data.demos import ChunkDataset, Demonstration, split_held_out
from vla_rl.distributed import accumulate_gradients, num_gradient_threads, torch_threads
from vla_rl.metrics import MetricsWriter
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.run import seed_sequence
from vla_rl.train.checkpoint import latest_checkpoint, load_trainer_state, save_checkpoint
from vla_rl.train.optim import OptimConfig, Optimizer


class SFTConfig(ConfigModel):
    """Cloning."""

    num_updates: int = Field(default=2000, ge=1)
    """Optimiser steps, at most."""
    target_success: float | None = Field(default=None, gt=0.0, le=1.0)
    """Stop as soon as greedy success on validation starts reaches this: a warm start that leaves RL room to improve.
    Success comes as a cliff (20 % and 72 % lay 300 updates apart) that no number of updates can hit; null: never."""
    evaluate_every: int = Field(default=50, ge=1)
    """Optimiser steps between these evaluations."""
    evaluation_starts_per_task: int = Field(default=24, ge=1)
    """Validation starts per task in these evaluations."""
    batch_size: int = Field(default=64, ge=1)
    """Samples (observation and chunk) per optimiser step."""
    micro_batch_size: int = Field(default=32, ge=1)
    """Samples per forward and backward pass; changes memory and speed, never the result (beyond rounding)."""
    optim: OptimConfig = OptimConfig(lr=2e-3, weight_decay=1e-4, warmup_updates=50, decay="cosine")
    """Optimiser. The defaults suit the tiny policy."""
    augment: bool = True
    """Random changes of the images, of the policy's own kind (tiny: brightness, contrast; OpenVLA: crop, colours)."""
    held_out_fraction: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the demonstrations of each task that only measures the held-out loss."""
    report_every: int = Field(default=100, ge=1)
    """Optimiser steps between two rows of metrics (training and held-out loss)."""
    checkpoint_every: int = Field(default=1000, ge=1)
    """Optimiser steps between two checkpoints."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Delete all but this many newest checkpoints; null keeps all."""


class SFTTrainer:
    """Clones demonstrations into a policy; every random draw is a function of (seed, update), so resuming is exact."""

    def __init__(
        self,
        policy: TokenPolicy,
        demonstrations: Sequence[Demonstration],
        config: SFTConfig,
        folder: Path,
        seed: int,
        measure_success: Callable[[], float] | None = None,
    ) -> None:
        """Set up.

        Args:
            policy: What learns.
            demonstrations: What it learns from.
            config: The settings.
            folder: The run's folder.
            seed: Seed of the run.
            measure_success: Greedy success of the policy on validation starts; needed for `target_success`.
        """
        if config.target_success is not None and measure_success is None:
            raise ValueError("sft.target_success is set, but nothing was given that measures success")
        training, held_out = split_held_out(
            demonstrations, config.held_out_fraction, np.random.default_rng(seed_sequence(seed, "held_out"))
        )
        self.policy = policy
        self._config = config
        self._folder = folder
        self._seed = seed
        self._training = ChunkDataset(training, policy.action_horizon)
        self._held_out = ChunkDataset(held_out, policy.action_horizon) if held_out else None
        self._optimizer = Optimizer(policy.named_parameters(), config.optim, total_updates=config.num_updates)
        self._parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self._measure_success = measure_success
        self._has_reached_target = False
        self._losses: list[float] = []
        self.num_updates = 0

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run's folder, if there is one."""
        checkpoint = latest_checkpoint(self._folder)
        if checkpoint is None:
            return
        state = load_trainer_state(checkpoint)
        self.policy.restore(checkpoint / "policy")
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_updates = int(state["num_updates"])
        self._has_reached_target = bool(state["has_reached_target"])
        self._losses = [float(loss) for loss in state["losses"]]

    def train(self, on_update: Callable[[dict[str, float]], None] = lambda row: None) -> None:
        """Run to the end; `on_update` gets the latest row of metrics after every optimiser step (progress)."""
        row: dict[str, float] = {}
        with (
            torch_threads(1),
            MetricsWriter(self._folder, first_iteration=self.num_updates + 1) as writer,
        ):
            while not self._is_finished():
                self._losses.append(self._update())
                self.num_updates += 1
                success = self._success_if_due()
                is_last = self._is_finished()
                if is_last or success or self.num_updates % self._config.report_every == 0:
                    row = self._report() | success
                    writer.write(self.num_updates, row)
                if is_last or self.num_updates % self._config.checkpoint_every == 0:
                    self._save()
                on_update(row)

    def _is_finished(self) -> bool:
        return self._has_reached_target or self.num_updates >= self._config.num_updates

    def _success_if_due(self) -> dict[str, float]:
        target = self._config.target_success
        if target is None or self._measure_success is None or self.num_updates % self._config.evaluate_every:
            return {}
        self.policy.eval()
        success = self._measure_success()
        self._has_reached_target = success >= target
        return {"eval/success": success}

    def _update(self) -> float:
        rng = np.random.default_rng(seed_sequence(self._seed, "sft", self.num_updates))
        rows = rng.integers(len(self._training), size=self._config.batch_size)
        augmentation = self.policy.draw_augmentation(rng, len(rows)) if self._config.augment else None
        batch = self._training.batch(rows)
        self.policy.train()
        num_valid = float(batch.valid.sum())

        def part(rows: slice) -> tuple[torch.Tensor, float]:
            drawn = None if augmentation is None else augmentation[rows]
            loss = self.policy.bc_loss(batch.observations[rows], batch.actions[rows], batch.valid[rows], drawn)
            share = loss * (float(batch.valid[rows].sum()) / num_valid)
            return share, float(share.item())

        size = self._config.micro_batch_size
        parts = [partial(part, slice(first, first + size)) for first in range(0, self._config.batch_size, size)]
        loss = sum(accumulate_gradients(self._parameters, parts, num_gradient_threads(self.policy.device)))
        if not math.isfinite(loss):
            raise FloatingPointError(f"the cloning loss is {loss} at update {self.num_updates}; lower sft.optim.lr")
        self._optimizer.step()
        return loss

    def _report(self) -> dict[str, float]:
        row = {"sft/loss": float(np.mean(self._losses)), "sft/lr": self._optimizer.lr}
        self._losses.clear()
        if self._held_out is not None:
            row["sft/held_out_loss"] = self._held_out_loss(self._held_out)
        return row

    @torch.inference_mode()
    def _held_out_loss(self, dataset: ChunkDataset) -> float:
        """Over at most 512 evenly spaced samples."""
        self.policy.eval()
        rows = np.unique(np.linspace(0, len(dataset) - 1, min(512, len(dataset))).astype(np.int64))
        batch = dataset.batch(rows)
        return float(self.policy.bc_loss(batch.observations, batch.actions, batch.valid).item())

    def _save(self) -> None:
        self.policy.eval()
        state = {
            "optimizer": self._optimizer.state_dict(),
            "num_updates": self.num_updates,
            "has_reached_target": self._has_reached_target,
            "losses": list(self._losses),
        }
        save_checkpoint(self._folder, self.num_updates, self.policy, state, keep_last=self._config.keep_checkpoints)
