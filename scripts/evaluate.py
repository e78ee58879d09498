"""vla-rl evaluate: success of a checkpoint on a suite, with intervals and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.progress import console, progress_bar
from scripts.run_config import ConfigArguments, OutFolder, PrintConfig, RunConfig, read_config
from sim.suites import make_suite, select_tasks
from vla_rl.evaluation.evaluate import evaluate_policy
from vla_rl.evaluation.report import EvaluationReport
from vla_rl.policies.loading import load_policy
from vla_rl.rollout.engine import Outcome
from vla_rl.run import flat_versions
from vla_rl.train.checkpoint import resolve_checkpoint


def evaluate(config: RunConfig, checkpoint: Path, folder: Path, title: str = "evaluation") -> EvaluationReport:
    """Evaluate a checkpoint; report and videos go to the folder."""
    policy = load_policy(resolve_checkpoint(checkpoint), config.device)
    suite = make_suite(config.suite)
    policy.check_spec(suite.spec)
    solved = 0

    with progress_bar(title, config.evaluation.starts_per_task * len(suite.tasks)) as bar:

        def on_outcome(outcome: Outcome) -> None:
            nonlocal solved
            solved += outcome.success
            bar.update(status=f"solved {solved}")

        report = evaluate_policy(
            policy,
            suite,
            config.evaluation,
            config.rollout,
            checkpoint=str(checkpoint),
            seed=config.seed,
            versions=flat_versions(),
            video_folder=folder / "videos",
            on_outcome=on_outcome,
        )
    report.save(folder)
    return report


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    arguments: ConfigArguments = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="What to evaluate on: a suite, 'suite/task', 'suite/family', or several with commas."
        ),
    ] = None,
    out: OutFolder = Path("runs/evaluation"),
    print_config: PrintConfig = False,
) -> None:
    """Evaluate a checkpoint: each (task, start) exactly once (sections: suite, evaluation, rollout, seed)."""
    config = read_config(arguments)
    if suite is not None:
        config = config.model_copy(update={"suite": select_tasks(config.suite, suite)})
    if print_config:
        read_config(arguments, print_config=True)
    report = evaluate(config, checkpoint, out)
    console.print(report.to_markdown())
    console.print(f"report.json, report.md and videos/ are in {out}")


if __name__ == "__main__":
    typer.run(main)
