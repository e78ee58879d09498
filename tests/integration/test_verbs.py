"""The real commands, end to end, at the smallest size that still exercises everything."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import sim.rendering
import sim.suites
from scripts.cli import app, main
from sim.mujoco_world import MujocoWorld
from vla_rl.metrics import read_metrics
from vla_rl.types import SimError, StepResult

SMALL = [
    "suite.tasks=[pick_up_red_cube, put_blue_cube_on_plate]",
    "suite.horizon=24",
    "demos.num_per_task=2",
    "demos.noise=0.0",
    "demos.push_probability=0.0",
    "policy.hidden_dim=32",
    "sft.num_updates=4",
    "sft.batch_size=8",
    "sft.report_every=2",
    "sft.checkpoint_every=2",
    "rollout.num_slots=4",
    "rollout.num_threads=2",
    "rollout.batching=waves",
    "rl.num_iterations=4",
    "rl.max_minutes=null",
    "rl.algo.group_size=2",
    "rl.algo.groups_per_iteration=2",
    "rl.algo.num_minibatches=2",
    # An untrained policy never succeeds: without the filter, updates still happen and every code path runs.
    "rl.dynamic_sampling.filter.enabled=false",
    "rl.dynamic_sampling.max_draw_factor=2",
    "rl.optim.lr=1e-3",
    "rl.evaluate_every=2",
    "rl.evaluation_starts_per_task=1",
    "rl.checkpoint_every=2",
    "evaluation.starts_per_task=2",
]


def run(*words: str | Path) -> Result:
    """A command that must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    # The expert needs more than the 24 steps that are enough for everything else.
    run("demos", *SMALL, "suite.horizon=80", "--out", folder.parent / "demos")
    run("quickstart", *SMALL, "suite.horizon=80", "--out", folder)
    return folder


def test_quickstart_leaves_everything_it_promises(quickstart: Path) -> None:
    report = json.loads((quickstart / "report.json").read_text())
    assert {"sft_success", "rl_success", "num_starts", "tasks", "overall", "seconds", "seed", "versions"} <= set(report)
    assert report["num_starts"] == 4
    assert len(report["tasks"]) == 2
    assert {"demonstrations", "cloning", "reinforcement learning"} <= set(report["seconds"])
    assert all(seconds > 0 for seconds in report["seconds"].values())
    for name in ("report.md", "learning_curve.png", "videos/before_after.mp4", "videos/after_rl.png"):
        assert (quickstart / name).stat().st_size > 0, name
    assert "videos/before_after.mp4" in (quickstart / "report.md").read_text()


def test_quickstart_resumes_without_repeating_a_stage(quickstart: Path) -> None:
    stages = (quickstart / "stages.json").read_text()
    run("quickstart", *SMALL, "suite.horizon=80", "--out", quickstart, "--resume")
    assert (quickstart / "stages.json").read_text() == stages
    result = CliRunner().invoke(
        app, ["quickstart", *SMALL, "suite.horizon=80", "seed=1", "--out", str(quickstart), "--resume"]
    )
    assert "begun with other settings" in str(result.exception)


def test_quickstart_interrupted_before_the_first_checkpoint_of_a_stage(quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    shutil.copytree(quickstart, folder)
    (folder / "stages.json").write_text(json.dumps({"done": ["demonstrations"], "seconds": {"demonstrations": 1.0}}))
    shutil.rmtree(folder / "sft" / "checkpoints")
    shutil.rmtree(folder / "rl" / "checkpoints")
    run("quickstart", *SMALL, "suite.horizon=80", "--out", folder, "--resume")
    assert (folder / "report.json").exists()


def test_evaluate_and_compare(quickstart: Path, tmp_path: Path) -> None:
    for name, checkpoint in (("a", quickstart / "sft"), ("b", quickstart / "rl")):
        run("evaluate", checkpoint, *SMALL, "--suite", "tabletop/pick_up_blue_cube", "--out", tmp_path / name)
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert [(outcome["task"], outcome["index"]) for outcome in report["outcomes"]] == [
        ("tabletop/pick_up_blue_cube", 0),
        ("tabletop/pick_up_blue_cube", 1),
    ]
    assert list((tmp_path / "a" / "videos").glob("*.mp4"))
    assert "pick_up_blue_cube" in run("compare", tmp_path / "a", tmp_path / "b").output


def without_times(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))}
        for row in read_metrics(folder)
    ]


def test_interrupted_rl_equals_uninterrupted(quickstart: Path, tmp_path: Path) -> None:
    words = ("--checkpoint", quickstart / "sft")
    run("train", *SMALL, *words, "--out", tmp_path / "whole")
    run("train", *SMALL, "rl.num_iterations=2", *words, "--out", tmp_path / "halves")
    run("train", *SMALL, *words, "--out", tmp_path / "halves", "--resume")
    whole = without_times(tmp_path / "whole")
    assert [row["iteration"] for row in whole] == [0, 1, 2, 3, 4]
    assert "update/grad_norm" in whole[-1]
    assert without_times(tmp_path / "halves") == whole
    assert _weights(tmp_path / "halves", 4) == _weights(tmp_path / "whole", 4)


def test_interrupted_sft_equals_uninterrupted(quickstart: Path, tmp_path: Path) -> None:
    words = ("--demos", quickstart / "demos")
    run("sft", *SMALL, *words, "--out", tmp_path / "whole")
    run("sft", *SMALL, *words, "--out", tmp_path / "halves")
    # As if the run had died after its second update: the later checkpoint never came to be.
    (tmp_path / "halves" / "checkpoints" / "iteration_000004" / "manifest.json").unlink()
    run("sft", *SMALL, *words, "--out", tmp_path / "halves", "--resume")
    assert without_times(tmp_path / "halves") == without_times(tmp_path / "whole")
    assert _weights(tmp_path / "halves", 4) == _weights(tmp_path / "whole", 4)


def _weights(folder: Path, iteration: int) -> bytes:
    return (folder / "checkpoints" / f"iteration_{iteration:06d}" / "policy" / "model.safetensors").read_bytes()


def test_print_config_and_help_name_every_setting() -> None:
    assert "clip_high: 0.28" in run("train", "--print-config").output
    assert "rl.algo.surrogate.clip_high" in run("train", "--help").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "rl.algo.groupsize=4"), "Did you mean 'rl.algo.group_size'"),
        (("train", "suite.tasks=[pick_up_red_cub]"), "pick_up_red_cube"),
        (("train", "no_such_preset.yaml"), "does not exist"),
        (("evaluate", "SFT", "--suite", "tabletopp"), "Did you mean 'tabletop'"),
        (("evaluate", "SFT", "--suite", "tabletop/pick_up_red_cub"), "pick_up_red_cube"),
        (("evaluate", "SFT", "suite.image_size=96"), "image_size: policy (64, 64), suite (96, 96)"),
        (("evaluate", "NOTHING"), "holds no checkpoint"),
        (("train", "--checkpoint", "SFT", "rollout.execution_horizon=9"), "execution_horizon is 9"),
        (("sft", "--demos", "NOTHING"), "holds no demonstrations"),
    ],
)
def test_bad_input_is_one_clear_error(
    quickstart: Path, tmp_path: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"SFT": str(quickstart / "sft"), "NOTHING": str(tmp_path / "nothing")}
    result = CliRunner().invoke(app, [places.get(word, word) for word in words])
    assert isinstance(result.exception, (ValueError, OSError)), result.output
    assert message in str(result.exception)
    assert not list(tmp_path.rglob("config.yaml")), "a mistake leaves no half-made run"


def test_missing_opengl_is_one_clear_error(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sim.suites, "ensure_gl_backend", sim.rendering.ensure_gl_backend.__wrapped__)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    out = tmp_path / "rl"
    monkeypatch.setattr(
        "sys.argv", ["vla-rl", "train", *SMALL, "--checkpoint", f"{quickstart / 'sft'}", "--out", f"{out}"]
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert "apt-get install" in capsys.readouterr().out
    assert not out.exists()


def test_worlds_that_become_invalid_end_the_run(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = MujocoWorld.step

    def poisoned(world: MujocoWorld, chunk: np.ndarray, record_frames: bool = False) -> StepResult:
        world.data.qvel[:] = np.nan
        return step(world, chunk, record_frames)

    monkeypatch.setattr(MujocoWorld, "step", poisoned)
    words = ["evaluate", str(quickstart / "sft"), *SMALL, "evaluation.starts_per_task=10", "--out", str(tmp_path / "e")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, SimError)
    assert "20 of 20 episodes crashed" in str(result.exception)
    assert "physics became invalid" in str(result.exception)
    assert not (tmp_path / "e" / "report.json").exists()


def test_corrupt_checkpoint_is_named(quickstart: Path, tmp_path: Path) -> None:
    run("sft", *SMALL, "--demos", quickstart / "demos", "--out", tmp_path / "sft")
    weights = tmp_path / "sft" / "checkpoints" / "iteration_000004" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "sft"), *SMALL])
    assert isinstance(result.exception, ValueError)
    assert "model.safetensors" in str(result.exception)
    assert "damaged" in str(result.exception)
