"""Paired comparison of two reports, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vla_rl.evaluation.compare import compare_reports
from vla_rl.evaluation.intervals import paired_difference_interval
from vla_rl.evaluation.report import EvaluationReport, StartOutcome


def make_report(successes: dict[str, Sequence[int]], **changes: Any) -> EvaluationReport:
    fields: dict[str, Any] = {
        "suite": "tabletop",
        "checkpoint": "first",
        "split": "test",
        "mode": "greedy",
        "temperature": 1.0,
        "seed": 0,
        "outcomes": tuple(
            StartOutcome(task=task, index=index, success=bool(success), num_steps=5)
            for task, row in successes.items()
            for index, success in enumerate(row)
        ),
        "seconds": 1.0,
        "versions": {},
    }
    return EvaluationReport(**{**fields, **changes})


FIRST = make_report({"a": [1, 1, 0, 0, 0, 0], "b": [0, 0]})
SECOND = make_report({"a": [1, 0, 1, 1, 1, 0], "b": [1, 1]}, checkpoint="second")


def test_pairs_are_counted_start_by_start() -> None:
    comparison = compare_reports(FIRST, SECOND)
    task_a, task_b = comparison.tasks
    # a: start 0 both, start 1 only first, starts 2 3 4 only second, start 5 neither. b: both starts only second.
    assert (task_a.num_both, task_a.num_only_first, task_a.num_only_second, task_a.num_neither) == (1, 1, 3, 1)
    assert (task_b.num_both, task_b.num_only_first, task_b.num_only_second, task_b.num_neither) == (0, 0, 2, 0)
    overall = comparison.overall
    assert (overall.num_both, overall.num_only_first, overall.num_only_second, overall.num_neither) == (1, 1, 5, 1)
    assert (overall.first_rate, overall.second_rate, overall.difference) == (2 / 8, 6 / 8, 4 / 8)
    assert overall.interval == paired_difference_interval(1, 1, 5, 1)
    # 1 against 5: 2 * (1 + 6) / 64.
    assert overall.p_value == pytest.approx(14 / 64)


def test_the_order_of_outcomes_does_not_matter() -> None:
    shuffled = make_report({}, checkpoint="second", outcomes=tuple(reversed(SECOND.outcomes)))
    assert compare_reports(FIRST, shuffled) == compare_reports(FIRST, SECOND)


def test_markdown_says_what_is_shown() -> None:
    weak = compare_reports(FIRST, SECOND).to_markdown()
    assert "| overall | 25.0 % | 75.0 % | +50.0 points |" in weak
    assert "No difference shown over 8 starts: 5 solved only by the second, 1 only by the first" in weak
    # 0 against 8: p = 2/256 < 0.05.
    nothing, everything = make_report({"a": [0] * 8}), make_report({"a": [1] * 8})
    assert "The second is better over 8 starts" in compare_reports(nothing, everything).verdict()
    assert "The first is better over 8 starts" in compare_reports(everything, nothing).verdict()


def test_json_carries_counts_and_the_test() -> None:
    document = compare_reports(FIRST, SECOND).overall.as_dict()
    assert document["num_only_second"] == 5
    assert document["difference"] == 0.5
    assert document["p_value"] == pytest.approx(14 / 64)
    assert document["low"] < 0.5 < document["high"]


@pytest.mark.parametrize("name", ["suite", "split"])
def test_different_sets_of_starts_are_refused(name: str) -> None:
    other = make_report({"a": [1] * 6, "b": [1, 1]}, **{name: {"suite": "libero", "split": "validation"}[name]})
    with pytest.raises(ValueError, match=f"differ in {name}"):
        compare_reports(FIRST, other)


def test_different_conditions_are_refused() -> None:
    easy, hard = (make_report({"a": [1, 0]}, conditions={"difficulty": level}) for level in ("easy", "hard"))
    with pytest.raises(ValueError, match=r"differ in conditions.*easy.*hard"):
        compare_reports(easy, hard)


def test_a_missing_start_is_named() -> None:
    with pytest.raises(ValueError, match=r"1 starts are in one report only, e\.g\. b/test/1"):
        compare_reports(FIRST, make_report({"a": [1] * 6, "b": [1]}))
