"""`vla-rl doctor` on every preset and recipe, and on configurations that cannot work."""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import openvla_golden
import pytest
import torch
from fakes import POLICY_SPEC, openvla_policy
from typer.testing import CliRunner, Result

import scripts.doctor
import scripts.memory_plan
from scripts.cli import app
from scripts.memory_plan import check_memory, openvla_files, planned_policy
from scripts.run_config import read_config
from sim.libero.suite import LiberoConfig
from sim.suites import make_suite
from vla_rl.config import ConfigError
from vla_rl.policies.compute import TrainLora
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.filters import GroupFilterConfig
from vla_rl.train.rl import RLConfig

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("simplevla_*.yaml"))
CLONING = sorted((CONFIGS / "recipes").glob("openvla_oft_*.yaml"))
OTHERS = sorted([*CONFIGS.glob("*.yaml"), *(CONFIGS / "policy").glob("*.yaml")])
OPENVLA = ("policy.type=openvla", "rl.algo.ratio_tolerance=0.1")


def doctor(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def test_there_is_a_recipe_for_each_suite_and_machine() -> None:
    suites, machines = ("spatial", "object", "goal", "long"), ("1x80gb", "8x80gb")
    assert {path.stem for path in RECIPES} == {f"simplevla_libero_{s}_{m}" for s in suites for m in machines}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_fits_its_machine(path: Path) -> None:
    result = doctor(path, "--gpu-memory-gb", "80")
    assert result.exit_code == 0, result.output
    for fact in (
        "suite libero: 10 tasks, at most 512 control steps, cameras agentview at 256 x 256 pixels",
        "64 groups x 8 = 512 episodes",
        "at most 64 decisions x 56 tokens; 4 optimiser steps of 128 episodes",
        "7,541,237,184 parameters in 982 tensors",
        "80 GB yes",
        "no problem found",
    ):
        assert fact in result.output


@pytest.mark.parametrize("path", CLONING, ids=lambda path: path.stem)
def test_cloning_recipe_fits_its_machine_and_has_the_published_figures(path: Path) -> None:
    result = doctor(path, "--for", "sft", "--gpu-memory-gb", "80")
    assert result.exit_code == 0, result.output
    assert "80 GB yes" in result.output
    assert "demonstrations" in result.output
    config = read_config([str(path)])
    lora, optim = config.compute.trained, config.sft.optim
    assert isinstance(lora, TrainLora)
    assert (lora.rank, lora.alpha, lora.targets) == (32, 16, "published")
    assert (optim.lr, optim.betas, optim.weight_decay, optim.max_grad_norm) == (5e-4, (0.9, 0.999), 0.01, None)
    assert (optim.decay, optim.decay_after, optim.warmup_updates) == ("step", 100_000, 0)
    assert (config.sft.num_updates, config.sft.batch_size, config.sft.augment) == (150_000, 64, True)
    assert isinstance(config.suite, LiberoConfig)
    has_l1_head = "_l1_" in path.stem
    assert len(config.suite.cameras) == (2 if has_l1_head else 1)
    assert isinstance(config.policy, OpenVLAConfig)
    assert (config.policy.action_head, config.policy.use_proprio) == (
        ("l1", True) if has_l1_head else ("tokens", False)
    )


def test_there_is_a_cloning_recipe_for_each_head() -> None:
    assert [path.stem for path in CLONING] == ["openvla_oft_libero_l1_1x80gb", "openvla_oft_libero_tokens_1x80gb"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_keeps_the_papers_learning_rule(path: Path) -> None:
    rl, paper = read_config([str(path)]).rl, RLConfig()
    algo = rl.algo.model_copy(
        update={"micro_batch_size": paper.algo.micro_batch_size, "ratio_tolerance": paper.algo.ratio_tolerance}
    )
    assert algo == paper.algo
    assert rl.optim.model_copy(update={"offload": False}) == paper.optim
    assert rl.dynamic_sampling.filter == GroupFilterConfig()


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("stage", ["sft", "train"])
def test_preset_has_no_problem(path: Path, stage: str) -> None:
    result = doctor(path, "--for", stage)
    assert result.exit_code == 0, result.output


def test_small_gpu_is_refused_with_advice() -> None:
    result = doctor(RECIPES[0], "--gpu-memory-gb", "24")
    assert result.exit_code == 1
    assert "there are 24 GB; the largest items are drawing contexts (24.0 GB)" in result.output
    assert "compute.trained.type=lora:" in result.output
    assert "1 problem" in result.output


def test_what_fits_no_gpu_is_refused_without_naming_one() -> None:
    result = doctor(RECIPES[0], "compute.precision=mixed", "rl.optim.offload=false")
    assert result.exit_code == 1
    assert "there are 141 GB" in result.output


def test_what_exceeds_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.memory_plan, "host_memory_bytes", lambda: int(0.5e9))
    result = doctor(*OPENVLA)
    assert result.exit_code == 1
    assert "of host memory and this machine has 0.5 GB" in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("compute.precision=bfloat16",), "rl.optim.offload=true"),
        (("compute.precision=mixed", "rl.algo.ratio_tolerance=1e-3"), "set it to 0.1"),
        (("rollout.execution_horizon=9",), "policy.action_horizon is only 8"),
        (("policy.action_head=l1",), "set policy.action_head=tokens"),
        (("policy.decoding=autoregressive", "policy.action_horizon=1"), "set policy.decoding=parallel"),
        (("policy.checkpoint=runs/nowhere/policy",), "'runs/nowhere/policy' does not exist"),
        (("suite.type=libero", "suite.tasks=[libero_spatial/77]"), "'77'"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], expected: str) -> None:
    result = doctor(*OPENVLA, *words)
    assert result.exit_code == 1
    assert expected in result.output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "has no tokenizer.json"),
        (("policy.adapter=nowhere",), "nowhere holds no LoRA adapter"),
        (("policy.use_proprio=true",), "needs the file proprio_projector--"),
    ],
)
def test_what_a_checkpoint_lacks_is_a_problem(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    result = doctor(*OPENVLA, *words, "--checkpoint", copy_of_golden(tmp_path / "tokens"))
    assert result.exit_code == 1
    assert expected in result.output


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("policy.sizes.vision_heads=5",), "vision_dim is 96 with vision_heads 5"),
        (("policy.sizes.language_dim=66",), "language_dim is 66 with language_heads 6"),
        (("policy.checkpoint=some/where", "policy.sizes.image_size=56"), "has sizes of its own"),
    ],
)
def test_sizes_that_cannot_be_or_are_not_used_are_refused(words: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_config([*OPENVLA, *words])


def test_head_for_cloning_only_is_no_problem_of_cloning() -> None:
    assert doctor("--for", "sft", "policy.type=openvla", "policy.action_head=l1").exit_code == 0


def test_missing_package_of_a_suite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_suite(config: object) -> None:
        raise ImportError("LIBERO is not installed: pip install 'vla-rl[libero]'")

    monkeypatch.setattr(scripts.doctor, "make_suite", make_suite)
    result = doctor(RECIPES[0])
    assert result.exit_code == 1
    assert "problem: LIBERO is not installed" in result.output


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    result = doctor(*OPENVLA)
    assert result.exit_code == 1
    assert "openvla no" in result.output
    assert "pip install 'vla-rl[openvla]'" in result.output


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, memory: float) -> SimpleNamespace:
    gpu = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(scripts.memory_plan, "checked_device", torch.device)
    return gpu


def test_run_is_refused_before_its_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = pretend_gpu(monkeypatch, 48e9)
    config = read_config([str(RECIPES[0]), "rollout.num_threads=1"])
    suite = make_suite(config.suite)
    check_memory(config, "train", suite, folder=None)  # random weights of a small model
    small = read_config([*OPENVLA, "device=cuda"])
    gpu.total_memory = 1e9
    with pytest.raises(ValueError, match="there are 1 GB"):
        check_memory(small, "sft", make_suite(small.suite), folder=None)
    with pytest.raises(ValueError, match=r"rl\.optim\.offload=true"):
        check_memory(read_config([*OPENVLA, "compute.precision=bfloat16"]), "train", suite, folder=None)
    check_memory(read_config([]), "train", suite, folder=None)  # the tiny policy


def copy_of_golden(folder: Path) -> Path:
    """The golden checkpoint without its side modules: action tokens."""
    shutil.copytree(openvla_golden.CHECKPOINT, folder, ignore=shutil.ignore_patterns("*_checkpoint.pt"))
    return folder


def test_architecture_of_a_run_is_that_of_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The golden checkpoint does not say the sizes of its towers, so it counts as one with the published ones.
    pretend_gpu(monkeypatch, 1.5e9)
    config = read_config([*OPENVLA, "device=cuda"])
    folder = copy_of_golden(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"optimiser \(6\.0 GB\)"):
        check_memory(config, "train", make_suite(config.suite), folder)


def test_gpu_that_is_not_here_is_named_first() -> None:
    config = read_config([*OPENVLA, "device=cuda"])
    with pytest.raises(ValueError, match=r"device 'cuda' cannot be used here .* try device=cpu"):
        check_memory(config, "train", make_suite(config.suite), folder=None)


def test_memory_of_the_host_is_checked_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = read_config([*OPENVLA])
    suite = make_suite(config.suite)
    check_memory(config, "train", suite, folder=None)
    assert re.search(r"memory: about \d+\.\d GB", capsys.readouterr().out)
    monkeypatch.setattr(scripts.memory_plan, "host_memory_bytes", lambda: int(0.5e9))
    with pytest.raises(ValueError, match=r"of host memory and this machine has 0\.5 GB"):
        check_memory(config, "train", suite, folder=None)
    # Offloaded moments count even where the policy itself is on a GPU.
    pretend_gpu(monkeypatch, 80e9)
    offloaded = read_config([*OPENVLA, "device=cuda", "rl.optim.offload=true"])
    with pytest.raises(ValueError, match="of host memory"):
        check_memory(offloaded, "train", suite, folder=copy_of_golden(tmp_path / "tokens"))


def test_what_a_checkpoint_says_of_its_policy_counts_not_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "policy"
    openvla_policy(replace(POLICY_SPEC, cameras=("front",)), action_horizon=3, use_proprio=True).save(folder)
    tiny = read_config([])
    suite = make_suite(tiny.suite)
    files = openvla_files(folder)
    planned = planned_policy(tiny, "train", files)
    assert planned is not None
    assert (planned.action_horizon, planned.use_proprio, planned.action_head) == (3, True, "tokens")
    monkeypatch.setattr(scripts.memory_plan, "host_memory_bytes", lambda: int(1e6))
    with pytest.raises(ValueError, match="of host memory"):  # though the configuration is of the tiny policy
        check_memory(tiny, "train", suite, folder)
    result = doctor("--checkpoint", folder)
    assert "tokens; 4 optimiser steps" in result.output
    assert f"decisions x {3 * 7} tokens" in result.output


def test_checkpoint_that_cannot_be_trained_is_refused_at_once(tmp_path: Path) -> None:
    config = read_config([*OPENVLA])
    with pytest.raises(ValueError, match="has a regression head"):
        check_memory(config, "train", make_suite(config.suite), openvla_golden.CHECKPOINT)
    result = doctor(*OPENVLA, "--checkpoint", openvla_golden.CHECKPOINT)
    assert "has a regression head, which gives no probabilities" in result.output
    result = doctor("--checkpoint", openvla_golden.CHECKPOINT)
    assert "is a published OpenVLA checkpoint: set policy.type=openvla" in result.output
    film = copy_of_golden(tmp_path / "film")
    shutil.copy(openvla_golden.FOLDER / "vision_backbone--100_checkpoint.pt", film)
    assert (
        "(FiLM), which can be evaluated, not trained" in doctor(*OPENVLA, "--for", "sft", "--checkpoint", film).output
    )


def test_checkpoint_on_disk_is_compared_with_the_model() -> None:
    # The golden checkpoint's towers have sizes that its files do not say: published ones are assumed, and differ.
    result = doctor(*OPENVLA, f"policy.checkpoint={openvla_golden.CHECKPOINT}")
    assert result.exit_code == 1
    assert "the checkpoint does not fit the model" in result.output
    assert "wrong shape: vision_backbone.featurizer.cls_token is [1, 1, 24], expected [1, 1, 1024]" in result.output
    assert "looked for 'tabletop'" in result.output
