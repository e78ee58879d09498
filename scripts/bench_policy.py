"""vla-rl bench-policy: OpenVLA's cost per decision and per update, against a plain implementation in the same run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Int
from rich.table import Table

from scripts.measuring import measured
from scripts.memory_plan import require_room, workload_of
from scripts.policies import make_policy
from scripts.progress import console
from scripts.run_config import ConfigArguments, RunConfig, read_config
from sim.suites import make_suite
from sim.world import Suite
from vla_rl.algos.batch import RolloutBatch
from vla_rl.algos.policy_gradient import AlgoConfig, update
from vla_rl.data.demos import Demonstration
from vla_rl.distributed import checked_device, num_cores, num_gradient_threads, torch_threads
from vla_rl.policies.compute import TrainEverything
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.memory import GB, estimate
from vla_rl.policies.openvla.parameters import PUBLISHED
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policy import Sampling
from vla_rl.run import flat_versions
from vla_rl.types import EnvSpec, Observation

if TYPE_CHECKING:
    from vla_rl.policies.openvla.model import OpenVLAModel
    from vla_rl.policies.openvla.reference import PlainOpenVLA

SIZES = (1, 8, 32)
GROUP = 8
INSTRUCTIONS = ("pick up the red cube", "put the blue cube on the plate and then push the plate to the green target")
Row = dict[str, float | str | None]


def bench(config: RunConfig, decisions_per_episode: int, architecture: Architecture | None = None) -> dict[str, Any]:
    """All figures.

    Args:
        config: Of an OpenVLA policy.
        decisions_per_episode: Up to the time limit.
        architecture: In place of the configured sizes.

    Raises:
        ValueError: The configuration is of another policy, or the model does not fit this machine.
    """
    if not isinstance(config.policy, OpenVLAConfig):
        raise ValueError("bench-policy is for OpenVLA policies; use configs/policy/openvla_oft_nano.yaml")
    from vla_rl.policies.openvla.reference import PlainOpenVLA

    suite = make_suite(config.suite)
    if architecture is not None:
        _require_room(config, config.policy, suite, architecture)
    policy = _policy(config, suite.spec, architecture)
    with torch_threads(num_cores()):
        plain = PlainOpenVLA(policy)
        rollout = [_rollout_row(policy, plain, suite.spec, size) for size in SIZES]
        rollout.append(_rollout_row(policy, plain, suite.spec, GROUP, num_different=1))
        batches = _batches(policy, suite.spec, config.rl.algo, decisions_per_episode)
        updates = _ours_and_plain(config, policy, plain, batches)
        updates += _variants(config, policy, batches[0])
    return {
        "parameters": sum(weight.numel() for weight in policy.parameters()),
        "precision": config.compute.precision,
        "device": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "cpu",
        "head": [
            _head_row("7B", PUBLISHED, policy.num_slots),
            _head_row("measured", policy.model.architecture, policy.num_slots),
        ],
        "rollout": rollout,
        "update": updates,
        "num_cores": num_cores(),
        "versions": flat_versions(),
    }


def _require_room(config: RunConfig, policy: OpenVLAConfig, suite: Suite, architecture: Architecture) -> None:
    """Without the optimiser, which is not measured, and the simulation."""
    needs = estimate(workload_of(config, policy, "train", suite, architecture))
    unused = ("optimiser", "drawing contexts")
    needs = replace(needs, resident=tuple(item for item in needs.resident if item.name not in unused), host=())
    device = checked_device(config.device)
    is_gpu = device.type == "cuda"
    require_room(needs, device, torch.cuda.get_device_properties(device).total_memory / GB if is_gpu else None)


def _policy(config: RunConfig, spec: EnvSpec, architecture: Architecture | None) -> OpenVLAPolicy:
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
    model = None if architecture is None else _random_model(architecture, config)
    policy = make_policy(config, spec, demonstrations, model)
    assert isinstance(policy, OpenVLAPolicy)
    return policy.eval()


def _random_model(architecture: Architecture, config: RunConfig) -> OpenVLAModel:
    """Where and in the precision in which it will be used: the host need not hold a second one."""
    from vla_rl.policies.openvla.model import OpenVLAModel

    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if config.compute.precision == "bfloat16" else torch.float32)
        with torch.device(config.device):
            return OpenVLAModel(architecture)
    finally:
        torch.set_default_dtype(before)


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
    ours, theirs = measured(
        [lambda one=one: one.act(observations, Sampling(), generators) for one in (policy, plain)],  # type: ignore[misc]
        policy.device,
        repeats=5,
    )
    return {
        "batch": f"{size} equal" if num_different else f"{size}",
        "ours_ms_per_decision": None if ours.seconds is None else 1e3 * ours.seconds / size,
        "plain_ms_per_decision": None if theirs.seconds is None else 1e3 * theirs.seconds / size,
        "ratio": None if ours.seconds is None or theirs.seconds is None else theirs.seconds / ours.seconds,
        "ours_mb": ours.megabytes,
        "plain_mb": theirs.megabytes,
    }


# --- Update ----------------------------------------------------------------------------------------------------------


def _batches(
    policy: OpenVLAPolicy, spec: EnvSpec, algo: AlgoConfig, decisions_per_episode: int
) -> tuple[RolloutBatch, RolloutBatch, RolloutBatch]:
    """The episodes of an iteration, as we learn from them, and padded to the time limit and to SimpleVLA-RL's.

    Lengths are spread evenly from a third of the time limit to all of it, so their mean is two thirds (in
    docs/results/tabletop_rl: 0.63 to 0.87 of it). The episodes of a group begin with the same observation.
    SimpleVLA-RL gives LIBERO-Spatial 512 control steps, of which the evaluations of OpenVLA-OFT need 220.
    """
    num_episodes = algo.groups_per_iteration * algo.group_size
    lengths = np.linspace(decisions_per_episode / 3, decisions_per_episode, num_episodes).round().astype(int)
    lengths = np.random.default_rng(2).permutation(lengths)
    observations = _observations(spec, int(lengths.sum()), seed=1)
    starts = np.cumsum(lengths) - lengths
    for episode, start in enumerate(starts):
        first_of_group = starts[episode - episode % algo.group_size]
        observations[start] = observations[first_of_group]
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
    longer = round(decisions_per_episode * 512 / 220)
    return whole, _padded(whole, lengths, decisions_per_episode), _padded(whole, lengths, longer)


def _padded(whole: RolloutBatch, lengths: Int[np.ndarray, " episodes"], limit: int) -> RolloutBatch:
    """A finished world stays in the batch with its last observation up to the limit, and its steps are masked."""
    ends = np.cumsum(lengths)
    rows = np.concatenate(
        [np.minimum(np.arange(limit) + end - n, end - 1) for end, n in zip(ends, lengths, strict=True)]
    )
    is_padding = np.concatenate([np.arange(limit) >= length for length in lengths])
    return RolloutBatch(
        observations=tuple(whole.observations[row] for row in rows),
        sample=whole.sample[rows],
        old_logprobs=whole.old_logprobs[rows],
        mask=whole.mask[rows] & ~is_padding[:, None],
        advantages=whole.advantages[rows],
        episode_ids=whole.episode_ids[rows],
        temperatures=whole.temperatures[rows],
        is_on_policy=whole.is_on_policy[rows],
    )


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


@dataclass(frozen=True, kw_only=True)
class _Update:
    """The gradients of an iteration's optimiser steps.

    Attributes:
        name: For the table.
        policy: Whose.
        batch: What it learns from.
        num_threads: Parts of the batch side by side; 1: threads work inside each operation.
    """

    name: str
    policy: OpenVLAPolicy
    batch: RolloutBatch
    num_threads: int


def _update_rows(updates: Sequence[_Update], config: AlgoConfig) -> list[Row]:
    """All in the same run, and per second the decisions that were really executed."""
    once = config.model_copy(update={"temperature": 1.0, "ratio_tolerance": 1e3})
    found: list[dict[str, float]] = [{} for _ in updates]

    def work(i: int) -> None:
        one = updates[i]
        one.policy.zero_grad(set_to_none=True)  # of a pass that ran out of memory
        rng = np.random.default_rng(0)
        with torch_threads(max(1, num_cores() // one.num_threads)):
            found[i].update(update(one.policy, _Measure(one.policy), one.batch, once, rng, one.num_threads))

    took = measured([partial(work, i) for i in range(len(updates))], updates[0].policy.device)
    num_samples = min(one.batch.num_decisions for one in updates)
    return [
        {
            "what": one.name,
            "samples_per_s": None if it.seconds is None else num_samples / it.seconds,
            "peak_mb": it.megabytes,
            "loss": values.get("update/loss"),
            "grad_norm": values.get("update/grad_norm"),
        }
        for one, it, values in zip(updates, took, found, strict=True)
    ]


def _ours_and_plain(
    config: RunConfig,
    policy: OpenVLAPolicy,
    plain: PlainOpenVLA,
    batches: tuple[RolloutBatch, RolloutBatch, RolloutBatch],
) -> list[Row]:
    """Ours against the plain one on the same executed decisions; the ratios say how much faster ours is."""
    plain.keep_pixels(batches[1].observations)
    names, threads = ("plain", "plain, SimpleVLA-RL's limit"), num_gradient_threads(policy.device)
    ours = _Update(name="ours", policy=policy, batch=batches[0], num_threads=threads)
    theirs = [
        _Update(name=name, policy=plain, batch=batch, num_threads=1)
        for name, batch in zip(names, batches[1:], strict=True)
    ]
    rows = _update_rows([ours, *theirs], config.rl.algo)
    first = rows[0]["samples_per_s"]
    for row in rows[1:]:
        speed = row["samples_per_s"]
        row["ours_over_it"] = first / speed if isinstance(first, float) and isinstance(speed, float) else None
    return rows


def _variants(config: RunConfig, policy: OpenVLAPolicy, batch: RolloutBatch) -> list[Row]:
    """The same weights under other settings of `compute`."""
    from vla_rl.policies.openvla.loading import assemble

    base = config.compute
    variants = {"activation checkpointing": base.model_copy(update={"activation_checkpointing": True})}
    if isinstance(base.trained, TrainEverything):
        frozen = base.model_copy(update={"trained": TrainEverything(freeze_vision=True)})
        variants["frozen vision"] = frozen
        variants["frozen vision, kept features"] = frozen.model_copy(update={"vision_cache_gb": 4.0})
    rows = []
    for name, compute in variants.items():
        parts = (policy.model, policy.config, policy.spec, policy.norm_stats, policy.tokenizer)
        variant = assemble(*parts, compute, policy.published_config).eval()
        one = _Update(name=name, policy=variant, batch=batch, num_threads=num_gradient_threads(policy.device))
        rows += _update_rows([one], config.rl.algo)
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
        cells = ["-" if row.get(name, "") is None else row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def main(
    arguments: ConfigArguments = None,
    decisions: Annotated[int, typer.Option("--decisions", help="Decisions up to the time limit.", min=3)] = 12,
    is_published: Annotated[
        bool, typer.Option("--published", help="The 7B model's sizes with random weights, in place of policy.sizes.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")] = None,
) -> None:
    """Measure an OpenVLA policy against a plain implementation: rollout, update, head (random weights).

    Memory is what a row needs above what was there before (weights, libraries); a dash: it did not fit.
    """
    config = read_config(arguments or ["configs/policy/openvla_oft_nano.yaml"])
    figures = bench(config, decisions, PUBLISHED if is_published else None)
    _print("head, per decision", figures["head"])
    _print("rollout", figures["rollout"])
    _print("update", figures["update"])
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
