"""The clipped objective zone by zone, its statistics, and the denominators, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from vla_rl.algos.denominators import ConstantNorm, EpisodeMean, TokenMean, token_weights
from vla_rl.algos.surrogates import ClippedSurrogate, clipped_loss, ratio_metrics

# Range [0.8, 1.28]. Inside, and where the ratio may come back, loss = -A r and d loss / d logprob = -A r.
# Beyond the bound that the advantage pushes to, loss = -A * bound and the gradient is exactly zero.
ZONES = [
    # ratio, advantage, loss, gradient
    (1.00, 1.0, -1.00, -1.00),
    (1.27, 1.0, -1.27, -1.27),
    (1.29, 1.0, -1.28, 0.0),
    (5.00, 2.0, -2.56, 0.0),
    (0.50, 1.0, -0.50, -0.50),
    (1.00, -1.0, 1.00, 1.00),
    (0.81, -1.0, 0.81, 0.81),
    (0.79, -1.0, 0.80, 0.0),
    (0.10, -2.0, 1.60, 0.0),
    (1.50, -1.0, 1.50, 1.50),
    (1.50, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), ZONES)
def test_loss_and_gradient_in_each_zone(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    old = torch.tensor([[-1.5]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    value = clipped_loss(new, old, torch.tensor([advantage], dtype=torch.float64), ClippedSurrogate())
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert new.grad is not None
    if gradient == 0.0:
        assert new.grad.item() == 0.0
    assert new.grad.item() == pytest.approx(gradient)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    old = torch.zeros(4, 1)
    new = torch.log(torch.tensor([[1.25], [1.30], [0.85], [0.75]]))
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    plain = clipped_loss(new, old, advantages, ClippedSurrogate(clip_low=0.2, clip_high=0.2))
    higher = clipped_loss(new, old, advantages, ClippedSurrogate())
    assert plain[:, 0].tolist() == pytest.approx([-1.20, -1.20, 0.85, 0.80])
    assert higher[:, 0].tolist() == pytest.approx([-1.25, -1.28, 0.85, 0.80])


def test_ratio_metrics() -> None:
    log_ratio = torch.log(torch.tensor([1.5, 0.5, 1.0, 1.5]))
    metrics = ratio_metrics(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]), ClippedSurrogate())
    k1 = -(2 * math.log(1.5) + math.log(0.5)) / 4
    assert metrics == pytest.approx(
        {
            "ratio_mean": 4.5 / 4,
            "ratio_max": 1.5,
            "clip_fraction_high": 1 / 4,  # only the first: the last one is high, but its advantage pulls it back
            "clip_fraction_low": 1 / 4,
            "kl_k1": k1,
            "kl_k3": 0.5 / 4 + k1,
        },
        abs=1e-6,
    )


# Two episodes: number 4 executed 2 tokens in one decision, number 9 executed 4 + 2 tokens in two decisions.
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=bool)
EPISODES = np.array([4, 9, 9])


@pytest.mark.parametrize(
    ("config", "of_first", "of_second"),
    [
        (EpisodeMean(), 1 / (2 * 2), 1 / (2 * 6)),
        (TokenMean(), 1 / 8, 1 / 8),
        (ConstantNorm(num_tokens=10), 1 / 20, 1 / 20),
    ],
)
def test_token_weights(config: EpisodeMean, of_first: float, of_second: float) -> None:
    weights = token_weights(MASK, EPISODES, config)
    assert weights[0].tolist() == pytest.approx([of_first, of_first, 0, 0])
    assert weights[1].tolist() == pytest.approx([of_second] * 4)
    assert weights[2].tolist() == pytest.approx([of_second, of_second, 0, 0])


@pytest.mark.parametrize("config", [EpisodeMean(), TokenMean()])
def test_weights_of_means_add_up_to_one(config: EpisodeMean) -> None:
    assert token_weights(MASK, EPISODES, config).sum() == pytest.approx(1.0)
