"""Every preset loads, and names only what exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.robot_config import DeployConfig
from scripts.run_config import RunConfig, read_config
from sim.suites import make_suite
from vla_rl.config import load_config
from vla_rl.train.rl import RLConfig

CONFIGS = Path(__file__).parents[2] / "configs"
ROBOTS = sorted((CONFIGS / "robots").glob("*.yaml"))
PRESETS = sorted(set(CONFIGS.rglob("*.yaml")) - set(ROBOTS))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_preset_loads_and_differs_from_the_defaults(path: Path) -> None:
    config = read_config([str(path)])
    assert config != RunConfig()
    assert len(make_suite(config.suite).tasks) >= 4


@pytest.mark.parametrize("path", ROBOTS, ids=lambda path: path.name)
def test_a_robots_preset_loads(path: Path) -> None:
    config = load_config(DeployConfig, [path])
    assert config.robot.type in path.stem


def test_the_defaults_are_the_papers() -> None:
    # SimpleVLA-RL, arXiv 2509.09674, table of hyper-parameters, and its released LIBERO script.
    config = RLConfig()
    algo, bounds = config.algo, config.dynamic_sampling.filter
    assert (algo.group_size, algo.groups_per_iteration, algo.num_minibatches, algo.num_epochs) == (8, 64, 4, 1)
    assert (algo.surrogate.clip_low, algo.surrogate.clip_high, algo.temperature) == (0.2, 0.28, 1.6)
    assert (bounds.min_success_rate, bounds.max_success_rate) == (0.1, 0.9)
    assert (algo.advantage.type, algo.denominator.type) == ("grpo", "episode_mean")
    assert (config.optim.lr, config.optim.weight_decay, config.optim.max_grad_norm) == (5e-6, 0.01, 1.0)
