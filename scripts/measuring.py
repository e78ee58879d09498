"""Time and working memory of pieces of work, for the benchmarks."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a piece of work took.

    Attributes:
        seconds: The least of some repetitions; None: it did not fit into the GPU's memory.
        megabytes: Most memory above what was there before; None: unknown on this system, or it did not fit.
    """

    seconds: float | None
    megabytes: float | None


def measured(works: Sequence[Callable[[], object]], device: torch.device, repeats: int = 3) -> list[Measurement]:
    """Run each piece of work to warm up and for its memory; then all of them in turn, several times, for the times.

    Taking turns spreads what else the machine does over all of them.
    """
    megabytes: list[float | None] = [None] * len(works)
    seconds: list[list[float]] = [[] for _ in works]
    for i, work in enumerate(works):
        try:
            work()
            megabytes[i] = _peak_megabytes(work, device)
            seconds[i].append(_seconds(work, device))
        except torch.cuda.OutOfMemoryError:
            seconds[i].clear()
        _tidy(device)
    for _ in range(repeats - 1):
        for i, work in enumerate(works):
            if seconds[i]:
                seconds[i].append(_seconds(work, device))
    return [Measurement(seconds=min(s, default=None), megabytes=m) for s, m in zip(seconds, megabytes, strict=True)]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _peak_megabytes(work: Callable[[], object], device: torch.device) -> float | None:
    _tidy(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = float(torch.cuda.memory_allocated(device))
        work()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    if not _forget_peak():
        return None
    before = _resident_kb("VmRSS")
    work()
    return max(0.0, (_resident_kb("VmHWM") - before) / 1e3)


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _forget_peak() -> bool:
    """Give freed memory back to the system and start its high-water mark anew; False where Linux does not offer it."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def _resident_kb(name: str) -> float:
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
