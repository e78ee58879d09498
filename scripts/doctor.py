"""vla-rl doctor: check a configuration and this machine, and say what would go wrong, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from scripts.memory_plan import (
    check_precision,
    check_trainable,
    openvla_files,
    planned_policy,
    require_room,
    workload_of,
)
from scripts.policies import find_policy
from scripts.progress import console
from scripts.run_config import ConfigArguments, RunConfig, read_config
from scripts.train import arithmetic
from sim.model import check_mujoco_version
from sim.rendering import ensure_gl_backend
from sim.suites import make_suite
from sim.world import Suite
from vla_rl.distributed import host_memory_bytes, num_cores
from vla_rl.policies.openvla.architecture import Architecture
from vla_rl.policies.openvla.checkpoint import CheckpointFiles, compare_shapes, is_hub_id, resolve_checkpoint_folder
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.memory import GB, Stage, estimate
from vla_rl.policies.openvla.parameters import PUBLISHED, model_parameters
from vla_rl.policies.openvla.side_modules import is_published_weight

_EXTRAS = {"libero": "libero", "openvla": "peft", "gymnasium": "gymnasium"}
"""Optional parts of the installation, each with a package that tells whether it is there."""
_BFLOAT16_TOLERANCE = 0.02
"""Acting and training differ by more than this in bfloat16, as they batch observations differently."""


class Diagnosis:
    """What was found, printed as it comes."""

    def __init__(self) -> None:
        self.num_problems = 0

    def say(self, text: str) -> None:
        """A fact."""
        console.print(text, markup=False, soft_wrap=True)

    def problem(self, text: str) -> None:
        """Something that would make the run fail."""
        self.num_problems += 1
        console.print(f"problem: {text}", style="red", markup=False, soft_wrap=True)

    def attempt(self, check: Callable[[], None]) -> None:
        """Run a check whose error is a problem of the configuration or of the machine."""
        try:
            check()
        except (ValueError, OSError, ImportError) as error:
            self.problem(str(error))


def examine(config: RunConfig, stage: Stage, gpu_memory_gb: float | None = None, checkpoint: Path | None = None) -> int:
    """Print everything about a run that can be known without its weights.

    Args:
        config: The run's.
        stage: The verb that is to run.
        gpu_memory_gb: Memory that each GPU is to have; None: that of this machine's, if it has one.
        checkpoint: Where the run starts; None: what the configuration names.

    Returns:
        Number of problems.
    """
    diagnosis = Diagnosis()
    diagnosis.attempt(lambda: _examine_machine(config, diagnosis))
    diagnosis.attempt(lambda: _examine_run(config, stage, gpu_memory_gb, checkpoint, diagnosis))
    return diagnosis.num_problems


def _examine_machine(config: RunConfig, diagnosis: Diagnosis) -> None:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("vla-rl", "torch", "mujoco", "robosuite")]
    diagnosis.say(f"{', '.join(versions)}, Python {platform.python_version()}")
    extras = [
        f"{name} {'yes' if importlib.util.find_spec(package) else 'no'}" for name, package in sorted(_EXTRAS.items())
    ]
    diagnosis.say(
        f"extras: {', '.join(extras)}; {num_cores()} CPU cores, {host_memory_bytes() / GB:.0f} GB of host memory"
    )
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = [f"{gpu.name} ({gpu.total_memory / GB:.0f} GB)" for gpu in gpus]
    device = torch.device(config.device)
    diagnosis.say(f"device: {config.device}; GPUs here: {', '.join(names) or 'none'}")
    if device.type == "cuda" and not gpus:
        diagnosis.say("  the run needs a machine with a GPU; this one can only check the configuration")
    check_mujoco_version()
    diagnosis.say(f"pictures are drawn through {ensure_gl_backend()} here")


def _examine_run(
    config: RunConfig, stage: Stage, gpu_memory_gb: float | None, checkpoint: Path | None, diagnosis: Diagnosis
) -> None:
    suite = make_suite(config.suite)
    spec = suite.spec
    diagnosis.say(
        f"suite {config.suite.type}: {len(suite.tasks)} tasks, at most {suite.horizon} control steps, "
        f"cameras {', '.join(spec.cameras)} at {spec.image_size[0]} x {spec.image_size[1]} pixels"
    )
    files = _find_checkpoint(config, checkpoint, diagnosis)
    policy = planned_policy(config, stage, files)
    horizon = (policy or config.policy).action_horizon
    executed = config.rollout.execution_horizon
    if executed > horizon:
        diagnosis.problem(f"rollout.execution_horizon is {executed}, but policy.action_horizon is only {horizon}")
    if stage == "train":
        diagnosis.say(arithmetic(config, suite.horizon, horizon * spec.action_dim))
    if policy is None and files is not None:
        diagnosis.problem(f"{files.folder} is a published OpenVLA checkpoint: set policy.type=openvla")
        return
    if policy is None:
        diagnosis.say("the tiny policy fits everywhere")
        return
    diagnosis.attempt(lambda: check_precision(config, stage))
    diagnosis.attempt(lambda: check_trainable(policy, files, stage))
    _examine_openvla(config, policy, files, stage, suite, gpu_memory_gb, diagnosis)


def _examine_openvla(
    config: RunConfig,
    policy: OpenVLAConfig,
    files: CheckpointFiles | None,
    stage: Stage,
    suite: Suite,
    gpu_memory_gb: float | None,
    diagnosis: Diagnosis,
) -> None:
    if (
        stage == "train"
        and config.compute.precision != "float32"
        and config.rl.algo.ratio_tolerance < _BFLOAT16_TOLERANCE
    ):
        diagnosis.problem(
            f"rl.algo.ratio_tolerance={config.rl.algo.ratio_tolerance:g} is below the rounding of "
            f"compute.precision={config.compute.precision}, and would stop the run; set it to 0.1"
        )
    if importlib.util.find_spec(_EXTRAS["openvla"]) is None:
        raise ImportError("OpenVLA policies need packages that are not installed: pip install 'vla-rl[openvla]'")
    if files is not None:
        architecture = Architecture.from_config(files.config)
    else:
        architecture = policy.sizes.architecture() if policy.checkpoint is None else PUBLISHED
    diagnosis.attempt(lambda: _examine_shapes(architecture, files, diagnosis))
    if files is not None:
        diagnosis.attempt(lambda: _examine_small_files(files, policy, stage))
    if files is not None and stage == "train":
        diagnosis.attempt(lambda: _examine_statistics(files, policy, suite, diagnosis))
    needs = estimate(workload_of(config, policy, stage, suite, architecture))
    diagnosis.say(needs.table())
    device = torch.device(config.device)
    is_here = device.type == "cpu" or torch.cuda.is_available()
    if gpu_memory_gb is None and device.type == "cuda" and is_here:
        gpu_memory_gb = torch.cuda.get_device_properties(device).total_memory / GB
    diagnosis.attempt(lambda: require_room(needs, device, gpu_memory_gb, is_here))


def _find_checkpoint(config: RunConfig, checkpoint: Path | None, diagnosis: Diagnosis) -> CheckpointFiles | None:
    """Files of the OpenVLA checkpoint that was named, or else configured, if they are here."""
    if checkpoint is not None:
        folder = find_policy(checkpoint)
        diagnosis.say(f"checkpoint {checkpoint}: in {folder}")
        return openvla_files(folder)
    name = config.policy.checkpoint if isinstance(config.policy, OpenVLAConfig) else None
    if name is None:
        diagnosis.say("checkpoint: none, random weights")
        return None
    try:
        folder = resolve_checkpoint_folder(name)
    except ValueError as error:
        if is_hub_id(name):
            diagnosis.say(f"checkpoint {name}: not in the local cache; get it with: hf download {name}")
        else:
            diagnosis.problem(str(error))
        return None
    diagnosis.say(f"checkpoint {name}: in {folder}")
    return CheckpointFiles.find(folder)


def _examine_shapes(architecture: Architecture, files: CheckpointFiles | None, diagnosis: Diagnosis) -> None:
    """Build the model without memory; it must have the expected size, and the tensors of the checkpoint."""
    from vla_rl.policies.openvla.model import OpenVLAModel

    with torch.device("meta"):
        model = OpenVLAModel(architecture)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items() if is_published_weight(name)}
    num_weights = sum(weight.numel() for weight in model.parameters())
    assumed = model_parameters(architecture)
    if num_weights != assumed:
        raise ValueError(
            f"the model has {num_weights:,} parameters, the memory is estimated for {assumed:,}; please report this"
        )
    diagnosis.say(f"model: {num_weights:,} parameters in {len(shapes)} tensors")
    differences = compare_shapes(shapes, files.shapes()) if files is not None else []
    if differences:
        raise ValueError("the checkpoint does not fit the model:\n" + "\n".join(differences))


def _examine_small_files(files: CheckpointFiles, policy: OpenVLAConfig, stage: Stage) -> None:
    from vla_rl.policies.openvla.loading import check_small_files

    check_small_files(files, policy, is_cloned=stage == "sft")


def _examine_statistics(files: CheckpointFiles, policy: OpenVLAConfig, suite: Suite, diagnosis: Diagnosis) -> None:
    from vla_rl.policies.openvla.loading import published_norm_stats

    if files.ours() is not None:
        return  # our checkpoints say which statistics are theirs
    suites = sorted({task.split("/")[0] for task in suite.tasks})
    diagnosis.say(f"actions are scaled by the statistics {published_norm_stats(files, suites, policy.norm_key).key!r}")


def main(
    arguments: ConfigArguments = None,
    stage: Annotated[Stage, typer.Option("--for", help="The verb that is to run.")] = "train",
    gpu_memory_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU, in GB; default: that of this machine's.", min=0.1)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Where the run starts; default: policy.checkpoint.")
    ] = None,
) -> None:
    """Check a configuration and this machine without loading weights: versions, suite, checkpoint, memory."""
    num_problems = examine(read_config(arguments), stage, gpu_memory_gb, checkpoint)
    if num_problems:
        console.print(f"{num_problems} problem{'s' if num_problems > 1 else ''}", style="red")
        raise typer.Exit(1)
    console.print("no problem found")


if __name__ == "__main__":
    typer.run(main)
