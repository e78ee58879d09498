"""Response matching on made-up oscillators whose numbers are known."""

from __future__ import annotations

import numpy as np
import pytest

from robots.response import ResponseModel, StepResponse, correction, fit_response, simulate, step_actions

PERIOD_S = 0.05


def response(scale: float, omega: float, zeta: float, noise: float = 0.0) -> StepResponse:
    actions = step_actions(0.5)
    moved = simulate(actions, PERIOD_S, scale, omega, zeta)
    moved = moved + np.random.default_rng(0).normal(scale=noise, size=moved.shape) if noise else moved
    return StepResponse(axis="x", actions=actions, moved=moved, period_s=PERIOD_S)


def test_a_stiff_critically_damped_spring_follows_by_the_book() -> None:
    # Step of the rest position by 1 at t = 0: x(t) = 1 - (1 + w t) exp(-w t) for zeta = 1.
    omega, times = 8.0, PERIOD_S * np.arange(21)
    moved = simulate(np.array([1.0] + [0.0] * 19), PERIOD_S, 1.0, omega, 1.0)
    np.testing.assert_allclose(moved, 1 - (1 + omega * times) * np.exp(-omega * times), atol=1e-9)


@pytest.mark.parametrize(("scale", "omega", "zeta"), [(0.05, 12.0, 1.0), (0.02, 30.0, 0.6), (0.3, 4.0, 1.8)])
def test_the_fit_finds_the_numbers(scale: float, omega: float, zeta: float) -> None:
    fit = fit_response(response(scale, omega, zeta))
    assert (fit.scale, fit.omega_rad_s, fit.zeta) == pytest.approx((scale, omega, zeta), rel=1e-3)
    assert fit.error < 1e-6 * scale * 10
    noisy = fit_response(response(scale, omega, zeta, noise=0.01 * scale))
    assert noisy.scale == pytest.approx(scale, rel=0.02)
    assert noisy.omega_rad_s == pytest.approx(omega, rel=0.15)


def test_the_correction_makes_both_alike() -> None:
    world, robot = (
        ResponseModel(axis="x", scale=scale, omega_rad_s=omega, zeta=zeta, error=0.0)
        for scale, omega, zeta in ((0.04, 12.0, 1.0), (0.05, 6.0, 0.5))
    )
    change = correction(world, robot)
    assert (change.scale, change.stiffness, change.damping) == pytest.approx((0.8, 4.0, 4.0))
    # A robot of mass 1 with K = w^2 and D = 2 z w, after the correction:
    stiffness, damping = 6.0**2 * change.stiffness, 2 * 0.5 * 6.0 * change.damping
    assert (np.sqrt(stiffness), damping / 2 / np.sqrt(stiffness)) == pytest.approx((12.0, 1.0))


def test_a_robot_that_does_not_move_is_named() -> None:
    still = StepResponse(axis="rz", actions=step_actions(0.5), moved=np.zeros(51), period_s=PERIOD_S)
    with pytest.raises(ValueError, match="did not move along rz"):
        fit_response(still)
