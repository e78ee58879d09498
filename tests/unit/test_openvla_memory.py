"""Memory estimates: parameters by formula, activations against what autograd keeps, and what is refused."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import openvla_golden
import pytest
import torch

from vla_rl.policies.compute import ComputeConfig, TrainEverything, TrainLora
from vla_rl.policies.openvla import activations
from vla_rl.policies.openvla.activations import SampleSize
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.config import NanoSizes
from vla_rl.policies.openvla.lora import add_lora
from vla_rl.policies.openvla.memory import GB, Workload, check_compute, estimate
from vla_rl.policies.openvla.model import OpenVLAModel, PromptBatch
from vla_rl.policies.openvla.parameters import (
    PUBLISHED,
    lora_parameters,
    model_parameters,
    side_parameters,
    trained_parameters,
    vision_parameters,
)

MANIFEST = Path(__file__).parents[1] / "golden" / "openvla7b_state_dict_manifest.json"
NANO = NanoSizes(language_dim=384, vision_dim=192).architecture()
SIZE = SampleSize(num_images=1, prompt_tokens=35, num_slots=56)
OFFLOADED = ComputeConfig(precision="bfloat16", activation_checkpointing=True)
RECIPE = Workload(
    stage="train",
    architecture=PUBLISHED,
    compute=OFFLOADED,
    offload=True,
    micro_batch_size=32,
    acting_batch_size=32,
    size=SIZE,
    kept_decisions=1000,
    image_bytes=256 * 256 * 3,
)
"""Full fine-tuning of the 7B model on one 80 GB GPU."""


def test_parameters_of_the_published_model_are_those_of_its_files() -> None:
    manifest = json.loads(MANIFEST.read_text())
    count = {name: sum(math.prod(shape) for shape in part.values()) for name, part in manifest.items()}
    towers = sum(math.prod(s) for name, s in manifest["model"].items() if name.startswith("vision_backbone."))
    assert model_parameters(PUBLISHED) == count["model"] == 7_541_237_184
    assert vision_parameters(PUBLISHED) == towers
    assert side_parameters(PUBLISHED, proprio_dim=8) == count["proprio_projector"]
    assert side_parameters(PUBLISHED, l1_action_dim=7) == count["action_head (L1)"]
    assert trained_parameters(PUBLISHED, TrainEverything(freeze_vision=True)) == count["model"] - towers


@pytest.mark.parametrize("architecture", [NANO, openvla_golden.architecture()], ids=["nano", "golden"])
def test_parameters_are_those_of_the_model(architecture: Architecture) -> None:
    with torch.device("meta"):
        model = OpenVLAModel(architecture)
    assert model_parameters(architecture) == sum(weight.numel() for weight in model.parameters())
    assert vision_parameters(architecture) == sum(weight.numel() for weight in model.vision_backbone.parameters())


def test_adapters_by_hand() -> None:
    # Width 192, 4 layers, MLP 512, vision 96 + 96: q, k, v, o have 384 inputs and outputs, gate, up, down 704; the
    # projector 192 -> 768 -> 192 -> 192 has 960, 960 and 384.
    small = NanoSizes().architecture()
    attention, mlp, projector = 4 * 4 * 384, 4 * 3 * 704, 960 + 960 + 384
    assert lora_parameters(small, TrainLora(rank=2, targets="attention")) == 2 * attention
    assert lora_parameters(small, TrainLora(rank=2, targets="language")) == 2 * (attention + mlp + projector)
    # Each tower: patches 588 -> 96, four blocks of 96 -> 288, 96 -> 96, 96 -> 384 -> 96; SigLIP's pool; the head.
    block, pool = 384 + 192 + 480 + 480, 192 + 288 + 192 + 480 + 480
    vision = 2 * (684 + 4 * block) + pool
    head = 192 + small.language.vocab_size
    everything = attention + mlp + projector + vision + head
    assert lora_parameters(small, TrainLora(rank=2, targets="published")) == 2 * everything


@pytest.mark.parametrize("targets", ["published", "language", "attention"])
def test_adapters_are_those_of_the_model(targets: str) -> None:
    lora = TrainLora.model_validate({"rank": 4, "targets": targets})
    model = OpenVLAModel(openvla_golden.architecture())
    add_lora(model, lora)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert lora_parameters(model.architecture, lora) == trained


def kept_by_autograd(compute: ComputeConfig) -> int:
    """Bytes that the graph of a forward pass holds, besides weights and copies of weights."""
    batch = 2
    model = OpenVLAModel(NANO).to(torch.bfloat16 if compute.precision == "bfloat16" else torch.float32)
    if isinstance(compute.trained, TrainLora):
        add_lora(model, compute.trained)
    else:
        model.vision_backbone.requires_grad_(requires_grad=not compute.trained.freeze_vision)
    model.activation_checkpointing = compute.activation_checkpointing
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {frozenset(weight.shape) for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and frozenset(tensor.shape) not in shapes:
            # On a CPU, RMSNorm keeps a float32 copy of a bfloat16 input; on a GPU, the input.
            is_copy = compute.precision == "bfloat16" and tensor.dtype == torch.float32 and tensor.shape[2:] == (384,)
            kept[storage.data_ptr()] = storage.nbytes() // (2 if is_copy else 1)
            alive.append(tensor)  # or its address may be used again
        return tensor

    alive: list[torch.Tensor] = []
    prompt = PromptBatch(ids=torch.full((batch, 35), 5), mask=torch.ones(batch, 35, dtype=torch.bool))
    pixels = torch.rand(batch, 1, 6, NANO.image_size, NANO.image_size).to(model.dtype)
    mixed = torch.autocast("cpu", torch.bfloat16) if compute.precision == "mixed" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        model.action_hidden(model.vision_features(pixels), prompt, num_slots=56)
    return sum(kept.values()) // batch


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize(
    "trained",
    [
        TrainEverything(),
        TrainEverything(freeze_vision=True),
        TrainLora(rank=8, targets="published"),
        TrainLora(rank=8, targets="language"),
        TrainLora(rank=8, targets="attention"),
    ],
    ids=["full", "frozen_vision", "lora_published", "lora_language", "lora_attention"],
)
def test_activations_are_what_autograd_keeps(precision: str, trained: TrainEverything | TrainLora) -> None:
    compute = ComputeConfig.model_validate({"precision": precision, "trained": trained})
    assert activations.update_bytes(NANO, compute, SIZE) == pytest.approx(kept_by_autograd(compute), rel=0.08)


def test_activation_checkpointing_keeps_the_inputs_of_layers() -> None:
    compute = ComputeConfig(activation_checkpointing=True)
    without = ComputeConfig()
    one_layer = 157 * (10 * 384 + 4 * 1024) * 4  # BOS, 64 patches, 35, 56, </s>; see the module's docstring
    inputs = 4 * (4 * 157 * 384 + 3 * (69 + 64) * 192)
    projector = 64 * 4 * (9 * 384 + 2 * 384)
    assert activations.update_bytes(NANO, compute, SIZE) == inputs + one_layer + projector
    assert activations.update_bytes(NANO, compute, SIZE) < activations.update_bytes(NANO, without, SIZE) / 2


def test_head_costs_a_thousandth_of_the_vocabulary() -> None:
    assert SIZE.length(PUBLISHED) == 1 + 256 + 35 + 56 + 1
    published = 4 * SIZE.length(PUBLISHED) * 32064 * 4  # float32 logits at every position
    assert activations.bin_logit_bytes(PUBLISHED, SIZE) * 500 < published


def test_full_fine_tuning_with_offload_by_hand() -> None:
    needs = estimate(RECIPE)
    resident = {item.name: item.size for item in needs.resident}
    assert resident["weights"] == resident["gradients"] == 15_082_474_368
    assert resident["optimiser"] == 0
    host = {item.name: item.size for item in needs.host}
    assert host["float32 weights"] + host["moments"] == 12 * 7_541_237_184
    assert host["images"] == 1000 * (196_608 + 3 * 224 * 224)  # as drawn, and as the towers see them
    assert needs.checkpoint == 14 * 7_541_237_184
    assert needs.total == pytest.approx(sum(resident.values()) + 1.1 * needs.peak.size)
    assert needs.peak.name == "update"
    assert needs.smallest_preset == 48


def test_published_training_of_one_gpu_does_not_fit() -> None:
    workload = replace(RECIPE, compute=ComputeConfig(precision="mixed"), offload=False)
    needs = estimate(workload)
    assert needs.smallest_preset is None
    assert {item.name: item.size for item in needs.resident}["optimiser"] == 8 * 7_541_237_184
    with pytest.raises(ValueError, match="largest items are update") as caught:
        needs.require_fits(80)
    message = str(caught.value)
    for change in (
        "compute.activation_checkpointing=true",
        "compute.trained.type=lora",
        "rl.optim.offload=true",
        "rl.algo.micro_batch_size=8",
        "compute.precision=bfloat16 rl.optim.offload=true",
    ):
        (total,) = re.findall(rf"\n  {re.escape(change)}: ([\d.]+) GB", message)
        assert float(total) < needs.total / GB


def test_advice_is_what_helps() -> None:
    workload = replace(RECIPE, micro_batch_size=1, draws_on_gpu=True, drawing_bytes=int(48e9))
    with pytest.raises(ValueError, match="drawing contexts") as caught:
        estimate(workload).require_fits(48)
    message = str(caught.value)
    assert "half of rollout.num_threads" in message
    assert "offload" not in message
    assert "micro_batch" not in message


def test_adapters_are_small_but_their_activations_are_not() -> None:
    lora = replace(RECIPE, offload=False, compute=ComputeConfig(precision="bfloat16", trained=TrainLora()))
    needs = estimate(lora)
    resident = {item.name: item.size for item in needs.resident}
    assert resident["gradients"] == 4 * lora_parameters(PUBLISHED, TrainLora())  # float32
    assert resident["optimiser"] == 2 * resident["gradients"]
    full = estimate(replace(RECIPE, compute=ComputeConfig(precision="bfloat16")))
    assert needs.peak.size > full.peak.size


def test_cloning_has_the_vocabulary_and_other_names() -> None:
    workload = replace(RECIPE, stage="sft", kept_decisions=0)
    extra = estimate(workload).peak.size - estimate(RECIPE).peak.size
    assert extra == 32 * (18 * 57 * 32064 - 16 * 56 * 256)
    with pytest.raises(ValueError, match=r"sft\.micro_batch_size=8"):
        estimate(workload).require_fits(24)


def test_vision_cache_takes_what_it_may_or_needs() -> None:
    frozen = TrainEverything(freeze_vision=True)
    for allowed, expected in ((0.5, 0.5e9), (50.0, 1000 * 256 * 2176 * 2)):
        compute = ComputeConfig(precision="bfloat16", vision_cache_gb=allowed, trained=frozen)
        items = {item.name: item.size for item in estimate(replace(RECIPE, compute=compute)).host}
        assert items["vision cache"] == expected


def test_table_marks_the_largest_of_what_comes_and_goes() -> None:
    lines = estimate(RECIPE).table().splitlines()
    (marked,) = [line for line in lines if line.startswith("  * ")]
    assert "update" in marked
    assert sum(line.startswith("  - ") for line in lines) == 2
    assert "  enough: 24 GB no, 48 GB yes, 80 GB yes, 141 GB yes" in lines


def test_updates_below_the_resolution_of_bfloat16_are_refused() -> None:
    compute = ComputeConfig(precision="bfloat16")
    with pytest.raises(ValueError, match=r"sft\.optim\.offload=true"):
        check_compute(compute, offload=False, section="sft.optim")
    check_compute(compute, offload=True, section="sft.optim")
    check_compute(ComputeConfig(precision="bfloat16", trained=TrainLora()), offload=False, section="rl.optim")
    check_compute(ComputeConfig(precision="mixed"), offload=False, section="rl.optim")


def test_vision_cache_of_trained_towers_is_refused() -> None:
    check_compute(ComputeConfig(vision_cache_gb=1.0, trained=TrainLora()), offload=False, section="rl.optim")
    for trained in (TrainEverything(), TrainLora(targets="published")):
        with pytest.raises(ValueError, match="vision_cache_gb"):
            check_compute(ComputeConfig(vision_cache_gb=1.0, trained=trained), offload=False, section="rl.optim")
