"""The one configuration that every verb reads; the laptop run and the eight-GPU run differ in its values only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn, Self

import typer
from pydantic import Field, model_validator

from sim.suites import SuiteConfig
from sim.tabletop.suite import TabletopConfig
from vla_rl.config import ConfigModel, load_config
from vla_rl.config_text import config_to_yaml, describe_fields
from vla_rl.data.collect import DemosConfig
from vla_rl.evaluation.evaluate import EvaluationConfig
from vla_rl.policies.compute import ComputeConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.tiny_vla import TinyVLAConfig
from vla_rl.rollout.engine import RolloutConfig
from vla_rl.train.rl import RLConfig
from vla_rl.train.sft import SFTConfig


class RunConfig(ConfigModel):
    """Everything a run depends on, besides the checkpoint it starts from."""

    seed: int = Field(default=0, ge=0)
    """Fixes every random draw of the run."""
    device: str = "cpu"
    """Where the policy lives: "cpu", "cuda" or "cuda:0"."""
    suite: SuiteConfig = TabletopConfig()
    """Tasks, cameras, time limit."""
    policy: Annotated[TinyVLAConfig | OpenVLAConfig, Field(discriminator="type")] = TinyVLAConfig()
    """A new policy (for cloning; later stages read it from the checkpoint, if the checkpoint says it)."""
    compute: ComputeConfig = ComputeConfig()
    """Precision, memory and which weights are trained (OpenVLA)."""
    demos: DemosConfig = DemosConfig()
    """Recording of demonstrations."""
    sft: SFTConfig = SFTConfig()
    """Cloning."""
    rl: RLConfig = RLConfig()
    """Reinforcement learning."""
    rollout: RolloutConfig = RolloutConfig()
    """How episodes are run, in training and evaluation."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of a checkpoint."""

    @model_validator(mode="after")
    def _compute_is_used(self) -> Self:
        if isinstance(self.policy, TinyVLAConfig) and self.compute != ComputeConfig():
            raise ValueError(
                "compute.* is for OpenVLA policies, the tiny policy ignores it; leave it out or set policy.type=openvla"
            )
        return self


ConfigArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.yaml ...] [KEY=VALUE ...]",
        help="YAML files with differences from the defaults, left to right, then single values like rl.optim.lr=1e-4.",
        show_default=False,
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the effective configuration and stop.")]
OutFolder = Annotated[Path, typer.Option("--out", help="Folder of the run.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the folder from its newest checkpoint.")]


def read_config(arguments: list[str] | None, print_config: bool = False) -> RunConfig:
    """The configuration from command-line words; prints it and exits if asked to."""
    words = arguments or []
    files = [Path(word) for word in words if "=" not in word]
    config = load_config(RunConfig, files, [word for word in words if "=" in word])
    if print_config:
        print_and_exit(config)
    return config


def print_and_exit(config: RunConfig) -> NoReturn:
    """What `--print-config` does."""
    typer.echo(config_to_yaml(config, comments=True))
    raise typer.Exit


def field_table(*sections: str) -> str:
    """Help text: every key of these sections with its type, default and meaning."""
    rows = [row for row in describe_fields(RunConfig) if row.name.split(".")[0] in sections]
    return "\n\n".join(
        f"{row.name} ({row.type}, default {row.default}{', with ' + row.condition if row.condition else ''}): {row.doc}"
        for row in rows
    )
