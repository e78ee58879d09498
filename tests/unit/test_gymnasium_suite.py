"""Gymnasium environments as worlds: what is mapped, what is refused."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import dot_env
import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from sim.adapters import GymnasiumConfig, GymnasiumSuite
from sim.adapters.gymnasium_env import check_action_space, checked_picture, entry, scale_action
from sim.adapters.home_thread import HomeThread
from sim.adapters.replay_world import ReplayWorld
from vla_rl.types import SimError

DOT = "gymnasium/Dot-v0"
TO_GOAL = np.array([[1.0, 0.5]])  # a tenth of (1, 1) per step


def dot_suite(**changes: Any) -> GymnasiumSuite:
    choices: dict[str, Any] = {
        "tasks": ("Dot-v0",),
        "instructions": {"Dot-v0": "push the dot into the corner"},
        "cameras": ("image",),
        "proprio_keys": ("position",),
        "image_size": 24,
    }
    return GymnasiumSuite(GymnasiumConfig(**{**choices, **changes}))


def begun(suite: GymnasiumSuite, index: int = 0) -> ReplayWorld:
    world = suite.make_world()
    world.reset(suite.start(suite.tasks[0], "train", index))
    return world


def test_the_interface_is_the_environments() -> None:
    spec = dot_suite(cameras=("render", "image")).spec
    assert spec.cameras == ("render", "image")
    assert spec.proprio_names == ("position_0", "position_1")
    assert spec.action_names == ("action_0", "action_1")
    assert spec.control_rate_hz == 10.0
    assert spec.image_orientation == "top_down"
    assert dot_suite(proprio_keys=(), control_rate_hz=2.5).spec.control_rate_hz == 2.5
    assert dot_suite(proprio_keys=()).spec.proprio_dim == 0


def test_actions_span_the_bounds() -> None:
    space = dot_env.DotEnv.action_space  # [-1, 1] and [0, 4]
    np.testing.assert_array_equal(scale_action(np.array([0.5, -0.5]), space), [0.5, 1.0])
    np.testing.assert_array_equal(scale_action(np.array([-1.0, 1.0]), space), [-1.0, 4.0])
    narrow = Box(-0.1, 0.3, (1,), np.float32)
    for extreme in (-1.0, 1.0):
        assert narrow.contains(scale_action(np.array([extreme]), narrow))


def test_an_observation_is_the_environments() -> None:
    suite = dot_suite(cameras=("image", "render"))
    world = begun(suite)
    seen = world.observe()
    env = gymnasium.make("Dot-v0")
    expected, _ = env.reset(seed=world.start.seed)
    np.testing.assert_array_equal(seen.images[0], expected["image"])
    np.testing.assert_array_equal(seen.proprio, expected["position"])
    assert seen.instruction == "push the dot into the corner"
    # The picture of render() has 48 pixels, one of them white: a quarter of the pixel that covers it.
    assert seen.images[1].max(axis=(0, 1)).tolist() == [round((255 + 3 * other) / 4) for other in (20, 60, 20)]
    world.step(np.array([[0.0, 0.0]]))  # the middle of [0, 4] is standstill
    expected = env.step(np.array([0.0, 2.0]))[0]
    np.testing.assert_array_equal(world.observe().proprio, expected["position"])


def test_success_ends_the_episode_inside_the_chunk() -> None:
    world = begun(dot_suite())
    result = world.step(TO_GOAL.repeat(30, axis=0))
    assert (result.success, result.truncated) == (True, False)
    assert 3 <= result.num_steps <= 9  # 0.5 +- 0.2 in tenths, and some wind
    position = world.observe().proprio
    assert np.abs(position - dot_env.GOAL).max() < 0.25


def test_success_may_be_the_end_with_a_reward() -> None:
    assert begun(dot_suite(success="terminated_with_reward")).step(TO_GOAL.repeat(30, axis=0)).success
    suite = dot_suite(success="terminated_with_reward", kwargs={"leaves": True})
    result = begun(suite).step(np.full((30, 2), -1.0))
    assert (result.success, result.truncated) == (False, True)
    assert result.num_steps < 15


def test_success_that_the_environment_does_not_tell_is_an_error() -> None:
    world = begun(dot_suite(success="success"))
    with pytest.raises(ValueError, match=r"does not tell info\['success'\] \(it tells: is_success\); set 'success' to"):
        world.step(TO_GOAL)


def test_the_time_limit_is_the_environments_or_the_configs() -> None:
    still = np.zeros((70, 2))
    assert begun(dot_suite()).step(still).num_steps == 60
    result = begun(dot_suite(horizon=65)).step(still)
    assert (result.num_steps, result.truncated) == (65, True)


def test_randomness_outside_the_seed_is_found_out() -> None:
    world = begun(dot_suite(kwargs={"jitter": 1e-6}))
    world.step(np.zeros((3, 2)))
    with pytest.raises(SimError, match="randomness that does not come from the seed"):
        world.restore_state(world.save_state())


def test_starts_differ_and_stay() -> None:
    suite = dot_suite()
    positions = {}
    for split in ("train", "test"):
        for index in range(2):
            world = suite.make_world()
            world.reset(suite.start(DOT, split, index))
            positions[split, index] = tuple(world.observe().proprio.tolist())
    assert len(set(positions.values())) == 4
    assert tuple(begun(dot_suite(), 1).observe().proprio.tolist()) == positions["train", 1]


def test_data_needs_mujoco() -> None:
    with pytest.raises(ValueError, match="gymnasium/Dot-v0 has no MuJoCo data"):
        _ = begun(dot_suite()).data


def test_a_mujoco_environment_shows_its_data() -> None:
    suite = GymnasiumSuite(
        GymnasiumConfig(
            tasks=("InvertedPendulum-v5",),
            instructions={"InvertedPendulum-v5": "balance"},
            success="terminated_with_reward",
            proprio_keys=("observation",),
            kwargs={"width": 32, "height": 32},
        )
    )
    world = begun(suite)
    result = world.step(np.full((100, 1), 1.0))
    assert (result.success, result.truncated) == (False, True)  # the pole falls
    assert result.num_steps < 30
    np.testing.assert_array_equal(world.observe().proprio[:2], world.data.qpos.astype(np.float32))
    saved = world.save_state()
    assert saved.physics[0] == world.data.time > 0.0
    assert world.observe().images.std() > 0


def test_there_is_no_expert() -> None:
    with pytest.raises(ValueError, match="no scripted expert"):
        dot_suite().make_expert(DOT, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("Dott-v0",), "instructions": {"Dott-v0": ""}}, r"cannot make 'Dott-v0'.*Dott.*doesn't exist"),
        ({"tasks": ("no_module:X-v0",), "instructions": {"no_module:X-v0": ""}}, "No module named 'no_module'"),
        ({"kwargs": {"jiter": 1}}, r"cannot make 'Dot-v0' with \{'jiter': 1\}: .*unexpected keyword argument 'jiter'"),
        ({"tasks": ("CartPole-v1",), "instructions": {"CartPole-v1": ""}, "cameras": ("render",), "proprio_keys": ()},
         r"action space Discrete\(2\); only a Box"),
        ({"cameras": ("left",)}, "no entry 'left'; there is: image, position"),
        ({"cameras": ("position",)}, r"camera 'position' shows float32 of shape \(2,\), but an RGB image"),
        ({"proprio_keys": ("observation",)}, "no entry 'observation'; there is: image, position"),
        ({"tasks": ("Dot-v0", "Line-v0"), "instructions": {"Dot-v0": "", "Line-v0": ""}, "horizon": 9,
          "control_rate_hz": 10.0}, r"Line-v0 has the interface .*action_dim=3.*Dot-v0 has .*action_dim=2.*their own"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dot_suite(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instructions": {"dot": "go"}}, "Dot-v0 has no instruction; write one under 'instructions'"),
        ({"kwargs": {"render_mode": "human"}}, "'render_mode' is set by the suite; use the field 'cameras'"),
        ({"kwargs": {"max_episode_steps": 5}}, "'max_episode_steps' is set by the suite; use the field 'horizon'"),
    ],
)
def test_mistakes_in_the_config_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dot_suite(**changes)


class LineEnv(dot_env.DotEnv):
    """Has another action space, no rate and no time limit."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = Box(-1.0, 1.0, (3,), np.float64)


gymnasium.register("Line-v0", entry_point=LineEnv)


def test_rates_and_limits_must_come_from_somewhere() -> None:
    line: dict[str, Any] = {"tasks": ("Line-v0",), "instructions": {"Line-v0": "draw"}}
    with pytest.raises(ValueError, match="does not tell its control rate; set 'control_rate_hz'"):
        dot_suite(**line)
    with pytest.raises(ValueError, match="no time limit of its own; set 'horizon'"):
        dot_suite(**line, control_rate_hz=5.0)
    assert dot_suite(**line, control_rate_hz=5.0, horizon=3).spec.action_dim == 3


def test_action_spaces_and_pictures() -> None:
    assert check_action_space("task", Box(-1.0, 1.0, (4,))) == 4
    for space in (Discrete(3), Box(-1.0, 1.0, (2, 2)), Box(0, 5, (2,), np.int64)):
        with pytest.raises(ValueError, match="only a Box of real numbers with one axis"):
            check_action_space("task", space)
    with pytest.raises(ValueError, match="without bounds"):
        check_action_space("task", Box(-np.inf, np.inf, (2,)))
    assert checked_picture("eye", np.zeros((4, 5, 3), np.uint8)).shape == (4, 5, 3)
    for picture in (np.zeros((4, 5), np.uint8), np.zeros((3, 4, 5), np.uint8), np.zeros((4, 5, 3)), None, []):
        with pytest.raises(ValueError, match="camera 'eye' shows"):
            checked_picture("eye", picture)
    assert entry(np.arange(3), "observation").tolist() == [0, 1, 2]


def test_an_environment_lives_in_one_thread_and_its_thread_ends_with_it() -> None:
    class HomeEnv(dot_env.DotEnv):
        homes: set[int] = set()  # noqa: RUF012
        num_closed = 0

        def _observe(self) -> dict[str, np.ndarray]:
            self.homes.add(threading.get_ident())
            return super()._observe()

        def render(self) -> np.ndarray:
            self.homes.add(threading.get_ident())
            return super().render()

        def close(self) -> None:
            self.homes.add(threading.get_ident())
            HomeEnv.num_closed += 1

    gymnasium.register("Home-v0", entry_point=HomeEnv, max_episode_steps=9)
    suite = dot_suite(tasks=("Home-v0",), instructions={"Home-v0": "stay"}, cameras=("render",))
    HomeEnv.homes.clear()
    HomeEnv.num_closed = 0
    world = begun(suite)
    for use in (partial(world.step, np.zeros((2, 2))), world.observe):
        user = threading.Thread(target=use)
        user.start()
        user.join()
    thread = next(thread for thread in threading.enumerate() if thread.ident in HomeEnv.homes)
    del world, user, use
    gc.collect()
    thread.join(timeout=10.0)
    assert not thread.is_alive()
    assert (len(HomeEnv.homes), HomeEnv.num_closed) == (1, 1)
    gymnasium.registry.pop("Home-v0")


def test_a_home_thread_hands_over_results_and_errors() -> None:
    home = HomeThread("home")
    assert home.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        home.run(lambda: 1 / 0)
    assert home.run(lambda: 3) == 3
    home.stop()
