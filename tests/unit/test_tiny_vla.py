"""What makes the tiny policy a VLA: language steers what it looks at, keypoints say where, and it is tiny."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import INSTRUCTIONS, POLICY_SPEC, norm_stats, random_observations, tiny_policy
from pydantic import ValidationError

from sim.tabletop.suite import TabletopSuite
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig, jitter_colours
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.policy import Sampling


def keypoints(policy: TinyVLA, images: np.ndarray, instruction: str) -> torch.Tensor:
    """(D, 3): x, y in [-1, 1] and peakedness of each keypoint of a single camera."""
    with torch.inference_mode():
        encoded = policy._encode_instructions([instruction])
        return policy.stem(torch.from_numpy(images)[None], encoded).reshape(-1, 3)


def test_the_default_is_tiny() -> None:
    suite = TabletopSuite()
    instructions = {suite.start(task, "train", 0).instruction for task in suite.tasks}
    tokenizer = WordTokenizer.from_instructions(instructions)
    policy = TinyVLA(TinyVLAConfig(), suite.spec, norm_stats(suite.spec), tokenizer)
    assert 0.3e6 <= sum(weight.numel() for weight in policy.parameters()) <= 3e6


def test_the_instruction_moves_the_keypoints_and_the_actions() -> None:
    policy = tiny_policy()
    observation = random_observations(POLICY_SPEC, 1)[0]
    found = [keypoints(policy, observation.images, instruction)[:, :2] for instruction in INSTRUCTIONS]
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert (one - other).abs().max() > 1e-3
    rows = [replace(observation, instruction=instruction) for instruction in INSTRUCTIONS]
    with torch.inference_mode():
        logits = policy.logits(rows)
    assert torch.cdist(logits.flatten(1), logits.flatten(1)).fill_diagonal_(1.0).min() > 1e-2


def test_gradients_reach_the_instruction_encoder_through_the_picture() -> None:
    policy = tiny_policy()
    images = torch.from_numpy(random_observations(POLICY_SPEC, 1)[0].images)[None]
    policy.stem(images, policy._encode_instructions([INSTRUCTIONS[0]])).square().sum().backward()
    for name, weight in policy.instruction.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.any(), name
    words = policy.tokenizer.encode([INSTRUCTIONS[0]])[0]
    embedding = policy.instruction.embedding.weight.grad
    assert sorted(torch.nonzero(embedding.any(dim=1)).flatten().tolist()) == sorted(set(words.tolist()))


def test_word_order_counts_and_padding_does_not() -> None:
    policy = tiny_policy()
    with torch.inference_mode():
        one, swapped, alone = (
            policy._encode_instructions(batch)
            for batch in (["red cube on blue plate"], ["blue cube on red plate"], ["push the cube"])
        )
        beside_a_longer_one = policy._encode_instructions(["push the cube", "put the red cube on the plate now please"])
    assert not torch.allclose(one, swapped, atol=1e-4)
    torch.testing.assert_close(beside_a_longer_one[:1], alone, rtol=0, atol=1e-6)


def test_a_keypoint_says_where_its_map_is_brightest() -> None:
    # One camera, one 5x5 convolution that averages, no instruction: the only keypoint follows a white square on black.
    policy = tiny_policy(channels=(1,), strides=(1,), num_keypoints=1)
    stem = policy.stem
    with torch.no_grad():
        stem.convs[0].weight.fill_(1 / 75)
        stem.convs[0].bias.fill_(1.0)
        stem.films[0].weight.zero_()
        stem.films[0].bias.zero_()
        stem.maps.weight.fill_(1.0)
        stem.sharpness.fill_(100.0)
    height, width = POLICY_SPEC.image_size
    for row, column in [(6, 5), (12, 16), (18, 27)]:
        images = np.zeros((1, height, width, 3), dtype=np.uint8)
        images[0, row - 2 : row + 3, column - 2 : column + 3] = 255
        x, y, _ = keypoints(policy, images, INSTRUCTIONS[0])[0].tolist()
        assert x == pytest.approx(2 * column / (width - 1) - 1, abs=0.02)
        assert y == pytest.approx(2 * row / (height - 1) - 1, abs=0.02)


def test_each_camera_has_keypoints_of_its_own() -> None:
    spec = replace(POLICY_SPEC, cameras=("agentview", "robot0_eye_in_hand"))
    policy = tiny_policy(spec)
    observation = random_observations(spec, 1)[0]
    swapped = replace(observation, images=observation.images[::-1].copy())
    logits = [policy.logits([item]).detach() for item in (observation, swapped)]
    assert not torch.allclose(*logits, atol=1e-3)
    one_changed = observation.images.copy()
    one_changed[1] = 0
    before, after = (
        keypoints(policy, images, INSTRUCTIONS[0]).reshape(2, -1) for images in (observation.images, one_changed)
    )
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_proprioception_is_read_only_if_configured() -> None:
    observation = random_observations(POLICY_SPEC, 1)[0]
    moved = replace(observation, proprio=observation.proprio + np.float32(0.1))
    for use_proprio in (True, False):
        policy = tiny_policy(use_proprio=use_proprio)
        is_same = torch.equal(policy.logits([observation]), policy.logits([moved]))
        assert is_same is not use_proprio


def test_neighbouring_bins_share_evidence() -> None:
    """The logits of a token are smooth: 32 bumps, 8.2 bins apart, over 256 bins."""
    with torch.inference_mode():
        logits = tiny_policy().logits(random_observations(POLICY_SPEC, 4))
    between_neighbours = (logits[..., 1:] - logits[..., :-1]).abs().mean()
    between_strangers = (logits[..., 64:] - logits[..., :-64]).abs().mean()
    assert between_neighbours < 0.25 * between_strangers


def test_a_bad_instruction_is_named() -> None:
    observation = replace(random_observations(POLICY_SPEC, 1)[0], instruction="???")
    with pytest.raises(ValueError, match=r"the instruction '\?\?\?' has no words"):
        tiny_policy().act([observation], Sampling(), [np.random.default_rng(0)])


def test_every_convolution_needs_a_stride() -> None:
    with pytest.raises(ValidationError, match=r"strides \(2, 1\) and channels \(16,\) must have the same length"):
        TinyVLAConfig(channels=(16,), strides=(2, 1))


def test_greedy_takes_the_mean_bin() -> None:
    policy = tiny_policy()
    logits = torch.full((1, 3, 256), -100.0)
    logits[0, 0, [10, 20]] = 0.0  # mean 15, though nothing is likely there
    logits[0, 1, 100] = 5.0
    logits[0, 2, 0], logits[0, 2, 255] = 0.0, np.log(3.0)  # a gripper, 3 to 1: 0.75 * 255 = 191
    assert policy.greedy_bins(logits).tolist() == [[15, 100, 191]]


def test_jitter_scales_around_grey_adds_and_clips() -> None:
    images = np.array([[[[0, 100, 255]]]], dtype=np.uint8)
    # (100 - 127.5) * 1.2 + 127.5 + 10 = 104.5, truncated; 0 and 255 leave the range.
    assert jitter_colours(images, 1.2, 10.0).ravel().tolist() == [0, 104, 255]
    # (0 - 127.5) * 0.8 + 127.5 - 20 = 5.5; (255 - 127.5) * 0.8 + 127.5 - 20 = 209.5
    assert jitter_colours(images, 0.8, -20.0).ravel().tolist() == [5, 85, 209]


def test_the_augmentation_is_drawn_per_row_and_changes_the_loss() -> None:
    policy = tiny_policy()
    drawn = policy.draw_augmentation(np.random.default_rng(0), 500)
    assert drawn.shape == (500, 2)
    assert np.all(np.abs(drawn[:, 0] - 1.0) <= 0.2)
    assert np.all(np.abs(drawn[:, 1]) <= 20.0)
    assert drawn[:, 0].std() > 0.1
    assert drawn[:, 1].std() > 10.0
    observations = random_observations(POLICY_SPEC, 2)
    with torch.inference_mode():
        plain, changed = policy.logits(observations), policy.logits(observations, drawn[:2])
        neutral = policy.logits(observations, np.array([[1.0, 0.0]] * 2))
    torch.testing.assert_close(neutral, plain)
    assert (plain - changed).abs().amax(dim=(1, 2)).min() > 1e-3
