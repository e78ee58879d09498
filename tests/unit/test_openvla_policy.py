"""What is particular to the OpenVLA policy: saved in the published format, adapters, kept features, other heads."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import INSTRUCTIONS, POLICY_SPEC, openvla_policy, random_observations
from openvla_golden import CHECKPOINT, TOWERS
from safetensors.torch import load_file, save_file

from vla_rl.policies.compute import ComputeConfig, TrainEverything, TrainLora
from vla_rl.policies.loading import load_policy
from vla_rl.policies.openvla.checkpoint import CheckpointFiles
from vla_rl.policies.openvla.config import OpenVLAConfig, Surroundings
from vla_rl.policies.openvla.conventions import from_published_actions, to_published_actions
from vla_rl.policies.openvla.loading import load_openvla
from vla_rl.policies.openvla.model import OpenVLAModel
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.openvla.prompt import PromptTokenizer, prompt_text
from vla_rl.policy import Sampling

GREEDY, SAMPLED = Sampling(mode="greedy"), Sampling(temperature=1.6)


def streams(num: int) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(num)]


def chunks(policy: OpenVLAPolicy, num: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.8, (num, policy.action_horizon, policy.action_dim))


def loss_of(policy: OpenVLAPolicy, num: int = 2) -> torch.Tensor:
    valid = np.ones((num, policy.action_horizon), dtype=bool)
    return policy.bc_loss(random_observations(policy.spec, num), chunks(policy, num), valid)


# --- The published format --------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The golden checkpoint, with the sizes of its towers and a tokenizer, which it came without."""
    folder = tmp_path / "published"
    shutil.copytree(CHECKPOINT, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_towers": TOWERS}))
    PromptTokenizer.from_instructions(INSTRUCTIONS).save(folder)
    return folder


def surroundings(**config: object) -> Surroundings:
    spec = replace(POLICY_SPEC, cameras=("agentview", "wrist"), image_size=(64, 64))
    return Surroundings(config=OpenVLAConfig(**config), spec=spec, suites=["libero_tiny"])  # type: ignore[arg-type]


def test_a_published_checkpoint_is_written_back_tensor_by_tensor(published: Path, tmp_path: Path) -> None:
    policy = load_openvla(published, compute=ComputeConfig(precision="bfloat16"), surroundings=surroundings())
    policy.save(tmp_path / "written")
    before, after = (CheckpointFiles.find(folder) for folder in (published, tmp_path / "written"))
    assert after.shapes() == before.shapes()
    stored, written = (dict(files.tensors("cpu")) for files in (before, after))
    for name, tensor in stored.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=0)
    assert after.config == {name: value for name, value in before.config.items() if name != "auto_map"}
    assert "auto_map" not in (tmp_path / "written" / "preprocessor_config.json").read_text()  # code that is not there
    assert set(after.side_files) == {"action_head", "proprio_projector"}
    for name in after.side_files:
        for key, tensor in before.side_module(name).items():
            torch.testing.assert_close(after.side_module(name)[key], tensor.bfloat16(), rtol=0, atol=0)
    theirs, ours = (json.loads((f / "preprocessor_config.json").read_text()) for f in (published, tmp_path / "written"))
    for name, value in theirs.items():
        if name == "tvf_normalize_params":  # theirs went through float32
            for one, other in zip(ours[name], value, strict=True):
                np.testing.assert_allclose(one["mean"], other["mean"], rtol=1e-6)
        else:
            assert ours[name] == value, name
    observations = random_observations(policy.spec, 2)
    reloaded = load_policy(tmp_path / "written", compute=ComputeConfig(precision="bfloat16"))
    outputs = [one.act(observations, GREEDY, streams(2)).actions for one in (policy, reloaded)]
    np.testing.assert_array_equal(*outputs)


def test_weights_are_split_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.policies.openvla.exporting._SHARD_SIZE", "200KB")
    policy = openvla_policy()
    policy.save(tmp_path)
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(shards) > 3
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    loaded = load_policy(tmp_path)
    for name, weight in policy.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, rtol=0, atol=0)
    policy.save(tmp_path)  # over the old one, of which nothing may stay behind
    assert sorted(path.name for path in tmp_path.glob("model-*.safetensors")) == shards


def test_the_base_model_predicts_one_action_and_refuses_to_sample(published: Path) -> None:
    (published / "action_head--100_checkpoint.pt").unlink()
    (published / "proprio_projector--100_checkpoint.pt").unlink()
    around = surroundings(decoding="autoregressive", action_horizon=1)
    policy = load_openvla(published, surroundings=around)
    observations = random_observations(policy.spec, 3)
    together = policy.act(observations, GREEDY, streams(3)).actions
    assert together.shape == (3, 1, 7)
    alone = np.concatenate([policy.act([one], GREEDY, streams(1)).actions for one in observations])
    np.testing.assert_array_equal(together, alone)  # prompts of different lengths share a batch
    with pytest.raises(ValueError, match="sampling: a policy with the head 'autoregressive tokens' has no prob"):
        policy.act(observations, SAMPLED, streams(3))
    with pytest.raises(ValueError, match=r"set policy\.action_horizon=1"):
        load_openvla(published, surroundings=surroundings(decoding="autoregressive"))


def test_a_regression_head_acts_but_has_no_probabilities(published: Path) -> None:
    policy = load_openvla(published, surroundings=surroundings())
    observations = random_observations(policy.spec, 2)
    output = policy.act(observations, GREEDY, streams(2))
    assert output.actions.shape == (2, 8, 7)
    assert set(np.unique(output.actions[..., -1])) <= {-1.0, 1.0}
    with pytest.raises(ValueError, match="reinforcement learning needs a checkpoint that was cloned with discrete"):
        policy.evaluate(observations, output.sample, 1.0)


def test_a_regression_head_learns_by_mean_absolute_error() -> None:
    policy = openvla_policy(action_head="l1", use_proprio=True)
    optimizer = torch.optim.Adam([w for w in policy.parameters() if w.requires_grad], lr=2e-3)
    losses = []
    for _ in range(100):
        loss = loss_of(policy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]


# --- What is trained, and how it is computed -------------------------------------------------------------------------


def test_min_max_normalisation_spans_the_extremes() -> None:
    policy = openvla_policy(normalization="min_max")
    stats = policy.norm_stats.action
    bins = np.array([[255, 1] + [128] * 54])
    decoded = policy.decode(bins)[0]
    width = stats.max[0] - stats.min[0]
    assert decoded[0, 0] == pytest.approx(stats.min[0] + width / 255 / 2)
    assert decoded[0, 1] == pytest.approx(stats.max[1] - width / 255 / 2)


def test_the_gripper_is_translated_both_ways() -> None:
    ours = np.zeros((4, 7))
    ours[:, -1] = [-1.0, 1.0, 0.3, 0.7]
    published = to_published_actions(ours, POLICY_SPEC)
    assert published[:, -1].tolist() == pytest.approx([1.0, 0.0, 0.7, 0.3])
    assert from_published_actions(published, POLICY_SPEC)[:, -1].tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert not published[:, :-1].any()


def test_equal_observations_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, sizes = openvla_policy(), []
    original = OpenVLAModel.action_hidden

    def counted(self: OpenVLAModel, features: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        sizes.append(len(features))
        return original(self, features, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenVLAModel, "action_hidden", counted)
    one, other = random_observations(POLICY_SPEC, 2)
    copies = [replace(one, images=one.images.copy()) for _ in range(4)]
    output = policy.act([*copies, other], SAMPLED, streams(5))
    assert sizes == [2]
    assert len({row.tobytes() for row in output.sample[:4]}) == 4  # each copy draws for itself
    evaluation = policy.evaluate([*copies, other], output.sample, 1.6)
    assert sizes == [2, 2]
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), output.logprobs, atol=1e-5)
    changed = replace(one, proprio=one.proprio + 1)
    policy.act([one, changed], SAMPLED, streams(2))
    assert sizes[-1] == 2


def test_features_of_frozen_towers_are_kept_while_their_observation_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ComputeConfig(trained=TrainEverything(freeze_vision=True), vision_cache_gb=1.0)
    policy, plain, sizes = openvla_policy(compute=compute), openvla_policy(), []
    original = OpenVLAModel.vision_features

    def counted(self: OpenVLAModel, pixels: torch.Tensor, *args: object) -> torch.Tensor:
        sizes.append(len(pixels))
        return original(self, pixels, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenVLAModel, "vision_features", counted)
    observations = random_observations(POLICY_SPEC, 3)
    output = policy.act(observations[:2], SAMPLED, streams(2))
    evaluation = policy.evaluate(observations, np.concatenate([output.sample, output.sample[:1]]), 1.6)
    evaluation.logprobs.sum().backward()
    assert sizes == [2, 1]
    assert not any(weight.grad is not None for weight in policy.model.vision_backbone.parameters())
    assert policy.model.projector.fc1.weight.grad is not None
    expected = plain.act(observations[:2], SAMPLED, streams(2))
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
    assert len(policy._features_of) == 3
    del observations[1:]
    assert len(policy._features_of) == 1


def test_the_cache_keeps_to_its_size() -> None:
    features_gb = 4 * 64 * 4 / 1e9  # 4 patches x 64 features x 4 bytes
    compute = ComputeConfig(trained=TrainEverything(freeze_vision=True), vision_cache_gb=2.5 * features_gb)
    policy = openvla_policy(compute=compute)
    observations = random_observations(POLICY_SPEC, 5)
    policy.act(observations, SAMPLED, streams(5))
    assert len(policy._features_of) == 2


@pytest.mark.parametrize("targets", ["published", "language", "attention"])
def test_adapters_start_at_zero_train_alone_and_survive_saving(targets: str, tmp_path: Path) -> None:
    compute = ComputeConfig(trained=TrainLora(rank=2, alpha=4, targets=targets))  # type: ignore[arg-type]
    policy, plain = openvla_policy(compute=compute), openvla_policy()
    observations = random_observations(POLICY_SPEC, 3)
    with torch.inference_mode():
        torch.testing.assert_close(policy.logits(observations), plain.logits(observations))
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    has_vision, has_head = (any(part in name for name in trained) for part in ("vision_backbone", "lm_head"))
    assert (has_vision, has_head) == ((True, True) if targets == "published" else (False, False))
    optimizer = torch.optim.Adam([w for w in policy.parameters() if w.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(policy).backward()
        optimizer.step()
    policy.save(tmp_path / "saved")
    base = load_file(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(base["projector.fc2.weight"], plain.model.projector.fc2.weight.detach())
    merged, kept = load_policy(tmp_path / "saved"), load_policy(tmp_path / "saved", compute=compute)
    assert not any(".lora_" in name for name in merged.state_dict())
    with torch.inference_mode():
        ours = policy.logits(observations)
        assert (ours - plain.logits(observations)).abs().max() > 1e-2
        torch.testing.assert_close(kept.logits(observations), ours, rtol=0, atol=0)
        torch.testing.assert_close(merged.logits(observations), ours, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"adapters of rank 2, alpha 4, but compute\.trained says rank 8"):
        load_policy(tmp_path / "saved", compute=ComputeConfig(trained=TrainLora(rank=8)))
    other = "language" if targets == "attention" else "attention"
    with pytest.raises(ValueError, match=rf"layers, but compute\.trained\.targets={other} means"):
        load_policy(tmp_path / "saved", compute=ComputeConfig(trained=TrainLora(rank=2, alpha=4, targets=other)))
    policy.restore(tmp_path / "saved")


def test_adapters_of_a_bfloat16_model_are_float32() -> None:
    compute = ComputeConfig(precision="bfloat16", trained=TrainLora(rank=2, alpha=4))
    policy = openvla_policy(compute=compute)
    dtypes = {weight.requires_grad: weight.dtype for weight in policy.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    loss_of(policy).backward()


def test_an_unmerged_adapter_is_merged_when_it_is_named(tmp_path: Path) -> None:
    compute = ComputeConfig(trained=TrainLora(rank=2, alpha=4))
    policy = openvla_policy(compute=compute)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    policy.save(tmp_path / "base")
    shutil.move(tmp_path / "base" / "lora_adapter", tmp_path / "adapter")
    (tmp_path / "base" / "vla_rl.json").unlink()
    config = policy.config.model_copy(update={"adapter": str(tmp_path / "adapter"), "norm_key": "made_up"})
    around = Surroundings(config=config, spec=policy.spec, suites=["made_up"])
    merged = load_openvla(tmp_path / "base", surroundings=around)
    observations = random_observations(POLICY_SPEC, 2)
    with torch.inference_mode():
        torch.testing.assert_close(merged.logits(observations), policy.logits(observations), rtol=1e-4, atol=1e-4)
        merged.save(tmp_path / "again")
        again = load_openvla(tmp_path / "again")  # which does not merge it a second time
        torch.testing.assert_close(again.logits(observations), merged.logits(observations))
    kept = load_openvla(tmp_path / "base", compute=compute, surroundings=around)  # to train on
    trained = {name: weight for name, weight in kept.named_parameters() if weight.requires_grad}
    for name, weight in policy.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(trained.pop(name), weight, rtol=0, atol=0)
    assert not trained
    with pytest.raises(ValueError, match="holds no LoRA adapter"):
        load_openvla(
            tmp_path / "base", surroundings=replace(around, config=config.model_copy(update={"adapter": "no"}))
        )
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if "lora_B" in name)
    tensors.pop(lost)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"is incomplete: it lacks {lost.removeprefix('base_model.model.')}"):
        load_openvla(tmp_path / "base", surroundings=around)


def test_an_adapter_needs_a_checkpoint() -> None:
    with pytest.raises(ValueError, match=r"policy\.checkpoint is not: there is nothing to add it to"):
        openvla_policy(adapter="somewhere")


@pytest.mark.parametrize("compute", [{"activation_checkpointing": True}, {"precision": "mixed"}])
def test_cheaper_gradients_are_the_same_gradients(compute: dict) -> None:
    policy, plain = openvla_policy(compute=ComputeConfig(**compute)), openvla_policy()
    for one in (policy, plain):
        loss_of(one).backward()
    tolerance = 1e-5 if "precision" not in compute else 0.1
    for (name, weight), (_, expected) in zip(policy.named_parameters(), plain.named_parameters(), strict=True):
        assert (weight.grad is None) == (expected.grad is None), name
        if weight.grad is not None and expected.grad is not None:
            scale = float(expected.grad.abs().max())
            torch.testing.assert_close(weight.grad, expected.grad, rtol=tolerance, atol=tolerance * scale)


def test_unused_weights_are_not_trained() -> None:
    frozen = {name for name, weight in openvla_policy().named_parameters() if not weight.requires_grad}
    assert any("attn_pool" in name for name in frozen)
    assert all(any(part in name for part in ("blocks.1.", ".norm.", "attn_pool")) for name in frozen)
    loss_of(policy := openvla_policy()).backward()
    assert all((weight.grad is not None) == weight.requires_grad for weight in policy.parameters())


# --- Prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_the_published_sentence_and_end_with_the_space_mark() -> None:
    assert prompt_text("Pick up the Bowl") == "In: What action should the robot take to pick up the bowl?\nOut:"
    tokenizer = PromptTokenizer.from_instructions(["pick up the red cube", "open it"])
    ids, mask = tokenizer.batch(["pick up the red cube", "open it"])
    assert ids.shape == mask.shape
    assert ids[:, -1].tolist() == [3, 3]
    assert mask.sum(dim=1).tolist() == [ids.shape[1], ids.shape[1] - 3]
    assert ids[1, :3].tolist() == [tokenizer.pad_token_id] * 3
    assert tokenizer.ids("open it")[0] == 1
    with pytest.raises(ValueError, match="has no words"):
        tokenizer.batch(["  "])


def test_too_many_words_for_the_small_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="different words; the small model's tokenizer has room for"):
        PromptTokenizer.from_instructions([" ".join(f"word{i}" for i in range(600))])


def test_a_tokenizer_is_read_back_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer.from_instructions(INSTRUCTIONS)
    tokenizer.save(tmp_path)
    again = PromptTokenizer.load(tmp_path, tokenizer.pad_token_id)
    assert [again.ids(text) for text in INSTRUCTIONS] == [tokenizer.ids(text) for text in INSTRUCTIONS]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        PromptTokenizer.load(tmp_path, 0)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        PromptTokenizer.load(tmp_path, 0)
