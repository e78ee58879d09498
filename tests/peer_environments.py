"""Environments of other projects' servers and clients, each with the versions that it needs."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

INSTALL_S = 600
PEERS = Path(os.environ.get("VLA_RL_PEERS", "~/.cache/vla-rl/peers")).expanduser()


def peer_python(name: str, *requirements: str) -> Path:
    """Interpreter of a peer's environment, which is made if it is not there."""
    folder = PEERS / name
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join(requirements) + "\n"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=folder.exists())
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        problem = done.stderr.strip()[-200:] if done.returncode else None
    except subprocess.TimeoutExpired:
        problem = f"not within {INSTALL_S} s"
    if problem is not None:
        pytest.skip(f"peer {name} cannot be installed ({' '.join(requirements)}): {problem}")
    stamp.write_text(wanted)
    return python
