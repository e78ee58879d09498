"""The quickstart's result on one page: success before and after reinforcement learning, on the same held-out starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vla_rl.evaluation.compare import Comparison, compare_reports
from vla_rl.evaluation.intervals import Interval
from vla_rl.evaluation.report import (
    EvaluationReport,
    TaskResult,
    markdown_interval,
    markdown_versions,
    result_as_dict,
    write_text_atomically,
)

CURVE_FILE = "learning_curve.png"
"""Name of the learning curve within the report's folder."""
VIDEO_FOLDER = "videos"
"""Name of the folder of videos and still pictures within the report's folder."""


def write_quickstart_report(
    folder: Path,
    sft: EvaluationReport,
    rl: EvaluationReport,
    seconds: Mapping[str, float],
    seed: int,
    versions: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Write `report.json` and `report.md`; the page links the curve and the videos that lie in the folder by then.

    Args:
        folder: Where to write; holds `learning_curve.png` and `videos/`.
        sft: Evaluation of the cloned policy.
        rl: Evaluation of the trained policy on the same starts, with the same action mode.
        seconds: Stage -> wall seconds, in the order of the stages.
        seed: Seed of the run.
        versions: Package name -> version.
        config: The run's settings, JSON-serialisable.

    Raises:
        ValueError: The evaluations do not cover the same starts, or chose actions differently.
    """
    if (sft.mode, sft.temperature) != (rl.mode, rl.temperature):
        raise ValueError(
            f"the evaluations chose actions differently: {sft.mode} at temperature {sft.temperature:g} and {rl.mode} "
            f"at {rl.temperature:g}; evaluate both the same way"
        )
    comparison = compare_reports(sft, rl)
    document = {
        "sft_success": sft.overall.success_rate,
        "rl_success": rl.overall.success_rate,
        "num_starts": rl.overall.num_starts,
        "suite": rl.suite,
        "split": rl.split,
        "mode": rl.mode,
        "temperature": rl.temperature,
        "overall": _as_dict(sft.overall, rl.overall),
        "difference": comparison.overall.as_dict(),
        "tasks": [_as_dict(before, _same_task(rl, before)) for before in sft.tasks],
        "seconds": dict(seconds),
        "seed": seed,
        "versions": dict(versions),
        "config": dict(config),
    }
    write_text_atomically(folder / "report.json", json.dumps(document, indent=1) + "\n")
    write_text_atomically(folder / "report.md", _markdown(folder, sft, rl, comparison, seconds, seed, versions))


def _as_dict(before: TaskResult, after: TaskResult) -> dict[str, Any]:
    return {"task": before.task, "before": result_as_dict(before), "after": result_as_dict(after)}


def _same_task(report: EvaluationReport, like: TaskResult) -> TaskResult:
    return next(result for result in report.tasks if result.task == like.task)


def _markdown(
    folder: Path,
    sft: EvaluationReport,
    rl: EvaluationReport,
    comparison: Comparison,
    seconds: Mapping[str, float],
    seed: int,
    versions: Mapping[str, str],
) -> str:
    how = "greedy actions" if rl.mode == "greedy" else f"actions sampled at temperature {rl.temperature:g}"
    lines = [
        "# Quickstart report",
        "",
        f"Success: **{_percent(sft.overall)}** cloned from demonstrations, **{_percent(rl.overall)}** after "
        "reinforcement learning.",
        f"Measured on the same {rl.overall.num_starts} starts of the `{rl.split}` split with {how}; "
        "intervals cover 95 %.",
        "",
        "| task | before | interval | after | interval | difference | interval |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = zip((*sft.tasks, sft.overall), (*comparison.tasks, comparison.overall), strict=True)
    for before, paired in rows:
        after = rl.overall if before.task == "overall" else _same_task(rl, before)
        lines.append(
            f"| {before.task} | {_percent(before)} | {markdown_interval(before.interval)} | {_percent(after)} "
            f"| {markdown_interval(after.interval)} | {_points(paired.difference)} | {_signed(paired.interval)} |"
        )
    lines += ["", f"Exact McNemar test over all starts: p = {comparison.overall.p_value:.2g}.", ""]
    lines += _media(folder)
    lines += ["| stage | time |", "|---|---|"]
    lines += [f"| {stage} | {_duration(stage_seconds)} |" for stage, stage_seconds in seconds.items()]
    lines += [f"| total | {_duration(sum(seconds.values()))} |", ""]
    lines += [f"Seed {seed}. {markdown_versions(versions)}"]
    return "\n".join(lines) + "\n"


def _media(folder: Path) -> list[str]:
    lines = []
    if (folder / CURVE_FILE).exists():
        lines += [f"![Learning curve]({CURVE_FILE})", ""]
    for file in sorted((folder / VIDEO_FOLDER).glob("*")):
        title, link = file.stem.replace("_", " "), f"{VIDEO_FOLDER}/{file.name}"
        if file.suffix == ".mp4":
            lines += [f"Video: [{title}]({link})", ""]
        elif file.suffix in (".png", ".gif"):
            lines += [f"![{title}]({link})", ""]
    return lines


def _percent(result: TaskResult) -> str:
    return f"{100 * result.success_rate:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def _signed(interval: Interval) -> str:
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
