"""Side files of OpenVLA-OFT through the loader, the policy and back: heads, projectors, FiLM; what does not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import INSTRUCTIONS, POLICY_SPEC, random_observations
from openvla_golden import CHECKPOINT, FOLDER, TOWERS, case, meta, norm_stats, pixels, prompt, proprio

from vla_rl.policies.compute import ComputeConfig, TrainLora
from vla_rl.policies.openvla.checkpoint import CheckpointFiles
from vla_rl.policies.openvla.config import OpenVLAConfig, Surroundings
from vla_rl.policies.openvla.heads import DiffusionActionHead, L1ActionHead
from vla_rl.policies.openvla.loading import load_model, load_openvla
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.openvla.prompt import PromptTokenizer
from vla_rl.policies.openvla.side_modules import PUBLISHED_RANK
from vla_rl.policy import Sampling

GREEDY, SAMPLED = Sampling(mode="greedy"), Sampling(temperature=1.0)
SPEC = replace(POLICY_SPEC, cameras=("agentview", "wrist"), image_size=(64, 64))
HEADS = ("action_head", "proprio_projector", "noisy_action_projector", "vision_backbone")


def streams(num: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng(seed + i) for i in range(num)]


def make_folder(folder: Path, *side_files: str) -> Path:
    """The golden checkpoint with a tokenizer, the sizes of its towers, and these side files only."""
    shutil.copytree(CHECKPOINT, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_towers": TOWERS}))
    PromptTokenizer.from_instructions(INSTRUCTIONS).save(folder)
    for old in folder.glob("*_checkpoint.pt"):
        old.unlink()
    for source in side_files:
        name = source.removeprefix("diffusion_")
        at = CHECKPOINT if (CHECKPOINT / f"{source}--100_checkpoint.pt").is_file() else FOLDER
        shutil.copy(at / f"{source}--100_checkpoint.pt", folder / f"{name}--100_checkpoint.pt")
    return folder


def load(folder: Path, compute: ComputeConfig | None = None, **config: object) -> OpenVLAPolicy:
    around = Surroundings(config=OpenVLAConfig(**config), spec=SPEC, suites=["libero_tiny"])  # type: ignore[arg-type]
    return load_openvla(folder, compute=compute, surroundings=around)


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "film", "action_head", "proprio_projector", "vision_backbone")


@pytest.fixture
def diffusion(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "diffusion", "diffusion_action_head", "noisy_action_projector", "proprio_projector")


def test_a_film_file_that_the_loader_read_gives_the_published_actions(film: Path) -> None:
    golden, name = case("oft_film_2img_l1_proprio_fp32"), "oft_film_2img_l1_proprio_fp32"
    model = load_model(CheckpointFiles.find(film), "cpu", ComputeConfig()).eval()
    with torch.inference_mode():
        features = model.vision_features(pixels(meta()["cases"][name]["num_images"]), prompt())
        hidden = model.action_hidden(features, prompt(), num_slots=56, proprio=proprio())
        assert isinstance(model.action_head, L1ActionHead)
        normalized = model.action_head(hidden)[0].double().numpy()
    actions = norm_stats().action.denormalize(normalized)
    np.testing.assert_allclose(actions, golden["actions"].double().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compute", [None, ComputeConfig(trained=TrainLora(rank=2, alpha=4, targets="published"))])
def test_film_acts_and_is_written_as_its_evaluation_reads_it(
    film: Path, tmp_path: Path, compute: ComputeConfig | None
) -> None:
    policy = load(film, compute)
    observations = random_observations(SPEC, 3)
    actions = policy.act(observations, GREEDY, streams(3)).actions
    policy.save(tmp_path / "written")
    tensors = torch.load(tmp_path / "written" / "vision_backbone--latest_checkpoint.pt", weights_only=True)
    block = "vision_backbone.fused_featurizer.blocks.0."
    assert tensors[f"{block}block.attn.qkv.base_layer.weight"].shape == (96, 32)
    assert tensors[f"{block}block.attn.qkv.lora_A.default.weight"].shape == (PUBLISHED_RANK, 32)
    assert tensors[f"{block}block.attn.qkv.lora_B.default.weight"].shape == (96, PUBLISHED_RANK)
    assert tensors[f"{block}scale.weight"].shape == (32, 32)
    patches = "vision_backbone.featurizer.patch_embed.proj."
    assert tensors[f"{patches}lora_A.default.weight"].shape == (PUBLISHED_RANK, 3, 14, 14)
    assert tensors[f"{patches}lora_B.default.weight"].shape == (24, PUBLISHED_RANK, 1, 1)
    assert not any(tensor.any() for name, tensor in tensors.items() if ".lora_" in name)
    # What the published file holds, and nothing else, once the empty adapters are taken away.
    stored = torch.load(FOLDER / "vision_backbone--100_checkpoint.pt", weights_only=True)
    plain = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    assert plain.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(plain[name], tensor.float(), rtol=0, atol=0)
    again = load_openvla(tmp_path / "written", compute=compute)
    np.testing.assert_array_equal(again.act(observations, GREEDY, streams(3)).actions, actions)


def test_film_reads_the_instruction_and_is_not_trained(film: Path) -> None:
    policy = load(film)
    one = random_observations(SPEC, 1)[0]
    other = replace(one, instruction=next(text for text in INSTRUCTIONS if text != one.instruction))
    with torch.no_grad():
        features = policy.features([one, other])
    assert not torch.equal(*features)
    valid = np.ones((1, policy.action_horizon), dtype=bool)
    with pytest.raises(ValueError, match=r"\(FiLM\) can be evaluated, not trained"):
        policy.bc_loss([one], np.zeros((1, 8, 7)), valid)
    with pytest.raises(ValueError, match=r"\(FiLM\), which can be evaluated, not trained"):
        CheckpointFiles.find(film).require_trainable("sft")


def test_a_diffusion_head_acts_from_the_episodes_noise_and_is_written_back(diffusion: Path, tmp_path: Path) -> None:
    policy = load(diffusion, num_denoising_steps=3)
    assert isinstance(policy.model.action_head, DiffusionActionHead)
    observations = random_observations(SPEC, 2)
    actions = policy.act(observations, SAMPLED, streams(2)).actions
    assert actions.shape == (2, 8, 7)
    np.testing.assert_array_equal(policy.act(observations, GREEDY, streams(2)).actions, actions)
    assert not np.array_equal(policy.act(observations, SAMPLED, streams(2, seed=7)).actions, actions)
    fewer = load(diffusion, num_denoising_steps=1)
    assert not np.array_equal(fewer.act(observations, SAMPLED, streams(2)).actions, actions)
    policy.save(tmp_path / "written")
    before, after = CheckpointFiles.find(diffusion), CheckpointFiles.find(tmp_path / "written")
    assert set(before.side_files) == set(after.side_files) == set(HEADS[:3])
    for name in before.side_files:
        stored, written = before.side_module(name), after.side_module(name)
        assert stored.keys() == written.keys()
        for key, tensor in stored.items():
            torch.testing.assert_close(written[key], tensor.float(), rtol=0, atol=0)
    again = load_openvla(tmp_path / "written")
    np.testing.assert_array_equal(again.act(observations, SAMPLED, streams(2)).actions, actions)
    valid = np.ones((2, policy.action_horizon), dtype=bool)
    with pytest.raises(ValueError, match="without the files action_head--"):
        policy.bc_loss(observations, np.zeros((2, 8, 7)), valid)
    with pytest.raises(ValueError, match="has a diffusion head, which can be evaluated, not trained"):
        before.require_trainable("sft")


def test_a_regression_head_can_be_cloned_on_but_not_reinforced(tmp_path: Path) -> None:
    files = CheckpointFiles.find(make_folder(tmp_path / "l1", "action_head"))
    files.require_trainable("sft")
    with pytest.raises(ValueError, match="has a regression head, which gives no probabilities"):
        files.require_trainable("train")
    CheckpointFiles.find(make_folder(tmp_path / "tokens")).require_trainable("train")


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"action_head": "l1"}, r"policy\.action_head=l1 needs the file action_head--"),
        ({"use_proprio": True}, r"policy\.use_proprio=true needs the file proprio_projector--"),
    ],
)
def test_parts_that_are_asked_for_must_be_there(tmp_path: Path, setting: dict, match: str) -> None:
    folder = make_folder(tmp_path / "tokens")
    load(folder)
    with pytest.raises(ValueError, match=match):
        load(folder, **setting)


@pytest.mark.parametrize(
    "files", [["noisy_action_projector"], ["noisy_action_projector", "action_head"], ["diffusion_action_head"]]
)
def test_a_diffusion_head_and_its_projector_come_together(tmp_path: Path, files: list[str]) -> None:
    with pytest.raises(ValueError, match="of one training run belong together"):
        load(make_folder(tmp_path / "part", *files))


def test_what_is_trained_beside_adapters_moves_in_every_entry(tmp_path: Path) -> None:
    """In bfloat16 a LayerNorm's weights of one would swallow every step of 5e-4."""
    folder = make_folder(tmp_path / "l1", "action_head", "proprio_projector")
    policy = load(folder, ComputeConfig(precision="bfloat16", trained=TrainLora(rank=2, alpha=4)))
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    before = {name: weight.detach().clone() for name, weight in trained.items()}
    optimizer = torch.optim.AdamW(list(trained.values()), lr=5e-4)
    observations, valid = random_observations(SPEC, 2), np.ones((2, policy.action_horizon), dtype=bool)
    for _ in range(2):
        optimizer.zero_grad()
        policy.bc_loss(observations, np.random.default_rng(0).uniform(-0.5, 0.5, (2, 8, 7)), valid).backward()
        optimizer.step()
    for name in ("action_head.model.layer_norm1.weight", "action_head.model.layer_norm2.weight"):
        assert (trained[f"model.{name}"] != before[f"model.{name}"]).all(), name
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert policy.model.projector.fc1.get_base_layer().weight.dtype == torch.bfloat16  # type: ignore[operator]


def test_statistics_that_make_no_sense_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tokens")
    path = folder / "dataset_statistics.json"
    table = json.loads(path.read_text())
    for change, match in (
        ({"q99": [float("nan")] * 7}, "are not finite"),
        ({"q99": [1.0] * 6}, "different lengths"),
        ({"q01": [9.0] * 7}, "a lower bound above its upper bound"),
    ):
        entry = {name: dict(values, action=values["action"] | change) for name, values in table.items()}
        path.write_text(json.dumps(entry))
        with pytest.raises(ValueError, match=match):
            load(folder)
    path.write_text('{"libero_tiny": {')
    with pytest.raises(ValueError, match=r"dataset_statistics\.json is damaged"):
        load(folder)


def test_everything_that_does_not_fit_the_suite_is_listed_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "l1", "action_head", "proprio_projector")
    spec = replace(SPEC, action_names=SPEC.action_names[:5], proprio_names=("x", "y", "z"))
    around = Surroundings(config=OpenVLAConfig(), spec=spec, suites=["libero_tiny"])
    with pytest.raises(ValueError, match="the checkpoint does not fit the suite") as caught:
        load_openvla(folder, surroundings=around)
    for line in (
        "the statistics of actions: 7 entries, the suite 5",
        "the action head: 7 entries, the suite 5",
        "the projector of proprioception: 8 entries, the suite 3 (x, y, z)",
        "the statistics of proprioception: 8 entries, the suite 3",
    ):
        assert line in str(caught.value)
