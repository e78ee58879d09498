"""Reinforcement learning from task success: rollouts, group filter, advantages, update; evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from vla_rl.algos.advantages import group_advantages
from vla_rl.algos.batch import RolloutBatch, make_batch
from vla_rl.algos.policy_gradient import AlgoConfig, update
from vla_rl.config import ConfigModel
from vla_rl.distributed import num_gradient_threads
from vla_rl.metrics import MetricsWriter
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Sampling
from vla_rl.rollout.collector import Collector
from vla_rl.rollout.engine import requests_of, run_episodes
from vla_rl.rollout.filters import Group
from vla_rl.rollout.groups import DrawState, DynamicSamplingConfig, GroupRollouts
from vla_rl.rollout.sources import TrainStarts
from vla_rl.run import seed_sequence
from vla_rl.train.checkpoint import latest_checkpoint, load_carried_groups, load_trainer_state, save_checkpoint
from vla_rl.train.optim import OptimConfig, Optimizer
from vla_rl.types import Start, TrainingError


class RLConfig(ConfigModel):
    """The training loop. Defaults are SimpleVLA-RL's."""

    num_iterations: int = Field(default=300, ge=1)
    """Iterations, each one rollout phase and one pass of updates."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Stop after the iteration in which this much training time is used up (resumed runs count on); null: no limit."""
    algo: AlgoConfig = AlgoConfig()
    """The learning rule."""
    optim: OptimConfig = OptimConfig()
    """Optimiser."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Which groups are learned from, and how long to look for them."""
    num_starts_per_task: int | None = Field(default=None, ge=1)
    """Size of the pool of training starts per task; null: every group gets a start of its own."""
    evaluate_every: int = Field(default=4, ge=0)
    """Iterations between greedy evaluations on validation starts (also before the first); 0: never. SimpleVLA-RL: 4."""
    evaluation_starts_per_task: int = Field(default=32, ge=1)
    """Validation starts per task in these evaluations."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Iterations between checkpoints; there is always one at the end. SimpleVLA-RL: 25."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Delete all but this many newest checkpoints; null keeps all."""

    @model_validator(mode="after")
    def _check_group_size(self) -> Self:
        if self.algo.group_size == 1 and self.dynamic_sampling.filter.enabled:
            raise ValueError(
                "algo.group_size is 1, but a group of one is never mixed and dynamic sampling would drop all of them; "
                "use at least 2, or set dynamic_sampling.filter.enabled=false"
            )
        return self


class RLTrainer:
    """Improves a policy in place; every random draw is a function of (seed, position), so resuming is exact."""

    def __init__(
        self,
        policy: TokenPolicy,
        collector: Collector,
        starts: TrainStarts,
        validation: Sequence[Start],
        config: RLConfig,
        folder: Path,
        seed: int,
    ) -> None:
        self.policy = policy
        self.iteration = 0
        self._collector = collector
        self._validation = requests_of(validation)
        self._config = config
        self._folder = folder
        self._seed = seed
        self._optimizer = Optimizer(policy.named_parameters(), config.optim)
        self._rollouts = GroupRollouts(collector, starts, config.algo, config.dynamic_sampling)
        self._policy_version = 0
        self._num_starved = 0
        self._seconds = 0.0

    def train(self, on_iteration: Callable[[int, dict[str, float]], None] = lambda iteration, row: None) -> None:
        """Run to the last iteration or the time limit; `on_iteration` gets each row of metrics (progress).

        Raises:
            TrainingError: No group to learn from for too long; the last checkpoint is of the present iteration.
            SimError: Too many worlds crashed.
        """
        self.policy.eval()
        is_fresh = self.iteration == 0
        with MetricsWriter(self._folder, first_iteration=0 if is_fresh else self.iteration + 1) as writer:
            if is_fresh and self._config.evaluate_every:
                writer.write(0, self._evaluate())
            while not self._is_finished():
                self.iteration += 1
                row = self._iterate()
                writer.write(self.iteration, row)
                is_starved = self._num_starved >= self._config.dynamic_sampling.max_starved_iterations
                if is_starved or self._is_finished() or self.iteration % self._config.checkpoint_every == 0:
                    self.save()
                on_iteration(self.iteration, row)
                if is_starved:
                    raise self._starved_error()

    def _is_finished(self) -> bool:
        limit = self._config.max_minutes
        return self.iteration >= self._config.num_iterations or (limit is not None and self._seconds >= 60 * limit)

    def _iterate(self) -> dict[str, float]:
        """Rollouts, advantages, update; evaluation if it is due."""
        started = time.perf_counter()
        groups, row = self._rollouts.collect(policy_version=self._policy_version)
        rollout_s = time.perf_counter() - started
        self._num_starved = 0 if groups else self._num_starved + 1
        if groups:
            generator = np.random.default_rng(seed_sequence(self._seed, "minibatches", self.iteration))
            threads = num_gradient_threads(self.policy.device)
            row |= update(self.policy, self._optimizer, self._batch(groups), self._config.algo, generator, threads)
            self._policy_version += 1
        update_s = time.perf_counter() - started - rollout_s
        row |= self._collector.timings.take() | _throughput(rollout_s, update_s, row)
        self._seconds += rollout_s + update_s
        if self._config.evaluate_every and self.iteration % self._config.evaluate_every == 0:
            row |= self._evaluate()
        row["time/train_minutes"] = self._seconds / 60
        return row

    def _batch(self, groups: Sequence[Group]) -> RolloutBatch:
        episodes = [episode for group in groups for episode in group]
        rewards = np.array([float(episode.success) for episode in episodes])
        group_indices = np.array([episode.group_index for episode in episodes])
        return make_batch(
            episodes,
            group_advantages(rewards, group_indices, self._config.algo.advantage),
            tokens_per_step=len(episodes[0].decisions[0].logprobs) // self.policy.action_horizon,
            policy_version=self._policy_version,
        )

    def _starved_error(self) -> TrainingError:
        return TrainingError(
            f"no group with both successes and failures in {self._num_starved} iterations (up to {self.iteration}): "
            "the tasks are solved, or hopeless for this policy. Evaluate the last checkpoint; if it is hopeless, start "
            "from more demonstrations or easier starts, or raise algo.group_size"
        )

    def _evaluate(self) -> dict[str, float]:
        """Greedy success on the validation starts, overall and by task; a crashed episode counts as a failure."""
        outcomes = run_episodes(self._collector, self._validation, Sampling(mode="greedy"))
        self._collector.timings.take()  # "time/..." is about training
        by_task: dict[str, list[float]] = {}
        for outcome in outcomes:
            by_task.setdefault(outcome.start.task, []).append(float(outcome.success))
        everything = [success for successes in by_task.values() for success in successes]
        return {
            "eval/success": float(np.mean(everything)),
            "eval/num_starts": float(len(everything)),
            **{f"eval/success/{task}": float(np.mean(successes)) for task, successes in sorted(by_task.items())},
        }

    def save(self) -> None:
        """Write a checkpoint of the present iteration."""
        state: dict[str, Any] = {
            "iteration": self.iteration,
            "optimizer": self._optimizer.state_dict(),
            "draw": asdict(self._rollouts.state),
            "policy_version": self._policy_version,
            "num_starved": self._num_starved,
            "seconds": self._seconds,
        }
        groups, keep_last = self._rollouts.buffer.groups, self._config.keep_checkpoints
        save_checkpoint(self._folder, self.iteration, self.policy, state, groups, keep_last)

    def resume(self) -> None:
        """Continue from the newest checkpoint of the run's folder, if there is one."""
        checkpoint = latest_checkpoint(self._folder)
        if checkpoint is None:
            return
        state = load_trainer_state(checkpoint)
        self.policy.restore(checkpoint / "policy")
        self._optimizer.load_state_dict(state["optimizer"])
        self._rollouts.state = DrawState(**state["draw"])
        self._rollouts.buffer.restore(load_carried_groups(checkpoint))
        self._policy_version = int(state["policy_version"])
        self._num_starved = int(state["num_starved"])
        self._seconds = float(state["seconds"])
        self.iteration = int(state["iteration"])


def _throughput(rollout_s: float, update_s: float, row: dict[str, float]) -> dict[str, float]:
    return {
        "time/rollout_s": rollout_s,
        "time/update_s": update_s,
        "throughput/control_steps_per_s": row["rollout/control_steps"] / rollout_s,
        "throughput/episodes_per_s": row["rollout/episodes"] / rollout_s,
        "throughput/update_tokens_per_s": row.get("update/num_tokens", 0.0) / update_s if update_s else 0.0,
    }
