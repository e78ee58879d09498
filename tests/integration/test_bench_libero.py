"""The benchmark against LIBERO's own environments at its smallest; whether the figures are good is not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.cli import app

pytest.importorskip("libero")
pytestmark = [pytest.mark.libero, pytest.mark.slow]

HEADLINES = ("physics_ratio", "decision_ratio", "decision_ratio_lite", "reset_ratio", "world_mb", "threads_ratio")


@pytest.mark.long  # several minutes: most of it in building and drawing the environments of the peer
@pytest.mark.timeout(1200)
def test_the_report_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ["--suite", "libero_object/0", "--against", "libero", "--seconds", "0.1"]
    words += ["--execution-horizon", "1", "--max-threads", "2", "--json"]
    # In a process of its own: it starts others, and its environment variables stay there.
    result = subprocess.run(
        [sys.executable, "-m", "scripts.cli", "bench-sim", *words, str(file)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text(encoding="utf-8"))
    for name in HEADLINES:
        assert isinstance(report[name], float), name
        assert report[name] > 0.0, name
    assert report["settings"]["task"] == "libero_object/0"
    assert report["versions"]["mujoco"] == "3.3.2"
    assert "libero" in report["versions"]["libero"]
    assert [row["threads"] for row in report["threads"]] == [1, 2]
    kinds = {(row["image_size"], row["threads"], row["cameras"], row["mesh_quality"]) for row in report["decisions"]}
    assert kinds == {(size, n, c, q) for size in (256, 128) for n in (1, 2) for c in (1, 2) for q in ("full", "lite")}
    assert all(row["decisions_per_s"] > 0.0 and row["libero_decisions_per_s"] > 0.0 for row in report["decisions"])
    best = max(row["decisions_per_s"] for row in report["decisions"])
    assert f"{best:.{2 if best < 100 else 0}f}" in result.stdout  # the table shows what the file holds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--suite", "libero_object/0"), "--suite 'libero_object/0' with --against 'robosuite'"),
        (("--against", "libero"), "--suite 'tabletop' with --against 'libero'"),
        (("--suite", "libero_object", "--against", "libero"), "stands for 10 tasks"),
        (("--suite", "libero_objec/0", "--against", "libero"), "Did you mean 'libero_object'?"),
        (("--suite", "libero_object/0", "--against", "libero", "--lift-steps", "20"), "belong to --suite tabletop"),
        (("--json", "no/such/folder/bench.json"), "there is no folder 'no/such/folder'"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_error(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["bench-sim", *words])
    assert isinstance(result.exception, ValueError), result.output
    assert message in str(result.exception)
