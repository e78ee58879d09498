"""Puts the rollout engine together from its config, and runs each start of a list once (evaluation, filming)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8
from pydantic import Field

from sim.vec_env import ThreadVecEnv
from sim.world import Suite
from vla_rl.config import ConfigModel
from vla_rl.distributed import num_cores
from vla_rl.policy import Policy, Sampling
from vla_rl.rollout.collector import Batching, Collector, EpisodeRequest
from vla_rl.types import Episode, Start


class RolloutConfig(ConfigModel):
    """How episodes are run; none of this changes what an episode is."""

    num_slots: int = Field(default=64, ge=2)
    """Episodes that run at the same time."""
    num_threads: int | None = Field(default=None, ge=1)
    """Simulation threads; null: one per CPU core."""
    execution_horizon: int = Field(default=8, ge=1)
    """Control steps executed of each predicted chunk, at most the policy's action_horizon. LIBERO recipes: 8."""
    batching: Batching = "waves"
    """Which waiting slots share a policy call: "waves" (of one half, then of the other: bit-reproducible), or
    "ready" (whatever waits: faster where worlds or episodes are uneven)."""


def make_vec_env(suite: Suite, config: RolloutConfig) -> ThreadVecEnv:
    """The worlds of a suite in slots; close it when done."""
    return ThreadVecEnv(suite, num_slots=config.num_slots, num_threads=config.num_threads or num_cores())


def make_collector(env: ThreadVecEnv, policy: Policy, config: RolloutConfig, run_seed: int) -> Collector:
    """The engine over these worlds."""
    return Collector(
        env=env,
        policy=policy,
        execution_horizon=config.execution_horizon,
        run_seed=run_seed,
        batching=config.batching,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """How one episode went; the images that the policy saw are not kept.

    Attributes:
        start: Where it began.
        success: Solved.
        num_steps: Control steps executed.
        crashed: The world failed; neither success nor failure of the policy.
        frames: Recorded images of the first camera, if asked for.
    """

    start: Start
    success: bool
    num_steps: int
    crashed: bool
    frames: Sequence[UInt8[np.ndarray, "height width 3"]] = ()


def requests_of(starts: Sequence[Start]) -> list[EpisodeRequest]:
    """One episode from each start; its position in the sequence fixes its random draws."""
    return [EpisodeRequest(start=start, episode_index=i, group_index=i) for i, start in enumerate(starts)]


def run_episodes(
    collector: Collector,
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run each request exactly once.

    Args:
        collector: The engine.
        requests: What to run, with different episode indices.
        sampling: How the policy acts.
        on_outcome: Called after every episode, in the order in which they end (progress).

    Returns:
        The outcomes in the order of the requests.
    """
    waiting = deque(requests)
    outcomes: dict[int, Outcome] = {}

    def finished(episode: Episode | None, request: EpisodeRequest) -> None:
        outcome = Outcome(
            start=request.start,
            success=episode is not None and episode.success,
            num_steps=0 if episode is None else episode.num_steps,
            crashed=episode is None,
            frames=() if episode is None else episode.frames,
        )
        outcomes[request.episode_index] = outcome
        on_outcome(outcome)

    collector.run(lambda: waiting.popleft() if waiting else None, finished, sampling)
    return [outcomes[request.episode_index] for request in requests]
