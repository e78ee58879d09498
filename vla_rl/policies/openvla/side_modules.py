"""Modules that OpenVLA-OFT keeps in files of their own: attached when a checkpoint has them, written back by `save`."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from vla_rl.policies.openvla.checkpoint import load_weights
from vla_rl.policies.openvla.heads import DiffusionActionHead, L1ActionHead, NoisyActionProjector, ProprioProjector
from vla_rl.policies.openvla.model import OpenVLAModel
from vla_rl.policies.openvla.vision import Film, split_film_weights

_NAMES = ("action_head", "proprio_projector", "noisy_action_projector")
_FILM_FILE = "vision_backbone"
PUBLISHED_RANK = 32
"""Of the adapters that OpenVLA-OFT trains and, for FiLM, evaluates with (its default `lora_rank`)."""
_OUTSIDE = (*(f"{name}." for name in _NAMES), "film.")


def is_published_weight(name: str) -> bool:
    """Whether a weight of an `OpenVLAModel` belongs into the shards, not into a side file."""
    return not name.startswith(_OUTSIDE)


def attach_side_module(
    model: OpenVLAModel, name: str, tensors: Mapping[str, torch.Tensor], device: str, dtype: torch.dtype
) -> None:
    """Give the model a side module with these weights.

    Args:
        model: Has its main weights already.
        name: As in the file's name.
        tensors: The file's content.
        device: Of the module.
        dtype: Of the module.

    Raises:
        ValueError: The weights do not fit; lists which.
    """
    hidden_dim = model.architecture.language.hidden_dim
    if name == _FILM_FILE:
        backbone, film = split_film_weights(tensors)
        with torch.device("meta"):
            model.film = Film(model.architecture)
        _fill(model.film, film, name, device, dtype)
        _fill(model.vision_backbone, backbone, name, device, dtype)
        return
    module: nn.Module
    with torch.device("meta"):
        match name:
            case "proprio_projector":
                module = ProprioProjector(_num_inputs(tensors, name), hidden_dim)
            case "noisy_action_projector":
                module = NoisyActionProjector(hidden_dim)
            case "action_head" if any(key.startswith("noise_predictor.") for key in tensors):
                module = DiffusionActionHead(hidden_dim, _num_outputs(tensors, name))
            case "action_head":
                module = L1ActionHead(hidden_dim, _num_outputs(tensors, name))
            case _:
                raise ValueError(f"there is no side module {name!r}; known: {', '.join((*_NAMES, _FILM_FILE))}")
    _fill(module, tensors, name, device, dtype)
    setattr(model, name, module)


def add_new_side_modules(model: OpenVLAModel, *, proprio_dim: int | None, l1_action_dim: int | None) -> None:
    """Give the model a projector of proprioception or a regression head with random weights, unless it has them."""
    like = model.language_model.model.norm.weight
    hidden_dim = model.architecture.language.hidden_dim
    if proprio_dim is not None and model.proprio_projector is None:
        model.proprio_projector = ProprioProjector(proprio_dim, hidden_dim).to(like)
    if l1_action_dim is not None and model.action_head is None:
        model.action_head = L1ActionHead(hidden_dim, l1_action_dim).to(like)


def side_state_dicts(model: OpenVLAModel) -> dict[str, dict[str, torch.Tensor]]:
    """What belongs into each side file, by the name of the module."""
    files = {name: module.state_dict() for name in _NAMES if isinstance(module := getattr(model, name), nn.Module)}
    if model.film is not None:
        files[_FILM_FILE] = _film_file(model.vision_backbone, model.film)
    return files


def _film_file(backbone: nn.Module, film: nn.Module) -> dict[str, torch.Tensor]:
    """Backbone and FiLM layers as OpenVLA-OFT's evaluation reads them.

    It wraps the backbone with adapters of its rank before it loads this file, so each linear map and convolution needs
    one here, too; these are zero, because ours are merged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in backbone.state_dict().items():
        if ".lora_" in name:
            continue  # still being trained: these go to the folder of adapters
        parent, _, kind = name.replace(".base_layer.", ".").rpartition(".")
        inside = re.sub(r"\.blocks\.(\d+)\.", r".blocks.\1.block.", f"{parent}.")
        if not isinstance(backbone.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Conv2d):
            tensors[f"{inside}{kind}"] = tensor
            continue
        tensors[f"{inside}base_layer.{kind}"] = tensor
        if kind == "weight":
            tensors[f"{inside}lora_A.default.weight"] = tensor.new_zeros(PUBLISHED_RANK, *tensor.shape[1:])
            ones = [1] * (tensor.ndim - 2)
            tensors[f"{inside}lora_B.default.weight"] = tensor.new_zeros(len(tensor), PUBLISHED_RANK, *ones)
    for name, tensor in film.state_dict().items():
        tensors[re.sub(r"^(\w+)\.(\d+)\.", r"\1.blocks.\2.", name)] = tensor
    return {f"vision_backbone.{name}": tensor for name, tensor in tensors.items()}


def _fill(module: nn.Module, tensors: Mapping[str, torch.Tensor], name: str, device: str, dtype: torch.dtype) -> None:
    moved = ((key, tensor.to(device)) for key, tensor in tensors.items())
    load_weights(module, moved, dtype, f"the file of {name}")


def _num_inputs(tensors: Mapping[str, torch.Tensor], name: str) -> int:
    return int(_tensor(tensors, "fc1.weight", name).shape[1])


def _num_outputs(tensors: Mapping[str, torch.Tensor], name: str) -> int:
    return int(_tensor(tensors, "fc2.weight", name).shape[0])


def _tensor(tensors: Mapping[str, torch.Tensor], ending: str, name: str) -> torch.Tensor:
    found = [tensor for key, tensor in tensors.items() if key == ending or key.endswith(f".{ending}")]
    if len(found) != 1:
        raise ValueError(f"the file of {name} should have one tensor {ending!r}; it has {sorted(tensors)}")
    return found[0]
