"""vla-rl evaluate: success of a checkpoint on a suite, with intervals and videos."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
import yaml

from scripts.policies import read_policy
from scripts.progress import console, progress_bar
from scripts.run_config import ConfigArguments, PrintConfig, RunConfig, print_and_exit, read_config
from sim.suites import make_suite, select_tasks
from vla_rl.evaluation.evaluate import evaluate_policy
from vla_rl.evaluation.report import EvaluationReport
from vla_rl.rollout.engine import Outcome
from vla_rl.run import flat_versions


def evaluate(config: RunConfig, checkpoint: Path, folder: Path, title: str = "evaluation") -> EvaluationReport:
    """Evaluate a checkpoint; report and videos go to the folder."""
    suite = make_suite(config.suite)
    policy = read_policy(config, checkpoint, suite)
    solved = 0
    shutil.rmtree(folder / "videos", ignore_errors=True)  # of an earlier evaluation into the same folder
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
            conditions={
                **config.suite.model_dump(mode="json", exclude={"tasks"}),
                "execution_horizon": config.rollout.execution_horizon,
                **training_starts(checkpoint, config),
            },
            on_outcome=on_outcome,
        )
    report.save(folder)
    return report


def training_starts(checkpoint: Path, config: RunConfig) -> dict[str, str]:
    """What the checkpoint was trained on, as far as its run says it, for suites that publish their starts."""
    if not hasattr(config.suite, "starts"):
        return {}
    for folder in (checkpoint, *checkpoint.resolve().parents[:3]):
        if (folder / "config.yaml").is_file():
            suite = (yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}).get("suite", {})
            kind = suite.get("starts", "generated") if suite.get("type") == config.suite.type else "of another suite"
            return {"training_starts": f"{kind} (the test starts)" if kind == "published" else kind}
    return {"training_starts": "unknown"}


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    arguments: ConfigArguments = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="What to evaluate on: a suite, 'suite/task', 'suite/family', or several with commas."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the report; default: runs/evaluation/<name of the checkpoint>."),
    ] = None,
    print_config: PrintConfig = False,
) -> None:
    """Evaluate a checkpoint: each (task, start) exactly once (sections: suite, evaluation, rollout, seed)."""
    config = read_config(arguments)
    if suite is not None:
        config = config.model_copy(update={"suite": select_tasks(config.suite, suite)})
    if print_config:
        print_and_exit(config)
    folder = out or Path("runs/evaluation") / checkpoint.resolve().name
    report = evaluate(config, checkpoint, folder)
    console.print(report.to_markdown())
    console.print(f"report.json, report.md and videos/ are in {folder}")


if __name__ == "__main__":
    typer.run(main)
