"""The tabletop suite: names, starts, scenes, success tests. Lengths in metres."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import mujoco
import numpy as np
import pytest

from sim.rendering import free_renderers
from sim.tabletop import TabletopConfig, TabletopScene, TabletopSuite
from sim.tabletop.instructions import TEMPLATES
from sim.tabletop.objects import parse_object
from sim.tabletop.panda import HOME_QPOS
from sim.tabletop.placement import HOVER, RANGES
from sim.tabletop.scene import TABLE_HEIGHT
from sim.tabletop.suite import select_tasks
from sim.tabletop.tasks import FAMILIES, TASKS, Difficulty

DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")
ONE_PER_FAMILY = (
    "pick_up_red_cube",
    "put_blue_cube_on_plate",
    "put_yellow_cylinder_in_box",
    "push_red_cube_to_green_target",
    "stack_red_cube_on_blue_cube",
)
RED_CUBE_QPOS = 9
"""First entry of the red cube's free joint: 7 arm joints and 2 fingers come before."""


def suite_of(*tasks: str, difficulty: Difficulty = "easy", **options: object) -> TabletopSuite:
    return TabletopSuite(TabletopConfig(tasks=tasks, difficulty=difficulty, **options))


def data_of(scene: TabletopScene, suite: TabletopSuite, index: int = 0) -> mujoco.MjData:
    data = mujoco.MjData(scene.model.mj_model)
    scene.place(data, suite.start(f"tabletop/{scene.task.name}", "test", index))
    return data


# --- Names -----------------------------------------------------------------------------------------------------------


def test_families_names_and_all_select_tasks() -> None:
    assert [task.name for task in select_tasks(["stack_blue_cube_on_red_cube", "pick_up"])] == [
        "pick_up_red_cube",
        "pick_up_blue_cube",
        "pick_up_green_cube",
        "pick_up_yellow_cylinder",
        "stack_blue_cube_on_red_cube",
    ]
    assert len(select_tasks(["all"])) == len(TASKS)
    assert {task.family for task in TASKS.values()} == set(FAMILIES)


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'pick_up_red_cub'; did you mean 'pick_up_red_cube'.*stack_blue_cube_on_red_cube"
    ):
        TabletopConfig(tasks=("pick_up_red_cub",))
    with pytest.raises(ValueError, match="no task given"):
        TabletopConfig(tasks=())


def test_unknown_object_lists_the_colours() -> None:
    with pytest.raises(ValueError, match=r"'pink_cube'.*red, blue"):
        parse_object("pink_cube")


def test_suite_refuses_tasks_and_starts_that_it_does_not_have() -> None:
    suite = suite_of("pick_up_red_cube")
    with pytest.raises(ValueError, match="tabletop/pick_up_red_cube"):
        suite.start("tabletop/pick_up_blue_cube", "test", 0)
    with pytest.raises(ValueError, match="indices from 0"):
        suite.start("tabletop/pick_up_red_cube", "test", -1)


# --- The instruction is needed ---------------------------------------------------------------------------------------


def test_default_tasks_share_one_model() -> None:
    suite = TabletopSuite()
    assert len(suite.tasks) == 4
    assert len({id(suite.scene(task).model) for task in suite.tasks}) == 1


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_scene_offers_something_else_to_do(difficulty: Difficulty) -> None:
    for task in TASKS.values():
        objects = {*task.scene_objects(difficulty), ""}
        others = [other for other in TASKS.values() if other is not task and {other.item, other.place} <= objects]
        assert any(other.item != task.item for other in others), task.name
        assert any(other.item == task.item for other in others), task.name


def test_paraphrases_belong_to_the_start() -> None:
    plain, varied = suite_of("put_red_cube_on_plate"), suite_of("put_red_cube_on_plate", paraphrases=True)
    task = plain.tasks[0]
    assert {plain.start(task, "train", i).instruction for i in range(30)} == {"put the red cube on the plate"}
    sentences = [varied.start(task, "train", i).instruction for i in range(30)]
    assert sentences == [varied.start(task, "train", i).instruction for i in range(30)]
    assert set(sentences) == {t.format(item="red cube", place="plate") for t in TEMPLATES["put_on"]}
    # The wording changes nothing else.
    np.testing.assert_array_equal(plain.start(task, "train", 5).init, varied.start(task, "train", 5).init)


# --- Starts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_starts_are_apart_inside_the_area_and_unsolved(difficulty: Difficulty) -> None:
    suite, ranges = suite_of("all", difficulty=difficulty), RANGES[difficulty]
    for task in suite.tasks:
        scene = suite.scene(task)
        model = scene.model.mj_model
        for index in range(5):
            data = data_of(scene, suite, index)
            mujoco.mj_kinematics(model, data)
            assert not scene.is_success(data), f"{task} {index}"
            spots = {item: data.body(item.name).xpos for item in scene.objects}
            for item, (x, y, z) in spots.items():
                assert ranges.x[0] <= x <= ranges.x[1]
                assert abs(y) <= ranges.y
                assert z == pytest.approx(TABLE_HEIGHT + item.rest_height)
            for (a, spot_a), (b, spot_b) in itertools.combinations(spots.items(), 2):
                assert math.dist(spot_a, spot_b) > a.footprint_radius + b.footprint_radius
            grip = data.site("gripper0_grip_site")
            assert (np.abs(grip.xpos - HOVER) <= np.array(ranges.hover) + 5e-4).all()
            np.testing.assert_allclose(grip.xmat.reshape(3, 3)[:, 2], [0.0, 0.0, -1.0], atol=1e-3)


def test_starts_are_reproducible_and_splits_differ() -> None:
    first, second = suite_of("pick_up"), suite_of("pick_up")
    task = first.tasks[0]
    inits = {}
    for split in ("train", "validation", "test"):
        for index in (0, 1):
            start = first.start(task, split, index)
            np.testing.assert_array_equal(start.init, second.start(task, split, index).init)
            inits[start.key] = tuple(start.init)
    assert len(set(inits.values())) == 6
    # Starts do not depend on which other tasks are selected, or on what was asked before.
    alone = suite_of("pick_up_red_cube").start(task, "test", 1)
    assert tuple(alone.init) == inits[alone.key]


def test_arm_noise_can_be_switched_off() -> None:
    suite = suite_of("pick_up_red_cube", randomise_arm=False)
    arms = {tuple(suite.start(suite.tasks[0], "train", i).init[:7]) for i in range(3)}
    assert len(arms) == 1


@pytest.mark.parametrize("task", ONE_PER_FAMILY)
def test_nothing_moves_after_the_start(task: str) -> None:
    suite = suite_of(task, difficulty="hard")
    world = suite.make_world()
    world.reset(suite.start(suite.tasks[0], "test", 0))
    grip = suite.scene(suite.tasks[0]).model.grip_site
    before, hand = world.data.xpos.copy(), world.data.site_xpos[grip].copy()
    world.step(np.zeros((20, 7)))
    names = [item.name for item in suite.scene(suite.tasks[0]).objects]
    ids = [suite.scene(suite.tasks[0]).model.mj_model.body(name).id for name in names]
    assert np.abs(world.data.xpos[ids] - before[ids]).max() < 1e-3
    assert np.abs(world.data.site_xpos[grip] - hand).max() < 1e-3


def test_a_start_of_another_scene_is_refused() -> None:
    suite = suite_of("pick_up_red_cube", "push_red_cube_to_green_target")
    scene = suite.scene("tabletop/pick_up_red_cube")
    with pytest.raises(ValueError, match="init has shape"):
        scene.place(
            mujoco.MjData(scene.model.mj_model), suite.start("tabletop/push_red_cube_to_green_target", "test", 0)
        )


# --- Success tests, by hand ------------------------------------------------------------------------------------------

Edit = Callable[[mujoco.MjData], None]
OPEN, HOLDING = (0.04, -0.04), (0.02, -0.02)


def put(x: float, y: float, z: float, fingers: tuple[float, float] = OPEN) -> Edit:
    """Put the red cube somewhere; receptacles are at (0, 0), the blue cube at (0.1, 0)."""

    def edit(data: mujoco.MjData) -> None:
        data.mocap_pos[:, :2] = 0.0
        data.qpos[RED_CUBE_QPOS : RED_CUBE_QPOS + 3] = x, y, TABLE_HEIGHT + z
        data.qpos[RED_CUBE_QPOS + 7 : RED_CUBE_QPOS + 10] = 0.1, 0.0, TABLE_HEIGHT + 0.02
        data.qpos[7:9] = fingers

    return edit


@pytest.mark.parametrize(
    ("task", "edit", "expected"),
    [
        ("pick_up_red_cube", put(0.0, 0.0, 0.069), False),  # rests at 0.02, must be above 0.07
        ("pick_up_red_cube", put(0.0, 0.0, 0.071), True),
        ("put_red_cube_on_plate", put(0.04, 0.0, 0.028), True),  # 8 mm plate + half a cube
        ("put_red_cube_on_plate", put(0.04, 0.04, 0.028), False),  # 57 mm from the centre of a plate of 55 mm
        ("put_red_cube_on_plate", put(0.04, 0.0, 0.040), False),  # in the air
        ("put_red_cube_on_plate", put(0.04, 0.0, 0.028, HOLDING), False),
        ("put_red_cube_in_box", put(0.02, -0.02, 0.024), True),
        ("put_red_cube_in_box", put(0.02, -0.02, 0.024, HOLDING), False),
        ("put_red_cube_in_box", put(0.02, -0.02, 0.045), False),  # above the rim of 30 mm
        ("put_red_cube_in_box", put(0.02, -0.07, 0.020), False),  # beside the box
        ("push_red_cube_to_green_target", put(0.03, 0.03, 0.020, HOLDING), True),  # 42 mm < 45 mm
        ("push_red_cube_to_green_target", put(0.04, 0.03, 0.020), False),  # 50 mm
        ("push_red_cube_to_green_target", put(0.0, 0.0, 0.050), False),  # lifted
        ("stack_red_cube_on_blue_cube", put(0.1, 0.01, 0.060), True),
        ("stack_red_cube_on_blue_cube", put(0.1, 0.01, 0.060, HOLDING), False),
        ("stack_red_cube_on_blue_cube", put(0.1, 0.03, 0.060), False),
        ("stack_red_cube_on_blue_cube", put(0.1, 0.0, 0.075), False),
    ],
)
def test_success(task: str, edit: Edit, expected: bool) -> None:
    suite = suite_of(task)
    scene = suite.scene(suite.tasks[0])
    data = data_of(scene, suite)
    edit(data)
    assert scene.is_success(data) is expected


# --- The model -------------------------------------------------------------------------------------------------------


def test_arm_is_robosuites_and_only_primitives_are_drawn() -> None:
    scene = suite_of("pick_up_red_cube").scene("tabletop/pick_up_red_cube")
    model = scene.model.mj_model
    data = mujoco.MjData(model)
    data.qpos[:7] = HOME_QPOS
    mujoco.mj_kinematics(model, data)
    # Where robosuite 1.4's own Panda has its grip site in this pose, with the base at the same place.
    np.testing.assert_allclose(data.site("gripper0_grip_site").xpos, [-0.1028, 0.0, 1.0110], atol=1e-4)
    # Masses of links 1 to 7, hand, gripper and two fingers with their tips, as in robosuite's files.
    moving = [model.body(f"robot0_link{i}").mass[0] for i in range(1, 8)] + [model.body("robot0_right_hand").mass[0]]
    assert moving == [3.0, 3.0, 2.0, 2.0, 2.0, 1.5, 0.5, 0.5]
    assert model.nmesh == 0
    assert model.ngeom < 50


def test_observation_has_liberos_layout_and_shows_the_cube() -> None:
    suite = suite_of("pick_up_red_cube", cameras=("agentview", "robot0_eye_in_hand"), image_size=64)
    world = suite.make_world()
    world.reset(suite.start(suite.tasks[0], "test", 0))
    observation = world.observe()
    free_renderers()
    assert observation.images.shape == (2, 64, 64, 3)
    assert observation.proprio.shape == (8,)
    np.testing.assert_allclose(observation.proprio[:3], world.data.site("gripper0_grip_site").xpos, atol=1e-6)
    np.testing.assert_allclose(observation.proprio[6:], [0.02, -0.02], atol=1e-6)
    red, green, blue = np.moveaxis(observation.images[0].astype(int), -1, 0)
    # Bottom row first: the table is brown and below, the wall is blue and above.
    assert (red[0] > blue[0]).all()
    assert (blue[-1] > red[-1]).mean() > 0.5
    is_cube = (red > 100) & (green < 60) & (blue < 60)
    rows, columns = np.nonzero(is_cube)
    assert np.ptp(rows) >= 4
    assert 4 <= np.ptp(columns) <= 8
