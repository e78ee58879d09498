"""Each fact of the published model matters: with any one of them wrong, the comparison with the golden data fails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial, partialmethod

import openvla_golden as golden
import pytest
import torch
from torch.nn import functional

from vla_rl.policies import action_tokens
from vla_rl.policies.normalization import RangeStats
from vla_rl.policies.openvla import language
from vla_rl.policies.openvla.model import OpenVLAModel, PromptBatch
from vla_rl.policies.openvla.vision import DinoV2, LayerScale

DISCRETE = "oft_discrete_1img_fp32"


def _fails(name: str, tensor: str, *, model: OpenVLAModel | None = None, causal: bool = False) -> None:
    with pytest.raises(AssertionError, match=tensor):
        golden.check_parallel_decoding(name, model or golden.build_for(name), causal=causal)


def test_tanh_gelu(monkeypatch):
    monkeypatch.setattr(functional, "gelu", partial(functional.gelu, approximate="tanh"))
    _fails(DISCRETE, "patch_features")


def test_last_block_used():
    _fails(DISCRETE, "patch_features", model=golden.with_last_block_used())


def test_no_layer_scale(monkeypatch):
    monkeypatch.setattr(LayerScale, "forward", lambda self, tokens: tokens)
    _fails(DISCRETE, "patch_features")


def test_no_registers(monkeypatch):
    # Attention cannot tell the order of tokens without positions, so this one fact is free.
    monkeypatch.setattr(DinoV2, "prefix_tokens", lambda self: [self.reg_token, self.cls_token])
    golden.check_parallel_decoding(DISCRETE, golden.build())
    monkeypatch.setattr(DinoV2, "prefix_tokens", lambda self: [self.cls_token])
    _fails(DISCRETE, "patch_features")


def test_causal_attention():
    _fails(DISCRETE, "layer0", causal=True)


def test_epsilon_of_the_rms_norm():
    sizes = golden.architecture()
    wrong = replace(sizes, language=replace(sizes.language, rms_norm_eps=1e-5))
    _fails(DISCRETE, "layer0", model=golden.build(sizes=wrong))


def test_shifted_readout(monkeypatch):
    embed_sequence = OpenVLAModel.embed_sequence

    def shifted(self, *inputs, **keywords):
        sequence = embed_sequence(self, *inputs, **keywords)
        return replace(sequence, readout_start=sequence.readout_start + 1)

    monkeypatch.setattr(OpenVLAModel, "embed_sequence", shifted)
    _fails(DISCRETE, "action_logits_256")


def test_rotation_rounded_to_bfloat16(monkeypatch):
    rotary_tables = language.rotary_tables

    def rounded(*inputs):
        cos, sin = rotary_tables(*inputs)
        return cos.bfloat16().float(), sin.bfloat16().float()

    monkeypatch.setattr(language, "rotary_tables", rounded)
    _fails(DISCRETE, "layer0")


def test_rotation_of_neighbours(monkeypatch):
    def interleaved(heads, rotation):
        cos, sin = (table[:, None, :, : heads.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in rotation)
        turned = torch.stack([-heads[..., 1::2], heads[..., ::2]], dim=-1).flatten(-2)
        return heads * cos + turned * sin

    monkeypatch.setattr(language, "rotate", interleaved)
    _fails(DISCRETE, "layer0")


def test_film_without_the_end_of_the_prompt(monkeypatch):
    def shortened(self, prompt: PromptBatch):
        ids = functional.pad(prompt.ids, (1, 0), value=1)
        return self.language_model.model.embed_tokens(ids).mean(dim=1)

    monkeypatch.setattr(OpenVLAModel, "_mean_embedding", shortened)
    _fails("oft_film_2img_l1_proprio_fp32", "patch_features")


def test_bins_off_by_one(monkeypatch):
    centres = torch.from_numpy(action_tokens._CENTRE_OF_BIN).roll(1).numpy()
    monkeypatch.setattr(action_tokens, "_CENTRE_OF_BIN", centres)
    _fails(DISCRETE, "actions")


def test_range_without_its_epsilon(monkeypatch):
    monkeypatch.setattr(RangeStats, "denormalize", partialmethod(RangeStats.denormalize, epsilon=0.0))
    _fails(DISCRETE, "actions")
