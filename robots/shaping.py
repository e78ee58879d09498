"""Jerk-limited following of a target that jumps once per control period, with the ruckig library.

Source: L. Berscheid, T. Kroeger, Jerk-limited real-time trajectory generation with arbitrary target states,
arXiv:2105.04830.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from ruckig import InputParameter, OutputParameter, Result, Ruckig, RuckigError


class Shaper:
    """One vector quantity (three axes): position, speed and acceleration so far, and the next position on the way.

    Limits are per axis, the vector's divided by the root of three, so that the vector keeps to them in any direction.
    """

    def __init__(self, period_s: float, speed: float, acceleration: float, jerk: float) -> None:
        """Set limits; the quantity is unknown until `reset`."""
        self._generator = Ruckig(3, period_s)
        self._input, self._output = InputParameter(3), OutputParameter(3)
        share = 1.0 / np.sqrt(3.0)
        self._input.max_velocity = [speed * share] * 3
        self._input.max_acceleration = [acceleration * share] * 3
        self._input.max_jerk = [jerk * share] * 3
        self.reset(np.zeros(3))

    @property
    def position(self) -> Float64[np.ndarray, 3]:
        """Where the last answer was."""
        return np.array(self._input.current_position)

    def reset(self, position: Float64[np.ndarray, 3]) -> None:
        """Begin at rest."""
        self._input.current_position = position.tolist()
        self._input.current_velocity = [0.0] * 3
        self._input.current_acceleration = [0.0] * 3

    def shift(self, offset: Float64[np.ndarray, 3]) -> None:
        """Move the origin: positions are measured from elsewhere from now on."""
        self._input.current_position = (self.position + offset).tolist()

    def follow(self, target: Float64[np.ndarray, 3]) -> Float64[np.ndarray, 3]:
        """The position one control period later, on the fastest way to rest at the target within the limits.

        Raises:
            ArithmeticError: The library found no way (limits that contradict the present motion, no numbers).
        """
        self._input.target_position = target.tolist()
        self._input.target_velocity = [0.0] * 3
        try:
            result = self._generator.update(self._input, self._output)
        except RuckigError as error:
            raise ArithmeticError(f"no way to {target} from {self.position}: {error}") from error
        if result not in (Result.Working, Result.Finished):
            raise ArithmeticError(f"ruckig answers {result} to target {target} from {self.position}")
        self._output.pass_to_input(self._input)
        return self.position

    def jump(self, target: Float64[np.ndarray, 3]) -> None:
        """Take the target as reached; for robots that follow every step within one period."""
        self.reset(target)
