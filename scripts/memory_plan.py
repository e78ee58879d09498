"""What a run needs in memory, from its configuration: printed and checked before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from scripts.progress import console
from scripts.run_config import RunConfig
from sim.libero.suite import LiberoConfig
from sim.rendering import MAX_RENDERERS_PER_THREAD, ensure_gl_backend
from sim.world import Suite
from vla_rl.distributed import num_cores
from vla_rl.policies.openvla.activations import SampleSize
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.checkpoint import CheckpointFiles
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.memory import GB, PROMPT_TOKENS, Stage, Workload, check_compute, estimate
from vla_rl.train.optim import OptimConfig

_DRAWING_BYTES = {"full": 0.6e9, "lite": 0.1e9}
"""Upper end of what a drawing context of a LIBERO task took (docs/libero.md); textures, mostly."""


def check_memory(config: RunConfig, stage: Stage, suite: Suite, folder: Path | None) -> None:
    """Print what an OpenVLA run will need; refuse what cannot fit on this machine's GPU, and what cannot learn.

    Args:
        config: The run's.
        stage: The verb.
        suite: The configured suite.
        folder: Of the policy that the run starts from; None: random weights.

    Raises:
        ValueError: It does not fit (says what to change), or updates would be lost.
    """
    if not isinstance(config.policy, OpenVLAConfig):
        return
    check_precision(config, stage)
    architecture = (
        config.policy.sizes.architecture()
        if folder is None
        else Architecture.from_config(CheckpointFiles.find(folder).config)
    )
    needs = estimate(workload_of(config, config.policy, stage, suite, architecture))
    device = torch.device(config.device)
    if device.type == "cuda":
        console.print(needs.table(), markup=False, soft_wrap=True)
        needs.require_fits(torch.cuda.get_device_properties(device).total_memory / GB)


def check_precision(config: RunConfig, stage: Stage) -> None:
    """Refuse settings of `compute` with which the stage would not learn.

    Raises:
        ValueError: See `vla_rl.policies.openvla.memory.check_compute`.
    """
    section = "sft.optim" if stage == "sft" else "rl.optim"
    check_compute(config.compute, offload=_optim(config, stage).offload, section=section)


def workload_of(
    config: RunConfig, policy: OpenVLAConfig, stage: Stage, suite: Suite, architecture: Architecture
) -> Workload:
    """Everything of a run that its memory depends on."""
    spec, slots, algo = suite.spec, config.rollout.num_slots, config.rl.algo
    height, width = spec.image_size
    decisions = -(-suite.horizon // config.rollout.execution_horizon)
    kept_groups = algo.groups_per_iteration + config.rl.dynamic_sampling.filter.max_carried_groups
    return Workload(
        stage=stage,
        architecture=architecture,
        compute=config.compute,
        offload=_optim(config, stage).offload,
        micro_batch_size=config.sft.micro_batch_size if stage == "sft" else algo.micro_batch_size,
        acting_batch_size=-(-slots // 2) if config.rollout.batching == "waves" else slots,
        size=SampleSize(
            num_images=len(spec.cameras),
            prompt_tokens=PROMPT_TOKENS,
            num_slots=policy.action_horizon * spec.action_dim,
            has_proprio=policy.use_proprio,
        ),
        proprio_dim=spec.proprio_dim if policy.use_proprio else 0,
        l1_action_dim=spec.action_dim if policy.action_head == "l1" else 0,
        kept_decisions=kept_groups * algo.group_size * decisions if stage == "train" else 0,
        image_bytes=len(spec.cameras) * height * width * 3,
        drawing_bytes=_drawing_bytes(config, len(suite.tasks)),
        draws_on_gpu=_draws_on_gpu(config.device),
    )


def _optim(config: RunConfig, stage: Stage) -> OptimConfig:
    return config.sft.optim if stage == "sft" else config.rl.optim


def _drawing_bytes(config: RunConfig, num_tasks: int) -> int:
    """Every thread keeps a context for each task that it draws."""
    if not isinstance(config.suite, LiberoConfig):
        return 0  # a few MB
    contexts = (config.rollout.num_threads or num_cores()) * min(num_tasks, MAX_RENDERERS_PER_THREAD)
    return int(contexts * _DRAWING_BYTES[config.suite.mesh_quality])


def _draws_on_gpu(device: str) -> bool:
    """Whether pictures share the policy's GPU; where it is not in this machine, its machine is taken to draw on it."""
    if torch.device(device).type != "cuda":
        return False
    return not torch.cuda.is_available() or ensure_gl_backend() == "egl"
