"""The benchmark's plain implementation gives the same numbers, so the comparison is fair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from fakes import POLICY_SPEC, openvla_policy, random_observations
from typer.testing import CliRunner

from scripts.cli import app
from vla_rl.policies.openvla.reference import PlainOpenVLA
from vla_rl.policy import Sampling


def test_transformers_llama_gives_our_logits_and_gradients_for_prompts_of_different_lengths() -> None:
    spec = replace(POLICY_SPEC, cameras=("agentview", "wrist"))
    policy = openvla_policy(spec, use_proprio=True)
    plain = PlainOpenVLA(policy)
    observations = random_observations(spec, 6)
    assert len({len(policy.tokenizer.ids(observation.instruction)) for observation in observations}) > 1
    sample = policy.act(observations, Sampling(), [np.random.default_rng(i) for i in range(6)]).sample
    found = []
    for one in (policy, plain):
        one.zero_grad()
        evaluation = one.evaluate(observations, sample, 1.6)
        evaluation.logprobs.sum().backward()
        gradients = {name: w.grad.clone() for name, w in policy.named_parameters() if w.grad is not None}
        found.append((evaluation.logprobs.detach(), gradients))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-4)
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-3 * scale, msg=name)


def test_the_command_reports_rollout_update_and_head(tmp_path: Path) -> None:
    words = ["configs/policy/openvla_oft_nano.yaml", "policy.sizes.image_size=28", "policy.sizes.language_layers=1"]
    words += ["policy.sizes.vision_depth=2", "suite.tasks=[pick_up_red_cube]", "--episodes", "2", "--decisions", "3"]
    result = CliRunner().invoke(app, ["bench-policy", *words, "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.exception
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["head"][0]["ratio"] > 500  # 350 positions x 32064 against 56 x 256
    assert [row["batch"] for row in figures["rollout"]] == ["1", "8", "32", "8 equal"]
    ours, plain = figures["update"][:2]
    assert abs(ours["grad_norm"] / plain["grad_norm"] - 1) < 1e-3
    wrong = CliRunner().invoke(app, ["bench-policy", "configs/quickstart.yaml"])
    assert "bench-policy is for OpenVLA policies" in str(wrong.exception)
