"""What all tests share: one torch thread (the worlds have their own), and reasons to skip what this machine lacks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # time is never asserted
settings.load_profile("no deadline")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


_REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (_has_gpu, "needs a CUDA device"),
    "libero": (lambda: importlib.util.find_spec("libero") is not None, "needs the LIBERO assets"),
    "robot": (lambda: "VLA_RL_ROBOT" in os.environ, "needs a real robot; name it in VLA_RL_ROBOT"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose marker asks for something that is not here."""
    for marker, (is_there, reason) in _REQUIREMENTS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_there():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
