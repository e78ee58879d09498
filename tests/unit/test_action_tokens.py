"""OpenVLA's 256 bins worked by hand, sampling by inverse CDF, log-probabilities and entropy at a temperature.

Edge k is -1 + 2k/255 (k = 0..255), the centre of interval d = 1..255 is -1 + (2d - 1)/255; bin = 256 - d, and the token
id of a bin in Llama's vocabulary is 31744 + bin.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vla_rl.policies.action_tokens import (
    NUM_BINS,
    decode_bins,
    encode_actions,
    sample_bins,
    token_entropy,
    token_logprobs,
)

FIRST_TOKEN_ID = 31744
JUST_BELOW_1 = float(np.nextafter(np.float32(1), np.float32(0)))


@pytest.mark.parametrize(
    ("action", "token_id", "decoded"),
    [
        (-1.0, 31999, -254 / 255),  # interval 1
        (1.0, 31744, 254 / 255),  # on the last edge: "interval" 256
        (0.9999, 31745, 254 / 255),  # 1.9999 * 127.5 = 254.99, so 255 edges are below: interval 255
        (0.0, 31872, 0.0),  # 127.5: interval 128
        (0.5, 31808, 128 / 255),  # 1.5 * 127.5 = 191.25: interval 192
        (-0.7, 31961, -178 / 255),  # 0.3 * 127.5 = 38.25: interval 39
        (7.0, 31744, 254 / 255),  # clipped
        (-7.0, 31999, -254 / 255),
    ],
)
def test_openvla_numbering_by_hand(action: float, token_id: int, decoded: float) -> None:
    (action_bin,) = encode_actions(np.array([action]))
    assert FIRST_TOKEN_ID + action_bin == token_id
    np.testing.assert_allclose(decode_bins(np.array([action_bin])), [decoded], atol=1e-15)


def test_all_bins() -> None:
    centres = decode_bins(np.arange(NUM_BINS))
    assert centres[0] == centres[1]
    np.testing.assert_allclose(centres[1:], -1 + (2 * np.arange(255, 0, -1) - 1) / 255, atol=1e-15)
    np.testing.assert_array_equal(encode_actions(centres), np.maximum(np.arange(NUM_BINS), 1))


@given(arrays(np.float64, (3, 2), elements=st.floats(-1.5, 1.5)))
def test_round_trip_is_within_half_a_bin(actions: np.ndarray) -> None:
    bins = encode_actions(actions)
    assert bins.shape == actions.shape
    assert bins.min() >= 0
    assert bins.max() < NUM_BINS
    assert np.abs(decode_bins(bins) - np.clip(actions, -1, 1)).max() <= 1 / 255 + 1e-12


def draw(logits: list[float], temperature: float, uniforms: list[float]) -> list[int]:
    """Bins of tokens that share one distribution."""
    rows = torch.tensor(logits, dtype=torch.float32).expand(1, len(uniforms), len(logits))
    return sample_bins(rows, temperature, np.array([uniforms], dtype=np.float32))[0].tolist()


def test_sampling_inverts_the_cumulative_distribution() -> None:
    # 0.1, 0.2, 0.3, 0.4 adds up to 0.1, 0.3, 0.6, 1.
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    uniforms = [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 0.9999, JUST_BELOW_1]
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 3]
    assert draw(logits.tolist(), 1.0, uniforms) == expected
    assert draw((1.6 * logits + 5.0).tolist(), 1.6, uniforms) == expected


def test_sampling_matches_the_probabilities() -> None:
    num = 4000
    bins = draw(np.log([0.15, 0.05, 0.5, 0.3]).tolist(), 1.0, ((np.arange(num) + 0.5) / num).tolist())
    np.testing.assert_allclose(np.bincount(bins, minlength=4) / num, [0.15, 0.05, 0.5, 0.3], atol=1.5 / num)


def test_a_bin_without_probability_is_never_drawn() -> None:
    # Both ends and the middle are impossible; the cumulative sums are 0, 0.5, 0.5, 1, 1.
    logits = [-np.inf, 0.0, -np.inf, 0.0, -np.inf]
    assert draw(logits, 1.0, [0.0, 0.4999, 0.5, JUST_BELOW_1]) == [1, 1, 3, 3]


@settings(max_examples=200)
@given(
    arrays(np.float32, 256, elements=st.floats(-40, 40, width=32)),
    st.sampled_from([0.0, JUST_BELOW_1]) | st.floats(0, JUST_BELOW_1, width=32),
    st.sampled_from([0.5, 1.0, 1.6]),
)
def test_a_draw_has_a_finite_log_probability_and_brackets_its_uniform(
    logits: np.ndarray, uniform: float, temperature: float
) -> None:
    (drawn,) = draw(logits.tolist(), temperature, [uniform])
    rows = torch.from_numpy(logits)[None, None]
    assert torch.isfinite(token_logprobs(rows, torch.tensor([[drawn]]), temperature)).all()
    cumulative = torch.softmax(rows[0, 0].double() / temperature, dim=-1).cumsum(-1)
    assert uniform <= cumulative[drawn] + 1e-5
    assert drawn == 0 or uniform >= cumulative[drawn - 1] - 1e-5


def test_log_probabilities_and_entropy_by_hand() -> None:
    # At temperature 0.5 the weights are exp(2 * logit) = 1, 4, 16, of 21.
    logits = torch.log(torch.tensor([1.0, 2.0, 4.0])).expand(1, 3, 3)
    logprobs = token_logprobs(logits, torch.tensor([[0, 1, 2]]), 0.5)
    np.testing.assert_allclose(logprobs[0].exp().tolist(), [1 / 21, 4 / 21, 16 / 21], rtol=1e-6)
    # ln 21 - (4 ln 4 + 16 ln 16) / 21 = 3.044522 - 49.906597 / 21
    np.testing.assert_allclose(token_entropy(logits, 0.5)[0].tolist(), [0.668017] * 3, atol=2e-6)
    # At temperature 1 the weights are 1, 2, 4, of 7: ln 7 - (2 ln 2 + 4 ln 4) / 7 = 1.945910 - 6.931472 / 7
    np.testing.assert_allclose(token_logprobs(logits, torch.tensor([[2, 2, 2]]), 1.0)[0].exp(), [4 / 7] * 3, rtol=1e-6)
    np.testing.assert_allclose(token_entropy(logits, 1.0)[0].tolist(), [0.955700] * 3, atol=2e-6)


def test_a_flat_distribution_has_the_largest_entropy() -> None:
    assert token_entropy(torch.full((1, 1, 256), 3.0), 1.6).item() == pytest.approx(np.log(256), abs=1e-6)


def test_half_precision_logits_are_evaluated_in_float32() -> None:
    logits = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    bins = torch.zeros(2, 3, dtype=torch.int64)
    found = token_logprobs(logits, bins, 1.6)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, token_logprobs(logits.float(), bins, 1.6), rtol=0, atol=0)
    assert token_entropy(logits, 1.6).dtype == torch.float32
