"""Records demonstrations of a scripted expert.

DART: what is executed is the expert's action plus noise, what is stored is the expert's action alone, so that the
images show states off the ideal path while the labels stay clean. Bursts of stronger noise ("pushes") put the hand
where the expert would never go; without them a cloned policy learns to read its own pose instead of the picture.

Reference: M. Laskey et al., "DART: Noise Injection for Robust Imitation Learning", arXiv 1703.09327.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from pydantic import Field

from sim.rendering import free_renderers
from sim.world import Suite, World
from vla_rl.config import ConfigModel
from vla_rl.data.demos import Demonstration
from vla_rl.data.libero_hdf5 import write_demonstrations
from vla_rl.distributed import num_cores
from vla_rl.run import seed_sequence
from vla_rl.types import SimError


class DemosConfig(ConfigModel):
    """Recording of demonstrations."""

    num_per_task: int = Field(default=20, ge=1)
    """Successful demonstrations per task."""
    noise: float = Field(default=0.1, ge=0.0, le=1.0)
    """Standard deviation of the noise on each executed translation action (actions are in [-1, 1])."""
    push_probability: float = Field(default=0.03, ge=0.0, le=1.0)
    """Chance per control step that a push begins: three control steps of a random translation."""
    max_attempts_factor: float = Field(default=3.0, ge=1.0)
    """Give up after this many times `num_per_task` attempts of one task."""


def collect_demonstrations(
    suite: Suite, config: DemosConfig, folder: Path, seed: int, on_demonstration: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Record demonstrations from training starts and write one HDF5 file per task (see `libero_hdf5`).

    Returns:
        Per task, the share of attempts in which the expert succeeded despite the noise.

    Raises:
        SimError: The expert failed too often (attempts in which the world crashed count as failed).
    """
    folder.mkdir(parents=True, exist_ok=True)

    def record(task: str) -> float:
        try:
            demos, num_attempts = _collect_task(suite, task, config, seed, on_demonstration)
        finally:
            free_renderers()
        write_demonstrations(folder / f"{task.replace('/', '_')}.hdf5", demos, suite.spec.cameras)
        return len(demos) / num_attempts

    with ThreadPoolExecutor(max_workers=num_cores()) as pool:
        return dict(zip(suite.tasks, pool.map(record, suite.tasks), strict=True))


def _collect_task(
    suite: Suite, task: str, config: DemosConfig, seed: int, on_demonstration: Callable[[], None]
) -> tuple[list[Demonstration], int]:
    world = suite.make_world()
    limit = round(config.max_attempts_factor * config.num_per_task)
    demos: list[Demonstration] = []
    for index in range(limit):
        rng = np.random.default_rng(seed_sequence(seed, "demonstration", task, index))
        # Which starts are shown depends on the seed, as with any fresh data set.
        demo = _demonstrate(suite, world, task, int(rng.integers(2**31)), config, rng)
        if demo is None:
            continue
        demos.append(demo)
        on_demonstration()
        if len(demos) == config.num_per_task:
            return demos, index + 1
    raise SimError(
        f"the expert solved only {len(demos)} of {limit} attempts of {task}, {config.num_per_task} demonstrations were "
        "asked for; lower demos.noise or demos.push_probability, or raise demos.max_attempts_factor"
    )


def _demonstrate(
    suite: Suite, world: World, task: str, index: int, config: DemosConfig, rng: np.random.Generator
) -> Demonstration | None:
    """One attempt; None if it failed or the world crashed."""
    start = suite.start(task, "train", index)
    expert = suite.make_expert(task, rng)
    world.reset(start)
    observations, actions = [], []
    push, push_steps = np.zeros(3), 0
    while True:
        observations.append(world.observe())
        actions.append(expert.act(world.data))
        executed = actions[-1].copy()
        if push_steps == 0 and rng.random() < config.push_probability:
            push, push_steps = rng.uniform(-1.0, 1.0, size=3), 3
        if push_steps:
            executed[:3], push_steps = push, push_steps - 1
        else:
            executed[:3] += config.noise * rng.standard_normal(3)
        try:
            result = world.step(np.clip(executed, -1.0, 1.0)[None])
        except SimError:
            return None
        if result.is_done:
            break
    if not result.success:
        return None
    return Demonstration(
        task=task,
        instruction=start.instruction,
        images=np.stack([observation.images for observation in observations]),
        proprio=np.stack([observation.proprio for observation in observations]),
        actions=np.stack(actions),
    )
