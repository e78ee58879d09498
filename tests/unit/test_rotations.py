"""Rotation matrices and vectors: limits by angle, and the corners at zero and half a turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy.spatial.transform import Rotation

from robots.rotations import (
    angle_between,
    limit_rotation,
    matrix_from_rotation_vector,
    rotation_vector_from_matrix,
)


@settings(max_examples=60, deadline=None)
@given(
    npst.arrays(np.float64, 3, elements=st.floats(-4, 4)),
    npst.arrays(np.float64, 3, elements=st.floats(-4, 4)),
    st.floats(0.01, 3.2),
)
def test_rotations_are_limited_by_angle(one: np.ndarray, other: np.ndarray, cap: float) -> None:
    target, reference = matrix_from_rotation_vector(one), matrix_from_rotation_vector(other)
    limited = limit_rotation(target, reference, cap)
    assert angle_between(limited, reference) <= cap + 1e-6
    expected = min(cap, angle_between(target, reference))
    assert angle_between(limited, reference) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-6, 1.0, np.pi - 1e-9, np.pi])
def test_rotation_vectors_are_exact_near_zero_and_half_a_turn(angle: float) -> None:
    vector = angle * np.array([2.0, -1.0, 2.0]) / 3.0
    matrix = matrix_from_rotation_vector(vector)
    np.testing.assert_allclose(matrix, Rotation.from_rotvec(vector).as_matrix(), atol=1e-14)
    back = rotation_vector_from_matrix(matrix)
    assert np.linalg.norm(back) == pytest.approx(angle, abs=1e-7)
    np.testing.assert_allclose(matrix_from_rotation_vector(back), matrix, atol=1e-9)
