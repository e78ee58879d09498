"""What every policy promises. A new one joins by adding its maker to `POLICIES`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import POLICY_SPEC, openvla_policy, random_observations, tiny_policy

from vla_rl.policies.loading import load_policy
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Policy, Sampling
from vla_rl.types import Observation

TWO_CAMERAS = replace(POLICY_SPEC, cameras=("agentview", "robot0_eye_in_hand"))
SMALL = {"hidden_dim": 64, "num_keypoints": 4}
POLICIES: dict[str, Callable[[], TokenPolicy]] = {
    "tiny, default": tiny_policy,
    "tiny, two cameras": lambda: tiny_policy(TWO_CAMERAS, action_horizon=3, **SMALL),
    "tiny, no proprioception": lambda: tiny_policy(use_proprio=False, channels=(8, 8, 8), strides=(1, 2, 2), **SMALL),
    "openvla": openvla_policy,
    "openvla, two cameras, proprioception": lambda: openvla_policy(TWO_CAMERAS, action_horizon=3, use_proprio=True),
}
SAMPLED, GREEDY = Sampling(temperature=1.6), Sampling(mode="greedy", temperature=1.6)
NUM = 9


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> TokenPolicy:
    return POLICIES[request.param]()


def streams(numbers: Sequence[int] = range(NUM)) -> list[np.random.Generator]:
    return [np.random.default_rng(number) for number in numbers]


def observations_of(policy: TokenPolicy, num: int = NUM) -> list[Observation]:
    return random_observations(policy.spec, num)


def demonstrated(policy: TokenPolicy, num: int = NUM, seed: int = 0) -> np.ndarray:
    shape = (num, policy.action_horizon, policy.action_dim)
    return np.random.default_rng(seed).uniform(-1.0, 1.0, shape)


def gradients(policy: TokenPolicy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}
    policy.zero_grad()
    return found


def test_it_is_a_policy_and_keeps_to_the_shapes(policy: TokenPolicy) -> None:
    assert isinstance(policy, Policy)
    output = policy.act(observations_of(policy), SAMPLED, streams())
    num_tokens = policy.action_horizon * policy.action_dim
    assert output.actions.shape == (NUM, policy.action_horizon, policy.action_dim)
    assert (output.actions.dtype, output.logprobs.dtype) == (np.float64, np.float32)
    assert len(output.sample) == NUM
    assert output.logprobs.shape == (NUM, num_tokens)
    evaluation = policy.evaluate(observations_of(policy), output.sample, 1.6)
    assert evaluation.logprobs.shape == evaluation.entropy.shape == (NUM, num_tokens)


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY, Sampling(temperature=1.0)], ids=["1.6", "greedy", "1.0"])
def test_act_and_evaluate_agree_on_log_probabilities(policy: TokenPolicy, sampling: Sampling) -> None:
    output = policy.act(observations_of(policy), sampling, streams())
    evaluation = policy.evaluate(observations_of(policy), output.sample, sampling.temperature)
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), output.logprobs, rtol=0, atol=1e-5)
    assert np.all(output.logprobs < 0)
    colder = policy.evaluate(observations_of(policy), output.sample, sampling.temperature / 2)
    assert not np.allclose(colder.logprobs.detach().numpy(), output.logprobs, atol=1e-3)


def test_greedy_ignores_the_streams(policy: TokenPolicy) -> None:
    greedy = policy.act(observations_of(policy), GREEDY, streams())
    again = policy.act(observations_of(policy), GREEDY, streams(range(100, 100 + NUM)))
    np.testing.assert_array_equal(greedy.actions, again.actions)
    sampled = policy.act(observations_of(policy), SAMPLED, streams())
    assert np.any(greedy.sample != sampled.sample)


def test_the_stream_fixes_the_sample(policy: TokenPolicy) -> None:
    observations = observations_of(policy)
    one, same, other = (policy.act(observations, SAMPLED, streams(range(i, i + NUM))) for i in (0, 0, 50))
    np.testing.assert_array_equal(one.sample, same.sample)
    np.testing.assert_array_equal(one.logprobs, same.logprobs)
    assert not np.array_equal(one.sample, other.sample)
    # Equal observations with different streams differ as well.
    twice = policy.act([observations[0]] * 2, SAMPLED, streams([0, 1]))
    assert not np.array_equal(twice.sample[0], twice.sample[1])


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_row_does_not_depend_on_the_rest_of_its_batch(policy: TokenPolicy, sampling: Sampling) -> None:
    num = 16
    observations = observations_of(policy, num)
    whole = policy.act(observations, sampling, streams(range(num)))
    for size in (1, 3, 8):
        parts = [
            policy.act(observations[i : i + size], sampling, streams(range(num)[i : i + size]))
            for i in range(0, num, size)
        ]
        is_same = np.concatenate([part.sample for part in parts]) == whole.sample
        assert is_same.mean() >= 0.999  # rounding may move a uniform across an edge
        logprobs = np.concatenate([part.logprobs for part in parts])
        np.testing.assert_allclose(logprobs[is_same], whole.logprobs[is_same], rtol=0, atol=1e-5)


def test_sampled_tokens_follow_the_probabilities(policy: TokenPolicy) -> None:
    """The mean of -logprob over samples is the entropy; for tokens drawn in another way it would be another number."""
    num, sharp = 200, Sampling(temperature=0.2)
    observations = observations_of(policy, 1) * num
    output = policy.act(observations, sharp, streams(range(num)))
    entropy = policy.evaluate(observations, output.sample, sharp.temperature).entropy.mean().item()
    assert -output.logprobs.mean() == pytest.approx(entropy, abs=0.05)
    flat = np.random.default_rng(0).integers(256, size=output.sample.shape)
    assert -policy.evaluate(observations, flat, sharp.temperature).logprobs.mean().item() > entropy + 0.5


def test_evaluation_has_gradients_and_acting_has_none(policy: TokenPolicy) -> None:
    observations = observations_of(policy)
    output = policy.act(observations, SAMPLED, streams())
    assert all(weight.grad is None for weight in policy.parameters())
    evaluation = policy.evaluate(observations, output.sample, 1.6)
    found = gradients(policy, evaluation.logprobs.sum() + evaluation.entropy.sum())
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    missing = [name for name in trained if name not in found or not found[name].any()]
    assert missing == []


def test_following_the_gradient_makes_a_sample_likelier(policy: TokenPolicy) -> None:
    observations = observations_of(policy)
    sample = policy.act(observations, SAMPLED, streams()).sample
    before = policy.evaluate(observations, sample, 1.6).logprobs.sum()
    found = gradients(policy, before)
    length = torch.cat([gradient.flatten() for gradient in found.values()]).norm()
    moved = copy.deepcopy(policy)
    with torch.no_grad():
        for name, weight in moved.named_parameters():
            if name in found:
                weight += 1e-3 * found[name] / length
    after = moved.evaluate(observations, sample, 1.6).logprobs.sum()
    assert (after - before).item() == pytest.approx(1e-3 * length.item(), rel=0.1)


def test_a_saved_policy_is_the_same_policy(policy: TokenPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert type(loaded) is type(policy)
    observations = observations_of(policy)
    output, again = (one.act(observations, SAMPLED, streams()) for one in (policy, loaded))
    np.testing.assert_array_equal(output.sample, again.sample)
    np.testing.assert_array_equal(output.logprobs, again.logprobs)
    np.testing.assert_array_equal(output.actions, again.actions)
    with torch.inference_mode():
        torch.testing.assert_close(loaded.logits(observations), policy.logits(observations), rtol=0, atol=0)
    assert loaded.spec == policy.spec
    loaded.check_spec(policy.spec)
    loaded.save(tmp_path / "policy")  # over the old one


def test_cloning_ignores_steps_that_do_not_exist(policy: TokenPolicy) -> None:
    observations, actions = observations_of(policy), demonstrated(policy)
    valid = np.ones(actions.shape[:2], dtype=bool)
    valid[::2, -1] = False
    valid[0, 1:] = False
    other = np.where(valid[..., None], actions, demonstrated(policy, seed=1))
    losses = [policy.bc_loss(observations, chunk, valid) for chunk in (actions, other)]
    assert losses[0].item() == losses[1].item()
    one, another = (gradients(policy, policy.bc_loss(observations, chunk, valid)) for chunk in (actions, other))
    assert one.keys() == another.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, another[name], rtol=0, atol=0)
    everything = policy.bc_loss(observations, actions, np.ones_like(valid))
    assert everything.item() != losses[0].item()


def test_the_cloning_loss_is_the_mean_over_valid_tokens(policy: TokenPolicy) -> None:
    """So a batch of one short and one whole chunk weighs every token alike."""
    observations, actions = observations_of(policy, 2), demonstrated(policy, 2)
    valid = np.ones(actions.shape[:2], dtype=bool)
    valid[0, 1:] = False
    horizon = policy.action_horizon
    short, whole = (policy.bc_loss(observations[i : i + 1], actions[i : i + 1], valid[i : i + 1]) for i in (0, 1))
    expected = (short.item() + horizon * whole.item()) / (horizon + 1)
    assert policy.bc_loss(observations, actions, valid).item() == pytest.approx(expected, abs=1e-5)


def test_cloning_teaches_the_demonstrated_actions(policy: TokenPolicy) -> None:
    student = copy.deepcopy(policy)
    observations = observations_of(policy, 2)
    # Within the normalised range [-0.5, 0.8], so that nothing is clipped; a bin is at most 1.3 / 255 wide.
    actions = np.clip(demonstrated(policy, 2), -0.5, 0.8)
    lr, num_updates = (3e-3, 120) if isinstance(policy, OpenVLAPolicy) else (1e-2, 30)
    optimizer = torch.optim.Adam(student.parameters(), lr=lr)
    for _ in range(num_updates):
        loss = student.bc_loss(observations, actions, np.ones(actions.shape[:2], dtype=bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = student.act(observations, GREEDY, streams([0, 1])).actions
    if isinstance(policy, OpenVLAPolicy):  # its gripper is open or closed
        actions[..., -1] = np.where(actions[..., -1] >= 0.5, 1.0, -1.0)
    assert np.abs(found - actions).max() < 0.03


@pytest.mark.parametrize("change", ["size", "camera"])
def test_other_images_are_refused(policy: TokenPolicy, change: str) -> None:
    observation = observations_of(policy, 1)[0]
    cameras, height, width, _ = made_for = observation.images.shape
    shape = (cameras, 2 * height, width, 3) if change == "size" else (cameras + 1, height, width, 3)
    wrong = replace(observation, images=np.zeros(shape, np.uint8))
    given, expected = (", ".join(map(str, numbers)) for numbers in (shape, made_for))
    match = rf"images have shape \({given}\) .* made for \({expected}\) with cameras \('agentview'"
    with pytest.raises(ValueError, match=match):
        policy.act([wrong], SAMPLED, streams([0]))
    with pytest.raises(ValueError, match=match):
        policy.bc_loss([wrong], demonstrated(policy, 1), np.ones((1, policy.action_horizon), bool))


def test_another_suite_is_refused_with_every_difference(policy: TokenPolicy) -> None:
    policy.check_spec(policy.spec)
    other = replace(policy.spec, image_size=(64, 64), control_rate_hz=10.0)
    differences = r"image_size: policy \(24, 32\), suite \(64, 64\); control_rate_hz: policy 20\.0, suite 10\.0"
    with pytest.raises(ValueError, match=rf"another interface .* \({differences}\); configure the suite's cameras"):
        policy.check_spec(other)
