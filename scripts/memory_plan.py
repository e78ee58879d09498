"""What a run needs in memory, from its configuration: printed and checked before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from scripts.progress import console
from scripts.run_config import RunConfig
from sim.libero.suite import LiberoConfig
from sim.rendering import MAX_RENDERERS_PER_THREAD, ensure_gl_backend
from sim.world import Suite
from vla_rl.distributed import checked_device, host_memory_bytes, num_cores, num_gradient_threads
from vla_rl.policies.openvla.activations import SampleSize
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.checkpoint import CheckpointFiles
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.memory import (
    GB,
    PRESETS_GB,
    PROMPT_TOKENS,
    MemoryEstimate,
    Stage,
    Workload,
    check_compute,
    estimate,
)
from vla_rl.train.optim import OptimConfig

_DRAWING_BYTES = {"full": 0.6e9, "lite": 0.1e9}
"""Upper end of what a drawing context of a LIBERO task took (docs/libero.md); textures, mostly."""


def check_memory(config: RunConfig, stage: Stage, suite: Suite, folder: Path | None) -> None:
    """Print what an OpenVLA run will need; refuse what cannot fit on this machine, and what cannot learn.

    Args:
        config: The run's.
        stage: The verb.
        suite: The configured suite.
        folder: Of the policy that the run starts from; None: random weights.

    Raises:
        ValueError: It does not fit (says what to change), updates would be lost, or the checkpoint cannot be trained.
    """
    files = None if folder is None else openvla_files(folder)
    policy = planned_policy(config, stage, files)
    if policy is None or (files is None) != (folder is None):
        return  # the tiny policy fits everywhere; a checkpoint of another kind than configured, the loader refuses
    check_precision(config, stage)
    check_trainable(policy, files, stage)
    device = checked_device(config.device)
    architecture = policy.sizes.architecture() if files is None else Architecture.from_config(files.config)
    needs = estimate(workload_of(config, policy, stage, suite, architecture))
    if device.type == "cuda":
        console.print(needs.table(), markup=False, soft_wrap=True)
    else:
        console.print(f"memory: about {(needs.total + needs.host_total) / GB:.1f} GB (vla-rl doctor shows the items)")
    is_gpu = device.type == "cuda"
    require_room(needs, device, torch.cuda.get_device_properties(device).total_memory / GB if is_gpu else None)


def check_trainable(policy: OpenVLAConfig, files: CheckpointFiles | None, stage: Stage) -> None:
    """Refuse a policy that the stage cannot train.

    Raises:
        ValueError: Says what to set, or which checkpoint to use instead.
    """
    if files is not None:
        files.require_trainable(stage)
    elif stage == "train" and policy.action_head != "tokens":
        raise ValueError("reinforcement learning needs probabilities of action tokens: set policy.action_head=tokens")
    if policy.decoding != "parallel":
        raise ValueError("autoregressive decoding can be evaluated, not trained: set policy.decoding=parallel")


def require_room(
    needs: MemoryEstimate, device: torch.device, gpu_memory_gb: float | None, is_here: bool = True
) -> None:
    """Refuse a run that is larger than this machine's memory or its GPU's.

    Args:
        needs: The run's.
        device: Where its policy lives.
        gpu_memory_gb: Of each GPU; None: the largest usual one, or there is no GPU in the run.
        is_here: Whether this machine is the one that will run it.

    Raises:
        ValueError: Says how much is needed, how much there is, and what to change.
    """
    host_needed = needs.host_total + (needs.total if device.type == "cpu" else 0.0)
    if is_here and host_needed > host_memory_bytes():
        raise ValueError(
            f"the run needs about {host_needed / GB:.1f} GB of host memory and this machine has "
            f"{host_memory_bytes() / GB:.1f} GB; see the items with vla-rl doctor: fewer trained weights "
            "(compute.trained.type=lora), smaller micro-batches or a larger machine help"
        )
    if device.type == "cuda":
        needs.require_fits(PRESETS_GB[-1] if gpu_memory_gb is None else gpu_memory_gb)


def openvla_files(folder: Path) -> CheckpointFiles | None:
    """The files of a policy folder; None: it is of another policy, or none at all."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return CheckpointFiles.find(folder) if content.get("model_type") == "openvla" else None


def planned_policy(config: RunConfig, stage: Stage, files: CheckpointFiles | None) -> OpenVLAConfig | None:
    """Settings of the policy that will be trained: those of the checkpoint where it says them, else the configured.

    Returns:
        None: No OpenVLA policy, or nothing says how a published checkpoint is to be used.
    """
    policy = config.policy if isinstance(config.policy, OpenVLAConfig) else None
    if files is None:
        return policy
    ours = files.ours() if stage == "train" else None  # cloning takes weights from a checkpoint, not its settings
    if ours is not None:
        policy = OpenVLAConfig.model_validate_json(json.dumps(ours["policy"]))
    if policy is None:
        return None
    has_head = "action_head" in files.side_files or policy.action_head == "l1"
    has_proprio = "proprio_projector" in files.side_files or policy.use_proprio
    return policy.model_copy(update={"action_head": "l1" if has_head else "tokens", "use_proprio": has_proprio})


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
        num_parallel=num_gradient_threads(torch.device(config.device)),
        demo_steps=config.demos.num_per_task * len(suite.tasks) * suite.horizon if stage == "sft" else 0,
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
