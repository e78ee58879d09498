"""vla-rl export: write a policy as one folder in its published format, adapters merged into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.policies import find_policy
from scripts.progress import console
from vla_rl.policies.compute import ComputeConfig, Precision
from vla_rl.policies.loading import load_policy


def export(checkpoint: Path, folder: Path, precision: Precision = "float32") -> None:
    """Write the policy of a checkpoint to a folder.

    Raises:
        ValueError: The folder is not empty, or there is no such checkpoint.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"'{folder}' is not empty; choose a new folder with --out")
    load_policy(find_policy(checkpoint), compute=ComputeConfig(precision=precision)).save(folder)


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", help="New folder.", show_default=False)],
    precision: Annotated[
        str, typer.Option("--precision", help="Of the written weights: float32 or bfloat16.")
    ] = "float32",
) -> None:
    """Write a policy as one folder in its published format: OpenVLA's own for OpenVLA policies, LoRA merged."""
    match precision:
        case "float32" | "bfloat16":
            export(checkpoint, out, precision)
        case _:
            raise ValueError(f"--precision is {precision!r}; choose float32 or bfloat16")
    console.print(f"the policy is in {out}; evaluate it with: vla-rl evaluate {out}")


if __name__ == "__main__":
    typer.run(main)
