"""An interrupted RL run equals an uninterrupted one while it learns: mixed and carried groups, moments, shuffles."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import FAKE_SPEC, FakePool, FakeVecEnv, tiny_policy

from vla_rl.algos.policy_gradient import AlgoConfig
from vla_rl.metrics import read_metrics
from vla_rl.policies.tiny_vla import TinyVLA
from vla_rl.rollout.collector import Collector
from vla_rl.rollout.filters import GroupFilterConfig
from vla_rl.rollout.groups import DynamicSamplingConfig
from vla_rl.rollout.sources import TrainStarts, evaluation_starts
from vla_rl.train.checkpoint import latest_checkpoint, load_carried_groups
from vla_rl.train.optim import OptimConfig
from vla_rl.train.rl import RLConfig, RLTrainer
from vla_rl.types import TrainingError

GOAL = 2.5


def trainer(folder: Path, num_iterations: int, goal: float = GOAL) -> RLTrainer:
    """An untrained policy in worlds of sums, where it succeeds now and then."""
    folder.mkdir(exist_ok=True)
    pool = FakePool("a", "b", goal=goal)
    policy: TinyVLA = tiny_policy(FAKE_SPEC, action_horizon=4, hidden_dim=16, num_keypoints=2)
    config = RLConfig(
        num_iterations=num_iterations,
        algo=AlgoConfig(group_size=4, groups_per_iteration=3, num_minibatches=2, temperature=1.0),
        optim=OptimConfig(lr=1e-3),
        dynamic_sampling=DynamicSamplingConfig(
            filter=GroupFilterConfig(max_carry_age=2), max_draw_factor=4.0, max_starved_iterations=2
        ),
        evaluate_every=2,
        evaluation_starts_per_task=2,
        checkpoint_every=3,
    )
    collector = Collector(
        env=FakeVecEnv(num_slots=24), policy=policy, execution_horizon=4, run_seed=0, batching="waves"
    )
    starts = evaluation_starts(pool, "validation", config.evaluation_starts_per_task)
    return RLTrainer(policy, collector, TrainStarts(pool, 0), starts, config, folder, seed=0)


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))}
        for row in read_metrics(folder)
    ]


def test_interrupted_equals_uninterrupted(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 7)
    whole.train()
    trainer(tmp_path / "parts", 3).train()
    interrupted_at = latest_checkpoint(tmp_path / "parts")
    assert interrupted_at is not None
    assert load_carried_groups(interrupted_at), "the test needs a carried group at the interruption"
    second = trainer(tmp_path / "parts", 7)
    second.resume()
    second.train()
    rows = rows_of(tmp_path / "whole")
    assert [row["iteration"] for row in rows] == list(range(8))
    assert all(row["update/grad_norm"] > 0 for row in rows[1:]), "the test needs gradients"
    assert rows_of(tmp_path / "parts") == rows
    for name, value in whole.policy.state_dict().items():
        assert (second.policy.state_dict()[name] == value).all(), name


def test_starvation_keeps_its_rows_and_a_checkpoint(tmp_path: Path) -> None:
    hopeless = trainer(tmp_path / "hopeless", 7, goal=1e6)
    with pytest.raises(TrainingError, match=r"in 2 iterations \(up to 2\).*hopeless"):
        hopeless.train()
    assert [row["iteration"] for row in rows_of(tmp_path / "hopeless")] == [0, 1, 2]
    assert rows_of(tmp_path / "hopeless")[-1]["rollout/draw_limit_reached"] == 1.0
    assert latest_checkpoint(tmp_path / "hopeless") is not None
