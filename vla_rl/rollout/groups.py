"""The groups of an iteration: draw starts, run each `group_size` times, keep mixed groups, stop when there are enough.

Groups are started as slots fall free. How many to start is foreseen from the running share of kept groups, so that few
slots idle at the end and few groups are surplus; what is surplus is carried over (`GroupBuffer`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from pydantic import Field

from vla_rl.algos.policy_gradient import AlgoConfig
from vla_rl.config import ConfigModel
from vla_rl.policy import Sampling
from vla_rl.rollout.collector import Collector, EpisodeRequest
from vla_rl.rollout.filters import Group, GroupBuffer, GroupFilterConfig
from vla_rl.rollout.sources import TrainStarts
from vla_rl.types import Episode, Start


class DynamicSamplingConfig(ConfigModel):
    """How long an iteration keeps drawing groups."""

    filter: GroupFilterConfig = GroupFilterConfig()
    """Which groups are learned from."""
    max_draw_factor: float = Field(default=4.0, ge=1.0)
    """Limit of an iteration's draws, in multiples of `groups_per_iteration`. SimpleVLA-RL: until the epoch ends."""
    max_starved_iterations: int = Field(default=5, ge=1)
    """The run stops after this many iterations in a row without a single group to learn from."""


@dataclass(kw_only=True)
class DrawState:
    """Position in the stream of starts and the running share of kept groups: all that a resumed run needs."""

    next_group: int = 0
    next_episode: int = 0
    kept_share: float = 0.5


class GroupRollouts:
    """Draws the groups of each iteration; the position in the stream of starts goes on from one to the next."""

    def __init__(
        self, collector: Collector, starts: TrainStarts, algo: AlgoConfig, config: DynamicSamplingConfig
    ) -> None:
        self.buffer = GroupBuffer(config.filter)
        self.state = DrawState()
        self._collector = collector
        self._starts = starts
        self._algo = algo
        self._config = config

    def collect(self, policy_version: int) -> tuple[list[Group], dict[str, float]]:
        """Groups to learn from, at most `groups_per_iteration`, and what happened on the way."""
        self.buffer.begin_iteration(policy_version)
        draw = _Draw(self.buffer, self._starts, self.state, self._algo, self._config)
        sampling = Sampling(temperature=self._algo.temperature)
        self._collector.run(draw.next_request, draw.on_episode, sampling, policy_version)
        groups = self.buffer.take(self._algo.groups_per_iteration)
        return groups, {**self.buffer.metrics(), **draw.metrics()}


class _Draw:
    """The books of one iteration: groups under way, members still to be started."""

    def __init__(
        self,
        buffer: GroupBuffer,
        starts: TrainStarts,
        state: DrawState,
        algo: AlgoConfig,
        config: DynamicSamplingConfig,
    ) -> None:
        self.buffer = buffer
        self.starts = starts
        self.state = state
        self.algo = algo
        self.max_groups = round(config.max_draw_factor * algo.groups_per_iteration)
        self.num_drawn = 0
        self.members_to_start: deque[EpisodeRequest] = deque()
        self.members: dict[int, list[Episode]] = defaultdict(list)
        self.under_way: dict[int, Start] = {}
        self.outcomes: dict[str, list[float]] = defaultdict(list)
        self.num_steps = 0
        self.num_decisions = 0

    def next_request(self) -> EpisodeRequest | None:
        if not self.members_to_start:
            if not self._wants_group():
                return None
            self._begin_group()
        return self.members_to_start.popleft()

    def _wants_group(self) -> bool:
        expected = self.buffer.num_groups + self.state.kept_share * len(self.under_way)
        return self.num_drawn < self.max_groups and expected < self.algo.groups_per_iteration

    def _begin_group(self) -> None:
        state = self.state
        start = self.starts.start(state.next_group)
        for member in range(self.algo.group_size):
            episode_index = state.next_episode + member
            self.members_to_start.append(
                EpisodeRequest(start=start, episode_index=episode_index, group_index=state.next_group)
            )
        self.under_way[state.next_group] = start
        state.next_group += 1
        state.next_episode += self.algo.group_size
        self.num_drawn += 1

    def on_episode(self, episode: Episode | None, request: EpisodeRequest) -> None:
        members = self.members[request.group_index]
        members.append(episode or _crashed(request))
        if episode is not None:
            self.outcomes[request.start.task].append(float(episode.success))
            self.num_steps += episode.num_steps
            self.num_decisions += len(episode.decisions)
        if len(members) < self.algo.group_size:
            return
        del self.under_way[request.group_index]
        del self.members[request.group_index]
        verdict = self.buffer.add(sorted(members, key=lambda member: member.episode_index))
        # Roughly the mean over the last 32 groups.
        self.state.kept_share += (float(verdict == "kept") - self.state.kept_share) / 32

    def metrics(self) -> dict[str, float]:
        """Success by task at the sampling temperature and sizes, before the filter."""
        all_outcomes = [outcome for outcomes in self.outcomes.values() for outcome in outcomes]
        metrics = {f"rollout/success/{task}": sum(o) / len(o) for task, o in sorted(self.outcomes.items())}
        if all_outcomes:
            metrics["rollout/success"] = sum(all_outcomes) / len(all_outcomes)
            metrics["rollout/episode_steps"] = self.num_steps / len(all_outcomes)
        metrics["rollout/groups_drawn"] = float(self.num_drawn)
        metrics["rollout/draw_limit_reached"] = float(self.num_drawn >= self.max_groups)
        metrics["rollout/episodes"] = float(len(all_outcomes))
        metrics["rollout/control_steps"] = float(self.num_steps)
        metrics["rollout/decisions"] = float(self.num_decisions)
        return metrics


def _crashed(request: EpisodeRequest) -> Episode:
    """Stands for an episode whose world crashed; neither success nor truncated, so the filter removes it."""
    return Episode(
        start=request.start, episode_index=request.episode_index, group_index=request.group_index, policy_version=-1
    )
