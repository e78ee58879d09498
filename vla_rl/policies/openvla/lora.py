"""Low-rank adapters through the PEFT library: which layers get them, and their files in the published layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from vla_rl.policies.compute import TrainLora
from vla_rl.policies.openvla.side_modules import is_published_weight

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_FOLDER = "lora_adapter"
_ADAPTER = "default"
_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def add_lora(model: nn.Module, config: TrainLora) -> None:
    """Give layers of the model adapters, and freeze everything else but the side modules.

    What is trained is float32, whatever the model is: bfloat16 would lose small updates. Adapters start at zero effect.
    """
    _inject(model, _peft_config(config, _targets(model, config)))


def check_lora(model: nn.Module, config: TrainLora) -> None:
    """Refuse settings that differ from the adapters that the model already has.

    Raises:
        ValueError: Rank, alpha or targets differ.
    """
    adapter = _adapter_config(model)
    if (adapter.r, adapter.lora_alpha) != (config.rank, config.alpha):
        raise ValueError(
            f"the checkpoint has LoRA adapters of rank {adapter.r}, alpha {adapter.lora_alpha}, but compute.trained "
            f"says rank {config.rank}, alpha {config.alpha}; use the checkpoint's values"
        )
    if config.targets == "existing":
        return
    there, wanted = _adapted(model), set(_targets(model, config))
    if there != wanted:
        raise ValueError(
            f"the checkpoint has LoRA adapters at {len(there)} layers, but compute.trained.targets={config.targets} "
            f"means {len(wanted)} ({len(there & wanted)} of them the same); set compute.trained.targets=existing"
        )


def has_lora(model: nn.Module) -> bool:
    """Whether the model has adapters."""
    return bool(_adapted(model))


def _adapted(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


def merge_lora(model: nn.Module) -> None:
    """Fold the adapters into the weights and put plain layers back in place."""
    for name, module in list(model.named_modules()):
        if hasattr(module, "lora_A"):
            module.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())


def base_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights under their published names, without the adapters."""
    return {
        name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name
    }


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapters so that PEFT and OpenVLA-OFT's scripts can read them."""
    folder.mkdir(parents=True, exist_ok=True)
    _adapter_config(model).save_pretrained(str(folder))
    tensors = {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name
    }
    save_file(tensors, folder / _WEIGHTS)


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Settings and tensors of an adapter, whose names say which layers have one.

    Raises:
        ValueError: The folder has no adapter, a damaged one, or one that changes more than linear maps.
    """
    from peft import LoraConfig

    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise ValueError(f"{folder} holds no LoRA adapter; expected {_CONFIG} and {_WEIGHTS}")
    try:
        config = LoraConfig.from_pretrained(str(folder))
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(folder / _WEIGHTS).items()}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ValueError(f"the adapter in {folder} is damaged: {error}; copy it again") from error
    more = {
        "DoRA": config.use_dora,
        f"bias={config.bias}": config.bias != "none",
        f"modules_to_save={config.modules_to_save}": bool(config.modules_to_save),
        "adapters of embeddings": any("lora_embedding" in name for name in tensors),
    }
    if found := [name for name, is_there in more.items() if is_there]:
        raise ValueError(f"the adapter in {folder} has {', '.join(found)}; only plain LoRA adapters are supported")
    # How the config's patterns are read depends on PEFT.
    config.target_modules = sorted({name.split(".lora_")[0] for name in tensors})
    return config, tensors


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Add the adapters of a folder to the model, ready to be trained on or merged.

    Raises:
        ValueError: See `read_adapter`; or the adapter does not fit the model.
    """
    config, tensors = read_adapter(folder)
    known = {name for name, _ in model.named_modules()}
    strangers = [name for name in config.target_modules or () if name not in known]
    if strangers:
        raise ValueError(f"the adapter in {folder} has layers that the model lacks, e.g. {strangers[0]}")
    _inject(model, config)
    _fill(model, tensors, folder)


def _fill(model: nn.Module, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    expected = {name.replace(f".{_ADAPTER}.", "."): tensor for name, tensor in model.named_parameters()}
    missing = sorted(name for name in expected if ".lora_" in name and name not in tensors)
    if missing:
        raise ValueError(f"the adapter in {folder} is incomplete: it lacks {', '.join(missing)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in expected or expected[name].shape != tensor.shape:
                wanted = list(expected[name].shape) if name in expected else "no such tensor"
                raise ValueError(f"adapter tensor {name} in {folder} is {list(tensor.shape)}; expected {wanted}")
            expected[name].copy_(tensor)


def _inject(model: nn.Module, config: LoraConfig) -> None:
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for name, parameter in model.named_parameters():
        is_trained = ".lora_" in name or not is_published_weight(name)
        parameter.requires_grad_(is_trained)
        if is_trained:
            parameter.data = parameter.data.float()


def _targets(model: nn.Module, config: TrainLora) -> list[str]:
    layers = [
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and is_published_weight(name) and ".lora_" not in name
    ]
    match config.targets:
        case "existing":
            raise ValueError(
                "compute.trained.targets is 'existing', but there are no adapters yet; choose published, language or "
                "attention"
            )
        case "published":
            return layers
        case "language":
            return [name for name in layers if name.startswith(("language_model.model.", "projector."))]
        case "attention":
            return [name for name in layers if name.startswith("language_model.model.") and ".self_attn." in name]


def _peft_config(config: TrainLora, targets: list[str]) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        init_lora_weights="gaussian",
    )


def _adapter_config(model: nn.Module) -> LoraConfig:
    configs: dict[str, Any] = model.peft_config  # type: ignore[assignment]
    config: LoraConfig = configs[_ADAPTER]
    return config
