"""Our OpenVLA against the published code: every case of the golden data.

Float32 agrees to 1e-5 of each tensor's scale. Bfloat16 is compared with looser bounds, because the kernels of another
torch version round differently; with equal inputs the first layer agrees to the last bit.
"""

from __future__ import annotations

import json

import openvla_golden as golden
import pytest
import torch
from openvla_golden import NUM_SLOTS, SPACE_ID, case, compare, difference, meta
from torch.nn import functional

from vla_rl.policies.action_tokens import token_entropy, token_logprobs
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.heads import (
    DiffusionActionHead,
    L1ActionHead,
    NoisyActionProjector,
    ProprioProjector,
    cumulative_alphas,
    denoise,
)
from vla_rl.policies.openvla.language import rotary_tables
from vla_rl.policies.openvla.model import OpenVLAModel, PromptBatch

FLOAT32 = 1e-5


@pytest.mark.parametrize(
    "name", ["oft_discrete_1img_fp32", "oft_l1_2img_proprio_fp32", "oft_film_2img_l1_proprio_fp32"]
)
def test_parallel_decoding_in_float32(name):
    golden.check_parallel_decoding(name, golden.build_for(name))


def test_we_are_not_causal_but_could_be():
    name = "oft_discrete_1img_causal_fp32"
    model = golden.build_for(name)
    golden.check_parallel_decoding(name, model, causal=True)
    bidirectional = golden.run(name, model)
    assert (bidirectional["action_logits_256"] - case(name)["action_logits_256"]).abs().max() > 5.0
    with pytest.raises(AssertionError, match="action_logits_256"):
        compare(bidirectional, name, 0.1)


@pytest.mark.parametrize("name", ["oft_discrete_1img_bf16", "oft_l1_2img_proprio_bf16"])
def test_parallel_decoding_in_bfloat16(name):
    ours, reference = golden.run(name, golden.build_for(name, torch.bfloat16)), case(name)
    floats = {key: value for key, value in ours.items() if value.is_floating_point() and key != "actions"}
    early = ("patch_features", "projected", "inputs_embeds", "layer0")
    compare({key: floats[key] for key in early}, name, 0.008)
    compare(floats, name, 0.03)
    # Where the reference's best score leads by more than four units in its last place, the choice is the same.
    best = reference["action_logits_256"].topk(2).values
    decided = best[..., 0] - best[..., 1] > 0.25
    assert decided.sum() > 0.6 * NUM_SLOTS
    assert torch.equal(ours["action_logit_argmax"][decided], reference["action_logit_argmax"][decided])
    if "discrete" in name:
        assert torch.equal(ours["actions"].flatten()[decided[0]], reference["actions"].flatten()[decided[0]])
    else:
        assert difference(ours["actions"], reference["actions"]) < 0.1


@pytest.mark.parametrize("name", ["oft_discrete_1img_bf16", "oft_l1_2img_proprio_bf16"])
def test_language_model_in_bfloat16_from_equal_inputs(name):
    decoder, reference = golden.build(torch.bfloat16).language_model.model, case(name)
    embeddings = reference["inputs_embeds"]
    positions = torch.arange(embeddings.shape[1])[None]
    sizes = decoder.sizes
    rotation = rotary_tables(positions, sizes.hidden_dim // sizes.num_heads, sizes.rope_theta)
    with torch.inference_mode():
        layer0 = decoder.layers[0](embeddings, rotation, None, slice(None), None)
        final = decoder(embeddings, positions, None, rows=slice(None))
    compare({"layer0": layer0}, name, 2**-8)
    compare({"final_norm": final}, name, 0.02)


def _step_tensors(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    first = golden.FIRST_ACTION_ID
    return {
        "step_logits_256": logits[..., first : first + 256],
        "step_max": logits.amax(-1),
        "step_logsumexp": logits.logsumexp(-1),
    }


def test_original_openvla_in_float32():
    name = "base_openvla_greedy_fp32"
    model = golden.build()
    features = model.vision_features(golden.pixels(1))
    ids, logits = model.generate_greedy(features, golden.prompt(), golden.ACTION_DIM)
    compare(_step_tensors(logits) | {"step_argmax": ids}, name, FLOAT32)
    compare({"actions": golden.base_actions(ids[0])}, name, 1e-15)


def test_original_openvla_in_bfloat16():
    # Given the reference's own tokens: from the first close decision on, another rounding leads elsewhere.
    name = "base_openvla_greedy_bf16"
    model, reference = golden.build(torch.bfloat16), case(name)
    ids = torch.cat([golden.prompt().ids, reference["step_argmax"][:, :-1]], dim=1)
    prompt = PromptBatch(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool))
    with torch.inference_mode():
        sequence = model.embed_sequence(model.vision_features(golden.pixels(1, torch.bfloat16)), prompt)
        decoder = model.language_model.model
        hidden = decoder(
            sequence.embeddings, sequence.positions, None, rows=slice(-golden.ACTION_DIM, None), causal=True
        )
        logits = model.full_logits(hidden)
    compare(_step_tensors(logits), name, 0.03)
    best = reference["step_logits_256"].topk(2).values
    decided = best[..., 0] - best[..., 1] > 0.25
    assert decided.sum() >= 3
    assert torch.equal(logits.argmax(-1)[decided], reference["step_argmax"][decided])
    compare({"actions": golden.base_actions(reference["step_argmax"][0])}, name, 1e-15)


def test_diffusion_end_to_end():
    # A rounding error of 1e-7 in the noise grows to 1e-3 in ten steps of this random model (and to order one in 50).
    name = "oft_diffusion10_2img_proprio_fp32"
    model, reference = golden.build_for(name), case(name)
    with torch.inference_mode():
        features = model.vision_features(golden.pixels(2))
        ours = model.denoise_actions(
            features, golden.prompt(), reference["noise"], num_steps=10, proprio=golden.proprio()
        )
    compare({"patch_features": features}, name, FLOAT32)
    compare({"actions": golden.oft_actions(ours)[0]}, name, 0.02)


@pytest.mark.parametrize("num_steps", [10, 50])
def test_diffusion_schedule(num_steps):
    reference = case(f"oft_diffusion{num_steps}_2img_proprio_fp32")
    visited = []
    denoise(lambda actions, timestep: visited.append(timestep) or actions, reference["noise"], num_steps)
    assert visited == reference["timesteps"].tolist()
    torch.testing.assert_close(cumulative_alphas(), reference["alphas_cumprod"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_steps", [10, 50])
def test_last_step_of_diffusion(num_steps):
    name = f"oft_diffusion{num_steps}_2img_proprio_fp32"
    model, reference = golden.build_for(name), case(name)
    head = model.action_head
    assert isinstance(head, DiffusionActionHead)
    noisy = _noisy_actions(model, reference["inputs_embeds"][:, -1 - NUM_SLOTS : -1])
    timestep = int(reference["timesteps"][-1])
    with torch.inference_mode():
        hidden = model.action_hidden(
            model.vision_features(golden.pixels(2)),
            golden.prompt(),
            num_slots=NUM_SLOTS,
            proprio=golden.proprio(),
            noisy_actions=noisy,
            timestep=timestep,
        )
        noise, alpha = head(hidden), reference["alphas_cumprod"][timestep]
        clean = ((noisy - (1 - alpha).sqrt() * noise) / alpha.sqrt()).clamp(-1, 1)
        logits = model.action_logits(hidden)
    compare({"action_hidden": hidden, "action_logits_256": logits}, name, FLOAT32)
    compare({"actions": golden.oft_actions(clean)[0]}, name, FLOAT32)


def _noisy_actions(model: OpenVLAModel, slots: torch.Tensor) -> torch.Tensor:
    """The actions whose embeddings fill the slots, (1, 8, 7): the best of a grid, then Gauss-Newton, in float64."""
    projector = model.noisy_action_projector
    assert projector is not None
    projector, targets = projector.double(), slots[0].double()
    with torch.no_grad():
        grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)[:, None]
        values = grid[torch.cdist(targets, projector(grid)).argmin(dim=1)]
        for _ in range(6):
            slope = (projector(values + 1e-5) - projector(values - 1e-5)) / 2e-5
            error = targets - projector(values)
            values = values + (slope * error).sum(1, keepdim=True) / slope.square().sum(1, keepdim=True)
    projector.float()
    return values.float().reshape(1, -1, golden.ACTION_DIM)


def _training_prompts(ids: torch.Tensor, mask: torch.Tensor) -> tuple[PromptBatch, torch.Tensor]:
    """Published training rows (prompt, 56 action tokens, </s>, padding) as prompts and the 57 supervised tokens."""
    rows = [row[real] for row, real in zip(ids, mask, strict=True)]
    prompts = [row[1 : -NUM_SLOTS - 1] for row in rows]
    length = max(map(len, prompts))
    pad = golden.architecture().pad_token_id
    padded = torch.stack([functional.pad(row, (length - len(row), 0), value=pad) for row in prompts])
    return PromptBatch(ids=padded, mask=padded != pad), torch.stack([row[-NUM_SLOTS - 1 :] for row in rows])


def test_training_step():
    name = "oft_train_discrete_fp32"
    model, reference, entry = golden.build(), case(name), meta()["cases"][name]
    prompt, targets = _training_prompts(reference["input_ids"], reference["attention_mask"])
    assert (prompt.ids[:, -1] == SPACE_ID).all()
    assert torch.equal(targets, reference["labels"][reference["labels"] != -100].reshape(2, -1))

    features = model.vision_features(reference["pixel_values"].unsqueeze(1))
    hidden = model.action_hidden(features, prompt, num_slots=NUM_SLOTS, num_readout=NUM_SLOTS + 1)
    logits = model.full_logits(hidden)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()

    ours = {
        "loss": loss.detach(),
        "action_hidden": hidden[:, :-1].detach(),
        "token_accuracy": (logits.argmax(-1) == targets).float().mean(),
    }
    compare(ours, name, FLOAT32)
    # The published masks of first and later actions pick our 56 slots from the shifted labels, in our order.
    labels = reference["labels"][:, 1:]
    assert torch.equal(labels[reference["current_action_mask"]].reshape(2, -1), targets[:, :7])
    assert torch.equal(labels[reference["next_actions_mask"]].reshape(2, -1), targets[:, 7:-1])

    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert sorted(key for key, gradient in gradients.items() if gradient is None) == sorted(entry["no_grad_params"])
    norms = {key: float(gradient.norm()) for key, gradient in gradients.items() if gradient is not None}
    assert norms == pytest.approx(entry["grad_norms"], rel=1e-5)
    given = [key for key in reference if key.startswith("grad.")]
    assert len(given) == 5
    compare({key: gradients[key.removeprefix("grad.")] for key in given}, name, FLOAT32)


def test_loss_of_the_regression_head():
    name = "oft_train_discrete_fp32"
    reference, head = case(name), golden.build_for("oft_l1_2img_proprio_fp32").action_head
    assert isinstance(head, L1ActionHead)
    with torch.inference_mode():
        predicted = head(reference["action_hidden"])
        loss = (predicted - reference["gt_actions"]).abs().mean()
    compare({"pred_actions": predicted, "l1_loss": loss}, name, FLOAT32)


def _rollout_prompts(ids: torch.Tensor, mask: torch.Tensor) -> PromptBatch:
    """Left-padded rows with BOS as prompts without; the place of a padded row's BOS becomes padding."""
    real = mask.bool() & (mask.cumsum(dim=1) > 1)
    return PromptBatch(ids=ids.where(real, golden.architecture().pad_token_id)[:, 1:], mask=real[:, 1:])


@pytest.mark.parametrize(
    ("name", "logit_tolerance", "logprob_tolerance"),
    [("simplevla_fp32", FLOAT32, 1e-5), ("simplevla_bf16", 0.03, 0.25)],
)
def test_simplevla_batch_of_two_prompts(name, logit_tolerance, logprob_tolerance):
    reference, entry = case(name), meta()["cases"][name]
    dtype, temperature = getattr(torch, entry["dtype"].removeprefix("torch.")), entry["temperature"]
    model = golden.build(dtype)
    prompt = _rollout_prompts(reference["input_ids_left"], reference["attention_mask"])
    assert prompt.mask.sum(dim=1).tolist() == [20, 25]
    with torch.inference_mode():
        features = model.vision_features(reference["pixel_values"].unsqueeze(1))
        logits = model.action_logits(model.action_hidden(features, prompt, num_slots=NUM_SLOTS))
    compare({"rollout_logits_256": logits, "train_logits_256": logits}, name, logit_tolerance)

    greedy = logits.argmax(-1) + golden.FIRST_ACTION_ID
    best = reference["rollout_logits_256"].topk(2).values
    decided = best[..., 0] - best[..., 1] > (0.25 if dtype == torch.bfloat16 else 0.0)
    assert decided.float().mean() > 0.7
    assert torch.equal(greedy[decided], reference["greedy_ids"][decided])
    actions = golden.decode_ids(greedy).flatten(1)
    assert torch.equal(actions[decided], reference["greedy_actions"].flatten(1)[decided])

    sampled = reference["sample_ids_seed77"]
    assert torch.equal(golden.decode_ids(sampled), reference["sample_actions_seed77"])
    bins = sampled - golden.FIRST_ACTION_ID
    for ours, theirs in (
        (token_logprobs(logits, bins, temperature), reference["train_log_probs"]),
        (token_entropy(logits, temperature), reference["train_entropy"]),
    ):
        torch.testing.assert_close(ours, theirs, atol=logprob_tolerance, rtol=0)


def test_rows_do_not_depend_on_their_batch():
    reference = case("simplevla_fp32")
    model = golden.build()
    prompt = _rollout_prompts(reference["input_ids_left"], reference["attention_mask"])
    with torch.inference_mode():
        features = model.vision_features(reference["pixel_values"].unsqueeze(1))
        together = model.action_hidden(features, prompt, num_slots=NUM_SLOTS)
        for row in range(2):
            real = prompt.mask[row]
            alone = PromptBatch(ids=prompt.ids[row][real][None], mask=prompt.mask[row][real][None])
            single = model.action_hidden(features[row : row + 1], alone, num_slots=NUM_SLOTS)
            assert difference(single[0], together[row]) < FLOAT32


def test_names_and_shapes_of_the_published_7b_model():
    manifest = json.loads((golden.FOLDER.parent / "openvla7b_state_dict_manifest.json").read_text())
    config = json.loads((golden.CHECKPOINT / "config.json").read_text())
    published = {"image_sizes": [224, 224], "text_config": {"model_type": "llama", "vocab_size": 32064}}
    with torch.device("meta"):
        model = OpenVLAModel(Architecture.from_config(config | published))
        modules = {
            "model": model,
            "action_head (L1)": L1ActionHead(4096, 7),
            "action_head (diffusion)": DiffusionActionHead(4096, 7),
            "proprio_projector": ProprioProjector(8, 4096),
            "noisy_action_projector": NoisyActionProjector(4096),
        }
    assert modules.keys() == manifest.keys()
    for name, module in modules.items():
        assert {key: list(tensor.shape) for key, tensor in module.state_dict().items()} == manifest[name], name
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_541_237_184
