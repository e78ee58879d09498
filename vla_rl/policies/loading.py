"""Which class a policy folder belongs to: the one place where the `type` tag becomes a class."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError

from vla_rl.policies.tiny_vla import TinyVLA
from vla_rl.policies.token_policy import TokenPolicy


def load_policy(folder: Path, device: str = "cpu") -> TokenPolicy:
    """Read any policy folder, e.g. `<checkpoint>/policy`.

    Raises:
        ValueError: The folder is not a policy, or a file in it is damaged.
    """
    try:
        kind = json.loads((folder / "config.json").read_text())["policy"]["type"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder} is not a policy: it has no config.json (expected a checkpoint or its policy/ folder)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged ({error}); use another checkpoint") from error
    match kind:
        case "tiny_vla":
            policy_class = TinyVLA
        case _:
            raise ValueError(f"{folder} holds a policy of unknown type {kind!r}; known: tiny_vla")
    try:
        policy = policy_class.load(folder)
    except (OSError, RuntimeError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the policy in {folder} cannot be read ({error}); use another checkpoint") from error
    return policy.to(device)
