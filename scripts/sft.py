"""vla-rl sft: clone demonstrations into a new policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.memory_plan import check_memory
from scripts.policies import make_policy
from scripts.progress import console, progress_bar
from scripts.run_config import ConfigArguments, OutFolder, PrintConfig, Resume, RunConfig, read_config
from sim.suites import make_suite
from vla_rl.config_text import config_to_yaml
from vla_rl.data.libero_hdf5 import read_folder
from vla_rl.policies.openvla.checkpoint import resolve_checkpoint_folder
from vla_rl.policy import Sampling
from vla_rl.rollout.engine import make_collector, make_vec_env, requests_of, run_episodes
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.run import open_run
from vla_rl.train.sft import SFTTrainer


def clone(config: RunConfig, demos_folder: Path, folder: Path, resume: bool = False) -> None:
    """Clone the demonstrations of a folder into a new policy; checkpoints go to the run folder."""
    suite = make_suite(config.suite)
    demonstrations = [demo for demo in read_folder(demos_folder, suite.spec.cameras) if demo.task in suite.tasks]
    if not demonstrations:
        raise ValueError(f"{demos_folder} has no demonstrations of the tasks {', '.join(suite.tasks)}")
    start = getattr(config.policy, "checkpoint", None)
    check_memory(config, "sft", suite, None if start is None else resolve_checkpoint_folder(start))
    policy = make_policy(config, suite.spec, demonstrations)
    env = make_vec_env(suite, config.rollout)
    try:
        collector = make_collector(env, policy, config.rollout, config.seed)
        requests = requests_of(evaluation_starts(suite, "validation", config.sft.evaluation_starts_per_task))

        def measure_success() -> float:
            outcomes = run_episodes(collector, requests, Sampling(mode="greedy"))
            return sum(outcome.success for outcome in outcomes) / len(outcomes)

        run = open_run(folder, config_to_yaml(config), resume)  # last: a mistake above leaves no half-made run
        trainer = SFTTrainer(policy, demonstrations, config.sft, run.path, config.seed, measure_success)
        if resume:
            trainer.resume()
        with progress_bar("cloning", config.sft.num_updates) as bar:
            trainer.train(lambda row: bar.update(trainer.num_updates, _status(row)))
    finally:
        env.close()


def _status(row: dict[str, float]) -> str:
    names = {"loss": "sft/loss", "held out": "sft/held_out_loss", "success": "eval/success"}
    return "  ".join(f"{label} {row[name]:.3f}" for label, name in names.items() if name in row)


def main(
    arguments: ConfigArguments = None,
    demos: Annotated[Path, typer.Option("--demos", help="Folder of demonstrations (*.hdf5).")] = Path("runs/demos"),
    out: OutFolder = Path("runs/sft"),
    resume: Resume = False,
    print_config: PrintConfig = False,
) -> None:
    """Clone demonstrations into a new policy (sections: suite, policy, sft, seed)."""
    clone(read_config(arguments, print_config), demos, out, resume)
    console.print(f"the policy is in {out}; next: vla-rl train --checkpoint {out}")


if __name__ == "__main__":
    typer.run(main)
