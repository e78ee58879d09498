"""vla-rl bench-policy: OpenVLA's cost per decision and per update, against a plain implementation in the same run."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from scripts.policies import make_policy
from scripts.progress import console
from scripts.run_config import ConfigArguments, RunConfig, read_config
from sim.suites import make_suite
from vla_rl.algos.batch import RolloutBatch
from vla_rl.algos.policy_gradient import AlgoConfig, update
from vla_rl.data.demos import Demonstration
from vla_rl.distributed import num_cores, num_gradient_threads, torch_threads
from vla_rl.policies.compute import ComputeConfig, TrainEverything
from vla_rl.policies.openvla.architecture import Architecture, LanguageSizes, TowerSizes
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policy import Sampling
from vla_rl.run import flat_versions
from vla_rl.types import EnvSpec, Observation

SIZES = (1, 8, 32)
GROUP = 8
INSTRUCTIONS = ("pick up the red cube", "put the blue cube on the plate and then push the plate to the green target")
PUBLISHED = Architecture(
    image_size=224,
    dinov2=TowerSizes(dim=1024, depth=24, num_heads=16, mlp_dim=4096),
    siglip=TowerSizes(dim=1152, depth=27, num_heads=16, mlp_dim=4304),
    language=LanguageSizes(
        hidden_dim=4096,
        mlp_dim=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        vocab_size=32064,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    ),
    pad_token_id=32000,
    num_padding_rows=64,
    num_bins=256,
)
Row = dict[str, float | str]


def bench(config: RunConfig, num_episodes: int, decisions_per_episode: int) -> dict[str, Any]:
    """All figures.

    Raises:
        ValueError: The configuration is of another policy.
    """
    if not isinstance(config.policy, OpenVLAConfig):
        raise ValueError("bench-policy is for OpenVLA policies; use configs/policy/openvla_oft_nano.yaml")
    from vla_rl.policies.openvla.reference import PlainOpenVLA

    spec = make_suite(config.suite).spec
    policy = _policy(config, spec)
    with torch_threads(num_cores()):
        rollout = [_rollout_row(policy, PlainOpenVLA(policy), spec, size) for size in SIZES]
        rollout.append(_rollout_row(policy, PlainOpenVLA(policy), spec, GROUP, num_different=1))
        batches = _batches(policy, spec, num_episodes, decisions_per_episode)
        updates = _update_rows(config, policy, batches)
        updates += _variant_rows(config, spec, batches)
    return {
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "head": [
            _head_row("7B", PUBLISHED, policy.num_slots),
            _head_row("configured", policy.model.architecture, policy.num_slots),
        ],
        "rollout": rollout,
        "update": updates,
        "num_cores": num_cores(),
        "versions": flat_versions(),
    }


def _policy(config: RunConfig, spec: EnvSpec) -> OpenVLAPolicy:
    """A freshly initialised policy that knows the bench's words."""
    rng = np.random.default_rng(0)
    demonstrations = [
        Demonstration(
            task="bench/bench",
            instruction=instruction,
            images=np.zeros((2, len(spec.cameras), *spec.image_size, 3), np.uint8),
            proprio=rng.uniform(-1, 1, (2, spec.proprio_dim)).astype(np.float32),
            actions=rng.uniform(-1, 1, (2, spec.action_dim)),
        )
        for instruction in INSTRUCTIONS
    ]
    policy = make_policy(config, spec, demonstrations)
    assert isinstance(policy, OpenVLAPolicy)
    return policy.eval()


def _observations(spec: EnvSpec, num: int, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    return [
        Observation(
            images=rng.integers(256, size=(len(spec.cameras), *spec.image_size, 3), dtype=np.uint8),
            proprio=rng.uniform(-1, 1, spec.proprio_dim).astype(np.float32),
            instruction=INSTRUCTIONS[i % len(INSTRUCTIONS)],
        )
        for i in range(num)
    ]


# --- Rollout ---------------------------------------------------------------------------------------------------------


def _rollout_row(
    policy: OpenVLAPolicy, plain: OpenVLAPolicy, spec: EnvSpec, size: int, num_different: int | None = None
) -> Row:
    observations = _observations(spec, num_different or size) * (size if num_different else 1)
    generators = [np.random.default_rng(i) for i in range(size)]
    ours, theirs = (
        _measured(lambda one=one: one.act(observations, Sampling(), generators), policy.device)  # type: ignore[misc]
        for one in (policy, plain)
    )
    return {
        "batch": f"{size} equal" if num_different else f"{size}",
        "ours_ms_per_decision": 1e3 * ours[0] / size,
        "plain_ms_per_decision": 1e3 * theirs[0] / size,
        "ratio": theirs[0] / ours[0],
        "ours_mb": ours[1],
        "plain_mb": theirs[1],
    }


def _measured(work: Callable[[], object], device: torch.device, repeats: int = 3) -> tuple[float, float]:
    """Least seconds of some repetitions, and the peak of memory (MB): of the GPU, or of this process above before."""
    work()
    times = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    if device.type == "cuda":
        return min(times), torch.cuda.max_memory_allocated(device) / 1e6
    return min(times), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# --- Update ----------------------------------------------------------------------------------------------------------


def _batches(
    policy: OpenVLAPolicy, spec: EnvSpec, num_episodes: int, decisions_per_episode: int
) -> tuple[RolloutBatch, RolloutBatch]:
    """The same episodes, as we learn from them, and padded to the time limit.

    Lengths are spread evenly from a third of the time limit to all of it, as in a run in which half of the episodes
    end early.
    """
    lengths = np.linspace(decisions_per_episode / 3, decisions_per_episode, num_episodes).round().astype(int)
    observations = _observations(spec, int(lengths.sum()), seed=1)
    generators = [np.random.default_rng(i) for i in range(len(observations))]
    output = policy.act(observations, Sampling(temperature=1.0), generators)
    episode_ids = np.repeat(np.arange(num_episodes), lengths)
    whole = RolloutBatch(
        observations=tuple(observations),
        sample=output.sample,
        old_logprobs=output.logprobs,
        mask=np.ones(output.logprobs.shape, dtype=bool),
        advantages=np.where(episode_ids % 2 == 0, 1.0, -1.0).astype(np.float32),
        episode_ids=episode_ids,
        temperatures=np.ones(len(observations)),
        is_on_policy=np.ones(len(observations), dtype=bool),
    )
    # A finished world stays in the batch with its last observation, and its steps are masked.
    ends = np.cumsum(lengths) - 1
    rows = np.concatenate(
        [
            np.concatenate([np.flatnonzero(episode_ids == i), np.full(decisions_per_episode - lengths[i], ends[i])])
            for i in range(num_episodes)
        ]
    )
    is_padding = np.concatenate([np.arange(decisions_per_episode) >= length for length in lengths])
    padded = RolloutBatch(
        observations=tuple(observations[row] for row in rows),
        sample=whole.sample[rows],
        old_logprobs=whole.old_logprobs[rows],
        mask=whole.mask[rows] & ~is_padding[:, None],
        advantages=whole.advantages[rows],
        episode_ids=whole.episode_ids[rows],
        temperatures=whole.temperatures[rows],
        is_on_policy=whole.is_on_policy[rows],
    )
    return whole, padded


class _Measure:
    """Takes the place of an optimiser: notes the gradient's norm and changes nothing."""

    def __init__(self, policy: OpenVLAPolicy) -> None:
        self._weights = [weight for weight in policy.parameters() if weight.requires_grad]

    def step(self) -> float:
        """Clear the gradients; returns their norm."""
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self._weights if weight.grad is not None])
        for weight in self._weights:
            weight.grad = None
        return float(norm)


def _update_row(
    name: str, policy: OpenVLAPolicy, batch: RolloutBatch, num_samples: int, config: AlgoConfig, num_threads: int
) -> Row:
    once = config.model_copy(update={"num_minibatches": 1, "temperature": 1.0, "ratio_tolerance": 1e3})
    found: dict[str, float] = {}

    def work() -> None:
        found.update(update(policy, _Measure(policy), batch, once, np.random.default_rng(0), num_threads))

    with torch_threads(max(1, num_cores() // num_threads)):  # in parts side by side, or inside each operation
        seconds, megabytes = _measured(work, policy.device, repeats=2)
    return {
        "what": name,
        "samples_per_s": num_samples / seconds,
        "peak_mb": megabytes,
        "loss": found["update/loss"],
        "grad_norm": found["update/grad_norm"],
    }


def _update_rows(config: RunConfig, policy: OpenVLAPolicy, batches: tuple[RolloutBatch, RolloutBatch]) -> list[Row]:
    """Ours against the plain one on the same executed decisions."""
    from vla_rl.policies.openvla.reference import PlainOpenVLA

    plain = PlainOpenVLA(policy)
    plain.keep_pixels(batches[1].observations)
    num, threads = batches[0].num_decisions, num_gradient_threads(policy.device)
    rows = [
        _update_row("ours", policy, batches[0], num, config.rl.algo, threads),
        _update_row("plain", plain, batches[1], num, config.rl.algo, 1),
    ]
    rows[0]["ratio"] = float(rows[0]["samples_per_s"]) / float(rows[1]["samples_per_s"])
    return rows


def _variant_rows(config: RunConfig, spec: EnvSpec, batches: tuple[RolloutBatch, RolloutBatch]) -> list[Row]:
    frozen = TrainEverything(freeze_vision=True)
    variants = {
        "activation checkpointing": ComputeConfig(activation_checkpointing=True),
        "frozen vision": ComputeConfig(trained=frozen),
        "frozen vision, kept features": ComputeConfig(trained=frozen, vision_cache_gb=4.0),
    }
    rows = []
    for name, compute in variants.items():
        policy = _policy(config.model_copy(update={"compute": compute}), spec)
        threads = num_gradient_threads(policy.device)
        rows.append(_update_row(name, policy, batches[0], batches[0].num_decisions, config.rl.algo, threads))
    return rows


# --- Arithmetic of the head ------------------------------------------------------------------------------------------


def _head_row(name: str, architecture: Architecture, num_slots: int, prompt_length: int = 36) -> Row:
    """Multiplications and bytes (float32) of the logits of one decision, ours and over everything."""
    positions = 1 + architecture.num_patches + prompt_length + num_slots + 1
    ours, full = num_slots * architecture.num_bins, positions * architecture.language.vocab_size
    return {
        "sizes": name,
        "positions": f"{num_slots} of {positions}",
        "ours_mflop": 2e-6 * ours * architecture.language.hidden_dim,
        "full_mflop": 2e-6 * full * architecture.language.hidden_dim,
        "ours_mb": 4e-6 * ours,
        "full_mb": 4e-6 * full,
        "ratio": full / ours,
    }


def _print(title: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title=title)
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def main(
    arguments: ConfigArguments = None,
    num_episodes: Annotated[int, typer.Option("--episodes", help="Episodes of the update.", min=2)] = 8,
    decisions: Annotated[int, typer.Option("--decisions", help="Decisions up to the time limit.", min=3)] = 12,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Measure an OpenVLA policy against a plain implementation: rollout, update, head (random weights)."""
    config = read_config(arguments or ["configs/policy/openvla_oft_nano.yaml"])
    figures = bench(config, num_episodes, decisions)
    _print("head, per decision", figures["head"])
    _print("rollout", figures["rollout"])
    _print("update", figures["update"])
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
