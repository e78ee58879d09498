"""vla-rl bench-train: speed of the policy, the update and whole iterations, and where an iteration's time goes."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from scripts.policies import make_policy
from scripts.progress import console
from scripts.run_config import ConfigArguments, PrintConfig, RunConfig, read_config
from sim.suites import make_suite
from sim.world import Suite
from vla_rl.algos.batch import make_batch
from vla_rl.algos.policy_gradient import update
from vla_rl.data.collect import collect_demonstrations
from vla_rl.data.libero_hdf5 import read_folder
from vla_rl.distributed import num_cores, num_gradient_threads, torch_threads
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policy import Sampling
from vla_rl.rollout.engine import make_collector, make_vec_env, requests_of
from vla_rl.rollout.sources import TrainStarts
from vla_rl.run import flat_versions
from vla_rl.train.optim import Optimizer
from vla_rl.types import Episode

BATCH_SIZES = (16, 32, 128)


def bench(config: RunConfig, num_episodes: int) -> dict[str, float]:
    """Figures by name; times are minima over repetitions where there are any."""
    suite = make_suite(config.suite)
    with tempfile.TemporaryDirectory() as folder:
        few = config.demos.model_copy(update={"num_per_task": 2})
        collect_demonstrations(suite, few, Path(folder), config.seed)
        policy = make_policy(config, suite.spec, read_folder(Path(folder), suite.spec.cameras))
    policy.eval()
    figures = {"policy_parameters": float(sum(p.numel() for p in policy.parameters()))}
    episodes, rollout = _rollout(suite, policy, config, num_episodes)
    figures |= rollout
    observations = [decision.observation for episode in episodes for decision in episode.decisions]
    with torch_threads(1):
        for size in BATCH_SIZES:
            if size <= len(observations):
                seconds = _act_seconds(policy, observations[:size], config.rl.algo.temperature)
                figures[f"act_ms_per_decision_batch_{size}"] = 1e3 * seconds / size
    figures |= _update(policy, episodes, config)
    return figures | _shares(figures)


def _rollout(
    suite: Suite, policy: TokenPolicy, config: RunConfig, num_episodes: int
) -> tuple[list[Episode], dict[str, float]]:
    """Episodes of an untrained policy: they run to the time limit, so the load is the same each time."""
    starts = TrainStarts(suite, config.seed)
    requests = requests_of([starts.start(i) for i in range(num_episodes)])
    episodes: list[Episode] = []
    env = make_vec_env(suite, config.rollout)
    try:
        collector = make_collector(env, policy, config.rollout, config.seed)
        for measured in (requests[: env.num_slots], requests):  # the first pass compiles and warms up
            episodes.clear()
            collector.timings.take()
            waiting = iter(measured)
            started = time.perf_counter()
            collector.run(
                lambda waiting=waiting: next(waiting, None),  # type: ignore[misc]
                lambda episode, _: episodes.append(episode) if episode else None,
                Sampling(temperature=config.rl.algo.temperature),
            )
            seconds = time.perf_counter() - started
        stages = collector.timings.take()
    finally:
        env.close()
    num_steps, num_decisions = sum(e.num_steps for e in episodes), sum(len(e.decisions) for e in episodes)
    return episodes, {
        "rollout_s": seconds,
        "control_steps_per_s": num_steps / seconds,
        "decisions_per_s": num_decisions / seconds,
        "episodes_per_s": len(episodes) / seconds,
        **{f"rollout_{name.removeprefix('time/')}": value for name, value in stages.items()},
    }


def _act_seconds(policy: TokenPolicy, observations: list, temperature: float, repeats: int = 10) -> float:  # type: ignore[type-arg]
    generators = [np.random.default_rng(i) for i in range(len(observations))]
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        policy.act(observations, Sampling(temperature=temperature), generators)
        times.append(time.perf_counter() - started)
    return min(times)


def _update(policy: TokenPolicy, episodes: list[Episode], config: RunConfig) -> dict[str, float]:
    """One update on these episodes with made-up advantages."""
    advantages = np.where(np.arange(len(episodes)) % 2 == 0, 1.0, -1.0)
    batch = make_batch(episodes, advantages, tokens_per_step=policy.action_dim, policy_version=0)
    optimizer = Optimizer(policy.named_parameters(), config.rl.optim)
    started = time.perf_counter()
    threads = num_gradient_threads(policy.device)
    update(policy, optimizer, batch, config.rl.algo, np.random.default_rng(0), threads)
    seconds = time.perf_counter() - started
    return {"update_s": seconds, "update_decisions_per_s": batch.num_decisions / seconds}


def _shares(figures: dict[str, float]) -> dict[str, float]:
    """Where an iteration goes: the rollout's wall time split by the thread seconds of its stages, and the update."""
    stages = {name: figures[f"rollout_{name}_s"] for name in ("physics", "render", "inference")}
    whole = figures["rollout_s"] + figures["update_s"]
    shares = {name: figures["rollout_s"] * seconds / sum(stages.values()) for name, seconds in stages.items()}
    return {f"share_{name}": seconds / whole for name, seconds in (shares | {"update": figures["update_s"]}).items()}


def main(
    arguments: ConfigArguments = None,
    num_episodes: Annotated[int, typer.Option("--episodes", help="Episodes of the measured rollout.")] = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
    print_config: PrintConfig = False,
) -> None:
    """Measure policy calls, updates and rollouts with this configuration (an untrained policy)."""
    figures = bench(read_config(arguments, print_config), num_episodes)
    for name, value in figures.items():
        console.print(f"{name:40s} {value:12.3f}")
    if json_file is not None:
        document = {**figures, "num_cores": num_cores(), "torch": torch.__version__, "versions": flat_versions()}
        json_file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
