"""Evaluates a policy: every (task, start) exactly once, in a fixed order; films what went right and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sim.world import Suite
from vla_rl.config import ConfigModel
from vla_rl.evaluation.report import EvaluationReport, StartOutcome
from vla_rl.evaluation.video import Clip, compose, write_mp4
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Sampling
from vla_rl.rollout.collector import Collector, EpisodeRequest
from vla_rl.rollout.engine import Outcome, RolloutConfig, make_collector, make_vec_env, requests_of, run_episodes
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.types import Split, Start


class EvaluationConfig(ConfigModel):
    """What is evaluated, and how the policy acts."""

    split: Split = "test"
    """Pool of starts; RL and demonstrations never see "test"."""
    starts_per_task: int = Field(default=64, ge=1)
    """Starts per task, each run once. LIBERO's protocol: 50."""
    mode: Literal["greedy", "sample"] = "greedy"
    """Most likely bin of each token (SimpleVLA-RL's evaluation), or sampled."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, for mode "sample" only."""

    @model_validator(mode="after")
    def _temperature_is_used(self) -> Self:
        if self.mode == "greedy" and self.temperature != 1.0:
            raise ValueError(f"temperature is {self.temperature}, but mode 'greedy' ignores it; set mode to 'sample'")
        return self

    videos_per_task: int = Field(default=1, ge=0)
    """Successes and failures, so many of each, that are filmed per task."""


def evaluate_policy(
    policy: TokenPolicy,
    suite: Suite,
    config: EvaluationConfig,
    rollout: RolloutConfig,
    *,
    checkpoint: str,
    seed: int,
    versions: Mapping[str, str],
    video_folder: Path | None = None,
    conditions: Mapping[str, Any] | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> EvaluationReport:
    """Run the evaluation.

    Args:
        policy: What is evaluated.
        suite: The tasks.
        config: Starts and mode.
        rollout: How episodes are run.
        checkpoint: Name of the policy for the report.
        seed: Fixes the sampled actions; greedy ones do not depend on it.
        versions: Package name -> version, for the report.
        video_folder: Where films go; None: no films.
        conditions: What else an episode depends on, for the report.
        on_outcome: Called after every episode (progress).
    """
    started = time.perf_counter()
    policy.eval()
    requests = requests_of(evaluation_starts(suite, config.split, config.starts_per_task))
    sampling = Sampling(mode=config.mode, temperature=config.temperature)
    env = make_vec_env(suite, rollout)
    try:
        collector = make_collector(env, policy, rollout, seed)
        outcomes = run_episodes(collector, requests, sampling, on_outcome)
        seconds = time.perf_counter() - started
        if video_folder is not None and config.videos_per_task:
            chosen = pick_for_video(requests, outcomes, config.videos_per_task)
            for start, clip in film(collector, chosen, sampling):
                name = f"{start.key.replace('/', '_')}_{'success' if clip.success else 'failure'}"
                write_mp4(video_folder / f"{name}.mp4", compose([[clip]]), suite.spec.control_rate_hz)
    finally:
        env.close()
    return EvaluationReport(
        suite=suite.name,
        checkpoint=checkpoint,
        split=config.split,
        mode=config.mode,
        temperature=config.temperature if config.mode == "sample" else 1.0,
        seed=seed,
        outcomes=tuple(map(_start_outcome, outcomes)),
        seconds=seconds,
        versions=versions,
        conditions=dict(conditions or {}),
    )


def _start_outcome(outcome: Outcome) -> StartOutcome:
    return StartOutcome(
        task=outcome.start.task,
        index=outcome.start.index,
        success=outcome.success,
        num_steps=outcome.num_steps,
        crashed=outcome.crashed,
    )


def pick_for_video(
    requests: Sequence[EpisodeRequest], outcomes: Sequence[Outcome], num_per_kind: int
) -> list[EpisodeRequest]:
    """The first successes and the first failures of each task."""
    count: dict[tuple[str, bool], int] = {}
    chosen = []
    for request, outcome in zip(requests, outcomes, strict=True):
        kind = (request.start.task, outcome.success)
        if not outcome.crashed and count.get(kind, 0) < num_per_kind:
            count[kind] = count.get(kind, 0) + 1
            chosen.append(request)
    return chosen


def film(
    collector: Collector, requests: Sequence[EpisodeRequest], sampling: Sampling, label: str = ""
) -> list[tuple[Start, Clip]]:
    """Run episodes again with frames recorded; a clip shows what happened this time. Crashed ones are left out."""
    recorded = [replace(request, record_frames=True) for request in requests]
    films = []
    for outcome in run_episodes(collector, recorded, sampling):
        if outcome.crashed:
            continue
        clip = Clip(
            frames=outcome.frames,
            orientation=collector.env.spec.image_orientation,
            instruction=outcome.start.instruction,
            success=outcome.success,
            label=label,
        )
        films.append((outcome.start, clip))
    return films
