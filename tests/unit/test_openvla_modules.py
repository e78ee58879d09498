"""What the golden data of OpenVLA do not reach: adapters, grouped queries, recomputation, caches, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import jaxtyping
import pytest
import torch
from torch import nn

from vla_rl.policies.openvla.architecture import Architecture, LanguageSizes, TowerSizes
from vla_rl.policies.openvla.heads import (
    DiffusionActionHead,
    NoisyActionProjector,
    ProprioProjector,
    denoise,
    timestep_embedding,
)
from vla_rl.policies.openvla.language import LlamaDecoder, linear_rows
from vla_rl.policies.openvla.model import OpenVLAModel, PromptBatch
from vla_rl.policies.openvla.vision import Film, FusedVisionBackbone, split_film_weights

LANGUAGE = LanguageSizes(
    hidden_dim=16,
    mlp_dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=384,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
SIZES = Architecture(
    image_size=28,
    dinov2=TowerSizes(dim=8, depth=3, num_heads=2, mlp_dim=16),
    siglip=TowerSizes(dim=8, depth=2, num_heads=2, mlp_dim=16),
    language=LANGUAGE,
    pad_token_id=320,
    num_padding_rows=64,
    num_bins=256,
)
NUM_SLOTS = 6


@pytest.fixture
def model() -> OpenVLAModel:
    torch.manual_seed(0)
    model = OpenVLAModel(SIZES)
    nn.init.normal_(model.language_model.model.embed_tokens.weight)
    return model


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(2, 2, 6, 28, 28, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prompt() -> PromptBatch:
    ids = torch.tensor([[320, 320, 5, 9], [7, 8, 6, 9]])
    return PromptBatch(ids=ids, mask=ids != 320)


def test_rows_of_a_linear_map():
    layer, inputs = nn.Linear(4, 10), torch.randn(2, 3, 4)
    torch.testing.assert_close(linear_rows(layer, inputs, slice(2, 5)), layer(inputs)[..., 2:5])


def test_rows_of_an_adapted_linear_map():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 4)
    network = nn.ModuleDict({"head": nn.Linear(4, 10, bias=False)})
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["head"], init_lora_weights=False)
    layer = peft.inject_adapter_in_model(config, network)["head"]
    wanted = layer(inputs)[..., 2:5]
    assert (wanted - layer.base_layer(inputs)[..., 2:5]).abs().max() > 0.1
    torch.testing.assert_close(linear_rows(layer, inputs, slice(2, 5)), wanted)

    # The adapter learns through these rows what it learns through the whole map.
    parameters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    expected = torch.autograd.grad(wanted.square().sum(), parameters)
    got = torch.autograd.grad(linear_rows(layer, inputs, slice(2, 5)).square().sum(), parameters)
    torch.testing.assert_close(got, expected)

    layer.merge()
    torch.testing.assert_close(linear_rows(layer, inputs, slice(2, 5)), wanted)
    layer.unmerge()
    layer.enable_adapters(False)
    torch.testing.assert_close(linear_rows(layer, inputs, slice(2, 5)), layer.base_layer(inputs)[..., 2:5])


def test_action_logits_are_rows_of_the_full_ones(model, pixels, prompt):
    with torch.inference_mode():
        hidden = model.action_hidden(model.vision_features(pixels), prompt, num_slots=NUM_SLOTS)
        assert SIZES.first_action_id == 64
        torch.testing.assert_close(model.action_logits(hidden), model.full_logits(hidden)[..., 64:320])
        assert hidden.shape == (2, NUM_SLOTS, 16)


def test_shared_key_heads():
    torch.manual_seed(0)
    grouped = LlamaDecoder(replace(LANGUAGE, num_kv_heads=2))
    full = LlamaDecoder(LANGUAGE)
    weights = grouped.state_dict()
    for key in [key for key in weights if "k_proj" in key or "v_proj" in key]:
        weights[key] = weights[key].reshape(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(weights)
    inputs, positions = torch.randn(2, 5, 16), torch.arange(5)[None]
    torch.testing.assert_close(
        grouped(inputs, positions, None, rows=slice(2, 4)), full(inputs, positions, None, rows=slice(None))[:, 2:4]
    )


def _gradients(model: OpenVLAModel, pixels: torch.Tensor, prompt: PromptBatch) -> dict[str, torch.Tensor]:
    hidden = model.action_hidden(model.vision_features(pixels), prompt, num_slots=NUM_SLOTS)
    loss = model.action_logits(hidden).logsumexp(-1).sum()
    model.zero_grad()
    loss.backward()
    return {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}


def test_activation_checkpointing_changes_nothing_but_the_work(model, pixels, prompt):
    calls = []
    for block in (model.vision_backbone.featurizer.blocks[0], model.language_model.model.layers[-1]):
        block.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    kept = _gradients(model, pixels, prompt)
    assert len(calls) == 2
    model.activation_checkpointing = True
    recomputed = _gradients(model, pixels, prompt)
    assert len(calls) == 2 + 4
    assert kept.keys() == recomputed.keys()
    for key, gradient in kept.items():
        assert torch.equal(gradient, recomputed[key]), key


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from the compiler's own looking
def test_compiled_blocks_agree(model, pixels, prompt, monkeypatch):
    plain = _gradients(model, pixels, prompt)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the compiler would read through the checks
    compiled_modules = []
    compile_module = nn.Module.compile
    # This backend traces each block as a whole and leaves out the code generator.
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self: compiled_modules.append(self) or compile_module(self, backend="eager", fullgraph=True),
    )
    model.compile_blocks()
    backbone = model.vision_backbone
    assert {*backbone.featurizer.blocks[:-1], *backbone.fused_featurizer.blocks[:-1]} <= set(compiled_modules)
    assert set(model.language_model.model.layers) <= set(compiled_modules)
    compiled = _gradients(model, pixels, prompt)
    assert plain.keys() == compiled.keys()
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


def test_unused_parts_of_the_towers_are_not_computed(model, pixels):
    backbone = model.vision_backbone
    unused = (backbone.featurizer.blocks[-1], backbone.fused_featurizer.blocks[-1], backbone.featurizer.norm)
    for module in unused:
        module.register_forward_hook(lambda *call: pytest.fail("an unused module was computed"))
    assert model.vision_features(pixels).shape == (2, 2 * 4, 16)


def test_generation_of_a_padded_batch_equals_single_rows(model, pixels, prompt):
    with torch.inference_mode():
        features = model.vision_features(pixels)
    ids, logits = model.generate_greedy(features, prompt, 4)
    assert torch.equal(ids, logits.argmax(-1))
    for row in range(2):
        real = prompt.mask[row]
        alone = PromptBatch(ids=prompt.ids[row][real][None], mask=prompt.mask[row][real][None])
        single_ids, single_logits = model.generate_greedy(features[row : row + 1], alone, 4)
        assert torch.equal(single_ids[0], ids[row])
        torch.testing.assert_close(single_logits[0], logits[row], atol=1e-5, rtol=0)


def test_denoising_by_hand():
    # One step visits level 0 only: what is left there is the clean estimate, clipped.
    noise = torch.tensor([[[0.5, 2.0]]])
    bar = [math.cos((step / 50 + 0.008) / 1.008 * math.pi / 2) ** 2 for step in (0, 1)]
    alpha = bar[1] / bar[0]
    clean = denoise(lambda actions, timestep: torch.full_like(actions, 0.1), noise, 1)
    expected = (0.5 - math.sqrt(1 - alpha) * 0.1) / math.sqrt(alpha)
    torch.testing.assert_close(clean, torch.tensor([[[expected, 1.0]]]))


@pytest.mark.parametrize("num_steps", [0, 51])
def test_denoising_refuses_other_numbers_of_steps(num_steps):
    with pytest.raises(ValueError, match=f"num_steps is {num_steps}"):
        denoise(lambda actions, timestep: actions, torch.zeros(1, 1, 1), num_steps)


def test_timestep_embedding_by_hand():
    got = timestep_embedding(2, 4, torch.device("cpu"))
    expected = [math.sin(2.0), math.sin(2e-4), math.cos(2.0), math.cos(2e-4)]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_diffusion_of_a_batch_without_proprioception(model, pixels, prompt):
    model.noisy_action_projector = NoisyActionProjector(16)
    model.action_head = DiffusionActionHead(16, 3)
    noise = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        features = model.vision_features(pixels)
        both = model.denoise_actions(features, prompt, noise, num_steps=2)
        second = PromptBatch(ids=prompt.ids[1:], mask=prompt.mask[1:])
        alone = model.denoise_actions(features[1:], second, noise[1:], num_steps=2)
    assert both.abs().max() <= 1.0
    torch.testing.assert_close(both[1:], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("rank", "factor"), [(4, 1.0), (32, 0.5)])
def test_film_file_with_low_rank_updates(rank, factor):
    stem = "vision_backbone.featurizer.blocks.0.block.attn.proj"
    convolution = "vision_backbone.featurizer.patch_embed.proj"
    tensors = {
        f"{stem}.base_layer.weight": torch.ones(2, 3),
        f"{stem}.base_layer.bias": torch.zeros(2),
        f"{stem}.lora_A.default.weight": torch.full((rank, 3), 1.0 / rank),
        f"{stem}.lora_B.default.weight": torch.tensor([[2.0] * rank, [4.0] * rank]),
        f"{convolution}.base_layer.weight": torch.zeros(2, 3, 1, 1),
        f"{convolution}.lora_A.default.weight": torch.full((rank, 3, 1, 1), 1.0 / rank),
        f"{convolution}.lora_B.default.weight": torch.ones(2, rank, 1, 1),
        "vision_backbone.featurizer.blocks.0.scale.weight": torch.zeros(2, 5),
    }
    backbone, film = split_film_weights(tensors)
    assert film.keys() == {"featurizer.0.scale.weight"}
    assert backbone.keys() == {
        "featurizer.blocks.0.attn.proj.weight",
        "featurizer.blocks.0.attn.proj.bias",
        "featurizer.patch_embed.proj.weight",
    }
    # (B @ A) has rows of 2 and of 4, and of 1 for the convolution.
    expected = torch.tensor([[1.0 + 2.0 * factor] * 3, [1.0 + 4.0 * factor] * 3])
    torch.testing.assert_close(backbone["featurizer.blocks.0.attn.proj.weight"], expected)
    torch.testing.assert_close(backbone["featurizer.patch_embed.proj.weight"], torch.full((2, 3, 1, 1), factor))

    del tensors[f"{stem}.lora_B.default.weight"]
    with pytest.raises(ValueError, match=r"lora_B\.default\.weight'; it is incomplete"):
        split_film_weights(tensors)


def test_film_names_cover_the_backbone():
    film = Film(SIZES).state_dict()
    assert "fused_featurizer.1.shift.bias" in film
    assert len(film) == 4 * (SIZES.dinov2.depth + SIZES.siglip.depth)
    assert set(split_film_weights(FusedVisionBackbone(SIZES).state_dict())[0]) == set(
        FusedVisionBackbone(SIZES).state_dict()
    )


def test_film_reads_each_row_of_the_prompt(model, pixels, prompt):
    plain = model.vision_features(pixels)
    model.film = Film(SIZES)
    for name, weights in model.film.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(weights)
    both = model.vision_features(pixels, prompt)
    assert (both - plain).abs().max() > 0.01
    alone = PromptBatch(ids=prompt.ids[:1, 2:], mask=prompt.mask[:1, 2:])
    torch.testing.assert_close(model.vision_features(pixels[:1], alone), both[:1], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="pass the prompt"):
        model.vision_features(pixels)


def test_inputs_without_their_module_are_refused(model, pixels, prompt):
    features = model.vision_features(pixels)
    with pytest.raises(ValueError, match="proprioception, but has no projector"):
        model.action_hidden(features, prompt, num_slots=NUM_SLOTS, proprio=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="noisy actions, but has no projector"):
        model.action_hidden(features, prompt, num_slots=NUM_SLOTS, noisy_actions=torch.zeros(2, 2, 3), timestep=1)
    with pytest.raises(ValueError, match="no diffusion head"):
        model.denoise_actions(features, prompt, torch.zeros(2, 2, 3), num_steps=1)
    model.proprio_projector = ProprioProjector(8, 16)
    with pytest.raises(ValueError, match="projector for it, but was given no proprioception"):
        model.action_hidden(features, prompt, num_slots=NUM_SLOTS)
    model.noisy_action_projector, model.proprio_projector = NoisyActionProjector(16), None
    with pytest.raises(ValueError, match="6 noisy actions cannot fill 5 slots"):
        model.action_hidden(features, prompt, num_slots=5, noisy_actions=torch.zeros(2, 2, 3), timestep=1)
