"""Recording of demonstrations: labels are the expert's, what runs is noisy, everything is a function of the seed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_suite import ToyExpert, ToySuite

from sim.tabletop.suite import TabletopConfig, TabletopSuite
from vla_rl.data.collect import DemosConfig, collect_demonstrations
from vla_rl.data.demos import Demonstration
from vla_rl.data.libero_hdf5 import read_demonstrations
from vla_rl.types import Start, StepResult

UP = ToyExpert().act(None)  # type: ignore[arg-type]
CLEAN = DemosConfig(num_per_task=2, noise=0.0, push_probability=0.0)
NOISY = DemosConfig(num_per_task=2, noise=0.2, push_probability=0.1)


class WatchedSuite(ToySuite):
    """Remembers the starts and the executed actions of each attempt."""

    def __init__(self, *tasks: str, horizon: int = 30) -> None:
        super().__init__(horizon)
        self.tasks = tuple(f"toy/{task}" for task in tasks)
        self.starts: list[Start] = []
        self.executed: list[list[np.ndarray]] = []

    def make_world(self) -> Any:
        world = super().make_world()
        reset, step = world.reset, world.step

        def watched_reset(start: Start) -> None:
            self.starts.append(start)
            self.executed.append([])
            reset(start)

        def watched_step(chunk: np.ndarray) -> StepResult:
            self.executed[-1].append(chunk)
            return step(chunk)

        world.reset, world.step = watched_reset, watched_step  # type: ignore[method-assign, assignment]
        return world


def collect(suite: ToySuite, config: DemosConfig, folder: Path, seed: int = 0) -> list[Demonstration]:
    """Of the suite's only task."""
    collect_demonstrations(suite, config, folder, seed)
    (path,) = folder.iterdir()
    return read_demonstrations(path, suite.spec.cameras)


def test_labels_are_the_experts_while_what_runs_is_noisy(tmp_path: Path) -> None:
    suite = WatchedSuite("raise")
    demos = collect(suite, NOISY, tmp_path)
    assert len(demos) == 2
    for demo, executed, start in zip(demos, suite.executed, suite.starts, strict=True):
        np.testing.assert_array_equal(demo.actions, np.tile(UP, (demo.num_steps, 1)))
        ran = np.concatenate(executed)
        assert ran.shape == demo.actions.shape  # one control step per decision of the expert
        assert np.abs(ran).max() <= 1.0
        np.testing.assert_array_equal(ran[:, 3:], demo.actions[:, 3:])  # rotation and gripper carry no noise
        assert np.all(np.any(ran[:, :3] != demo.actions[:, :3], axis=1))
        assert (demo.task, demo.instruction) == (start.task, start.instruction)


def test_observations_are_those_before_the_action(tmp_path: Path) -> None:
    suite = WatchedSuite("raise")
    demo, *_ = collect(suite, CLEAN, tmp_path)
    world = ToySuite().make_world()
    world.reset(suite.starts[0])
    for t in range(demo.num_steps):
        observation = world.observe()
        np.testing.assert_array_equal(demo.images[t], observation.images)
        np.testing.assert_array_equal(demo.proprio[t], observation.proprio)
        result = world.step(demo.actions[t][None])
    assert result.success


def test_pushes_last_three_control_steps(tmp_path: Path) -> None:
    suite = WatchedSuite("never")
    config = DemosConfig(num_per_task=1, noise=0.0, push_probability=0.1, max_attempts_factor=20.0)
    with pytest.raises(RuntimeError):
        collect(suite, config, tmp_path)
    lengths, num_steps = [], 0
    for executed in suite.executed:
        ran = np.concatenate(executed)[:, :3]
        num_steps += len(ran)
        changes = [0, *(np.flatnonzero(np.any(ran[1:] != ran[:-1], axis=1)) + 1), len(ran)]
        runs = [(ran[a], b - a) for a, b in pairwise(changes)]
        # The run that the time limit cuts off does not count.
        lengths += [length for action, length in runs[:-1] if not np.array_equal(action, UP[:3])]
    assert set(lengths) == {3}
    # 600 control steps; a push begins after 9 others on average and takes 3 itself.
    assert num_steps == 600
    assert 35 <= len(lengths) <= 65


def test_everything_follows_from_the_seed(tmp_path: Path) -> None:
    suites = [WatchedSuite("raise") for _ in range(3)]
    one, same, _ = (
        collect(suite, NOISY, tmp_path / str(i), seed)
        for i, (suite, seed) in enumerate(zip(suites, [3, 3, 4], strict=True))
    )
    for demo, again in zip(one, same, strict=True):
        for name in ("images", "proprio", "actions"):
            np.testing.assert_array_equal(getattr(demo, name), getattr(again, name))
    starts = [[start.key for start in suite.starts] for suite in suites]
    assert starts[0] == starts[1]
    assert len({*starts[0], *starts[2]}) == 4  # another seed shows other starts
    first, second, _, _, other, _ = (attempt[0] for suite in suites for attempt in suite.executed)
    assert not np.array_equal(first, second)  # every attempt has noise of its own
    assert not np.array_equal(first, other)


def test_tasks_do_not_disturb_each_other(tmp_path: Path) -> None:
    """They run on several threads; each file is the same as if its task were alone."""
    config = TabletopConfig(tasks=("push_to",), image_size=16)
    small = DemosConfig(num_per_task=1, noise=0.05, push_probability=0.0)
    names = tuple(task.removeprefix("tabletop/") for task in TabletopSuite(config).tasks[:2])
    for folder, tasks in (("both", names), ("alone", names[1:])):
        suite = TabletopSuite(config.model_copy(update={"tasks": tasks}))
        shares = collect_demonstrations(suite, small, tmp_path / folder, seed=0)
        assert list(shares) == list(suite.tasks)
    assert len(list((tmp_path / "both").iterdir())) == 2
    (path,) = (tmp_path / "alone").iterdir()
    (alone,), (beside,) = (
        read_demonstrations(tmp_path / folder / path.name, config.cameras) for folder in ("alone", "both")
    )
    np.testing.assert_array_equal(alone.images, beside.images)
    np.testing.assert_array_equal(alone.actions, beside.actions)


def test_starts_are_training_starts_and_attempts_are_counted(tmp_path: Path) -> None:
    suite, seen = WatchedSuite("raise"), []
    shares = collect_demonstrations(suite, CLEAN, tmp_path, 0, lambda: seen.append(1))
    assert {start.split for start in suite.starts} == {"train"}
    assert len({start.key for start in suite.starts}) == len(suite.starts) == 2
    assert len(seen) == 2
    assert shares == {"toy/raise": 1.0}


def test_an_expert_that_fails_too_often_ends_it(tmp_path: Path) -> None:
    suite = WatchedSuite("never", horizon=3)
    message = r"solved only 0 of 6 attempts of toy/never, 2 .* asked for; lower demos\.noise or .*, or raise demos\.max"
    with pytest.raises(RuntimeError, match=message):
        collect(suite, CLEAN, tmp_path)
    assert len(suite.executed) == 6  # 3.0 * 2
    assert list(tmp_path.iterdir()) == []
