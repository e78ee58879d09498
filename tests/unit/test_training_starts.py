"""A report says what the checkpoint was trained on, as far as the run's folder says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evaluate import training_starts
from scripts.run_config import RunConfig
from sim.libero.suite import LiberoConfig


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("suite: {type: libero, starts: published}", "published (the test starts)"),
        ("suite: {type: libero}", "generated"),
        ("suite: {type: tabletop}", "of another suite"),
        (None, "unknown"),
    ],
)
def test_the_runs_configuration_is_found_from_any_of_its_folders(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    policy = tmp_path / "run" / "checkpoints" / "iteration_000001" / "policy"
    policy.mkdir(parents=True)
    if text is not None:
        (tmp_path / "run" / "config.yaml").write_text(text)
    config = RunConfig(suite=LiberoConfig(tasks=("libero_spatial",)))
    for checkpoint in (tmp_path / "run", policy.parent, policy):
        assert training_starts(checkpoint, config) == {"training_starts": expected}
    assert training_starts(policy, RunConfig()) == {}
