"""Golden data of the published OpenVLA code on a tiny random checkpoint, and how ours is compared with it.

Weights are read straight from the files here, so that a mistake of the project's loader cannot hide one of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vla_rl.policies.action_tokens import decode_bins
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.heads import DiffusionActionHead, L1ActionHead, NoisyActionProjector, ProprioProjector
from vla_rl.policies.openvla.model import OpenVLAModel, PromptBatch
from vla_rl.policies.openvla.vision import Film, split_film_weights

FOLDER = Path(__file__).parent / "golden" / "openvla_oft_tiny"
CHECKPOINT = FOLDER / "checkpoint"
NUM_SLOTS, ACTION_DIM, PROPRIO_DIM = 56, 7, 8
SPACE_ID = 29871
FIRST_ACTION_ID = 31744

# timm has no id for towers of this size, so the published file does not say them.
TOWERS = [
    {"dim": 24, "depth": 4, "num_heads": 3, "mlp_dim": 96},
    {"dim": 32, "depth": 5, "num_heads": 4, "mlp_dim": 119},
]


@cache
def meta() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / "meta.json").read_text())
    return content


@cache
def architecture() -> Architecture:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    return Architecture.from_config(config | {"vision_towers": TOWERS})


@cache
def case(name: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def weights() -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(CHECKPOINT.glob("model-*.safetensors")):
        tensors |= load_file(shard)
    return tensors


@cache
def norm_stats() -> NormStats:
    return NormStats.load(CHECKPOINT)


def side_weights(path: Path) -> dict[str, torch.Tensor]:
    tensors = torch.load(path, weights_only=True, map_location="cpu")
    return {key.removeprefix("module."): value for key, value in tensors.items()}


def build(
    dtype: torch.dtype = torch.float32, *, sizes: Architecture | None = None, tensors: Mapping[str, Any] | None = None
) -> OpenVLAModel:
    """The tiny model without side modules; each call makes a new one."""
    with torch.device("meta"):
        model = OpenVLAModel(sizes or architecture())
    source = tensors if tensors is not None else weights()
    model.load_state_dict({key: tensor.to(dtype, copy=True) for key, tensor in source.items()}, assign=True)
    return model.eval()


def _attach(model: OpenVLAModel, name: str, module: torch.nn.Module, path: Path) -> None:
    module.load_state_dict(side_weights(path))
    setattr(model, name, module.to(next(model.parameters()).dtype).eval())


def build_for(name: str, dtype: torch.dtype = torch.float32) -> OpenVLAModel:
    """The tiny model with the side modules of a case."""
    model, entry = build(dtype), meta()["cases"][name]
    hidden_dim = architecture().language.hidden_dim
    if entry["proprio"]:
        projector = ProprioProjector(PROPRIO_DIM, hidden_dim)
        _attach(model, "proprio_projector", projector, CHECKPOINT / "proprio_projector--100_checkpoint.pt")
    if entry["action_head"]:
        head = L1ActionHead(hidden_dim, ACTION_DIM)
        _attach(model, "action_head", head, CHECKPOINT / "action_head--100_checkpoint.pt")
    if entry["diffusion_steps"]:
        diffusion = DiffusionActionHead(hidden_dim, ACTION_DIM)
        _attach(model, "action_head", diffusion, FOLDER / "diffusion_action_head--100_checkpoint.pt")
        noisy = NoisyActionProjector(hidden_dim)
        _attach(model, "noisy_action_projector", noisy, FOLDER / "noisy_action_projector--100_checkpoint.pt")
    if entry["film"]:
        backbone, film = split_film_weights(side_weights(FOLDER / "vision_backbone--100_checkpoint.pt"))
        model.vision_backbone.load_state_dict(backbone)
        model.film = Film(architecture())
        model.film.load_state_dict(film)
        model.film.to(dtype)
    return model


def pixels(num_images: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normalised images of one row, (1, N, 6, H, W)."""
    return load_file(FOLDER / "inputs.safetensors")["pixel_values"][None, :num_images].to(dtype)


def proprio() -> torch.Tensor:
    return load_file(FOLDER / "inputs.safetensors")["proprio_normalized"][None].float()


def prompt(ids: list[int] | None = None) -> PromptBatch:
    """The prompt of most cases."""
    row = torch.tensor([[*(ids or meta()["prompt_ids"])[1:], SPACE_ID]])
    return PromptBatch(ids=row, mask=torch.ones_like(row, dtype=torch.bool))


def run(name: str, model: OpenVLAModel, *, causal: bool = False) -> dict[str, torch.Tensor]:
    """Everything that a case with one row and 56 slots holds, from our model; not for diffusion cases."""
    entry = meta()["cases"][name]
    seen: dict[str, torch.Tensor] = {}
    with torch.inference_mode(), _Recorder(model, seen, causal):
        features = model.vision_features(pixels(entry["num_images"], next(model.parameters()).dtype), prompt())
        hidden = model.action_hidden(
            features, prompt(), num_slots=NUM_SLOTS, proprio=proprio() if entry["proprio"] else None
        )
        logits = model.full_logits(hidden)
        results = seen | {
            "patch_features": features,
            "action_hidden": hidden,
            "action_logits_256": model.action_logits(hidden),
            "action_logit_argmax": logits.argmax(-1),
            "action_logit_max": logits.amax(-1),
            "action_logsumexp": logits.logsumexp(-1),
        }
        if isinstance(model.action_head, L1ActionHead):
            return results | {"actions": oft_actions(model.action_head(hidden))[0]}
    return results | {"actions": decode_ids(results["action_logit_argmax"])[0]}


def oft_actions(normalized: torch.Tensor) -> torch.Tensor:
    """Actions in the suite's units, (B, K, A) float64."""
    return torch.from_numpy(norm_stats().action.denormalize(normalized.double().numpy()))


def decode_ids(ids: torch.Tensor) -> torch.Tensor:
    """Actions of the token ids of a chunk, (B, K, A) float64."""
    values = decode_bins((ids - FIRST_ACTION_ID).numpy()).reshape(len(ids), -1, ACTION_DIM)
    return torch.from_numpy(norm_stats().action.denormalize(values))


class _Recorder:
    """Hooks that note what passes the model; the final norm is computed for every position beside the read-out."""

    def __init__(self, model: OpenVLAModel, seen: dict[str, torch.Tensor], causal: bool) -> None:
        self._model, self._seen, self._causal = model, seen, causal

    def __enter__(self) -> None:
        model, seen = self._model, self._seen
        decoder = model.language_model.model

        def note(name: str) -> Any:
            return lambda module, inputs, output: seen.__setitem__(name, output)

        def before_decoder(module: Any, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            seen["inputs_embeds"] = inputs[0]
            keywords = keywords | {"causal": self._causal}
            seen["final_norm"] = decoder.forward(*inputs, **(keywords | {"rows": slice(None)}))
            return inputs, keywords

        self._hooks = [
            model.projector.register_forward_hook(note("projected")),
            decoder.register_forward_pre_hook(before_decoder, with_kwargs=True),
            decoder.layers[0].register_forward_hook(note("layer0")),
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def compare(ours: Mapping[str, torch.Tensor], name: str, tolerance: float) -> None:
    """Fail unless every tensor agrees.

    Args:
        ours: Results, by the names of the case.
        name: The case.
        tolerance: Largest difference of floats, relative to the tensor's largest entry; integers must be equal.

    Raises:
        AssertionError: Names the tensors that differ.
    """
    golden = case(name)
    problems = []
    for key, value in ours.items():
        reference = golden[key]
        if value.shape != reference.shape:
            problems.append(f"{key}: shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
        elif not reference.is_floating_point():
            count = int((value != reference).sum())
            problems += [f"{key}: {count} of {value.numel()} differ"] if count else []
        else:
            error = difference(value, reference)
            problems += [f"{key}: differs by {error:.2g} of its scale"] if not error <= tolerance else []
    assert not problems, f"{name}: " + "; ".join(problems)


def check_parallel_decoding(name: str, model: OpenVLAModel, *, causal: bool = False) -> None:
    """Fail unless a float32 case agrees: floats to 1e-5, the actions of equal tokens to the last bits.

    Raises:
        AssertionError: Names the tensors that differ.
    """
    ours = run(name, model, causal=causal)
    expected = meta()["cases"][name]["tensors"].keys() - {"lm_mask"}
    assert ours.keys() == expected, f"compared {sorted(ours)}, the case has {sorted(expected)}"
    compare(ours, name, 1e-5)
    if model.action_head is None:
        compare({"actions": ours["actions"]}, name, 1e-15)


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference, relative to the largest entry of the reference."""
    scale = reference.double().abs().max().clamp(min=1e-30)
    return float((value.double() - reference.double()).abs().max() / scale)


def base_actions(ids: torch.Tensor) -> torch.Tensor:
    """Actions of original OpenVLA, which has no 1e-8 in its range."""
    normalized = decode_bins((ids - FIRST_ACTION_ID).numpy())
    return torch.from_numpy(norm_stats().action.denormalize(normalized, epsilon=0.0))


def with_last_block_used() -> OpenVLAModel:
    """A mutant: one more block in each tower, so that the last published one is computed."""
    sizes = architecture()
    deeper = replace(
        sizes,
        dinov2=replace(sizes.dinov2, depth=sizes.dinov2.depth + 1),
        siglip=replace(sizes.siglip, depth=sizes.siglip.depth + 1),
    )
    tensors = dict(weights())
    for tower, depth in (("featurizer", sizes.dinov2.depth), ("fused_featurizer", sizes.siglip.depth)):
        prefix = f"vision_backbone.{tower}.blocks."
        for key in [key for key in tensors if key.startswith(f"{prefix}{depth - 1}.")]:
            tensors[key.replace(f"{prefix}{depth - 1}.", f"{prefix}{depth}.")] = tensors[key]
    return build(sizes=deeper, tensors=tensors)
