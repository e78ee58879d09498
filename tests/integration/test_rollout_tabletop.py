"""On the real suite: neither the number of slots nor that of threads changes what happens in an episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from sim.tabletop.suite import TabletopConfig, TabletopSuite
from vla_rl.policy import ActOutput, Policy, Sampling
from vla_rl.rollout.collector import Batching, EpisodeRequest
from vla_rl.rollout.engine import RolloutConfig, make_collector, make_vec_env, requests_of
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.types import Episode, Observation

NUM_STARTS = 12
SUITE = TabletopSuite(TabletopConfig(tasks=("pick_up_red_cube", "stack"), image_size=32, horizon=16))


@dataclass(eq=False)
class PixelPolicy(Policy):
    """Actions are a function of every bit of the observation, so whatever changes a pixel changes the episode."""

    action_horizon: int = 8
    action_dim: int = 7

    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        words = [[int(item.images.sum()), *item.proprio.view(np.uint32).tolist()] for item in observations]
        shape = (self.action_horizon, self.action_dim)
        actions = np.stack([np.random.default_rng(word).uniform(-1.0, 1.0, shape) for word in words])
        sample = actions.reshape(len(actions), -1)
        return ActOutput(actions=actions, sample=sample, logprobs=np.zeros(sample.shape, dtype=np.float32))


def run(num_slots: int, num_threads: int, batching: Batching) -> list[Episode]:
    config = RolloutConfig(num_slots=num_slots, num_threads=num_threads, batching=batching, execution_horizon=6)
    env = make_vec_env(SUITE, config)
    try:
        collector = make_collector(env, PixelPolicy(), config, run_seed=0)
        num_per_task = NUM_STARTS // len(SUITE.tasks)
        waiting = deque(requests_of(evaluation_starts(SUITE, "test", num_per_task)))
        episodes: dict[int, Episode] = {}

        def on_episode(episode: Episode | None, request: EpisodeRequest) -> None:
            assert episode is not None
            episodes[request.episode_index] = episode

        collector.run(lambda: waiting.popleft() if waiting else None, on_episode, Sampling())
        return [episodes[i] for i in range(len(episodes))]
    finally:
        env.close()


@pytest.fixture(scope="module")
def reference() -> list[Episode]:
    episodes = run(num_slots=2, num_threads=1, batching="waves")
    assert len(episodes) == NUM_STARTS
    assert [decision.num_steps for decision in episodes[0].decisions] == [6, 6, 4]
    assert len({decision.sample.tobytes() for episode in episodes for decision in episode.decisions}) == NUM_STARTS * 3
    return episodes


@pytest.mark.parametrize(
    ("num_slots", "num_threads", "batching"),
    [(2, 2, "ready"), (5, 1, "ready"), (5, 2, "waves"), (16, 1, "waves"), (16, 2, "ready")],
)
def test_slots_and_threads_do_not_change_an_episode(
    reference: list[Episode], num_slots: int, num_threads: int, batching: Batching
) -> None:
    episodes = run(num_slots, num_threads, batching)
    assert len(episodes) == len(reference)
    for episode, expected in zip(episodes, reference, strict=True):
        assert episode.start.key == expected.start.key
        assert (episode.success, episode.truncated) == (expected.success, expected.truncated)
        assert len(episode.decisions) == len(expected.decisions)
        for decision, other in zip(episode.decisions, expected.decisions, strict=True):
            assert decision.num_steps == other.num_steps
            np.testing.assert_array_equal(decision.observation.images, other.observation.images)
            np.testing.assert_array_equal(decision.observation.proprio, other.observation.proprio)
            np.testing.assert_array_equal(decision.sample, other.sample)
