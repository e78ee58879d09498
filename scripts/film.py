"""Films two policies on the same starts, side by side."""

from __future__ import annotations

from pathlib import Path

from scripts.policies import read_policy
from scripts.run_config import RunConfig
from sim.suites import make_suite
from vla_rl.evaluation.evaluate import film
from vla_rl.evaluation.quickstart_report import VIDEO_FOLDER
from vla_rl.evaluation.report import EvaluationReport
from vla_rl.evaluation.video import Clip, compose, contact_sheet, write_gif, write_mp4, write_png
from vla_rl.policy import Sampling
from vla_rl.rollout.engine import make_collector, make_vec_env, requests_of
from vla_rl.types import SimError, Start


def film_before_after(config: RunConfig, before: Path, after: Path, folder: Path) -> None:
    """One row per task: a test start that RL turned from failure to success where there is one, else the first."""
    suite = make_suite(config.suite)
    reports = [EvaluationReport.load(folder / name) for name in ("evaluation_sft", "evaluation_rl")]
    starts = [
        suite.start(task, config.evaluation.split, _interesting_index(task, reports[0], reports[1]))
        for task in suite.tasks
    ]
    left, right = _clips(config, before, starts, "before RL"), _clips(config, after, starts, "after RL")
    rows = [[left[key], right[key]] for key in left if key in right]  # a world that crashed has no film
    if not rows:
        raise SimError("all filmed episodes crashed")
    videos = folder / VIDEO_FOLDER
    write_mp4(videos / "before_after.mp4", compose(rows), suite.spec.control_rate_hz)
    write_gif(videos / "before_after.gif", compose(rows), suite.spec.control_rate_hz)
    write_png(videos / "after_rl.png", contact_sheet([pair[1] for pair in rows]))
    write_png(videos / "before_rl.png", contact_sheet([pair[0] for pair in rows]))


def _interesting_index(task: str, before: EvaluationReport, after: EvaluationReport) -> int:
    solved = [{(o.task, o.index): o.success for o in report.outcomes} for report in (before, after)]
    indices = sorted(index for name, index in solved[0] if name == task)
    turned = [index for index in indices if solved[1][task, index] and not solved[0][task, index]]
    return (turned or indices)[0]


def _clips(config: RunConfig, checkpoint: Path, starts: list[Start], label: str) -> dict[str, Clip]:
    """By the key of the start."""
    suite = make_suite(config.suite)
    policy = read_policy(config, checkpoint, suite)
    policy.eval()
    env = make_vec_env(suite, config.rollout)
    try:
        collector = make_collector(env, policy, config.rollout, config.seed)
        sampling = Sampling(mode=config.evaluation.mode, temperature=config.evaluation.temperature)
        return {start.key: clip for start, clip in film(collector, requests_of(starts), sampling, label)}
    finally:
        env.close()
