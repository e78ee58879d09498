"""vla-rl export: write a policy as one folder in its published format, adapters merged into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.memory_plan import openvla_files
from scripts.policies import find_policy, openvla_surroundings
from scripts.progress import console
from scripts.run_config import ConfigArguments, RunConfig, read_config
from sim.suites import make_suite
from vla_rl.distributed import checked_device
from vla_rl.policies.compute import ComputeConfig, Precision
from vla_rl.policies.loading import load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig


def export(config: RunConfig, checkpoint: Path, folder: Path, precision: Precision = "float32") -> None:
    """Write the policy of a checkpoint to a folder.

    Args:
        config: Read for published checkpoints, which do not say their suite, and for adapters that are named there.
        checkpoint: Run, checkpoint, policy folder, or a hub id.
        folder: New.
        precision: Of the written weights.

    Raises:
        ValueError: The folder is not empty, or there is no such checkpoint.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"'{folder}' is not empty; choose a new folder with --out")
    policy_folder, surroundings = find_policy(checkpoint), None
    files = openvla_files(policy_folder)
    if getattr(config.policy, "adapter", None) is not None and (files is None or files.ours() is not None):
        raise ValueError(f"policy.adapter is for published checkpoints; {policy_folder} brings its own adapters")
    if isinstance(config.policy, OpenVLAConfig):
        suite = make_suite(config.suite)
        surroundings = openvla_surroundings(config.policy, suite.spec, suite.tasks)
    device = str(checked_device(config.device))
    policy = load_policy(policy_folder, device, ComputeConfig(precision=precision), surroundings)
    policy.save(folder)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New folder.", show_default=False)],
    arguments: ConfigArguments = None,
    precision: Annotated[
        str, typer.Option("--precision", help="Of the written weights: float32 or bfloat16.")
    ] = "float32",
) -> None:
    """Write a policy as one folder in its published format: OpenVLA's own for OpenVLA policies, LoRA merged.

    Published checkpoints need a configuration with their suite; policy.adapter=FOLDER is merged (sections: suite,
    policy, device).
    """
    match precision:
        case "float32" | "bfloat16":
            export(read_config(arguments), checkpoint, out, precision)
        case _:
            raise ValueError(f"--precision is {precision!r}; choose float32 or bfloat16")
    console.print(f"the policy is in {out}; evaluate it with: vla-rl evaluate {out}")


if __name__ == "__main__":
    typer.run(main)
