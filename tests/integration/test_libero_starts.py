"""Starts of LIBERO tasks: the published ones as the published evaluation sees them, and our own."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from sim.libero.domain import LiberoDomain
from sim.libero.package import find_tasks, read_init_states
from sim.libero.suite import LiberoConfig, LiberoSuite
from sim.mujoco_world import MujocoWorld
from vla_rl.types import Start

pytest.importorskip("libero")
pytestmark = [pytest.mark.libero, pytest.mark.slow]

TASK = "libero_goal/3"


@pytest.fixture(scope="module")
def suite() -> LiberoSuite:
    return LiberoSuite(LiberoConfig(tasks=(TASK,)))


def test_test_starts_are_the_published_ones_after_ten_dummy_steps(suite: LiberoSuite) -> None:
    states = read_init_states(find_tasks([TASK])[0].init_states)
    assert len(states) == 50
    scene, world = suite.scene(TASK), suite.make_world()
    nq, nv = scene.model.mj_model.nq, scene.model.mj_model.nv
    for index in (0, 49):
        start = suite.start(TASK, "test", index)
        np.testing.assert_array_equal(start.init[: nq + nv], states[index][1:])
        assert start.instruction == "open the top drawer and put the bowl inside"
        world.reset(start)
        assert world.num_steps == 0
        assert world.data.time == pytest.approx(0.5)  # ten control steps at 20 Hz
        assert np.abs(world.data.qvel).max() < 0.5
    with pytest.raises(ValueError, match=r"libero_goal/3 has 50 published starts; there is no number 50"):
        suite.start(TASK, "test", 50)


def test_furniture_stands_where_the_published_evaluation_puts_it(suite: LiberoSuite) -> None:
    """LIBERO's own resets, with the model compiled anew at each of them, against our draws."""
    from libero.libero.envs.env_wrapper import ControlEnv

    task = find_tasks([TASK])[0]
    with contextlib.redirect_stdout(io.StringIO()):
        env = ControlEnv(bddl_file_name=str(task.bddl), use_camera_obs=False, has_offscreen_renderer=False)
        env.seed(0)
        theirs = []
        for _ in range(2):
            env.reset()
            bodies = map(env.sim.model._model.body, suite.scene(TASK).record.fixtures)
            theirs.append(np.array([[*body.pos, *body.quat] for body in bodies]))
    for index, poses in enumerate(theirs):
        np.testing.assert_array_equal(suite.scene(TASK).fixture_poses(suite.start(TASK, "test", index)), poses)
    assert np.abs(theirs[0] - theirs[1]).max() > 1e-4


def test_generated_starts_are_new_valid_and_reproducible(suite: LiberoSuite) -> None:
    scene, world = suite.scene(TASK), suite.make_world()
    starts = [suite.start(TASK, "train", index) for index in range(4)] + [suite.start(TASK, "validation", 0)]
    published = [suite.start(TASK, "test", index) for index in range(50)]
    for start in starts:
        world.reset(start)
        assert world.num_steps == 0
        assert not scene.is_success(world.data)
        assert np.abs(world.data.qvel).max() < 0.5
        positions = positions_of(start)
        others = [positions_of(other) for other in (*starts, *published) if other is not start]
        assert min(np.abs(positions - other).max() for other in others) > 1e-3
    again = LiberoSuite(LiberoConfig(tasks=(TASK,))).start(TASK, "train", 2)
    np.testing.assert_array_equal(again.init, starts[2].init)
    drawn = LiberoDomain(find_tasks([TASK])[0], has_textures=False)
    np.testing.assert_array_equal(drawn.draw(5)[0], drawn.draw(5)[0])  # whatever was drawn before


def positions_of(start: Start) -> np.ndarray:
    """Positions of the objects after settling; the time and the nine joints of the robot come before them."""
    assert start.snapshot is not None
    return start.snapshot.physics[10:40]


def test_published_training_starts_go_round(suite: LiberoSuite) -> None:
    published = LiberoSuite(LiberoConfig(tasks=(TASK,), starts="published"))
    first, wrapped = published.start(TASK, "train", 3), published.start(TASK, "train", 53)
    np.testing.assert_array_equal(first.init, suite.start(TASK, "test", 3).init)
    np.testing.assert_array_equal(first.init, wrapped.init)
    assert (first.index, wrapped.index) == (3, 3)


def test_a_start_of_another_task_is_refused(suite: LiberoSuite) -> None:
    world: MujocoWorld = suite.make_world()
    start = suite.start(TASK, "test", 0)
    bad = Start(task=TASK, instruction="", split="test", index=0, init=start.init[:-1], seed=0)
    with pytest.raises(ValueError, match=r"this scene needs \d+ positions, \d+ velocities and 7 numbers for each of 3"):
        world.reset(bad)
