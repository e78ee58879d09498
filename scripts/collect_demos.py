"""vla-rl demos: record demonstrations of the scripted expert."""

from __future__ import annotations

from pathlib import Path

import typer

from scripts.progress import console, progress_bar
from scripts.run_config import ConfigArguments, OutFolder, PrintConfig, RunConfig, read_config
from sim.suites import make_suite
from vla_rl.data.collect import collect_demonstrations


def collect(config: RunConfig, folder: Path) -> None:
    """Record into a folder, one HDF5 file per task."""
    suite = make_suite(config.suite)
    with progress_bar("demonstrations", config.demos.num_per_task * len(suite.tasks)) as bar:
        shares = collect_demonstrations(suite, config.demos, folder, config.seed, bar.update)
    for task, share in shares.items():
        console.print(f"  {task}: {config.demos.num_per_task} demonstrations, expert solved {share:.0%} under noise")


def main(
    arguments: ConfigArguments = None, out: OutFolder = Path("runs/demos"), print_config: PrintConfig = False
) -> None:
    """Record demonstrations of the scripted expert from training starts (sections: suite, demos, seed)."""
    collect(read_config(arguments, print_config), out)
    console.print(f"demonstrations are in {out}; next: vla-rl sft --demos {out}")


if __name__ == "__main__":
    typer.run(main)
