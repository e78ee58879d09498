"""Box and keep-out planes together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from robots.safety_config import SafetyConfig
from robots.workspace import Workspace

BOX = {"workspace_low_m": (0.0, 0.0, 0.0), "workspace_high_m": (1.0, 1.0, 1.0)}
# A roof with its ridge along x = 0.5, z = 0.5; what is below both sides is allowed: z <= 0.5 - |x - 0.5| / sqrt(3).
ROOF = (
    {"point_m": (0.5, 0.5, 0.5), "normal": (-0.5, 0.0, -np.sqrt(0.75))},
    {"point_m": (0.5, 0.5, 0.5), "normal": (0.5, 0.0, -np.sqrt(0.75))},
)


def workspace(*planes: dict) -> Workspace:
    return Workspace(SafetyConfig.model_validate({**BOX, "keep_out": planes}))


def test_one_plane_moves_a_target_straight_back() -> None:
    floor = workspace({"point_m": (0.0, 0.0, 0.2), "normal": (0.0, 0.0, 3.0)})
    np.testing.assert_allclose(floor.nearest(np.array([0.4, 0.5, 0.1])), [0.4, 0.5, 0.2])
    assert floor.depth_m(np.array([0.4, 0.5, 0.1])) == pytest.approx(0.1)
    inside = np.array([0.4, 0.5, 0.3])
    assert floor.nearest(inside) is inside
    assert floor.violations(inside) == []


def test_violations_are_told_with_numbers() -> None:
    floor = workspace({"point_m": (0.0, 0.0, 0.2), "normal": (0.0, 0.0, 3.0)})
    beside, below = floor.violations(np.array([1.02, 0.5, 0.19]))
    assert beside == "x is 20.0 mm outside of the workspace, 0 to 1 m"
    assert below == "10.0 mm beyond keep-out plane 0"


@settings(max_examples=100, deadline=None)
@given(npst.arrays(np.float64, 3, elements=st.floats(-1.0, 2.0)))
def test_a_target_that_was_pushed_by_one_oblique_plane_is_not_left_beyond_the_other(target: np.ndarray) -> None:
    """One pass over the planes left (0.5, 0.5, 0.9) beyond the first: the second had pushed it there."""
    roof = workspace(*ROOF)
    found = roof.nearest(target)
    assert found is not None
    assert roof.depth_m(found) <= 1e-9
    assert roof.violations(found) == []


def test_planes_that_leave_nothing_are_noticed() -> None:
    nothing = workspace(
        {"point_m": (0.0, 0.0, 0.6), "normal": (0.0, 0.0, 1.0)},
        {"point_m": (0.0, 0.0, 0.4), "normal": (0.0, 0.0, -1.0)},
    )
    assert nothing.nearest(np.array([0.5, 0.5, 0.5])) is None
