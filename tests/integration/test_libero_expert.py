"""The scripted expert solves LIBERO's tasks of picking and placing, also when it is disturbed.

The whole table: pytest -m long -s tests/integration/test_libero_expert.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("libero")

from sim.libero.expert import LiberoExpert, has_expert
from sim.libero.suite import LiberoConfig, LiberoSuite
from vla_rl.types import Split

pytestmark = [pytest.mark.libero, pytest.mark.slow]

SUITES = ("libero_object", "libero_spatial", "libero_goal")
NUM_STARTS = 20
PUSH_PROBABILITY = 0.03
"""As in the recording of demonstrations (`DemosConfig`)."""


@dataclass(frozen=True)
class Outcome:
    success: bool
    actions: np.ndarray  # (steps, 7), without the noise


def suite_of(task: str) -> LiberoSuite:
    return LiberoSuite(LiberoConfig(tasks=(task,)))


def run(suite: LiberoSuite, index: int, noise: float = 0.0, split: Split = "test") -> Outcome:
    """One episode of the suite's only task. With noise also bursts, as `collect_demonstrations` has them."""
    (task,) = suite.tasks
    rng = np.random.default_rng(index)
    world, expert = suite.make_world(), suite.make_expert(task, rng)
    world.reset(suite.start(task, split, index))
    actions = []
    push, push_steps = np.zeros(3), 0
    while True:
        actions.append(expert.act(world.data))
        executed = actions[-1].copy()
        if noise and push_steps == 0 and rng.random() < PUSH_PROBABILITY:
            push, push_steps = rng.uniform(-1.0, 1.0, size=3), 3
        if push_steps:
            executed[:3], push_steps = push, push_steps - 1
        else:
            executed[:3] += noise * rng.standard_normal(3)
        result = world.step(np.clip(executed, -1.0, 1.0)[None])
        if result.is_done:
            return Outcome(result.success, np.array(actions))


@pytest.mark.parametrize("task", ["libero_object/5", "libero_spatial/5"])
def test_expert_solves_published_starts_with_valid_and_vigorous_actions(task: str) -> None:
    suite = suite_of(task)
    outcomes = [run(suite, index) for index in range(3)]
    assert all(outcome.success for outcome in outcomes)
    actions = np.concatenate([outcome.actions for outcome in outcomes])
    assert np.abs(actions).max() <= 1.0
    assert set(np.unique(actions[:, 6])) == {-1.0, 1.0}  # it opens and it closes
    assert np.median(np.abs(actions[:, :3]).max(axis=1)) > 0.6  # most steps move about as fast as they may


@pytest.mark.parametrize("task", ["libero_object/5", "libero_spatial/5"])
def test_expert_solves_a_start_of_our_own_under_noise(task: str) -> None:
    assert run(suite_of(task), index=1, noise=0.1, split="train").success


def test_expert_goes_after_an_object_that_was_taken_away() -> None:
    suite = suite_of("libero_object/5")
    (task,) = suite.tasks
    start = suite.start(task, "test", 0)
    world, expert = suite.make_world(), suite.make_expert(task, np.random.default_rng(0))
    world.reset(start)
    model = world.data.model
    bottle = int(model.jnt_qposadr[model.body_jntadr[suite.scene(task).record.goal[0].body]])
    before = world.data.qpos[bottle : bottle + 7].copy()
    while world.data.qpos[bottle + 2] < before[2] + 0.03:  # until it hangs in the gripper
        assert not world.step(expert.act(world.data)[None]).is_done
    world.data.qpos[bottle : bottle + 7] = before
    world.step(expert.act(world.data)[None])
    assert expert.act(world.data)[6] == -1.0  # opens again
    result = world.step(expert.act(world.data)[None])
    while not result.is_done:
        result = world.step(expert.act(world.data)[None])
    assert result.success


def test_experts_differ_in_style_and_repeat_by_seed() -> None:
    suite = suite_of("libero_spatial/5")
    (task,) = suite.tasks
    world = suite.make_world()
    world.reset(suite.start(task, "test", 0))
    first, again, other = (suite.make_expert(task, np.random.default_rng(seed)).act(world.data) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_a_task_without_expert_is_named_with_what_is_missing() -> None:
    suite = suite_of("libero_goal/3")
    assert has_expert(suite.scene("libero_goal/3")) is False
    with pytest.raises(ValueError, match=r"libero_goal/3 \(open_the_top_drawer_and_put_the_bowl_inside\).*in_site"):
        suite.make_expert("libero_goal/3", np.random.default_rng(0))


def test_a_stove_to_put_something_on_is_a_task_with_expert() -> None:
    assert has_expert(suite_of("libero_goal/1").scene("libero_goal/1")) is True


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_expert_solves_80_percent_of_the_published_starts_of_20_tasks(
    noise: float, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {}
    for task in LiberoSuite(LiberoConfig(tasks=SUITES)).tasks:
        suite = suite_of(task)  # one at a time: all models together take gigabytes
        if not has_expert(suite.scene(task)):
            continue
        outcomes = [run(suite, index, noise) for index in range(NUM_STARTS)]
        steps = [len(outcome.actions) for outcome in outcomes if outcome.success]
        rates[task] = len(steps) / NUM_STARTS
        with capsys.disabled():
            mean, most = (f"{np.mean(steps):.0f}", max(steps)) if steps else ("-", "-")
            name = suite.scene(task).task.name
            print(
                f"\nnoise {noise:g}  {task:17s} {len(steps):2d}/{NUM_STARTS}  steps {mean} (max {most})  {name}", end=""
            )
    assert sum(rate >= 0.8 for rate in rates.values()) >= 20, rates


def test_the_suite_makes_this_expert() -> None:
    suite = suite_of("libero_spatial/5")
    assert isinstance(suite.make_expert("libero_spatial/5", np.random.default_rng(0)), LiberoExpert)
