"""Rotation matrices and rotation vectors, exact near zero and near half a turn.

Source: standard formulas of Rodrigues; see e.g. K. Lynch, F. Park, Modern Robotics, sections 3.2.3.2 and 3.2.3.3.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from scipy.spatial.transform import Rotation


def matrix_from_rotation_vector(vector: Float64[np.ndarray, 3]) -> Float64[np.ndarray, "3 3"]:
    """Rotation about the vector by its length (rad)."""
    matrix: Float64[np.ndarray, "3 3"] = Rotation.from_rotvec(vector).as_matrix()
    return matrix


def rotation_vector_from_matrix(matrix: Float64[np.ndarray, "3 3"]) -> Float64[np.ndarray, 3]:
    """The shortest rotation vector (length at most pi) of a rotation matrix."""
    vector: Float64[np.ndarray, 3] = Rotation.from_matrix(matrix).as_rotvec()
    return vector


def angle_between(one: Float64[np.ndarray, "3 3"], other: Float64[np.ndarray, "3 3"]) -> float:
    """Geodesic angle (rad) between two orientations."""
    return float(np.linalg.norm(rotation_vector_from_matrix(one @ other.T)))


def limit_rotation(
    target: Float64[np.ndarray, "3 3"], reference: Float64[np.ndarray, "3 3"], max_angle_rad: float
) -> Float64[np.ndarray, "3 3"]:
    """The orientation on the shortest way from `reference` to `target` that is at most this far from `reference`."""
    vector = rotation_vector_from_matrix(target @ reference.T)
    angle = float(np.linalg.norm(vector))
    if angle <= max_angle_rad:
        return target
    limited: Float64[np.ndarray, "3 3"] = matrix_from_rotation_vector(vector * (max_angle_rad / angle)) @ reference
    return limited
