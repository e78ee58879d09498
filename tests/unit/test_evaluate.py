"""An evaluation runs each (task, start) exactly once, reports it in a fixed order, and films what it says it films."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fakes import fake_start, norm_stats
from toy_suite import ToySuite

from vla_rl.evaluation.evaluate import EvaluationConfig, evaluate_policy, pick_for_video
from vla_rl.evaluation.report import EvaluationReport
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.rollout.engine import Outcome, RolloutConfig, requests_of

ROLLOUT = RolloutConfig(num_slots=3, num_threads=2, execution_horizon=2)


class Suite(ToySuite):
    """With a time limit of five control steps."""

    def __init__(self, *tasks: str) -> None:
        super().__init__(horizon=5)
        self.tasks = tuple(f"toy/{task}" for task in tasks)


def policy() -> TinyVLA:
    config = TinyVLAConfig(action_horizon=2, hidden_dim=16, num_keypoints=2)
    return TinyVLA(config, ToySuite.spec, norm_stats(ToySuite.spec), WordTokenizer(["move"]))


def evaluate(
    suite: Suite, config: EvaluationConfig, video_folder: Path | None = None, **changes: int
) -> EvaluationReport:
    return evaluate_policy(
        policy(),
        suite,
        config,
        ROLLOUT.model_copy(update=changes),
        checkpoint="a checkpoint",
        seed=5,
        versions={"torch": "2"},
        video_folder=video_folder,
    )


@pytest.mark.parametrize("num_slots", [2, 7])
def test_every_start_has_one_outcome_in_a_fixed_order(num_slots: int) -> None:
    report = evaluate(Suite("now", "never", "crash"), EvaluationConfig(starts_per_task=3), num_slots=num_slots)
    names = [(outcome.task, outcome.index) for outcome in report.outcomes]
    assert names == [(f"toy/{task}", index) for index in range(3) for task in ("now", "never", "crash")]
    by_task = {result.task: result for result in report.tasks}
    assert {task: (r.num_starts, r.num_successes, r.num_crashed) for task, r in by_task.items()} == {
        "toy/now": (3, 3, 0),
        "toy/never": (3, 0, 0),
        "toy/crash": (3, 0, 3),
    }
    steps = {outcome.task: outcome.num_steps for outcome in report.outcomes}
    assert steps == {"toy/now": 1, "toy/never": 5, "toy/crash": 0}


def test_the_report_says_how_it_was_measured() -> None:
    sampled = EvaluationConfig(starts_per_task=1, split="validation", mode="sample", temperature=1.6)
    report = evaluate(Suite("now"), sampled)
    assert (report.suite, report.checkpoint, report.split, report.seed) == ("toy", "a checkpoint", "validation", 5)
    assert (report.mode, report.temperature) == ("sample", 1.6)
    assert report.versions == {"torch": "2"}
    assert report.seconds > 0
    greedy = evaluate(Suite("now"), EvaluationConfig(starts_per_task=1))
    assert (greedy.mode, greedy.temperature, greedy.split) == ("greedy", 1.0, "test")


def test_a_temperature_that_would_be_ignored_is_an_error() -> None:
    with pytest.raises(ValueError, match="mode 'greedy' ignores it"):
        EvaluationConfig(temperature=1.6)


def test_progress_is_told_after_every_episode() -> None:
    seen: list[str] = []
    evaluate_policy(
        policy(),
        Suite("now", "never"),
        EvaluationConfig(starts_per_task=2),
        ROLLOUT,
        checkpoint="",
        seed=0,
        versions={},
        on_outcome=lambda outcome: seen.append(outcome.start.key),
    )
    assert sorted(seen) == sorted(f"toy/{task}/test/{index}" for task in ("now", "never") for index in range(2))


def test_films_show_successes_and_failures_of_each_task(tmp_path: Path) -> None:
    evaluate(Suite("now", "never", "crash"), EvaluationConfig(starts_per_task=2, videos_per_task=1), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["toy_never_test_0_failure.mp4", "toy_now_test_0_success.mp4"]


def test_no_films_unless_asked_for(tmp_path: Path) -> None:
    evaluate(Suite("now"), EvaluationConfig(starts_per_task=1, videos_per_task=0), tmp_path / "videos")
    assert not (tmp_path / "videos").exists()


def outcome(task: str, index: int, kind: str) -> Outcome:
    start = fake_start(index, task=task, split="test")
    return Outcome(start=start, success=kind == "success", num_steps=4, crashed=kind == "crash")


def test_films_are_of_the_first_successes_and_failures_by_hand() -> None:
    kinds = {
        "a": ["failure", "success", "success", "crash", "failure", "failure"],
        "b": ["success", "success", "success", "success", "crash", "failure"],
    }
    outcomes = [outcome(task, index, kinds[task][index]) for index in range(6) for task in "ab"]
    requests = requests_of([item.start for item in outcomes])
    chosen = {num: pick_for_video(requests, outcomes, num) for num in (0, 1, 2, 9)}
    names = {num: [(r.start.task, r.start.index) for r in picked] for num, picked in chosen.items()}
    assert names[0] == []
    assert names[1] == [("a", 0), ("b", 0), ("a", 1), ("b", 5)]
    assert names[2] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 4), ("b", 5)]
    assert len(names[9]) == 10  # all but the crashed ones
    assert all(request in requests for request in chosen[9])  # with their episode indices, so the draws are the same
    assert np.all(np.diff([request.episode_index for request in chosen[9]]) > 0)
