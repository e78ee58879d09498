"""vla-rl quickstart: demonstrations, cloning, evaluation, reinforcement learning, evaluation, one report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from scripts.collect_demos import collect
from scripts.evaluate import evaluate
from scripts.film import film_before_after
from scripts.progress import console
from scripts.run_config import ConfigArguments, OutFolder, PrintConfig, RunConfig, read_config
from scripts.sft import clone
from scripts.train import train
from vla_rl.config_text import config_to_yaml
from vla_rl.evaluation.plots import plot_learning_curve
from vla_rl.evaluation.quickstart_report import CURVE_FILE, write_quickstart_report
from vla_rl.evaluation.report import EvaluationReport, write_text_atomically
from vla_rl.metrics import read_metrics
from vla_rl.run import RunFolder, flat_versions, open_run

PRESET = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"


class Stages:
    """Runs each stage once: what the folder's `stages.json` lists as done is not repeated on resumption."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stages.json"
        before = json.loads(self._path.read_text()) if self._path.exists() else {"done": [], "seconds": {}}
        self.done: list[str] = before["done"]
        self.seconds: dict[str, float] = before["seconds"]

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Run a stage and note how long it took."""
        if name in self.done:
            return
        console.rule(name)
        started = time.perf_counter()
        try:
            work()
            self.done.append(name)
        finally:  # an interrupted stage has cost its time, too
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            write_text_atomically(self._path, json.dumps({"done": self.done, "seconds": self.seconds}, indent=1))


def quickstart(config: RunConfig, folder: Path, resume: bool = False) -> None:
    """Run all stages in a folder."""
    text = config_to_yaml(config)
    if resume and (folder / "config.yaml").exists() and (folder / "config.yaml").read_text() != text:
        raise ValueError(
            f"the quickstart in '{folder}' was begun with other settings (see its config.yaml); "
            "resume it with the same ones, or choose another folder with --out"
        )
    open_run(folder, text, resume)
    demos, sft, rl = folder / "demos", folder / "sft", folder / "rl"
    stages = Stages(folder)
    stages.run("demonstrations", lambda: collect(config, demos))
    stages.run("cloning", lambda: clone(config, demos, sft, resume=_has_begun(sft)))
    stages.run("evaluation before", lambda: evaluate(config, sft, folder / "evaluation_sft", "before RL"))
    stages.run("reinforcement learning", lambda: train(config, sft, rl, resume=_has_begun(rl)))
    stages.run("evaluation after", lambda: evaluate(config, rl, folder / "evaluation_rl", "after RL"))
    stages.run("videos", lambda: film_before_after(config, sft, rl, folder))
    plot_learning_curve(read_metrics(rl), folder / CURVE_FILE, f"Quickstart, seed {config.seed}")
    before = EvaluationReport.load(folder / "evaluation_sft")
    after = EvaluationReport.load(folder / "evaluation_rl")
    settings = config.model_dump(mode="json")
    write_quickstart_report(folder, before, after, stages.seconds, config.seed, flat_versions(), settings)
    _last_screen(folder, before, after, stages.seconds)


def _has_begun(folder: Path) -> bool:
    return RunFolder(folder).config_file.exists()


def _last_screen(folder: Path, before: EvaluationReport, after: EvaluationReport, seconds: dict[str, float]) -> None:
    console.rule("what was gained")
    for old, new in zip((*before.tasks, before.overall), (*after.tasks, after.overall), strict=True):
        gain = 100 * (new.success_rate - old.success_rate)
        interval = new.interval
        console.print(
            f"  {old.task:40s} {old.success_rate:6.1%} -> {new.success_rate:6.1%}  ({gain:+.1f} points; "
            f"95 % interval after: {interval.low:.1%} to {interval.high:.1%}, {new.num_starts} unseen starts)"
        )
    console.print(f"\n{sum(seconds.values()) / 60:.1f} minutes in all. In {folder}: report.md, {CURVE_FILE}, videos/")
    console.print("Try next:")
    console.print(
        f"  .venv/bin/vla-rl evaluate {folder / 'rl'} --suite tabletop/stack     a family that it never trained on"
    )
    console.print(f"  .venv/bin/vla-rl train configs/quickstart.yaml --checkpoint {folder / 'rl'} --out runs/longer")
    console.print("  .venv/bin/vla-rl quickstart --help     every setting, with its meaning")


def main(
    arguments: ConfigArguments = None,
    out: OutFolder = Path("runs/quickstart"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the folder's quickstart stopped.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Demonstrations, cloning, RL and evaluation on the tabletop suite, in minutes on two CPU cores."""
    quickstart(read_config([str(PRESET), *(arguments or [])], print_config), out, resume)


if __name__ == "__main__":
    typer.run(main)
