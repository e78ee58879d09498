"""Heights and grasps on scenes of a few boxes."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest

from sim.libero.grasps import Grasp, Taste, find_grasp
from sim.libero.motion import stretch, travel, yaw_of
from sim.libero.shapes import Boxes, HeightMap, collision_geoms

LOW, HIGH = (-0.3, -0.3), (0.3, 0.3)


def boxes_of(*geoms: str) -> tuple[Boxes, mujoco.MjData]:
    """Boxes of a model with these geoms, `type="box"` understood."""
    xml = "".join(f'<geom type="box" {geom}/>' for geom in geoms)
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{xml}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return Boxes.of(model, np.arange(model.ngeom)), data


def map_of(*geoms: str) -> HeightMap:
    return HeightMap.of(*boxes_of(*geoms), LOW, HIGH, floor=0.0)


def ring(radius: float, num_walls: int = 24) -> list[str]:
    """Upright walls around a circle, 5 cm high, 3 mm thick: a bowl."""
    half = radius * math.tan(math.pi / num_walls)
    angles = np.linspace(0.0, 360.0, num_walls, endpoint=False)
    return [
        f'size="0.0015 {half} 0.025" pos="{radius * math.cos(a)} {radius * math.sin(a)} 0.025" '
        f'euler="0 0 {math.degrees(a)}"'
        for a in np.radians(angles)
    ]


def grasp_of(thing: list[str], around: list[str], direction: float = 0.0, strength: float = 0.0) -> Grasp:
    boxes, data = boxes_of(*thing)
    obstacles = map_of('size="0.3 0.3 0.0005" pos="0 0 -0.0005"', *around)
    taste = Taste(direction=direction, strength=strength, depth=0.020, across=0.0)
    return find_grasp(boxes.points(data), obstacles, taste, lambda sites: np.zeros(len(sites)))


def test_geoms_that_touch_nothing_are_not_solid() -> None:
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><geom type="plane" size="1 1 1"/><geom type="box" size="1 1 1"/>'
        '<geom type="box" size="1 1 1" contype="0" conaffinity="0"/></worldbody></mujoco>'
    )
    np.testing.assert_array_equal(collision_geoms(model, np.array([0])), [1])


def test_heights_of_a_box_and_of_a_slope() -> None:
    heights = map_of('size="0.05 0.03 0.02" pos="0.1 0 0.02"', 'size="0.1 0.1 0.001" pos="-0.15 0 0.1" euler="0 45 0"')
    # The slope is turned about y: it falls with x, by as much as x grows, from 0.1 at x = -0.15.
    places = np.array([[0.1, 0.0], [0.14, 0.02], [0.1, 0.045], [-0.15, 0.0], [-0.12, 0.0], [-0.18, 0.0]])
    np.testing.assert_allclose(heights.at(places), [0.04, 0.04, 0.0, 0.1, 0.07, 0.13], atol=0.008)


def test_a_wall_thinner_than_a_cell_is_seen() -> None:
    heights = map_of('size="0.0005 0.1 0.05" pos="0.0012 0 0.05"')
    path = np.column_stack([np.linspace(-0.05, 0.05, 41), np.zeros(41)])
    assert heights.at(path).max() == pytest.approx(0.1, abs=0.003)


def test_a_widened_map_has_the_largest_height_around() -> None:
    heights = map_of('size="0.01 0.01 0.02" pos="0 0 0.02"').widened(0.05)
    # The box ends 1 cm from the middle: seen up to 6 cm away, not from 8.
    places = np.array([[0.055, 0.0], [0.0, -0.055], [0.08, 0.0], [0.06, 0.06]])
    np.testing.assert_allclose(heights.at(places), [0.04, 0.04, 0.0, 0.0])


def test_points_reach_to_the_corners() -> None:
    boxes, data = boxes_of('size="0.02 0.01 0.03" pos="0.1 0 0" euler="0 0 90"')
    points = boxes.points(data)
    np.testing.assert_allclose(points.min(axis=0), [0.09, -0.02, -0.03], atol=1e-9)
    np.testing.assert_allclose(points.max(axis=0), [0.11, 0.02, 0.03], atol=1e-9)


@pytest.mark.parametrize("degrees", [0.0, 45.0, 90.0, -22.5])
def test_a_box_is_taken_across_its_narrow_side(degrees: float) -> None:
    # Long side along x at 0 degrees: the fingers open along y, which is yaw 0.
    grasp = grasp_of([f'size="0.045 0.02 0.01" pos="0.1 0 0.01" euler="0 0 {degrees}"'], [])
    expected = math.radians(degrees)
    assert math.remainder(grasp.yaw - expected, math.pi) == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(grasp.position[:2], [0.1, 0.0], atol=0.003)
    assert grasp.width == pytest.approx(0.04, abs=0.002)
    assert grasp.middle == pytest.approx(0.0, abs=0.003)
    assert 0.009 < grasp.position[2] < 0.015  # the fingertips, 9.5 mm lower, stay above the table


def test_a_bowl_is_taken_by_its_wall() -> None:
    grasp = grasp_of(ring(0.05), [])
    wall = grasp.position[:2] + grasp.middle * np.array([-math.sin(grasp.yaw), math.cos(grasp.yaw)])
    assert np.hypot(*wall) == pytest.approx(0.05, abs=0.004)
    assert grasp.width < 0.015


@pytest.mark.parametrize("direction", [0.0, math.pi / 2, math.pi, -math.pi / 2])
def test_taste_chooses_the_side_of_the_bowl(direction: float) -> None:
    grasp = grasp_of(ring(0.05), [], direction, strength=0.05)
    side = math.atan2(grasp.position[1], grasp.position[0])
    assert abs(math.remainder(side - direction, 2 * math.pi)) < math.radians(45.0)


def test_a_grasp_keeps_clear_of_a_neighbour() -> None:
    wall = 'size="0.005 0.2 0.06" pos="0.075 0 0.06"'  # 2 cm beside the bowl, where a finger would go
    free, beside = (grasp_of(ring(0.05), around, direction=0.0, strength=0.03) for around in ([], [wall]))
    assert free.position[0] > 0.03
    along = np.array([-math.sin(beside.yaw), math.cos(beside.yaw)])
    fingertips = beside.position[0] + np.array([-1, 1]) * 0.053 * along[0]
    assert fingertips.max() < 0.07


def test_travel_rises_before_an_obstacle_and_comes_down_at_the_target() -> None:
    hand, target = np.array([0.0, 0.0, 0.1]), np.array([0.3, 0.0, 0.05])

    def height_over(path: np.ndarray) -> np.ndarray:
        return np.where(np.abs(path[:, 0] - 0.1) < 0.03, 0.2, 0.0)

    far = travel(hand, target, height_over, hover=0.04, clearance=0.02)
    # The obstacle begins at x = 0.075 (places are looked at every 1.5 cm): 0.22 less 0.8 for each metre beyond 3 cm.
    assert 0.17 < far[2] < 0.22
    assert far[0] == 0.3
    close = travel(np.array([0.06, 0.0, 0.1]), target, height_over, hover=0.04, clearance=0.02)
    assert close[0] == 0.06  # it is too low to go on
    assert close[2] == pytest.approx(0.22)
    past = travel(np.array([0.16, 0.0, 0.22]), target, height_over, hover=0.04, clearance=0.02)
    assert past[2] == pytest.approx(0.09)  # the funnel's upper end
    there = travel(np.array([0.298, 0.0, 0.06]), target, height_over, hover=0.04, clearance=0.02)
    np.testing.assert_allclose(there, target)


def test_yaw_of_an_opening_direction_ignores_its_sign() -> None:
    for yaw in (-1.5, -0.3, 0.0, 0.7, 1.5):
        opening = np.array([-math.sin(yaw), math.cos(yaw), 0.0])
        assert yaw_of(opening) == pytest.approx(yaw)
        assert yaw_of(-opening) == pytest.approx(yaw)


def test_stretch_is_the_distance_from_shoulder_to_wrist() -> None:
    # Wrist 0.204 above the site and 0.088 closer to the base; shoulder 0.333 above the base: legs of 0.4 and 0.3.
    site = np.array([[0.488, 0.0, 0.333 - 0.204 + 0.3]])
    np.testing.assert_allclose(stretch(site, np.zeros(3)), [0.5])
