"""What every `VecEnv` promises. A new implementation joins by adding its maker to `ENVS`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from toy_suite import ToySuite

from sim.adapters import GymnasiumConfig, GymnasiumSuite
from sim.tabletop.suite import TabletopConfig, TabletopSuite
from sim.vec_env import ThreadVecEnv, VecEnv
from sim.world import Suite
from vla_rl.types import SimError, SlotResult, Start

ENVS: dict[str, Callable[[Suite, int], VecEnv]] = {
    "one thread": lambda suite, num_slots: ThreadVecEnv(suite, num_slots, num_threads=1),
    "two threads": lambda suite, num_slots: ThreadVecEnv(suite, num_slots, num_threads=2),
}
UP = np.array([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0]])
NUM_SLOTS = 3

MakeEnv = Callable[..., VecEnv]


@pytest.fixture(params=ENVS)
def make_env(request: pytest.FixtureRequest) -> Iterator[MakeEnv]:
    envs = []

    def make(suite: Suite | None = None, num_slots: int = NUM_SLOTS) -> VecEnv:
        envs.append(ENVS[request.param](suite or ToySuite(), num_slots))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def make_dot_suite() -> Suite:
    choices = {"tasks": ("dot_env:Dot-v0",), "instructions": {"dot_env:Dot-v0": "go up"}, "proprio_keys": ("position",)}
    return GymnasiumSuite(GymnasiumConfig(**choices))


def start_of(task: str, index: int = 0) -> Start:
    return ToySuite().start(task, "train", index)


def rollout(env: VecEnv, starts: list[Start], chunks: np.ndarray) -> dict[str, list[SlotResult]]:
    """Run every start on whichever slot is free, answering slots as they come."""
    waiting, history = list(starts), {start.key: [] for start in starts}
    running: dict[int, str] = {}
    for slot in range(min(env.num_slots, len(starts))):
        running[slot] = waiting[0].key
        env.reset(slot, waiting.pop(0))
    while running:
        for result in env.wait():
            results = history[running[result.slot]]
            results.append(result)
            if result.observation is not None and len(results) <= len(chunks):
                env.step(result.slot, chunks[len(results) - 1])
            elif waiting:
                running[result.slot] = waiting[0].key
                env.reset(result.slot, waiting.pop(0))
            else:
                del running[result.slot]
    return history


@pytest.mark.parametrize("make_suite", [ToySuite, lambda: TabletopSuite(TabletopConfig(image_size=32)), make_dot_suite])
def test_episodes_equal_those_of_a_single_world(make_env: MakeEnv, make_suite: Callable[[], Suite]) -> None:
    suite = make_suite()
    tasks = [task for task in suite.tasks if task not in ("toy/crash", "toy/now")]
    starts = [suite.start(tasks[i % len(tasks)], "train", i) for i in range(5)]
    chunks = np.random.default_rng(0).uniform(-1.0, 1.0, (3, 4, suite.spec.action_dim))
    history = rollout(make_env(suite), starts, chunks)
    world = suite.make_world()
    for start in starts:
        world.reset(start)
        for i, result in enumerate(history[start.key]):
            if i > 0:
                step = world.step(chunks[i - 1])
                assert result.step is not None
                assert (result.step.num_steps, result.step.success) == (step.num_steps, step.success)
            if result.observation is not None:
                expected = world.observe()
                np.testing.assert_array_equal(result.observation.proprio, expected.proprio)
                np.testing.assert_array_equal(result.observation.images, expected.images)
                assert result.observation.instruction == start.instruction


def test_results_come_in_slot_order_and_carry_times(make_env: MakeEnv) -> None:
    env = make_env()
    for slot in (2, 0, 1):
        env.reset(slot, start_of("toy/never", slot))
    results = env.wait([2, 1, 0])
    assert [result.slot for result in results] == [0, 1, 2]
    assert all(result.step is None and result.error is None for result in results)
    assert all(result.physics_s > 0 and result.render_s > 0 for result in results)
    env.step(1, UP)
    (result,) = env.wait()
    assert result.slot == 1
    assert result.step is not None
    assert result.step.num_steps == 1


def test_waiting_for_one_slot_leaves_the_others(make_env: MakeEnv) -> None:
    env = make_env()
    for slot in range(NUM_SLOTS):
        env.reset(slot, start_of("toy/never", slot))
    assert [result.slot for result in env.wait([1])] == [1]
    assert [result.slot for result in env.wait([0, 2])] == [0, 2]


def test_a_finished_episode_has_no_observation_and_waits_for_a_start(make_env: MakeEnv) -> None:
    env = make_env()
    env.reset(0, start_of("toy/now"))
    env.wait()
    env.step(0, UP.repeat(4, axis=0))
    (result,) = env.wait()
    assert result.observation is None
    assert result.step is not None
    assert (result.step.num_steps, result.step.success) == (1, True)
    with pytest.raises(ValueError, match="slot 0 cannot step: it is over; reset it first"):
        env.step(0, UP)
    env.reset(0, start_of("toy/never"))
    assert env.wait()[0].observation is not None


def test_frames_are_recorded_only_when_asked_for(make_env: MakeEnv) -> None:
    env = make_env()
    for is_recorded in (True, False):
        env.reset(0, start_of("toy/never"), record_frames=is_recorded)
        env.wait()
        env.step(0, UP.repeat(3, axis=0))
        (result,) = env.wait()
        assert result.step is not None
        assert len(result.step.frames) == (3 if is_recorded else 0)


def test_a_crashed_world_is_reported_and_its_slot_usable(make_env: MakeEnv) -> None:
    env = make_env()
    env.reset(0, start_of("toy/crash"))
    env.reset(1, start_of("toy/never"))
    env.wait([0, 1])
    for slot in (0, 1):
        env.step(slot, UP.repeat(4, axis=0))
    crashed, healthy = env.wait([0, 1])
    assert isinstance(crashed.error, SimError)
    assert "toy/crash/train/0 at control step 3" in str(crashed.error)
    assert crashed.observation is None
    assert crashed.step is None
    assert healthy.error is None
    with pytest.raises(ValueError, match="reset it first"):
        env.step(0, UP)
    env.reset(0, start_of("toy/never"))
    assert env.wait()[0].error is None


def test_any_other_error_is_raised_with_slot_and_start(make_env: MakeEnv) -> None:
    env = make_env()
    for slot in (0, 1):
        env.reset(slot, start_of("toy/never", 5))
    env.wait([0, 1])
    env.step(0, np.zeros((2, 3)))
    env.step(1, UP)
    with pytest.raises(ValueError, match="a chunk has shape") as caught:
        env.wait([0, 1])
    assert caught.value.__notes__ == ["raised by the world in slot 0, start toy/never/train/5"]
    (result,) = env.wait()  # the other slot's answer is not lost
    assert result.slot == 1
    env.reset(0, start_of("toy/never"))
    assert env.wait()[0].observation is not None


def test_requests_out_of_turn_are_refused(make_env: MakeEnv) -> None:
    env = make_env()
    with pytest.raises(ValueError, match="slot 0 cannot step: it is empty"):
        env.step(0, UP)
    with pytest.raises(ValueError, match="slot 9 does not exist; slots are 0 to 2"):
        env.reset(9, start_of("toy/never"))
    with pytest.raises(ValueError, match="nothing to wait for"):
        env.wait()
    with pytest.raises(ValueError, match=r"nothing to wait for in slots \[1\]"):
        env.wait([1])
    env.reset(0, start_of("toy/never"))
    for request in (lambda: env.reset(0, start_of("toy/never")), lambda: env.step(0, UP)):
        with pytest.raises(ValueError, match="wait for it first"):
            request()
    env.wait()


def test_the_callers_chunk_may_change_after_the_request(make_env: MakeEnv) -> None:
    env = make_env()
    proprios = []
    for is_changed in (False, True):
        env.reset(0, start_of("toy/never"))
        env.wait()
        chunk = UP.repeat(5, axis=0)
        env.step(0, chunk)
        if is_changed:
            chunk[:] = -1.0
        observation = env.wait()[0].observation
        assert observation is not None
        proprios.append(observation.proprio)
    np.testing.assert_array_equal(*proprios)


def test_close_is_idempotent_and_final(make_env: MakeEnv) -> None:
    env = make_env()
    env.reset(0, start_of("toy/never"))
    env.close()
    env.close()
    with pytest.raises(ValueError, match="closed"):
        env.reset(1, start_of("toy/never"))


class _BlockedSuite(ToySuite):
    """Its task `raise` does not get past the reset until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def make_world(self) -> object:
        world = super().make_world()
        reset = world.reset

        def slow_reset(start: Start) -> None:
            if start.task == "toy/raise":
                assert self.release.wait(30.0)
            reset(start)

        world.reset = slow_reset  # type: ignore[method-assign]
        return world


def test_a_slow_world_does_not_hold_up_the_others_and_is_named_at_the_time_limit() -> None:
    suite = _BlockedSuite()
    env = ThreadVecEnv(suite, num_slots=4, num_threads=2)
    try:
        env.reset(0, suite.start("toy/raise", "train", 7))
        for slot in (1, 2, 3):
            env.reset(slot, suite.start("toy/never", "train", slot))
        assert [result.slot for result in env.wait([1, 2, 3])] == [1, 2, 3]
        with pytest.raises(TimeoutError, match=r"within 0\.05 s from slots: 0 \(toy/raise/train/7\)"):
            env.wait([0], timeout_s=0.05)
        suite.release.set()
        assert env.wait([0])[0].observation is not None
    finally:
        suite.release.set()
        env.close()


@pytest.mark.parametrize(("num_slots", "num_threads"), [(0, 1), (1, 0)])
def test_sizes_must_be_positive(num_slots: int, num_threads: int) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        ThreadVecEnv(ToySuite(), num_slots, num_threads)
