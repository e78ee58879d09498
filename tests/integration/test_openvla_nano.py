"""OpenVLA-OFT in small through the real commands: cloning, reinforcement learning, evaluation, export.

The code and the checkpoint format are those of the 7B model; only the sizes in the configuration differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from scripts.cli import app
from vla_rl.metrics import read_metrics
from vla_rl.policies.loading import load_policy
from vla_rl.train.checkpoint import latest_checkpoint

NANO = [
    "configs/policy/openvla_oft_nano.yaml",
    "policy.sizes.image_size=56",
    "policy.sizes.language_layers=2",
    "demos.num_per_task=2",
    "demos.noise=0.0",
    "demos.push_probability=0.0",
    "sft.num_updates=4",
    "sft.batch_size=4",
    "sft.micro_batch_size=2",
    "sft.checkpoint_every=2",
    "sft.report_every=2",
    "rollout.num_slots=4",
    "rollout.num_threads=2",
    "rl.num_iterations=2",
    "rl.algo.group_size=2",
    "rl.algo.groups_per_iteration=2",
    "rl.algo.num_minibatches=2",
    "rl.algo.micro_batch_size=4",
    # An untrained policy never succeeds: without the filter, updates still happen and every code path runs.
    "rl.dynamic_sampling.filter.enabled=false",
    "rl.dynamic_sampling.max_draw_factor=2",
    "rl.evaluate_every=2",
    "rl.evaluation_starts_per_task=1",
    "rl.checkpoint_every=1",
    "evaluation.starts_per_task=2",
    "evaluation.videos_per_task=0",
]
TABLETOP = ["suite.tasks=[pick_up_red_cube]"]
LIBERO = [
    "suite.type=libero",
    "suite.tasks=[libero_object/0]",
    "suite.image_size=64",
    "suite.samples=0",
    "demos.num_per_task=1",
    "compute.trained.type=lora",
    "compute.trained.rank=4",
    "compute.trained.targets=published",
    "compute.activation_checkpointing=true",
]
SHORT = "suite.horizon=16"


def run(*words: str | Path) -> Result:
    """A command that must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def tabletop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano")
    run("demos", *NANO, *TABLETOP, "--out", folder / "demos")
    run("sft", *NANO, *TABLETOP, "--demos", folder / "demos", "--out", folder / "sft")
    run("train", *NANO, *TABLETOP, SHORT, "--checkpoint", folder / "sft", "--out", folder / "rl")
    return folder


@pytest.mark.slow
def test_cloning_and_an_iteration_of_reinforcement_learning_change_the_weights(tabletop: Path) -> None:
    sft, rl = (latest_checkpoint(tabletop / name) for name in ("sft", "rl"))
    assert sft is not None
    assert rl is not None
    before, after = weights(sft / "policy"), weights(rl / "policy")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "language_model.lm_head.weight" in changed
    assert "vision_backbone.featurizer.patch_embed.proj.weight" in changed
    assert not any("attn_pool" in name for name in changed)
    rows = [row for row in read_metrics(tabletop / "rl") if "update/grad_norm" in row]
    assert len(rows) == 2
    assert all(np.isfinite(row["update/grad_norm"]) and row["update/num_tokens"] > 0 for row in rows)
    assert [row["sft/loss"] for row in read_metrics(tabletop / "sft")][-1] < np.log(832)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tabletop: Path, tmp_path: Path) -> None:
    words = [*NANO, *TABLETOP, SHORT, "--checkpoint", tabletop / "sft", "--out", tmp_path / "rl"]
    run("train", *words, "rl.num_iterations=1")
    run("train", *words, "--resume")
    one, other = latest_checkpoint(tmp_path / "rl"), latest_checkpoint(tabletop / "rl")
    assert one is not None
    assert other is not None
    for name, tensor in weights(other / "policy").items():
        assert torch.equal(weights(one / "policy")[name], tensor), name


@pytest.mark.slow
def test_an_exported_policy_is_evaluated_like_its_run(tabletop: Path, tmp_path: Path) -> None:
    run("export", tabletop / "rl", "--out", tmp_path / "exported")
    for name, checkpoint in (("run", tabletop / "rl"), ("exported", tmp_path / "exported")):
        run("evaluate", checkpoint, *NANO, *TABLETOP, SHORT, "--out", tmp_path / name)
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("run", "exported")]
    assert reports[0]["outcomes"] == reports[1]["outcomes"]
    run("export", tabletop / "rl", "--out", tmp_path / "half", "--precision", "bfloat16")
    assert {tensor.dtype for tensor in weights(tmp_path / "half").values()} == {torch.bfloat16}
    # A folder of the published kind, which does not say its suite.
    (tmp_path / "exported" / "vla_rl.json").unlink()
    words = ["export", str(tmp_path / "exported"), "--out", str(tmp_path / "again")]
    result = CliRunner().invoke(app, words)
    assert "give a configuration with policy.type=openvla" in str(result.exception)
    run(*words, *NANO, *TABLETOP)
    for name, tensor in weights(tmp_path / "exported").items():
        assert torch.equal(weights(tmp_path / "again")[name], tensor), name
    result = CliRunner().invoke(app, ["export", str(tabletop / "rl"), "--out", str(tmp_path / "half")])
    assert "is not empty" in str(result.exception)


@pytest.mark.slow
def test_frozen_towers_with_kept_features_and_offloaded_moments_train(tabletop: Path, tmp_path: Path) -> None:
    settings = [
        "compute.trained.freeze_vision=true",
        "compute.vision_cache_gb=0.5",
        "compute.precision=bfloat16",
        "rl.optim.offload=true",
        "rl.algo.ratio_tolerance=0.3",
        "rl.num_iterations=1",
    ]
    words = [*NANO, *TABLETOP, SHORT, *settings, "--checkpoint", tabletop / "sft", "--out", tmp_path / "rl"]
    run("train", *words)
    checkpoint = latest_checkpoint(tmp_path / "rl")
    assert checkpoint is not None
    stored = weights(checkpoint / "policy")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_the_regression_recipe_clones_and_its_policy_is_evaluated_but_not_reinforced(
    tabletop: Path, tmp_path: Path
) -> None:
    """The settings of configs/recipes/openvla_oft_libero_l1_1x80gb.yaml, in small."""
    recipe = [
        "policy.action_head=l1",
        "policy.use_proprio=true",
        "compute.precision=bfloat16",
        "compute.activation_checkpointing=true",
        "compute.trained.type=lora",
        "compute.trained.targets=published",
        "sft.optim.warmup_updates=0",
        "sft.optim.decay=step",
        "sft.optim.decay_after=2",
        "sft.optim.max_grad_norm=null",
        "sft.held_out_fraction=0.0",
    ]
    run("sft", *NANO, *TABLETOP, *recipe, "--demos", tabletop / "demos", "--out", tmp_path / "sft")
    rates = [row["sft/lr"] for row in read_metrics(tmp_path / "sft")]
    assert rates == pytest.approx([1e-4, 1e-4])
    checkpoint = latest_checkpoint(tmp_path / "sft")
    assert checkpoint is not None
    folder = checkpoint / "policy"
    assert {path.name.split("--")[0] for path in folder.glob("*.pt")} == {"action_head", "proprio_projector"}
    words = [*NANO, *TABLETOP, SHORT]
    run("evaluate", tmp_path / "sft", *words, "evaluation.starts_per_task=1", "--out", tmp_path / "report")
    result = CliRunner().invoke(
        app, ["train", *words, "--checkpoint", str(tmp_path / "sft"), "--out", str(tmp_path / "rl")]
    )
    assert "has a regression head, which gives no probabilities" in str(result.exception)
    assert not (tmp_path / "rl").exists()


@pytest.mark.slow
@pytest.mark.libero
def test_adapters_are_cloned_and_reinforced_on_libero(tmp_path: Path) -> None:
    pytest.importorskip("libero")
    run("demos", *NANO, *LIBERO, "--out", tmp_path / "demos")
    run("sft", *NANO, *LIBERO, "--demos", tmp_path / "demos", "--out", tmp_path / "sft")
    run(
        "train",
        *NANO,
        *LIBERO,
        SHORT,
        "rl.num_iterations=1",
        "--checkpoint",
        tmp_path / "sft",
        "--out",
        tmp_path / "rl",
    )
    sft, rl = (latest_checkpoint(tmp_path / name) for name in ("sft", "rl"))
    assert sft is not None
    assert rl is not None
    for name, tensor in weights(sft / "policy").items():
        assert torch.equal(weights(rl / "policy")[name], tensor), name  # the weights stay, the adapters move
    before, after = (load_file(c / "policy" / "lora_adapter" / "adapter_model.safetensors") for c in (sft, rl))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    run(
        "evaluate", tmp_path / "rl", *NANO, *LIBERO, SHORT, "evaluation.starts_per_task=1", "--out", tmp_path / "report"
    )
    assert load_policy(rl / "policy").norm_stats.key == "libero_object"
