"""Policies for the commands: read from a checkpoint, or made for cloning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import torch

from scripts.run_config import RunConfig
from sim.world import Suite
from vla_rl.data.demos import Demonstration, norm_stats
from vla_rl.distributed import checked_device
from vla_rl.policies.loading import load_policy, new_openvla_policy
from vla_rl.policies.openvla.checkpoint import is_hub_id, resolve_checkpoint_folder
from vla_rl.policies.openvla.config import OpenVLAConfig, Surroundings
from vla_rl.policies.openvla.conventions import to_published_actions
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.run import seed_sequence
from vla_rl.train.checkpoint import resolve_checkpoint
from vla_rl.types import EnvSpec

if TYPE_CHECKING:
    from vla_rl.policies.openvla.model import OpenVLAModel


def find_policy(checkpoint: Path) -> Path:
    """The policy folder that a user means: a run, a checkpoint, a policy folder, or a hub id in the local cache.

    Raises:
        ValueError: None of these.
    """
    is_id = not checkpoint.exists() and is_hub_id(str(checkpoint))
    return resolve_checkpoint_folder(str(checkpoint)) if is_id else resolve_checkpoint(checkpoint)


def read_policy(config: RunConfig, checkpoint: Path, suite: Suite) -> TokenPolicy:
    """The policy of a checkpoint, on the configured device; it fits the suite.

    Raises:
        ValueError: No checkpoint, a damaged one, or one that was made for another interface.
    """
    checked_device(config.device)
    surroundings = None
    if isinstance(config.policy, OpenVLAConfig):
        surroundings = openvla_surroundings(config.policy, suite.spec, suite.tasks)
    policy = load_policy(find_policy(checkpoint), config.device, config.compute, surroundings)
    policy.check_spec(suite.spec)
    policy.execution_horizon = config.rollout.execution_horizon
    return policy


def make_policy(
    config: RunConfig, spec: EnvSpec, demonstrations: list[Demonstration], model: OpenVLAModel | None = None
) -> TokenPolicy:
    """A new policy that knows the demonstrations' statistics and, if it starts from nothing, their words.

    Args:
        config: The run's.
        spec: Interface of the suite.
        demonstrations: What it will be cloned from.
        model: With random weights, in place of one of the configured sizes (OpenVLA).
    """
    policy = _new_policy(config, spec, demonstrations, model)
    policy.execution_horizon = config.rollout.execution_horizon
    return policy


def _new_policy(
    config: RunConfig, spec: EnvSpec, demonstrations: list[Demonstration], model: OpenVLAModel | None
) -> TokenPolicy:
    device = str(checked_device(config.device))
    torch.manual_seed(int(seed_sequence(config.seed, "policy").generate_state(1)[0]))
    is_raw = [name == "gripper" for name in spec.action_names]
    instructions = [demo.instruction for demo in demonstrations]
    suites = _suites([demo.task for demo in demonstrations])
    key = suites[0] if len(suites) == 1 else config.suite.type  # published statistics are found by the suite's name
    match config.policy:
        case TinyVLAConfig():
            stats = norm_stats(demonstrations, key, is_raw)
            return TinyVLA(config.policy, spec, stats, WordTokenizer.from_instructions(instructions)).to(device)
        case OpenVLAConfig():
            published = [replace(demo, actions=to_published_actions(demo.actions, spec)) for demo in demonstrations]
            stats = norm_stats(published, config.policy.norm_key or key, is_raw)
            surroundings = openvla_surroundings(config.policy, spec, [demo.task for demo in demonstrations])
            return new_openvla_policy(surroundings, instructions, stats, config.compute, device, model)
        case _:
            assert_never(config.policy)


def openvla_surroundings(config: OpenVLAConfig, spec: EnvSpec, tasks: Sequence[str]) -> Surroundings:
    """What published checkpoints do not say, from the settings and the suite's interface and tasks."""
    return Surroundings(config=config, spec=spec, suites=_suites(tasks))


def _suites(tasks: Sequence[str]) -> list[str]:
    return sorted({task.split("/")[0] for task in tasks})
