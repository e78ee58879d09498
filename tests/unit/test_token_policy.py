"""The path from logits to actions and losses that all token policies share, with logits written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from fakes import POLICY_SPEC, norm_stats, random_observations

from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Sampling
from vla_rl.types import Observation

SPEC = replace(POLICY_SPEC, action_names=("dx", "gripper"))


class FixedLogits(TokenPolicy):
    """Two control steps of (dx, gripper): four tokens with these logits, whatever the observation."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(2, SPEC, norm_stats(SPEC))
        self.table = torch.nn.Parameter(logits)

    def logits(self, observations: Sequence[Observation], augmentation: np.ndarray | None = None) -> torch.Tensor:
        return self.table.expand(len(observations), -1, -1)

    def draw_augmentation(self, generator: np.random.Generator, batch: int) -> np.ndarray:
        raise AssertionError("not needed here")

    def save(self, folder: Path) -> None:
        raise AssertionError("not needed here")

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        raise AssertionError("not needed here")


def peaks(bins: list[int]) -> torch.Tensor:
    """Logits that are ln 3 at one bin of each token and 0 elsewhere: its probability is 3 / 258 at temperature 1."""
    logits = torch.zeros(len(bins), 256)
    logits[range(len(bins)), bins] = float(np.log(3.0))
    return logits


def observations(num: int) -> list[Observation]:
    return random_observations(SPEC, num)


def test_greedy_actions_by_hand() -> None:
    # Tokens in the order (step 0: dx, gripper), (step 1: dx, gripper). The centre of bin 255 is -254/255, of bin 128 it
    # is 0, of bins 0 and 1 254/255. dx is mapped to 0.5 * (x + 1) * 1.3 - 0.5, the gripper passes through.
    output = FixedLogits(peaks([255, 1, 128, 255])).act(observations(1), Sampling(mode="greedy"), [])
    expected = [[[0.65 / 255 - 0.5, 254 / 255], [0.15, -254 / 255]]]
    np.testing.assert_allclose(output.actions, expected, atol=1e-7)
    assert output.sample.tolist() == [[255, 1, 128, 255]]
    np.testing.assert_allclose(output.logprobs, np.full((1, 4), np.log(3 / 258)), rtol=1e-5)


def test_greedy_log_probabilities_are_at_the_sampling_temperature() -> None:
    # At temperature 0.5 the weight of the peak is 9.
    output = FixedLogits(peaks([5, 6, 7, 8])).act(observations(1), Sampling(mode="greedy", temperature=0.5), [])
    np.testing.assert_allclose(output.logprobs, np.full((1, 4), np.log(9 / 264)), rtol=1e-5)


def test_cloning_loss_by_hand() -> None:
    policy = FixedLogits(peaks([255, 128, 255, 128]))
    # dx = -0.5 and below is bin 255, gripper 0 is bin 128: all four tokens have probability 3 / 258.
    actions = np.array([[[-0.5, 0.0], [-0.9, 0.0]]])
    loss = policy.bc_loss(observations(1), actions, np.array([[True, True]]))
    assert loss.item() == pytest.approx(np.log(258 / 3), rel=1e-6)
    # The second step of another one misses both peaks: (2 ln 86 + 2 ln 258) / 4. It does not count if invalid.
    actions[0, 1] = [0.8, 1.0]
    loss = policy.bc_loss(observations(1), actions, np.array([[True, True]]))
    assert loss.item() == pytest.approx((np.log(86) + np.log(258)) / 2, rel=1e-6)
    loss = policy.bc_loss(observations(1), actions, np.array([[True, False]]))
    assert loss.item() == pytest.approx(np.log(86), rel=1e-6)
    loss.backward()
    gradient = policy.table.grad
    assert gradient is not None
    assert gradient[:2].any(dim=-1).all()
    assert not gradient[2:].any()


def test_temperature_scales_the_gradient_of_log_probabilities() -> None:
    policy = FixedLogits(torch.zeros(4, 256))
    sample = np.array([[0, 10, 20, 255]])
    policy.evaluate(observations(1), sample, 2.0).logprobs.sum().backward()
    # d log softmax(x / T)[b] / d x = (onehot - 1/256) / T
    expected = (torch.eye(256)[sample[0]] - 1 / 256) / 2
    assert policy.table.grad is not None
    torch.testing.assert_close(policy.table.grad, expected)
