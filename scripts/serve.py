"""vla-rl serve: answer observations over the network with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from robots.contract import DeploymentContract
from scripts.progress import console
from vla_rl.distributed import checked_device
from vla_rl.policies.compute import ComputeConfig, Precision
from vla_rl.policies.loading import load_policy
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.serving.inference import PolicyInference
from vla_rl.serving.server import PolicyServer, wait_for_signal
from vla_rl.train.checkpoint import resolve_checkpoint


def make_server(
    checkpoint: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    device: str = "cpu",
    compute: ComputeConfig | None = None,
) -> PolicyServer:
    """A server of a checkpoint, not started yet.

    Raises:
        ValueError: No checkpoint, one without a deployment contract or with other statistics than it names, no such
            device, or an address that is not safe.
    """
    checked_device(device)
    folder = resolve_checkpoint(checkpoint)
    contract = DeploymentContract.load(folder)
    policy = load_policy(folder, device, compute)
    _require_statistics(policy, contract)
    inference = PolicyInference(policy, contract)
    return PolicyServer(inference, host=host, port=port, api_key=api_key, warm_up=inference.example("warm up"))


def _require_statistics(policy: TokenPolicy, contract: DeploymentContract) -> None:
    """With other statistics the same tokens are other movements."""
    sides = {
        "statistics' key": (contract.norm_stats_key, policy.norm_stats.key),
        "statistics' SHA-256": (contract.norm_stats_sha256, policy.statistics_digest),
    }
    differences = [f"{what}: contract {one} | loaded {other}" for what, (one, other) in sides.items() if one != other]
    if differences:
        raise ValueError(
            "the checkpoint does not scale actions as its contract.json says:\n  " + "\n  ".join(differences) + "\n"
            "its statistics or its contract come from another checkpoint; save it again, or use another"
        )


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Run, checkpoint or policy folder.", show_default=False)],
    host: Annotated[
        str, typer.Option("--host", help="Address; one that other machines can reach needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 picks a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the key that clients must send.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where the policy runs, e.g. cuda.")] = "cpu",
    precision: Annotated[str, typer.Option("--precision", help="OpenVLA: float32, bfloat16 or mixed.")] = "float32",
) -> None:
    """Serve a policy over openpi's websocket protocol, until interrupted."""
    api_key = None if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
    if precision not in get_args(Precision):
        raise ValueError(f"--precision is {precision!r}; choose one of {', '.join(get_args(Precision))}")
    compute = ComputeConfig.model_validate({"precision": precision})
    with make_server(checkpoint, host=host, port=port, api_key=api_key, device=device, compute=compute) as server:
        console.print(f"serving {checkpoint} at {server.url}; stop with Ctrl-C", markup=False, soft_wrap=True)
        wait_for_signal()
    console.print("stopped")


if __name__ == "__main__":
    typer.run(main)
