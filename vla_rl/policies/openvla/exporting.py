"""Writes policies as checkpoints in the published format, which the original code and this package read.

config.json, preprocessor_config.json, generation_config.json, dataset_statistics.json, tokenizer files, README.md
model-0000i-of-0000n.safetensors and their index (or one model.safetensors)
action_head--latest_checkpoint.pt, proprio_projector--latest_checkpoint.pt, ...     side modules, where there are any
lora_adapter/       adapters that are still being trained; the weights beside them are without these
vla_rl.json         what the published files do not say
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from vla_rl.policies.openvla.checkpoint import OUR_FILE
from vla_rl.policies.openvla.lora import ADAPTER_FOLDER, base_state_dict, has_lora, save_adapter
from vla_rl.policies.openvla.preprocessor import preprocessor_config
from vla_rl.policies.openvla.side_modules import is_published_weight, side_state_dicts
from vla_rl.run import flat_versions

if TYPE_CHECKING:
    from vla_rl.policies.openvla.policy import OpenVLAPolicy

_SHARD_SIZE = "5GB"


def save_policy(policy: OpenVLAPolicy, folder: Path) -> None:
    """Write everything that evaluation, serving, a robot or further training needs; adapters stay apart."""
    folder.mkdir(parents=True, exist_ok=True)
    # Removed, not overwritten: weights of a policy that was read from this very folder are mapped to these files.
    for old in (*folder.glob("model*.safetensors*"), *folder.glob("*_checkpoint.pt")):
        old.unlink()
    shutil.rmtree(folder / ADAPTER_FOLDER, ignore_errors=True)
    weights = base_state_dict(policy.model)
    _write_weights({name: tensor for name, tensor in weights.items() if is_published_weight(name)}, folder)
    for name, tensors in side_state_dicts(policy.model).items():
        torch.save({key: tensor.cpu() for key, tensor in tensors.items()}, folder / f"{name}--latest_checkpoint.pt")
    if has_lora(policy.model):
        save_adapter(policy.model, folder / ADAPTER_FOLDER)
    stats = policy.norm_stats
    stats.save(folder)
    table = json.loads((folder / "dataset_statistics.json").read_text())
    published = {name: value for name, value in policy.published_config.items() if name != "auto_map"}
    dtype = str(policy.model.dtype).removeprefix("torch.")
    # Without auto_map, which would name code that is not here.
    _write_json(folder / "config.json", published | {"norm_stats": table, "torch_dtype": dtype})
    _write_json(folder / "preprocessor_config.json", preprocessor_config(policy.model.architecture.image_size))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": policy.model.architecture.pad_token_id},
    )
    config = policy.config.model_copy(update={"adapter": None})  # these weights contain it: once is enough
    _write_json(
        folder / OUR_FILE,
        {"format": 1, "policy": config.model_dump(mode="json"), "env_spec": asdict(policy.spec)},
    )
    policy.tokenizer.save(folder)
    policy.save_contract(folder)
    (folder / "README.md").write_text(_model_card(policy), encoding="utf-8")


def _write_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD_SIZE
    )
    for name, keys in split.filename_to_tensors.items():
        save_file({key: tensors[key].contiguous() for key in keys}, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        _write_json(
            folder / "model.safetensors.index.json",
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename},
        )


def _model_card(policy: OpenVLAPolicy) -> str:
    config = policy.config
    rows = {
        "Decoding": config.decoding,
        "Action head": policy.head_name,
        "Predicted control steps": policy.action_horizon,
        "Cameras": ", ".join(policy.spec.cameras),
        "Actions": ", ".join(policy.spec.action_names),
        "Control rate": f"{policy.spec.control_rate_hz:g} Hz",
        "Proprioception": "yes" if policy.model.proprio_projector is not None else "no",
        "Normalisation statistics": policy.norm_stats.key,
        "Centre crop": "yes" if config.centre_crop else "no",
        "Parameters": f"{sum(weight.numel() for weight in policy.model.parameters()):,}",
        "Written with": ", ".join(f"{name} {version}" for name, version in flat_versions().items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: vla-rl\npipeline_tag: robotics\ntags: [openvla, vision-language-action]\n---\n\n"
        "# A vision-language-action policy in OpenVLA's format\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "Evaluate it with `vla-rl evaluate <this folder>`. `vla_rl.json` holds what OpenVLA's own files do not say.\n"
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
