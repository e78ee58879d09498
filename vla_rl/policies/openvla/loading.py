"""Makes OpenVLA policies: from published checkpoints, from our own, and with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.policies.compute import ComputeConfig, TrainEverything, TrainLora
from vla_rl.policies.normalization import NormStats, RangeStats
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.checkpoint import CheckpointFiles, load_weights, resolve_checkpoint_folder
from vla_rl.policies.openvla.config import OpenVLAConfig, Surroundings
from vla_rl.policies.openvla.lora import (
    ADAPTER_FOLDER,
    add_lora,
    check_lora,
    has_lora,
    load_adapter,
    merge_lora,
    read_adapter,
)
from vla_rl.policies.openvla.model import OpenVLAModel
from vla_rl.policies.openvla.other_heads import AutoregressiveOpenVLA, ContinuousOpenVLA
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.openvla.preprocessor import check_preprocessor
from vla_rl.policies.openvla.prompt import PromptTokenizer
from vla_rl.policies.openvla.side_modules import add_new_side_modules, attach_side_module
from vla_rl.types import EnvSpec

_SUFFIX = "_no_noops"


def load_openvla(
    folder: Path, device: str = "cpu", compute: ComputeConfig | None = None, surroundings: Surroundings | None = None
) -> OpenVLAPolicy:
    """The policy of a folder in the published format.

    Args:
        folder: With `vla_rl.json` (ours), or without (any other).
        device: Where the weights go, shard by shard.
        compute: Precision, memory and what is trained; None: float32, everything.
        surroundings: Needed where there is no `vla_rl.json`; where there is, that file says everything.

    Raises:
        ValueError: A file is missing or damaged, a tensor does not fit, or nothing says what the policy is.
    """
    files = CheckpointFiles.find(folder)
    compute = compute or ComputeConfig()
    ours = files.ours()
    if ours is not None:
        config = OpenVLAConfig.model_validate_json(json.dumps(ours["policy"]))
        spec = EnvSpec.from_dict(ours["env_spec"])
        stats = NormStats.load(folder)
    elif surroundings is None:
        raise ValueError(
            f"{folder} is a published OpenVLA checkpoint, whose files do not say its chunk length, cameras and suite; "
            "give a configuration with policy.type=openvla and the suite it was trained for"
        )
    else:
        config, spec = surroundings.config, surroundings.spec
        stats = published_norm_stats(files, surroundings.suites, config.norm_key)
    tokenizer = check_small_files(files, config)
    model = load_model(files, device, compute)
    if ours is not None and (folder / ADAPTER_FOLDER).is_dir():
        load_adapter(model, folder / ADAPTER_FOLDER)
    elif ours is None and config.adapter is not None:
        load_adapter(model, Path(config.adapter))
    return assemble(model, config, spec, stats, tokenizer, compute, dict(files.config))


def check_small_files(files: CheckpointFiles, config: OpenVLAConfig, *, is_cloned: bool = False) -> PromptTokenizer:
    """What can be known before the weights are read.

    Args:
        files: Of the checkpoint.
        config: Settings of the policy.
        is_cloned: Whether cloning adds the parts that the settings ask for.

    Returns:
        The tokenizer.

    Raises:
        ValueError: Tokenizer, adapter, or a side module that the settings ask for is missing or damaged, or the image
            preprocessing is not the published one.
    """
    architecture = Architecture.from_config(files.config)
    check_preprocessor(files.folder, architecture.image_size)
    _check_parts(files)
    if config.adapter is not None and files.ours() is None:
        read_adapter(Path(config.adapter))
    wanted = {
        "action_head": (config.action_head == "l1", "policy.action_head=l1"),
        "proprio_projector": (config.use_proprio, "policy.use_proprio=true"),
    }
    for name, (is_wanted, setting) in wanted.items():
        if is_wanted and not is_cloned and name not in files.side_files:
            raise ValueError(
                f"{setting} needs the file {name}--*_checkpoint.pt beside the weights, which is not there; leave the "
                "setting out, or clone with it first (vla-rl sft)"
            )
    return PromptTokenizer.load(files.folder, architecture.pad_token_id)


def load_model(files: CheckpointFiles, device: str, compute: ComputeConfig) -> OpenVLAModel:
    """The model with its side modules, on the device."""
    dtype = torch.bfloat16 if compute.precision == "bfloat16" else torch.float32
    with torch.device("meta"):
        model = OpenVLAModel(Architecture.from_config(files.config))
    load_weights(model, files.tensors(device), dtype, str(files.folder))
    for name in files.side_files:
        attach_side_module(model, name, files.side_module(name), device, dtype)
    return model


def assemble(
    model: OpenVLAModel,
    config: OpenVLAConfig,
    spec: EnvSpec,
    norm_stats: NormStats,
    tokenizer: PromptTokenizer,
    compute: ComputeConfig,
    published_config: dict[str, Any],
) -> OpenVLAPolicy:
    """A policy of these parts: chooses what is trained and how it is computed, and the class that goes with the head.

    Raises:
        ValueError: The parts do not fit each other or the settings.
    """
    _check_dims(model, spec, norm_stats)
    match compute.trained:
        case TrainLora() if has_lora(model):
            check_lora(model, compute.trained)
        case TrainLora():
            add_lora(model, compute.trained)
        case TrainEverything():
            merge_lora(model)
            model.requires_grad_(requires_grad=True)
            model.vision_backbone.requires_grad_(requires_grad=not compute.trained.freeze_vision)
    freeze_unused(model)
    model.activation_checkpointing = compute.activation_checkpointing
    if compute.compile:
        model.compile_blocks()
    if config.decoding == "autoregressive":
        if config.action_horizon != 1 or model.action_head is not None:
            raise ValueError(
                "policy.decoding is 'autoregressive', which predicts one action of tokens: set policy.action_horizon=1 "
                "and use a checkpoint without action_head file"
            )
        policy_class: type[OpenVLAPolicy] = AutoregressiveOpenVLA
    else:
        policy_class = OpenVLAPolicy if model.action_head is None else ContinuousOpenVLA
    return policy_class(model, config, spec, norm_stats, tokenizer, compute, published_config)


def _check_parts(files: CheckpointFiles) -> None:
    """Refuse a diffusion head without its projector of noisy actions, and the reverse."""
    has_projector = "noisy_action_projector" in files.side_files
    if "action_head" in files.side_files:
        is_diffusion = any(name.startswith("noise_predictor.") for name in files.side_module("action_head"))
    else:
        is_diffusion = False
    if has_projector != is_diffusion:
        raise ValueError(
            f"{files.folder} has {'a' if is_diffusion else 'no'} diffusion head, but "
            f"{'a' if has_projector else 'no'} projector of noisy actions; the files action_head--* and "
            "noisy_action_projector--* of one training run belong together"
        )


def _check_dims(model: OpenVLAModel, spec: EnvSpec, norm_stats: NormStats) -> None:
    """Compare the sizes of heads, projectors and statistics with the suite's.

    Raises:
        ValueError: Lists all that differ.
    """
    action_dims = {"the statistics of actions": len(norm_stats.action.q01)}
    if model.action_head is not None:
        action_dims["the action head"] = model.action_head.action_dim
    proprio_dims = {}
    if model.proprio_projector is not None:
        proprio_dims["the projector of proprioception"] = model.proprio_projector.fc1.in_features
        proprio_dims["the statistics of proprioception"] = len(norm_stats.proprio.q01)
    differences = [
        f"{name}: {dim} entries, the suite {expected} ({', '.join(names)})"
        for dims, expected, names in (
            (action_dims, spec.action_dim, spec.action_names),
            (proprio_dims, spec.proprio_dim, spec.proprio_names),
        )
        for name, dim in dims.items()
        if dim != expected
    ]
    if differences:
        raise ValueError(f"the checkpoint does not fit the suite: {'; '.join(differences)}")


def freeze_unused(model: OpenVLAModel) -> None:
    """Exclude from training what the forward pass never reads: an optimiser would only keep books of zeros for it."""
    backbone = model.vision_backbone
    unused: list[torch.nn.Module] = [backbone.fused_featurizer.attn_pool]
    unused += [
        part for tower in (backbone.featurizer, backbone.fused_featurizer) for part in (tower.blocks[-1], tower.norm)
    ]
    for module in unused:
        module.requires_grad_(requires_grad=False)


def published_norm_stats(files: CheckpointFiles, suites: Sequence[str], key: str | None) -> NormStats:
    """The statistics that scale a checkpoint's actions: of the key, else of the suite (OpenVLA-OFT's rule).

    Raises:
        ValueError: None or several fit; lists the candidates.
    """
    table = files.norm_stats()
    different = sorted(set(suites))
    wanted = [key] if key else [name for suite in different for name in (suite, suite + _SUFFIX)]
    found = [name for name in wanted if name in table]
    if not found or (key is None and len(different) != 1):
        raise ValueError(
            f"the statistics in {files.folder} are of {', '.join(sorted(table)) or 'no dataset'}; looked for "
            f"{' or '.join(map(repr, wanted))}. Set policy.norm_key to the one that the policy was trained on"
        )
    entry = table[found[0]]
    return NormStats(
        key=found[0],
        action=RangeStats.from_dict(entry["action"]),
        proprio=RangeStats.from_dict(entry["proprio"]) if "proprio" in entry else _NOTHING,
        num_transitions=int(entry.get("num_transitions", 0)),
        num_trajectories=int(entry.get("num_trajectories", 0)),
    )


_EMPTY = np.zeros(0)
_NOTHING = RangeStats(q01=_EMPTY, q99=_EMPTY, min=_EMPTY, max=_EMPTY, mean=_EMPTY, std=_EMPTY, mask=_EMPTY.astype(bool))
"""Statistics of datasets that recorded no proprioception."""


def new_openvla(
    surroundings: Surroundings,
    instructions: Sequence[str],
    norm_stats: NormStats,
    compute: ComputeConfig,
    device: str = "cpu",
    model: OpenVLAModel | None = None,
) -> OpenVLAPolicy:
    """A policy for cloning: from the checkpoint that the settings name, or with random weights of torch's generator.

    Args:
        surroundings: Settings and interface.
        instructions: What the demonstrations say; the words of a new tokenizer.
        norm_stats: Of the demonstrations, in the published convention.
        compute: Precision, memory and what is trained.
        device: Where the weights go.
        model: With random weights, on the device; None: one is made with the settings' sizes.

    Raises:
        ValueError: An adapter without a checkpoint; or see `load_openvla`.
    """
    config = surroundings.config
    if config.checkpoint is None:
        if config.adapter is not None:
            raise ValueError("policy.adapter is set, but policy.checkpoint is not: there is nothing to add it to")
        model = model or _random_model(config.sizes.architecture(), device, compute)
        tokenizer = PromptTokenizer.from_instructions(instructions)
        published = model.architecture.to_config()
    else:
        files = CheckpointFiles.find(resolve_checkpoint_folder(config.checkpoint))
        tokenizer = check_small_files(files, config, is_cloned=True)
        model = load_model(files, device, compute)
        if config.adapter is not None and files.ours() is None:
            load_adapter(model, Path(config.adapter))
        published = dict(files.config)
    add_new_side_modules(
        model,
        proprio_dim=surroundings.spec.proprio_dim if config.use_proprio else None,
        l1_action_dim=surroundings.spec.action_dim if config.action_head == "l1" else None,
    )
    return assemble(model, config, surroundings.spec, norm_stats, tokenizer, compute, published)


def _random_model(architecture: Architecture, device: str, compute: ComputeConfig) -> OpenVLAModel:
    """On the host in float32 and then moved: the same numbers for every device and precision."""
    model = OpenVLAModel(architecture)
    return model.to(device, torch.bfloat16 if compute.precision == "bfloat16" else torch.float32)
