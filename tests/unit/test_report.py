"""Evaluation reports: counted from outcomes, written whole, read back equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.evaluation.intervals import wilson_interval
from vla_rl.evaluation.report import EvaluationReport, StartOutcome, write_text_atomically

PICK, PUT = "tabletop/pick_up_red_cube", "tabletop/put_red_cube_on_plate"


def make_report(**changes: Any) -> EvaluationReport:
    """Pick: 2 of 3 solved (10 and 20 steps), one crash. Put: 0 of 1."""
    fields: dict[str, Any] = {
        "suite": "tabletop",
        "checkpoint": "runs/a/checkpoints/100",
        "split": "test",
        "mode": "greedy",
        "temperature": 1.0,
        "seed": 7,
        "outcomes": (
            StartOutcome(task=PICK, index=0, success=True, num_steps=10),
            StartOutcome(task=PICK, index=1, success=True, num_steps=20),
            StartOutcome(task=PUT, index=0, success=False, num_steps=64),
            StartOutcome(task=PICK, index=2, success=False, num_steps=3, crashed=True),
        ),
        "seconds": 12.5,
        "versions": {"mujoco": "3.3.2", "vla-rl": "0.1.0"},
    }
    return EvaluationReport(**{**fields, **changes})


def test_counts_by_task_and_overall() -> None:
    report = make_report()
    pick, put = report.tasks
    assert (pick.task, pick.num_starts, pick.num_successes, pick.num_crashed) == (PICK, 3, 2, 1)
    assert pick.mean_steps == 15.0
    assert (put.task, put.num_successes, put.mean_steps) == (PUT, 0, None)
    assert report.overall.success_rate == 0.5
    assert report.overall.num_crashed == 1
    assert report.overall.interval == wilson_interval(2, 4)


def test_json_comes_back_equal_and_shows_the_rates(tmp_path: Path) -> None:
    report = make_report()
    report.save(tmp_path / "new" / "folder")
    document = json.loads((tmp_path / "new/folder/report.json").read_text())
    assert document["overall"]["success"] == 0.5
    assert document["overall"]["low"] == wilson_interval(2, 4).low
    assert [task["num_starts"] for task in document["tasks"]] == [3, 1]
    assert EvaluationReport.load(tmp_path / "new" / "folder") == report
    assert EvaluationReport.load(tmp_path / "new/folder/report.json") == report


def test_derived_rates_in_the_file_are_not_believed() -> None:
    document = json.loads(make_report().to_json())
    document["overall"]["success"] = 1.0
    assert EvaluationReport.from_json(json.dumps(document)).overall.success_rate == 0.5


def test_markdown_has_a_row_per_task_and_names_crashes() -> None:
    text = make_report().to_markdown()
    assert f"| {PICK} | 66.7 % | 20.8 to 93.9 % | 2 of 3 | 15 |" in text
    assert f"| {PUT} | 0.0 % | 0.0 to 79.3 % | 0 of 1 | - |" in text
    assert "greedy actions" in text
    assert "1 episodes crashed and count as failures" in text
    assert "mujoco 3.3.2" in text
    assert "Conditions" not in text
    conditioned = make_report(conditions={"starts": "published", "horizon": None}).to_markdown()
    assert 'Conditions: horizon null, starts "published".' in conditioned
    sampled = make_report(mode="sample", temperature=1.6, outcomes=make_report().outcomes[:2]).to_markdown()
    assert "sampled actions at temperature 1.6" in sampled
    assert "crashed" not in sampled


def test_a_start_counts_once() -> None:
    outcome = StartOutcome(task=PICK, index=3, success=True, num_steps=1)
    with pytest.raises(ValueError, match=rf"{PICK}/test/3 has two outcomes"):
        make_report(outcomes=(outcome, outcome))


def test_an_empty_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one outcome"):
        make_report(outcomes=())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "format 1"),
        ('{"format_version": 99}', "format 1"),
        ('{"format_version": 1}', "suite"),
        ("{", "report.json"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        EvaluationReport.load(tmp_path)
    assert "report.json" in str(caught.value)


def test_an_unknown_field_of_an_outcome_is_refused() -> None:
    document = json.loads(make_report().to_json())
    document["outcomes"][0]["reward"] = 5
    with pytest.raises(ValueError, match="reward"):
        EvaluationReport.from_json(json.dumps(document))


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    write_text_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old"
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["report.md"]
