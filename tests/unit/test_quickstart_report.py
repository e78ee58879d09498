"""The quickstart's page: before and after on the same starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.evaluation.quickstart_report import write_quickstart_report
from vla_rl.evaluation.report import EvaluationReport, StartOutcome

PICK, PUT = "tabletop/pick_up_red_cube", "tabletop/put_red_cube_on_plate"


def make_report(pick: list[int], put: list[int], **changes: Any) -> EvaluationReport:
    fields: dict[str, Any] = {
        "suite": "tabletop",
        "checkpoint": "runs/quickstart/policy",
        "split": "test",
        "mode": "greedy",
        "temperature": 1.0,
        "seed": 0,
        "outcomes": tuple(
            StartOutcome(task=task, index=index, success=bool(success), num_steps=5)
            for task, row in ((PICK, pick), (PUT, put))
            for index, success in enumerate(row)
        ),
        "seconds": 1.0,
        "versions": {},
    }
    return EvaluationReport(**{**fields, **changes})


BEFORE = make_report([1, 0, 0, 0], [1, 0])
AFTER = make_report([1, 1, 1, 1], [0, 1])


def write(folder: Path, before: EvaluationReport, after: EvaluationReport) -> tuple[dict[str, Any], str]:
    write_quickstart_report(
        folder,
        before,
        after,
        seconds={"demonstrations": 20.4, "cloning": 100.0, "reinforcement learning": 3600.0},
        seed=3,
        versions={"mujoco": "3.3.2"},
        config={"algo": {"group_size": 8}},
    )
    return json.loads((folder / "report.json").read_text()), (folder / "report.md").read_text()


def test_the_document_holds_both_rates_per_task_and_overall(tmp_path: Path) -> None:
    document, _ = write(tmp_path, BEFORE, AFTER)
    assert (document["sft_success"], document["rl_success"], document["num_starts"]) == (2 / 6, 5 / 6, 6)
    pick, put = document["tasks"]
    assert (pick["task"], pick["before"]["success"], pick["after"]["success"]) == (PICK, 0.25, 1.0)
    assert (put["task"], put["before"]["num_successes"], put["after"]["num_successes"]) == (PUT, 1, 1)
    assert 0.0 < pick["before"]["low"] < 0.25 < pick["before"]["high"] < 1.0
    assert document["overall"]["after"]["success"] == 5 / 6
    # Only after: starts 1 2 3 of pick, 1 of put; only before: start 0 of put. p = 2 * (1 + 5) / 32.
    assert document["difference"]["num_only_second"] == 4
    assert document["difference"]["p_value"] == pytest.approx(12 / 32)
    assert document["seconds"]["cloning"] == 100.0
    assert (document["seed"], document["versions"], document["config"]["algo"]) == (
        3,
        {"mujoco": "3.3.2"},
        {"group_size": 8},
    )


def test_the_page_shows_tables_times_and_the_media_that_exist(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    for name in ("learning_curve.png", "videos/before_after.mp4", "videos/contact_sheet.png", "videos/.a.tmp"):
        (tmp_path / name).touch()
    _, page = write(tmp_path, BEFORE, AFTER)
    assert "**33.3 %** cloned from demonstrations, **83.3 %** after reinforcement learning" in page
    assert f"| {PICK} | 25.0 % | 4.6 to 69.9 % | 100.0 % |" in page
    assert "p = 0.38" in page
    assert "| demonstrations | 20 s |" in page
    assert "| total | 62 min 00 s |" in page
    assert "![Learning curve](learning_curve.png)" in page
    assert "Video: [before after](videos/before_after.mp4)" in page
    assert "![contact sheet](videos/contact_sheet.png)" in page
    assert ".tmp" not in page


def test_the_page_links_nothing_that_is_missing(tmp_path: Path) -> None:
    _, page = write(tmp_path, BEFORE, AFTER)
    assert "](" not in page


def test_different_starts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in one report only"):
        write(tmp_path, BEFORE, make_report([1, 1, 1, 1], [1, 1, 1]))
    assert not list(tmp_path.iterdir())


def test_different_ways_to_act_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"greedy at temperature 1 and sample at 1\.6"):
        write(tmp_path, BEFORE, make_report([1] * 4, [1] * 2, mode="sample", temperature=1.6))
