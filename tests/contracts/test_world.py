"""What every world promises. A new suite joins by adding its maker to `SUITES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from toy_suite import ToySuite

from sim.adapters import GymnasiumConfig, GymnasiumSuite, RobosuiteConfig, RobosuiteSuite
from sim.libero.suite import LiberoConfig, LiberoSuite
from sim.mujoco_world import MujocoWorld
from sim.tabletop.suite import TabletopConfig, TabletopSuite
from sim.world import Suite
from vla_rl.types import SimError, WorldState

SUITES: dict[str, Callable[[], Suite]] = {
    "toy": ToySuite,
    "tabletop": lambda: TabletopSuite(TabletopConfig(cameras=("agentview", "robot0_eye_in_hand"), image_size=32)),
    "robosuite in the kernel": lambda: RobosuiteSuite(RobosuiteConfig(tasks=("Lift", "Door"), image_size=32)),
    "robosuite": lambda: RobosuiteSuite(RobosuiteConfig(tasks=("Door",), kernel=False, image_size=32)),
    "gymnasium": lambda: GymnasiumSuite(
        GymnasiumConfig(
            tasks=("dot_env:Dot-v0",),
            instructions={"dot_env:Dot-v0": "go up"},
            cameras=("image", "render"),
            proprio_keys=("position",),
            image_size=32,
        )
    ),
    "gymnasium with MuJoCo": lambda: GymnasiumSuite(
        GymnasiumConfig(
            tasks=("Reacher-v5",),
            instructions={"Reacher-v5": "reach the target"},
            success="terminated_with_reward",
            kwargs={"width": 64, "height": 64},
        )
    ),
    "libero": lambda: LiberoSuite(
        LiberoConfig(
            tasks=("libero_goal/7",), cameras=("agentview", "robot0_eye_in_hand"), image_size=32, mesh_quality="lite"
        )
    ),
}
UP = np.array([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0]])


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.libero] if name == "libero" else []) for name in SUITES],
)
def suite(request: pytest.FixtureRequest) -> Suite:
    if request.param == "libero":
        pytest.importorskip("libero")
    return SUITES[request.param]()


def random_chunk(suite: Suite, seed: int, num_steps: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, (num_steps, suite.spec.action_dim))


def any_task(suite: Suite) -> str:
    return "toy/never" if suite.name == "toy" else suite.tasks[0]


def assert_same_state(one: WorldState, other: WorldState) -> None:
    np.testing.assert_array_equal(one.physics, other.physics)
    np.testing.assert_array_equal(one.controller, other.controller)
    np.testing.assert_array_equal(one.fixtures, other.fixtures)
    assert one.num_steps == other.num_steps


def test_observation_has_the_shape_of_the_spec(suite: Suite) -> None:
    world = suite.make_world()
    start = suite.start(any_task(suite), "train", 0)
    world.reset(start)
    observation = world.observe()
    np.testing.assert_array_equal(world.proprio(), observation.proprio)
    assert observation.images.shape == (len(suite.spec.cameras), *suite.spec.image_size, 3)
    assert observation.images.dtype == np.uint8
    assert all(image.std() > 0 for image in observation.images)  # something is drawn
    assert observation.proprio.shape == (suite.spec.proprio_dim,)
    assert observation.proprio.dtype == np.float32
    assert observation.instruction == start.instruction
    assert world.start is start
    assert world.num_steps == 0


def test_every_task_starts_and_steps(suite: Suite) -> None:
    world = suite.make_world()
    for task in suite.tasks:
        world.reset(suite.start(task, "test", 1))
        result = world.step(random_chunk(suite, 0, num_steps=1))
        assert result.num_steps == world.num_steps == 1


def test_same_start_and_actions_give_the_same_episode(suite: Suite) -> None:
    start, other_start = (suite.start(any_task(suite), "train", i) for i in range(2))
    states, images = [], []
    reused = suite.make_world()
    for world in (suite.make_world(), reused, reused):  # a fresh world, another one, and that one after another episode
        world.reset(start)
        world.step(random_chunk(suite, 3))
        states.append(world.save_state())
        images.append(world.observe().images)
        world.reset(other_start)
        world.step(random_chunk(suite, 4))
    for state, image in zip(states[1:], images[1:], strict=True):
        assert_same_state(states[0], state)
        np.testing.assert_array_equal(images[0], image)
    assert not np.array_equal(states[0].physics, reused.save_state().physics)


def test_branches_continue_bit_for_bit_from_any_control_step(suite: Suite) -> None:
    start = suite.start(any_task(suite), "train", 2)
    actions = random_chunk(suite, 5, num_steps=12)
    world, branch = suite.make_world(), suite.make_world()
    world.reset(start)
    saved = [world.save_state()]
    for action in actions:
        world.step(action[None])
        saved.append(world.save_state())
    end = world.observe()
    for step, state in enumerate(saved[:-1]):
        branch.reset(replace(start, snapshot=state))
        assert branch.num_steps == step
        assert_same_state(branch.save_state(), state)
        branch.step(actions[step:])
        assert_same_state(branch.save_state(), saved[-1])
        np.testing.assert_array_equal(branch.observe().proprio, end.proprio)
        np.testing.assert_array_equal(branch.observe().images, end.images)


def test_observing_and_rendering_change_nothing(suite: Suite) -> None:
    start, chunk = suite.start(any_task(suite), "train", 0), random_chunk(suite, 6)
    seen, unseen = suite.make_world(), suite.make_world()
    for world in (seen, unseen):
        world.reset(start)
        for action in chunk:
            world.step(action[None])
            if world is seen:
                world.observe()
                world.render(suite.spec.cameras[0], 20, 28)
    assert_same_state(seen.save_state(), unseen.save_state())


def test_recorded_frames_are_the_first_camera_after_each_control_step(suite: Suite) -> None:
    start, chunk = suite.start(any_task(suite), "train", 0), random_chunk(suite, 7, num_steps=3)
    world = suite.make_world()
    world.reset(start)
    result = world.step(chunk, record_frames=True)
    assert len(result.frames) == result.num_steps == 3
    world.reset(start)
    for action, frame in zip(chunk, result.frames, strict=True):
        assert world.step(action[None]).frames == ()
        np.testing.assert_array_equal(frame, world.render(suite.spec.cameras[0], *frame.shape[:2]))


def test_actions_are_clipped(suite: Suite) -> None:
    start = suite.start(any_task(suite), "train", 0)
    chunk = random_chunk(suite, 8)
    chunk[:, 0], chunk[:, -1] = 1.0, -1.0
    beyond = chunk.copy()
    beyond[:, 0], beyond[:, -1] = 7.0, -3.0
    world = suite.make_world()
    world.reset(start)
    world.step(chunk)
    state = world.save_state()
    world.reset(start)
    world.step(beyond)
    assert_same_state(state, world.save_state())


@pytest.mark.parametrize(
    ("make_chunk", "message"),
    [
        (lambda dim: np.zeros((0, dim)), r"a chunk has shape \(steps >= 1, {dim}\); got \(0, {dim}\)"),
        (lambda dim: np.zeros((2, dim + 1)), r"a chunk has shape \(steps >= 1, {dim}\); got \(2, \d\)"),
        (lambda dim: np.full((2, dim), np.nan), "not finite"),
    ],
)
def test_bad_chunks_are_refused(suite: Suite, make_chunk: Callable[[int], np.ndarray], message: str) -> None:
    world, chunk = suite.make_world(), make_chunk(suite.spec.action_dim)
    world.reset(suite.start(any_task(suite), "train", 0))
    with pytest.raises(ValueError, match=message.format(dim=suite.spec.action_dim)):
        world.step(chunk)
    assert world.num_steps == 0


def test_a_world_without_an_episode_says_so(suite: Suite) -> None:
    world = suite.make_world()
    for use in (world.observe, world.save_state, lambda: world.start, lambda: world.step(random_chunk(suite, 0))):
        with pytest.raises(ValueError, match="reset"):
            use()


def test_unknown_camera_is_refused_with_the_list(suite: Suite) -> None:
    world = suite.make_world()
    world.reset(suite.start(any_task(suite), "train", 0))
    with pytest.raises(ValueError, match=f"no camera 'nowhere'.*{suite.spec.cameras[0]}"):
        world.render("nowhere", 8, 8)


# The toy's tasks are made for these; the code is the same for all suites.


def test_success_ends_the_episode_inside_the_chunk() -> None:
    suite = ToySuite()
    world = suite.make_world()
    world.reset(suite.start("toy/raise", "train", 0))
    result = world.step(UP.repeat(20, axis=0), record_frames=True)
    assert result.success
    assert not result.truncated
    assert 1 < result.num_steps < 20
    assert len(result.frames) == result.num_steps == world.num_steps
    with pytest.raises(ValueError, match=r"toy/raise/train/0 is over after \d+ steps"):
        world.step(UP)


def test_success_is_never_claimed_at_reset() -> None:
    suite = ToySuite()
    world = suite.make_world()
    world.reset(suite.start("toy/now", "train", 0))
    assert world.step(UP.repeat(3, axis=0)).num_steps == 1


def test_time_limit_truncates_inside_the_chunk() -> None:
    suite = ToySuite(horizon=7)
    world = suite.make_world()
    world.reset(suite.start("toy/never", "train", 0))
    assert not world.step(UP.repeat(5, axis=0)).is_done
    result = world.step(UP.repeat(5, axis=0))
    assert (result.num_steps, result.truncated, result.success) == (2, True, False)
    with pytest.raises(ValueError, match="over after 7 steps"):
        world.step(UP)


def test_success_at_the_time_limit_counts_as_success() -> None:
    suite = ToySuite(horizon=1)
    world = suite.make_world()
    world.reset(suite.start("toy/now", "train", 0))
    result = world.step(UP)
    assert result.success
    assert not result.truncated


def test_broken_physics_name_task_start_and_step_and_the_world_recovers() -> None:
    suite = ToySuite()
    world = suite.make_world()
    world.reset(suite.start("toy/crash", "train", 4))
    with pytest.raises(SimError, match=r"toy/crash/train/4 at control step 3 .*BADQ"):
        world.step(UP.repeat(5, axis=0))
    with pytest.raises(ValueError, match="over"):
        world.step(UP)
    world.reset(suite.start("toy/never", "train", 0))
    assert world.step(UP).num_steps == 1


def test_an_impossible_start_is_a_sim_error() -> None:
    suite = ToySuite()
    start = suite.start("toy/never", "train", 0)
    world = suite.make_world()
    with pytest.raises(SimError, match=r"not a valid state in toy/never/train/0 .*BADQPOS"):
        world.reset(replace(start, init=np.full_like(start.init, np.nan)))


def test_a_state_of_another_model_is_refused() -> None:
    toy, tabletop = ToySuite(), TabletopSuite()
    world, other = toy.make_world(), tabletop.make_world()
    world.reset(toy.start("toy/never", "train", 0))
    other.reset(tabletop.start(tabletop.tasks[0], "train", 0))
    with pytest.raises(ValueError, match="restore it with the task"):
        world.restore_state(other.save_state())


def test_orientation_of_the_spec_is_kept() -> None:
    images = {}
    for top_down in (False, True):
        suite = ToySuite(top_down=top_down)
        world = suite.make_world()
        world.reset(suite.start("toy/never", "train", 0))
        images[top_down] = world.observe().images
    np.testing.assert_array_equal(images[True], images[False][:, ::-1])
    bottom, top = images[False][0][:4], images[False][0][-4:]
    assert bottom.mean() > top.mean()  # the floor is grey, the sky black


def test_proprio_is_liberos_layout() -> None:
    suite = ToySuite()
    world = suite.make_world()
    world.reset(suite.start("toy/never", "train", 0))
    held = world.observe().proprio
    world.step(np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]] * 4))
    moved = world.observe().proprio
    assert 0.02 < moved[0] - held[0] < 4 * 0.05  # lags the goal, which is 5 cm ahead at every control step
    np.testing.assert_allclose(moved[1:3], held[1:3], atol=0.01)
    np.testing.assert_allclose(moved[3:6], held[3:6], atol=0.1)
    assert moved[6] > held[6]  # the fingers open in opposite directions
    assert moved[7] < held[7]


def test_a_lagged_observation_shows_an_earlier_instant() -> None:
    suite = ToySuite()
    chunk = random_chunk(suite, 9, num_steps=4)
    start = replace(suite.start("toy/never", "train", 0), init=suite.model.reset_data.qpos.copy())
    plain = suite.make_world()
    lagged = MujocoWorld(plain._scene_of, suite.spec, suite.horizon, robosuite_timing=True)
    for world in (plain, lagged):
        world.reset(start)
    np.testing.assert_array_equal(plain.observe().proprio, lagged.observe().proprio)  # a reset is observed at once
    for world in (plain, lagged):
        world.step(chunk)
    np.testing.assert_array_equal(plain.save_state().physics, lagged.save_state().physics)
    shift = np.abs(plain.observe().proprio[:3] - lagged.observe().proprio[:3]).max()
    assert 1e-5 < shift < 2 * 0.005 * 1.0  # two physics steps at less than 1 m/s
    branch = MujocoWorld(plain._scene_of, suite.spec, suite.horizon, robosuite_timing=True)
    branch.reset(replace(start, snapshot=lagged.save_state()))
    np.testing.assert_array_equal(branch.observe().images, lagged.observe().images)
    np.testing.assert_array_equal(branch.observe().proprio, lagged.observe().proprio)


def test_a_world_needs_time() -> None:
    suite = ToySuite(horizon=0)
    with pytest.raises(ValueError, match="at least one control step"):
        suite.make_world().reset(suite.start("toy/never", "train", 0))
