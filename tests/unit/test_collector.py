"""Early ends, immediate refill, nothing wasted after an end; slots, batches and timing do not change an episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fakes import FakePolicy, FakeVecEnv, fake_start

from vla_rl.policy import Sampling
from vla_rl.rollout.collector import Batching, Collector, EpisodeRequest
from vla_rl.rollout.engine import requests_of, run_episodes
from vla_rl.types import Episode, SimError, Start

# The deterministic policy pushes by (7 * (start + num_steps + total) + k) % 5 in step k of a chunk. Start 5 at its
# first observation: sum 5, so 35 % 5 = 0: pushes 0, 1, 2, 3. Start 6: 42 % 5 = 2: pushes 2, 3, 4, 0.
STARTS = [fake_start(index, goal=goal) for index, goal in enumerate([3, 30, 0, 11, 5, 8, 1, 30, 2, 19, 6, 40])]


def collector(
    env: FakeVecEnv, policy: FakePolicy | None = None, batching: Batching = "ready", **settings: Any
) -> Collector:
    settings = {"execution_horizon": 3, "run_seed": 0, **settings}
    return Collector(env=env, policy=policy or FakePolicy(), batching=batching, **settings)


def run(collector: Collector, starts: Sequence[Start], record_frames: bool = False) -> dict[int, Episode | None]:
    """Episodes by their index."""
    waiting = deque(replace(request, record_frames=record_frames) for request in requests_of(starts))
    episodes: dict[int, Episode | None] = {}

    def on_episode(episode: Episode | None, request: EpisodeRequest) -> None:
        assert request.episode_index not in episodes
        assert episode is None or episode.start is request.start
        episodes[request.episode_index] = episode

    collector.run(lambda: waiting.popleft() if waiting else None, on_episode, Sampling(temperature=1.6))
    return episodes


def story(episode: Episode | None) -> tuple | None:
    """All that an episode is, comparable."""
    if episode is None:
        return None
    decisions = [
        (d.observation.proprio.tolist(), d.sample.tolist(), d.logprobs.tolist(), d.temperature, d.num_steps)
        for d in episode.decisions
    ]
    return (episode.start.key, episode.episode_index, episode.success, episode.truncated, decisions)


def test_success_inside_a_chunk_ends_the_episode_there() -> None:
    # Start 5, goal 8: pushes 0, 1, 2 (execution horizon 3), total 3 after 3 steps. Then 7 * (5 + 3 + 3) = 77 and
    # 77 % 5 = 2: pushes 2, 3, total 8 in control step 5, the second of its chunk.
    (episode,) = run(collector(FakeVecEnv(num_slots=2)), [fake_start(5, goal=8)]).values()
    assert episode is not None
    assert (episode.success, episode.truncated) == (True, False)
    assert [decision.num_steps for decision in episode.decisions] == [3, 2]
    assert episode.num_steps == 5
    assert episode.decisions[0].sample.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # the whole chunk, of which 3 steps ran
    assert [decision.observation.proprio.tolist() for decision in episode.decisions] == [[5, 0, 0], [5, 3, 3]]


def test_the_time_limit_is_no_success() -> None:
    (episode,) = run(collector(FakeVecEnv(num_slots=1, horizon=4)), [fake_start(5, goal=100)]).values()
    assert episode is not None
    assert (episode.success, episode.truncated) == (False, True)
    assert [decision.num_steps for decision in episode.decisions] == [3, 1]


def test_an_episode_records_how_it_came_about() -> None:
    request = EpisodeRequest(start=fake_start(0), episode_index=7, group_index=4)
    requests, episodes = deque([request]), []
    engine = collector(FakeVecEnv(num_slots=1))
    engine.run(
        lambda: requests.popleft() if requests else None,
        lambda episode, request: episodes.append(episode),
        Sampling(temperature=1.6),
        policy_version=12,
    )
    (episode,) = episodes
    assert (episode.episode_index, episode.group_index, episode.policy_version) == (7, 4, 12)
    assert {decision.temperature for decision in episode.decisions} == {1.6}
    np.testing.assert_allclose(episode.decisions[0].logprobs, np.full(8, -np.log(5) / 1.6), rtol=1e-6)
    assert episode.frames == []
    # One reset and as many chunks as decisions, at 1 s of physics and 2 s of drawing each.
    num_answers = 1 + len(episode.decisions)
    times = engine.timings.take()
    assert (times["time/physics_s"], times["time/render_s"]) == (num_answers, 2 * num_answers)


def test_frames_are_kept_if_asked_for() -> None:
    (episode,) = run(collector(FakeVecEnv(num_slots=1)), [fake_start(5, goal=8)], record_frames=True).values()
    assert episode is not None
    assert len(episode.frames) == episode.num_steps == 5


@pytest.mark.parametrize("batching", ["ready", "waves"])
def test_a_finished_slot_is_refilled_before_anything_else_is_waited_for(batching: Batching) -> None:
    env, policy = FakeVecEnv(num_slots=4), FakePolicy()
    episodes = run(collector(env, policy, batching), STARTS)
    assert sorted(episodes) == list(range(len(STARTS)))
    # The fake environment refuses a step after an end, so all that could be wasted is inference: one row a decision.
    assert len(policy.seen) == sum(len(episode.decisions) for episode in episodes.values() if episode is not None)
    last_reset = max(i for i, (name, *_) in enumerate(env.log) if name == "reset")
    while_starts_are_left = [pending for name, _, pending in env.log[:last_reset] if name == "wait"]
    assert while_starts_are_left == [[0, 1, 2, 3]] * len(while_starts_are_left)
    assert len(while_starts_are_left) > 5


@pytest.mark.parametrize("is_stochastic", [False, True])
def test_slots_batching_and_timing_do_not_change_an_episode(is_stochastic: bool) -> None:
    def stories(num_slots: int, batching: Batching, seed: int) -> list[tuple | None]:
        env = FakeVecEnv(num_slots, seed=seed)
        episodes = run(collector(env, FakePolicy(is_stochastic=is_stochastic), batching, run_seed=3), STARTS)
        return [story(episodes[i]) for i in range(len(STARTS))]

    expected = stories(1, "ready", 0)
    assert len({outcome[2:4] for outcome in expected if outcome is not None}) == 2  # successes and failures
    for num_slots in (2, 3, 5, 16):
        for batching in ("ready", "waves"):
            for seed in (1, 2):  # another order of answers
                assert stories(num_slots, batching, seed) == expected


def test_draws_belong_to_the_run_seed_and_the_episode() -> None:
    def samples(run_seed: int, starts: Sequence[Start]) -> list[list[int]]:
        engine = collector(FakeVecEnv(num_slots=2), FakePolicy(is_stochastic=True), run_seed=run_seed)
        episodes = run(engine, starts)
        return [episodes[i].decisions[0].sample.tolist() for i in range(len(starts))]  # type: ignore[union-attr]

    same_start = [fake_start(0, goal=30)] * 2
    first, second = samples(0, same_start)
    assert first != second
    assert samples(0, same_start) == [first, second]
    assert samples(1, same_start) != [first, second]


def test_waves_take_turns() -> None:
    env = FakeVecEnv(num_slots=5)
    run(collector(env, batching="waves"), STARTS)
    waits = [(slots, pending) for name, slots, pending in env.log if name == "wait"]
    for slots, pending in waits:
        assert slots == [slot for slot in pending if slot % 2 == slots[0] % 2]  # a whole half, as far as it runs
    for (before, _), (slots, pending) in pairwise(waits):
        assert slots[0] % 2 != before[0] % 2 or len({slot % 2 for slot in pending}) == 1
    assert waits[0] == ([0, 2, 4], [0, 1, 2, 3, 4])


def test_a_crash_is_handed_over_as_none_and_frees_its_slot() -> None:
    starts = [fake_start(5, goal=30), fake_start(6, goal=30, crash_at=2), fake_start(7, goal=30)]
    env = FakeVecEnv(num_slots=1)
    engine = collector(env)
    episodes = run(engine, starts)
    assert [episodes[i] is None for i in range(3)] == [False, True, False]
    assert (engine.num_crashed, engine.num_finished) == (1, 3)
    assert ("reset", 0, starts[2].key) in env.log


@pytest.mark.parametrize("batching", ["ready", "waves"])
def test_too_many_crashes_stop_the_run(batching: Batching) -> None:
    starts = [fake_start(i, goal=30, crash_at=int(i % 7 == 0)) for i in range(20)]  # 0, 7 and 14: 3 of 20
    engine = collector(FakeVecEnv(num_slots=2), batching=batching, max_crashed_fraction=0.15)
    assert len(run(engine, starts)) == 20  # 3 is not more than 0.15 * 20
    # Fewer than 20 episodes never stop a run; at the 20th, 3 > 0.14 * 20 = 2.8. It must be a crash, so start 21 is one.
    strict = collector(FakeVecEnv(num_slots=2), batching=batching, max_crashed_fraction=0.14)
    assert len(run(strict, starts)) == 20
    with pytest.raises(
        SimError, match=r"^4 of 21 episodes crashed, .* 0\.14; the last one: fake/push/train/21 crashed"
    ):
        run(strict, [fake_start(21, crash_at=1)])


def test_requests_may_dry_up_and_come_again() -> None:
    """A source that waits for an episode to end before it knows whether it wants another."""
    num_asked, finished = 0, []

    def next_request() -> EpisodeRequest | None:
        nonlocal num_asked
        if num_asked > len(finished) or num_asked == 4:
            return None
        num_asked += 1
        return EpisodeRequest(start=fake_start(num_asked), episode_index=num_asked, group_index=0)

    engine = collector(FakeVecEnv(num_slots=3))
    engine.run(next_request, lambda episode, request: finished.append(request.episode_index), Sampling())
    assert finished == [1, 2, 3, 4]


def test_outcomes_come_in_the_order_of_the_requests_each_once() -> None:
    starts = [*STARTS, fake_start(99, crash_at=1)]
    seen = []
    engine = collector(FakeVecEnv(num_slots=5))
    outcomes = run_episodes(engine, requests_of(starts), Sampling(), lambda outcome: seen.append(outcome.start.key))
    assert [outcome.start for outcome in outcomes] == starts
    assert sorted(seen) == sorted(start.key for start in starts)
    assert seen != [start.key for start in starts]  # they ended in another order
    assert [outcome.crashed for outcome in outcomes] == [False] * 12 + [True]
    assert (outcomes[-1].success, outcomes[-1].num_steps) == (False, 0)
    assert outcomes[1].num_steps == 10  # goal 30 is out of reach: the time limit


def test_nothing_to_run_is_nothing_run() -> None:
    env = FakeVecEnv(num_slots=2)
    assert run_episodes(collector(env), [], Sampling()) == []
    assert env.log == []


@pytest.mark.parametrize("execution_horizon", [0, 5])
def test_more_cannot_be_executed_than_is_predicted(execution_horizon: int) -> None:
    with pytest.raises(ValueError, match=rf"is {execution_horizon}, but the policy predicts 4 .* from 1 to 4"):
        collector(FakeVecEnv(num_slots=1), execution_horizon=execution_horizon)


def test_policy_and_suite_must_have_the_same_actions() -> None:
    with pytest.raises(ValueError, match=r"have 7 entries, the suite's 2 \(push, nothing\)"):
        collector(FakeVecEnv(num_slots=1), FakePolicy(action_dim=7))
