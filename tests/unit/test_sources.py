"""Training starts are a function of (seed, position), every task gets its share, and evaluation never meets them."""

from __future__ import annotations

from collections import Counter

import pytest
from fakes import FakePool

from sim.tabletop.suite import TabletopConfig, TabletopSuite
from vla_rl.rollout.sources import TrainStarts, evaluation_starts

POOL = FakePool("a", "b", "c")


def keys(starts: TrainStarts, num: int) -> list[str]:
    return [starts.start(group).key for group in range(num)]


def test_a_start_is_a_function_of_seed_and_position() -> None:
    forwards = keys(TrainStarts(POOL, seed=1), 30)
    another = TrainStarts(POOL, seed=1)
    backwards = [another.start(group).key for group in reversed(range(30))]
    assert backwards[::-1] == forwards
    assert keys(TrainStarts(POOL, seed=2), 30) != forwards


def test_every_round_has_every_task_once_in_changing_order_and_no_start_comes_twice() -> None:
    starts = [TrainStarts(POOL, seed=0).start(group) for group in range(60)]
    rounds = [[start.task for start in starts[i : i + 3]] for i in range(0, 60, 3)]
    assert all(sorted(tasks) == list(POOL.tasks) for tasks in rounds)
    assert len({tuple(tasks) for tasks in rounds}) > 3
    assert len({start.key for start in starts}) == 60
    assert {start.split for start in starts} == {"train"}


@pytest.mark.parametrize("num_starts", [1, 4])
def test_a_limited_pool_is_gone_through_evenly_in_changing_order(num_starts: int) -> None:
    source = TrainStarts(POOL, seed=0, num_starts_per_task=num_starts)
    drawn = [source.start(group) for group in range(3 * num_starts * 5)]  # five times through
    count = Counter(start.key for start in drawn)
    assert count == {f"{task}/train/{i}": 5 for task in POOL.tasks for i in range(num_starts)}
    orders = {
        tuple(start.index for start in drawn if start.task == task)[i * num_starts : (i + 1) * num_starts]
        for task in POOL.tasks
        for i in range(5)
    }
    assert all(sorted(order) == list(range(num_starts)) for order in orders)  # each once before any comes again
    assert len(orders) > 1 or num_starts == 1


def test_evaluation_takes_each_start_once_with_the_tasks_mixed() -> None:
    starts = evaluation_starts(POOL, "test", 2)
    assert [start.key for start in starts] == [f"fake/{task}/test/{index}" for index in (0, 1) for task in "abc"]


def test_training_never_meets_an_evaluation_start() -> None:
    suite = TabletopSuite(TabletopConfig(tasks=("pick_up_red_cube", "put_red_cube_on_plate")))
    source = TrainStarts(suite, seed=0)
    training = [source.start(group) for group in range(40)]
    pools = [training, evaluation_starts(suite, "validation", 20), evaluation_starts(suite, "test", 20)]
    names = {start.key for pool in pools for start in pool}
    placements = {start.init.tobytes() for pool in pools for start in pool}
    assert len(names) == len(placements) == 120
