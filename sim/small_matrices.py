"""Arithmetic of small dense matrices in compiled kernels, where a LAPACK call would cost more than the sum itself."""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numba import njit

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_compiled = njit(nogil=True, cache=True)


@_compiled
@no_type_check
def product(left: Matrix, right: Matrix) -> Matrix:
    """Product of small matrices; a BLAS call would cost more than the arithmetic."""
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
    product = np.zeros((rows, columns))
    for i in range(rows):
        for k in range(inner):
            for j in range(columns):
                product[i, j] += left[i, k] * right[k, j]
    return product


@_compiled
@no_type_check
def solve(matrix: Matrix, right: Matrix) -> Matrix:
    """Solve a small symmetric positive definite system by Cholesky; C-contiguous (n, n), (n, m) -> (n, m).

    At an exactly singular posture, coordinates without a pivot get no force (robosuite: pseudo-inverse).
    """
    n, columns = right.shape
    lower = np.empty((n, n))
    inverse_pivot = np.empty(n)
    for i in range(n):
        for j in range(i + 1):
            value = matrix[i, j]
            for k in range(j):
                value -= lower[i, k] * lower[j, k]
            if i > j:
                lower[i, j] = value * inverse_pivot[j]
            else:
                inverse_pivot[i] = 1.0 / np.sqrt(value) if value > 1e-15 * matrix[i, i] else 0.0
    solution = right.copy()
    for i in range(n):
        for k in range(i):
            for column in range(columns):
                solution[i, column] -= lower[i, k] * solution[k, column]
        for column in range(columns):
            solution[i, column] *= inverse_pivot[i]
    for i in range(n - 1, -1, -1):
        for k in range(i + 1, n):
            for column in range(columns):
                solution[i, column] -= lower[k, i] * solution[k, column]
        for column in range(columns):
            solution[i, column] *= inverse_pivot[i]
    return solution
