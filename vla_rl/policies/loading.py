"""Which class a policy folder belongs to: the one place where the `type` tag becomes a class."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from robots.contract import saved_execution_horizon
from vla_rl.policies.compute import ComputeConfig
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.config import Surroundings
from vla_rl.policies.tiny_vla import TinyVLA
from vla_rl.policies.token_policy import TokenPolicy

if TYPE_CHECKING:
    from vla_rl.policies.openvla.model import OpenVLAModel
    from vla_rl.policies.openvla.policy import OpenVLAPolicy


def load_policy(
    folder: Path, device: str = "cpu", compute: ComputeConfig | None = None, surroundings: Surroundings | None = None
) -> TokenPolicy:
    """Read any policy folder, e.g. `<checkpoint>/policy`, or a published OpenVLA checkpoint.

    Args:
        folder: Where.
        device: Where the weights go.
        compute: For OpenVLA: precision, memory, what is trained.
        surroundings: What published checkpoints do not say.

    Raises:
        ValueError: The folder is not a policy, or a file in it is damaged.
        ImportError: The policy needs an extra that is not installed.
    """
    policy = _load(folder, device, compute, surroundings)
    if horizon := saved_execution_horizon(folder):
        policy.execution_horizon = horizon
    return policy


def _load(folder: Path, device: str, compute: ComputeConfig | None, surroundings: Surroundings | None) -> TokenPolicy:
    match _kind(folder):
        case "tiny_vla":
            policy: TokenPolicy = _reading(folder, lambda: TinyVLA.load(folder))
            if compute not in (None, ComputeConfig()):
                raise ValueError(f"{folder} holds a tiny policy, which ignores compute.*; leave these settings out")
            return policy.to(device)
        case "openvla":
            with _extra():
                from vla_rl.policies.openvla.loading import load_openvla
            return _reading(folder, lambda: load_openvla(folder, device, compute, surroundings))
        case kind:
            raise ValueError(f"{folder} holds a policy of unknown type {kind!r}; known: tiny_vla, openvla")


def _kind(folder: Path) -> object:
    try:
        content = json.loads((folder / "config.json").read_text())
        return content["model_type"] if "model_type" in content else content["policy"]["type"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} is not a policy: it has no config.json (expected a checkpoint or its policy/ folder)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged ({error}); use another checkpoint") from error


def _reading(folder: Path, read: Callable[[], TokenPolicy]) -> TokenPolicy:
    try:
        return read()
    except (OSError, RuntimeError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the policy in {folder} cannot be read ({error}); use another checkpoint") from error


def new_openvla_policy(
    surroundings: Surroundings,
    instructions: Sequence[str],
    norm_stats: NormStats,
    compute: ComputeConfig,
    device: str,
    model: OpenVLAModel | None = None,
) -> OpenVLAPolicy:
    """See `vla_rl.policies.openvla.loading.new_openvla`."""
    with _extra():
        from vla_rl.policies.openvla.loading import new_openvla
    return new_openvla(surroundings, instructions, norm_stats, compute, device, model)


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"OpenVLA policies need packages that are not installed ({error}): pip install 'vla-rl[openvla]'"
        ) from error
