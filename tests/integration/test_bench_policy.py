"""The benchmark's plain implementation gives the same numbers, so the comparison is fair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import POLICY_SPEC, openvla_policy, random_observations
from typer.testing import CliRunner

import scripts.memory_plan
from scripts.bench_policy import bench
from scripts.cli import app
from scripts.measuring import measured
from scripts.run_config import read_config
from vla_rl.policies.openvla.config import NanoSizes
from vla_rl.policies.openvla.reference import PlainOpenVLA
from vla_rl.policy import Sampling

SMALL = ("rl.algo.groups_per_iteration=1", "rl.algo.group_size=2", "rl.algo.num_minibatches=1")


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


def test_other_sizes_are_made_where_they_are_used() -> None:
    config = read_config(["policy.type=openvla", "compute.precision=bfloat16", *SMALL])
    figures = bench(config, 3, NanoSizes(image_size=28, vision_depth=2, language_layers=1).architecture())
    assert figures["head"][1]["positions"].endswith(f"of {1 + 4 + 36 + 57}")
    assert figures["precision"] == "bfloat16"
    assert torch.get_default_dtype() == torch.float32
    assert all(row["samples_per_s"] > 0 for row in figures["update"])


def test_what_does_not_fit_is_a_gap_in_the_table() -> None:
    def too_large() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    fits, misfit = measured([lambda: bytearray(50_000_000), too_large], torch.device("cpu"), repeats=2)
    assert (misfit.seconds, misfit.megabytes) == (None, None)
    assert fits.seconds is not None
    assert fits.megabytes is not None
    assert 40 < fits.megabytes < 200  # of this piece of work, not of the process


def test_the_command_reports_rollout_update_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["configs/policy/openvla_oft_nano.yaml", "policy.sizes.image_size=28", "policy.sizes.language_layers=1"]
    words += ["policy.sizes.vision_depth=2", "suite.tasks=[pick_up_red_cube]", "--decisions", "3"]
    words += SMALL
    result = CliRunner().invoke(app, ["bench-policy", *words, "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.exception
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["head"][0]["ratio"] > 500  # 350 positions x 32064 against 56 x 256
    assert [row["batch"] for row in figures["rollout"]] == ["1", "8", "32", "8 equal"]
    ours, plain, longer = figures["update"][:3]
    for other in (plain, longer):
        assert abs(ours["grad_norm"] / other["grad_norm"] - 1) < 1e-3
        assert other["ours_over_it"] > 0
    assert all(row["peak_mb"] >= 0 for row in figures["update"])
    monkeypatch.setattr(scripts.memory_plan, "host_memory_bytes", lambda: int(16e9))
    seven_billion = CliRunner().invoke(app, ["bench-policy", *words, "--published"])
    assert "GB of host memory and this machine has 16.0 GB" in str(seven_billion.exception)
    wrong = CliRunner().invoke(app, ["bench-policy", "configs/quickstart.yaml"])
    assert "bench-policy is for OpenVLA policies" in str(wrong.exception)
