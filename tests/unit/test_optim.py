"""The optimiser: schedule, clipping, decay and refused gradients, against numbers worked out by hand."""

import math

import pytest
import torch

from vla_rl.train.optim import OptimConfig, Optimizer


def make(config: OptimConfig, total_updates: int | None = None) -> tuple[torch.nn.Parameter, Optimizer]:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    return weight, Optimizer([("head.weight", weight)], config, total_updates)


def test_first_step_is_the_learning_rate_against_the_sign_plus_decay() -> None:
    # AdamW: w (1 - lr * decay) - lr * g / (|g| + eps), whatever the size of g.
    weight, optimizer = make(OptimConfig(lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([0.003, -0.004])
    assert optimizer.step() == pytest.approx(0.005)
    assert weight.tolist() == pytest.approx([3 * 0.95 - 0.1, 4 * 0.95 + 0.1], abs=1e-4)
    assert weight.grad is None


def test_norm_is_reported_before_clipping() -> None:
    weight, optimizer = make(OptimConfig(lr=0.1, max_grad_norm=1.0))
    weight.grad = torch.tensor([30.0, 40.0])
    assert optimizer.step() == pytest.approx(50.0)
    (moments,) = optimizer.state_dict()["adamw"]["state"].values()
    # First moment = (1 - 0.9) * clipped gradient.
    assert moments["exp_avg"].tolist() == pytest.approx([0.06, 0.08])


def rates(config: OptimConfig, num: int, total_updates: int | None = None) -> list[float]:
    weight, optimizer = make(config, total_updates)
    found = []
    for _ in range(num):
        found.append(optimizer.lr)
        weight.grad = torch.ones(2)
        optimizer.step()
    return [*found, optimizer.lr]


def test_constant_rate_after_linear_warmup() -> None:
    assert rates(OptimConfig(lr=1.0, warmup_updates=4), 5) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert rates(OptimConfig(lr=1.0), 2) == [1.0, 1.0, 1.0]


def test_cosine_decay_reaches_zero_at_the_end() -> None:
    found = rates(OptimConfig(lr=1.0, warmup_updates=2, decay="cosine"), 6, total_updates=6)
    halves = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert found == pytest.approx([0.5, 1.0, *halves], abs=1e-12)
    with pytest.raises(ValueError, match="no fixed number of updates"):
        make(OptimConfig(decay="cosine"))


def test_step_decay_is_a_tenth_from_its_place_on() -> None:
    found = rates(OptimConfig(lr=1.0, warmup_updates=2, decay="step", decay_after=4), 5, total_updates=6)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.1, 0.1])
    for wrong in ({"decay": "step"}, {"decay_after": 4}, {"decay": "cosine", "decay_after": 4}):
        with pytest.raises(ValueError, match="decay=step needs decay_after"):
            OptimConfig(**wrong)  # type: ignore[arg-type]


def test_without_a_largest_norm_the_gradient_passes_as_it_is() -> None:
    weight, optimizer = make(OptimConfig(lr=0.1, max_grad_norm=None))
    weight.grad = torch.tensor([30.0, 40.0])
    assert optimizer.step() == pytest.approx(50.0)
    (moments,) = optimizer.state_dict()["adamw"]["state"].values()
    assert moments["exp_avg"].tolist() == pytest.approx([3.0, 4.0])


def test_a_gradient_that_is_not_finite_is_named_and_not_applied() -> None:
    weight, optimizer = make(OptimConfig(lr=0.1))
    weight.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(FloatingPointError, match=r"the gradient of 'head\.weight' is not finite"):
        optimizer.step()
    assert weight.tolist() == [3.0, 4.0]


def test_frozen_parameters_are_left_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    with pytest.raises(ValueError, match="nothing can be trained"):
        Optimizer([("weight", weight)], OptimConfig())


def test_offloaded_steps_equal_those_on_the_device_and_continue_from_a_saved_state() -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.5)
    gradients = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    plain, reference = make(config)
    weight, optimizer = make(config.model_copy(update={"offload": True}))
    for gradient in gradients[:2]:
        for parameter, stepper in ((plain, reference), (weight, optimizer)):
            parameter.grad = gradient.clone()
            stepper.step()
    torch.testing.assert_close(weight, plain)
    resumed_weight, resumed = make(config.model_copy(update={"offload": True}))
    resumed.load_state_dict(optimizer.state_dict())
    for gradient in gradients[2:]:
        for parameter, stepper in ((plain, reference), (resumed_weight, resumed)):
            parameter.grad = gradient.clone()
            stepper.step()
    torch.testing.assert_close(resumed_weight, plain)
    with pytest.raises(ValueError, match=r"optim\.offload=True and cannot go on with optim.offload=False"):
        reference.load_state_dict(optimizer.state_dict())


def test_master_weights_keep_steps_that_bfloat16_cannot_hold() -> None:
    def train(offload: bool) -> float:
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = Optimizer([("w", weight)], OptimConfig(lr=1e-4, weight_decay=0.0, offload=offload))
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.item()

    # A hundred steps of 1e-4 are 0.01; the next bfloat16 below 1 is 0.0039 away, 40 times one step.
    assert train(offload=False) == 1.0
    assert train(offload=True) == pytest.approx(0.99, abs=0.002)
