"""vla-rl train: improve a policy by reinforcement learning from task success."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.memory_plan import check_memory
from scripts.policies import find_policy, read_policy
from scripts.progress import console, progress_bar
from scripts.run_config import ConfigArguments, OutFolder, PrintConfig, Resume, RunConfig, read_config
from sim.suites import make_suite
from vla_rl.config_text import config_to_yaml
from vla_rl.evaluation.plots import plot_learning_curve
from vla_rl.metrics import read_metrics
from vla_rl.rollout.engine import make_collector, make_vec_env
from vla_rl.rollout.sources import TrainStarts, evaluation_starts
from vla_rl.run import open_run
from vla_rl.train.rl import RLTrainer


def train(config: RunConfig, checkpoint: Path, folder: Path, resume: bool = False) -> None:
    """Run reinforcement learning from a checkpoint; metrics, checkpoints and the curve go to the run folder."""
    suite = make_suite(config.suite)
    check_memory(config, "train", suite, find_policy(checkpoint))
    policy = read_policy(config, checkpoint, suite)
    env = make_vec_env(suite, config.rollout)
    try:
        collector = make_collector(env, policy, config.rollout, config.seed)
        run = open_run(folder, config_to_yaml(config), resume)  # last: a mistake above leaves no half-made run
        console.print(arithmetic(config, suite.horizon, policy.action_horizon * policy.action_dim))
        trainer = RLTrainer(
            policy,
            collector,
            TrainStarts(suite, config.seed, config.rl.num_starts_per_task),
            evaluation_starts(suite, "validation", config.rl.evaluation_starts_per_task),
            config.rl,
            run.path,
            config.seed,
        )
        if resume:
            trainer.resume()
        total = config.rl.max_minutes or config.rl.num_iterations
        with progress_bar("minutes of RL" if config.rl.max_minutes else "iterations", total) as bar:
            trainer.train(
                lambda iteration, row: bar.update(
                    row["time/train_minutes"] if config.rl.max_minutes else iteration, _status(iteration, row)
                )
            )
    finally:
        env.close()
    plot_learning_curve(
        read_metrics(run.path), run.path / "learning_curve.png", f"Reinforcement learning, seed {config.seed}"
    )


def arithmetic(config: RunConfig, horizon: int, tokens_per_decision: int) -> str:
    """What one iteration amounts to."""
    algo, sampling = config.rl.algo, config.rl.dynamic_sampling
    episodes = algo.groups_per_iteration * algo.group_size
    decisions = -(-horizon // config.rollout.execution_horizon)
    steps = algo.num_minibatches * algo.num_epochs
    drawn = round(sampling.max_draw_factor * algo.groups_per_iteration)
    return (
        f"an iteration learns from {algo.groups_per_iteration} groups x {algo.group_size} = {episodes} episodes "
        f"(drawing at most {drawn} groups to find mixed ones), each of at most {decisions} decisions x "
        f"{tokens_per_decision} tokens; {steps} optimiser steps of {episodes // algo.num_minibatches} episodes"
    )


def _status(iteration: int, row: dict[str, float]) -> str:
    kept = f"{row['groups/taken']:.0f} groups"
    return f"iteration {iteration}  success {row.get('rollout/success', 0.0):.2f}  {kept}"


def main(
    arguments: ConfigArguments = None,
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="Policy to start from.")] = Path("runs/sft"),
    out: OutFolder = Path("runs/rl"),
    resume: Resume = False,
    print_config: PrintConfig = False,
) -> None:
    """Improve a policy by reinforcement learning (sections: suite, rl, rollout, seed)."""
    train(read_config(arguments, print_config), checkpoint, out, resume)
    console.print(f"metrics, checkpoints and learning_curve.png are in {out}; next: vla-rl evaluate {out}")


if __name__ == "__main__":
    typer.run(main)
