"""Adapters that PEFT itself wrote: merged, trained on, and refused where they are more than plain LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import POLICY_SPEC, openvla_policy, random_observations
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from vla_rl.policies.compute import ComputeConfig, TrainLora
from vla_rl.policies.openvla.config import Surroundings
from vla_rl.policies.openvla.loading import load_openvla
from vla_rl.policies.openvla.policy import OpenVLAPolicy

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def base(tmp_path: Path) -> OpenVLAPolicy:
    policy = openvla_policy()
    policy.save(tmp_path / "base")
    (tmp_path / "base" / "vla_rl.json").unlink()  # as if others had published it
    return policy


@pytest.fixture
def expected(base: OpenVLAPolicy, tmp_path: Path) -> torch.Tensor:
    """Logits of PEFT's own model, whose adapter is in the folder \"adapter\"."""
    config = LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    torch.manual_seed(0)
    wrapped = get_peft_model(base.model, config)  # type: ignore[arg-type]
    folder = tmp_path / "adapter"
    folder.mkdir()
    config.save_pretrained(str(folder))
    tensors = {name: tensor.contiguous() for name, tensor in get_peft_model_state_dict(wrapped).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    with torch.inference_mode():
        return base.logits(random_observations(POLICY_SPEC, 2))


def load(folder: Path, compute: ComputeConfig | None = None) -> OpenVLAPolicy:
    policy = openvla_policy()
    config = policy.config.model_copy(update={"adapter": str(folder / "adapter"), "norm_key": "made_up"})
    around = Surroundings(config=config, spec=policy.spec, suites=["made_up"])
    return load_openvla(folder / "base", compute=compute, surroundings=around)


def existing(**values: int) -> ComputeConfig:
    return ComputeConfig(trained=TrainLora(targets="existing", **values))  # type: ignore[arg-type]


def test_merged_it_gives_what_peft_gives(expected: torch.Tensor, tmp_path: Path) -> None:
    policy = load(tmp_path)
    assert not any(".lora_" in name for name in policy.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(policy.logits(random_observations(POLICY_SPEC, 2)), expected, rtol=1e-4, atol=1e-4)


def test_it_is_trained_on_at_its_own_layers_and_read_back(expected: torch.Tensor, tmp_path: Path) -> None:
    policy = load(tmp_path, existing(rank=3, alpha=6))
    trained = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert trained
    assert all(any(target in name for target in TARGETS) for name in trained)
    policy.save(tmp_path / "saved")
    observations = random_observations(POLICY_SPEC, 2)
    with torch.inference_mode():
        torch.testing.assert_close(policy.logits(observations), expected, rtol=1e-5, atol=1e-5)
        again = load_openvla(tmp_path / "saved", compute=existing(rank=3, alpha=6))
        torch.testing.assert_close(again.logits(observations), policy.logits(observations), rtol=0, atol=0)
        merged = load_openvla(tmp_path / "saved")
        merged.save(tmp_path / "saved")  # over the folder with the adapter, which must not stay behind
        once = load_openvla(tmp_path / "saved")
        torch.testing.assert_close(once.logits(observations), merged.logits(observations), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"set compute\.trained\.targets=existing"):
        load(tmp_path, ComputeConfig(trained=TrainLora(rank=3, alpha=6)))


def test_existing_adapters_must_exist() -> None:
    with pytest.raises(ValueError, match="there are no adapters yet"):
        openvla_policy(compute=existing())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"use_dora": True}, "has DoRA; only plain"),
        ({"bias": "all"}, "has bias=all"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save="),
    ],
)
def test_more_than_plain_lora_is_refused(expected: torch.Tensor, tmp_path: Path, change: dict, match: str) -> None:
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=match):
        load(tmp_path)


def test_damaged_files_are_named(expected: torch.Tensor, tmp_path: Path) -> None:
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(ValueError, match=rf"the adapter in {tmp_path / 'adapter'} is damaged"):
        load(tmp_path)
    weights.write_bytes(content)
    tensors = {name: tensor for name, tensor in load_file(weights).items() if "layers.0" not in name or "q_" in name}
    save_file(tensors | {"base_model.model.somewhere.lora_A.weight": torch.zeros(3, 3)}, weights)
    with pytest.raises(ValueError, match=r"has layers that the model lacks, e\.g\. somewhere"):
        load(tmp_path)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load(tmp_path)
