"""The scripted expert solves every family, also when it is disturbed."""

from __future__ import annotations

import numpy as np
import pytest

from sim.tabletop import TabletopConfig, TabletopSuite
from sim.tabletop.tasks import FAMILIES, Difficulty
from vla_rl.types import Start

TASKS = (
    "pick_up_yellow_cylinder",
    "put_red_cube_on_plate",
    "put_green_cube_in_box",
    "push_blue_cube_to_yellow_target",
    "stack_red_cube_on_blue_cube",
)


def suite_of(task: str, difficulty: Difficulty = "medium", horizon: int = 80) -> TabletopSuite:
    return TabletopSuite(TabletopConfig(tasks=(task,), difficulty=difficulty, horizon=horizon))


def run(suite: TabletopSuite, start: Start, noise: float = 0.0) -> tuple[bool, np.ndarray]:
    """One episode; returns success and the expert's actions, (steps, 7). Noise is executed but not returned."""
    rng = np.random.default_rng(start.index)
    world, expert = suite.make_world(), suite.make_expert(start.task, rng)
    world.reset(start)
    actions = []
    while True:
        action = expert.act(world.data)
        actions.append(action)
        executed = action + noise * np.array([1, 1, 1, 0.2, 0.2, 0.2, 0]) * rng.normal(size=7)
        result = world.step(np.clip(executed, -1.0, 1.0)[None])
        if result.is_done:
            return result.success, np.array(actions)


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
@pytest.mark.parametrize("task", TASKS)
def test_expert_solves_the_task_with_valid_and_vigorous_actions(task: str, difficulty: Difficulty) -> None:
    suite = suite_of(task, difficulty)
    outcomes = [run(suite, suite.start(suite.tasks[0], "test", index)) for index in range(6)]
    assert sum(success for success, _ in outcomes) >= 5
    actions = np.concatenate([actions for _, actions in outcomes])
    assert np.abs(actions).max() <= 1.0
    assert np.quantile(np.abs(actions[:, :3]).max(axis=1), 0.6) > 0.8  # most steps move about as fast as they may


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_expert_solves_95_percent_of_every_family_at_the_default_difficulty(family: str) -> None:
    suite = TabletopSuite(TabletopConfig(tasks=(family,)))
    starts = [suite.start(task, "test", index) for task in suite.tasks for index in range(50)]
    assert np.mean([run(suite, start)[0] for start in starts]) >= 0.95


@pytest.mark.parametrize("task", TASKS)
def test_expert_finds_its_way_under_noise(task: str) -> None:
    suite = suite_of(task, "easy", horizon=120)
    outcomes = [run(suite, suite.start(suite.tasks[0], "test", index), noise=0.3)[0] for index in range(6)]
    assert sum(outcomes) >= 5


def test_expert_goes_after_an_object_that_was_taken_away() -> None:
    suite = suite_of("put_red_cube_on_plate", "easy", horizon=160)
    start = suite.start(suite.tasks[0], "test", 3)
    world, expert = suite.make_world(), suite.make_expert(start.task, np.random.default_rng(0))
    world.reset(start)
    cube = int(world.data.model.joint("red_cube_joint").qposadr[0])
    while world.data.qpos[cube + 2] < start.init[cube + 2] + 0.03:  # until it hangs in the gripper
        assert not world.step(expert.act(world.data)[None]).is_done
    world.data.qpos[cube : cube + 7] = start.init[cube : cube + 7]
    world.step(expert.act(world.data)[None])
    assert expert.act(world.data)[6] == -1.0  # opens again
    result = world.step(expert.act(world.data)[None])
    while not result.is_done:
        result = world.step(expert.act(world.data)[None])
    assert result.success


def test_experts_differ_in_style_and_repeat_by_seed() -> None:
    suite = suite_of("pick_up_yellow_cylinder")
    start = suite.start(suite.tasks[0], "train", 0)
    world = suite.make_world()
    world.reset(start)
    first, again, other = (
        suite.make_expert(start.task, np.random.default_rng(seed)).act(world.data) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
