"""LeRobot's own environment, which tests run scripts in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_TORCHVISION = {
    "__init__.py": "",
    "transforms/__init__.py": """
import numpy, torch

class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255
""",
    "transforms/functional.py": "",
    "transforms/v2/__init__.py": "import torch\nclass Transform(torch.nn.Module): pass\n",
    "transforms/v2/functional.py": "",
}


def lerobot_python() -> str:
    """The interpreter that `VLA_RL_LEROBOT_PYTHON` names; without it the test is skipped."""
    python = os.environ.get("VLA_RL_LEROBOT_PYTHON")
    if python is None:
        pytest.skip("LeRobot's environment is not there: see test_lerobot_plugin.py, then set VLA_RL_LEROBOT_PYTHON")
    return python


def lerobot_variables(python: str, folder: Path) -> dict[str, str]:
    """Environment variables for a script; LeRobot stays off the network and writes into the folder.

    LeRobot imports torchvision. Where it is not installed, as with builds of torch that have none, the little that
    robots and datasets without videos use of it stands in.
    """
    roots: list[str] = []
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torchvision') is None)"
    if subprocess.run([python, "-c", check], timeout=60, check=False).returncode:
        for name, content in _TORCHVISION.items():
            file = folder / "standins" / "torchvision" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        roots.append(str(folder / "standins"))
    path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
