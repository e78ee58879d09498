"""How many groups an iteration draws, what it keeps, what it carries over, and where the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from fakes import FakePolicy, FakePool, FakeVecEnv
from tabular import decision

from vla_rl.algos.policy_gradient import AlgoConfig
from vla_rl.policy import Sampling
from vla_rl.rollout.collector import Batching, Collector, EpisodeRequest
from vla_rl.rollout.filters import Group, GroupFilterConfig
from vla_rl.rollout.groups import DrawState, DynamicSamplingConfig, GroupRollouts
from vla_rl.rollout.sources import TrainStarts
from vla_rl.types import Episode

Outcome = bool | None
"""Success, failure, or None for a crash."""

SOLVED, FAILED, MIXED = [True] * 4, [False] * 4, [True, False, True, False]
POOL = FakePool("a", "b")


class ScriptedCollector(Collector):
    """Episodes end as the script of their group says, in the order of their start, or the newest first."""

    def __init__(self, script: Callable[[int], list[Outcome]], num_slots: int, newest_first: bool) -> None:
        super().__init__(env=FakeVecEnv(num_slots), policy=FakePolicy(), execution_horizon=4, run_seed=0)
        self.script = script
        self.newest_first = newest_first
        self.requests: list[EpisodeRequest] = []
        self.sampling: list[Sampling] = []

    def run(
        self,
        next_request: Callable[[], EpisodeRequest | None],
        on_episode: Callable[[Episode | None, EpisodeRequest], None],
        sampling: Sampling,
        policy_version: int = 0,
    ) -> None:
        self.sampling.append(sampling)
        running: list[EpisodeRequest] = []
        while True:
            while len(running) < self.env.num_slots and (request := next_request()) is not None:
                running.append(request)
                self.requests.append(request)
            if not running:
                return
            request = running.pop(-1 if self.newest_first else 0)
            success = self.script(request.group_index)[request.episode_index % 4]
            on_episode(None if success is None else _episode(request, success, policy_version), request)


def _episode(request: EpisodeRequest, success: bool, version: int) -> Episode:
    return Episode(
        start=request.start,
        episode_index=request.episode_index,
        group_index=request.group_index,
        policy_version=version,
        decisions=[decision([0], [0.0], num_steps=3), decision([0], [0.0], num_steps=2)],
        success=success,
        truncated=not success,
    )


def rollouts(
    script: Callable[[int], list[Outcome]], num_slots: int = 64, newest_first: bool = False, **config: Any
) -> tuple[GroupRollouts, ScriptedCollector]:
    """Two groups of four members per iteration."""
    collector = ScriptedCollector(script, num_slots, newest_first)
    algo = AlgoConfig(groups_per_iteration=2, group_size=4, temperature=1.6)
    return GroupRollouts(collector, TrainStarts(POOL, seed=0), algo, DynamicSamplingConfig(**config)), collector


def indices(groups: list[Group]) -> list[int]:
    return [group[0].group_index for group in groups]


def test_mixed_groups_are_kept_surplus_is_carried_over_and_then_nothing_is_drawn() -> None:
    # Two groups are wanted and half of them are expected to be kept, so four are begun at once: 0.5 * 3 < 2 <= 0.5 * 4.
    draw, collector = rollouts(lambda group: MIXED)
    groups, metrics = draw.collect(policy_version=0)
    assert len(groups) == 2
    assert metrics["rollout/groups_drawn"] == metrics["groups/kept"] == 4
    assert metrics["groups/surplus"] == 2
    again, metrics = draw.collect(policy_version=1)
    assert sorted(indices(groups + again)) == [0, 1, 2, 3]
    assert {episode.policy_version for group in again for episode in group} == {0}
    assert metrics["groups/carried"] == 2
    assert metrics["rollout/groups_drawn"] == metrics["rollout/episodes"] == 0
    assert len(collector.requests) == 16
    draw.collect(policy_version=2)
    assert len(collector.requests) > 16


def test_what_is_too_old_to_be_carried_is_dropped() -> None:
    draw, _ = rollouts(lambda group: MIXED)
    draw.collect(policy_version=0)
    _, metrics = draw.collect(policy_version=2)
    assert metrics["groups/dropped_too_old"] == 2
    assert metrics["rollout/groups_drawn"] > 0


def test_uniform_groups_are_replaced_until_there_are_enough() -> None:
    draw, _ = rollouts(lambda group: MIXED if group % 3 == 2 else SOLVED, num_slots=1)
    groups, metrics = draw.collect(policy_version=0)
    assert indices(groups) == [2, 5]
    assert metrics["rollout/groups_drawn"] == 6
    assert metrics["groups/dropped_too_many_successes"] == 4
    assert metrics["rollout/draw_limit_reached"] == 0


def test_the_draw_limit_ends_an_iteration_with_fewer_groups_or_none() -> None:
    for script, expected in [(lambda group: MIXED if group == 3 else FAILED, [3]), (lambda group: FAILED, [])]:
        draw, collector = rollouts(script, num_slots=6, max_draw_factor=3.0)
        groups, metrics = draw.collect(policy_version=0)
        assert indices(groups) == expected
        assert metrics["rollout/groups_drawn"] == 6  # 3 * 2
        assert metrics["rollout/draw_limit_reached"] == 1
        assert len(collector.requests) == 24
        assert metrics["rollout/success"] == sum(episode.success for group in groups for episode in group) / 24


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("num_slots", [1, 3, 8, 64])
def test_every_group_is_whole_and_in_order(num_slots: int, newest_first: bool) -> None:
    draw, collector = rollouts(lambda group: MIXED, num_slots, newest_first)
    groups = [group for version in range(4) for group in draw.collect(version)[0]]
    assert len(groups) == 8
    for group in groups:
        first = 4 * group[0].group_index  # episodes are numbered through
        assert [episode.episode_index for episode in group] == [first, first + 1, first + 2, first + 3]
        assert [episode.success for episode in group] == MIXED
        assert len({id(episode.start) for episode in group}) == 1
    requested = [request.episode_index for request in collector.requests]
    assert requested == list(range(len(requested)))
    starts = {request.group_index: request.start.key for request in collector.requests}
    assert starts == {group: TrainStarts(POOL, seed=0).start(group).key for group in starts}
    assert {sampling.temperature for sampling in collector.sampling} == {1.6}
    assert {sampling.mode for sampling in collector.sampling} == {"sample"}


def test_crashed_members_are_removed_and_no_outcome() -> None:
    # Group 0 loses one member, group 1 all but one, which is no group any more.
    scripts = {0: [True, None, False, True], 1: [None, None, True, None]}
    draw, _ = rollouts(lambda group: scripts.get(group, MIXED), num_slots=1)
    groups, metrics = draw.collect(policy_version=0)
    assert indices(groups) == [0, 2]
    assert [episode.episode_index for episode in groups[0]] == [0, 2, 3]
    assert metrics["groups/crashed_episodes"] == 4
    assert metrics["groups/dropped_crashed"] == 1
    # Episodes that ended: T F T of group 0, T of group 1, T F T F of group 2.
    assert metrics["rollout/episodes"] == 8
    assert metrics["rollout/success"] == 5 / 8


def test_metrics_by_hand() -> None:
    # One slot, groups 0 and 1 are the first round: one of each task.
    draw, collector = rollouts(lambda group: [True, False, False, False] if group == 0 else MIXED, num_slots=1)
    _, metrics = draw.collect(policy_version=0)
    first, second = (collector.requests[i].start.task for i in (0, 4))
    assert {first, second} == set(POOL.tasks)
    assert metrics["rollout/groups_drawn"] == 2
    assert metrics[f"rollout/success/{first}"] == 1 / 4
    assert metrics[f"rollout/success/{second}"] == 2 / 4
    assert metrics["rollout/success"] == 3 / 8
    assert metrics["rollout/episodes"] == 8
    assert metrics["rollout/decisions"] == 16
    assert metrics["rollout/control_steps"] == 40
    assert metrics["rollout/episode_steps"] == 5


def test_the_kept_share_is_a_running_mean_over_32_groups() -> None:
    draw, _ = rollouts(lambda group: MIXED if group == 1 else SOLVED, num_slots=1, max_draw_factor=1.0)
    draw.collect(policy_version=0)
    # From 0.5: group 0 dropped, * 31/32 = 0.484375; group 1 kept, * 31/32 + 1/32 = 0.50048828125.
    assert draw.state == DrawState(next_group=2, next_episode=8, kept_share=0.50048828125)


@pytest.mark.parametrize(("kept_share", "num_begun"), [(1.0, 2), (0.5, 4), (0.3, 7), (0.0, 8)])
def test_rarely_kept_groups_are_begun_ahead(kept_share: float, num_begun: int) -> None:
    # 0.3 * 6 = 1.8 < 2 <= 0.3 * 7; a share of 0 begins all that the limit allows (4 * 2).
    began: list[int] = []

    def script(group: int) -> list[Outcome]:
        if not began:  # the first episode ends
            began.append(draw.state.next_group)
        return MIXED

    draw, _ = rollouts(script)
    draw.state.kept_share = kept_share
    draw.collect(policy_version=0)
    assert began == [num_begun]


def test_a_resumed_run_draws_what_the_uninterrupted_one_draws() -> None:
    whole, whole_collector = rollouts(lambda group: MIXED, num_slots=4)
    for version in range(3):
        whole.collect(version)
    before, before_collector = rollouts(lambda group: MIXED, num_slots=4)
    before.collect(0)
    after, after_collector = rollouts(lambda group: MIXED, num_slots=4)
    after.state = DrawState(**asdict(before.state))
    after.buffer.restore(before.buffer.groups)
    for version in (1, 2):
        after.collect(version)
    assert after.state == whole.state

    def names(*collectors: ScriptedCollector) -> list[tuple[str, int]]:
        return [(r.start.key, r.episode_index) for collector in collectors for r in collector.requests]

    assert names(before_collector, after_collector) == names(whole_collector)


@pytest.mark.parametrize("batching", ["ready", "waves"])
def test_with_the_real_engine(batching: Batching) -> None:
    # Three pushes of 0 to 4 reach a sum of 6 in half of the episodes, or thereabouts.
    collector = Collector(
        env=FakeVecEnv(num_slots=5, horizon=3),
        policy=FakePolicy(is_stochastic=True),
        execution_horizon=2,
        run_seed=0,
        batching=batching,
    )
    algo = AlgoConfig(groups_per_iteration=6, group_size=4, temperature=1.6)
    config = DynamicSamplingConfig(filter=GroupFilterConfig(min_success_rate=0.1, max_success_rate=0.9))
    draw = GroupRollouts(collector, TrainStarts(FakePool("a", "b", goal=6.0), seed=0), algo, config)
    for version in range(3):
        groups, metrics = draw.collect(version)
        assert len(groups) == 6
        for group in groups:
            assert len(group) == 4
            assert 0 < sum(episode.success for episode in group) < 4
            assert version - group[0].policy_version in (0, 1)
        assert metrics["rollout/episodes"] == 4 * metrics["rollout/groups_drawn"]
