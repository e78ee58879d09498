"""Compute resources of this process: CPU threads of torch, and gradients of several parts of a batch at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

ResultT = TypeVar("ResultT")


def num_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def host_memory_bytes() -> int:
    """Memory that this process may use: the machine's, or what its control group grants."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    granted = Path("/sys/fs/cgroup/memory.max")
    if granted.is_file() and (text := granted.read_text().strip()).isdecimal():
        limit = min(limit, int(text))
    return limit


def checked_device(name: str) -> torch.device:
    """The device with this name.

    Raises:
        ValueError: No such device here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {name!r} cannot be used here ({str(error).splitlines()[0]}); try device=cpu"
        ) from error
    return device


def num_gradient_threads(device: torch.device) -> int:
    """Parts of a batch that are worked on at the same time: one per core on the CPU, one on a GPU."""
    return num_cores() if device.type == "cpu" else 1


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Run a block with this many threads inside each torch operation (of the calling thread)."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def accumulate_gradients(
    parameters: Sequence[torch.nn.Parameter],
    parts: Sequence[Callable[[], tuple[torch.Tensor, ResultT]]],
    num_threads: int = 1,
) -> list[ResultT]:
    """Add the gradients of several losses to the parameters' `grad`.

    On CPUs, small models gain little from threads inside an operation, and lose much where a core is busy with
    something else (every operation waits for the slowest thread). Here each thread takes whole parts instead. Gradients
    are added in the order of the parts, so the sum does not depend on the number of threads.

    Args:
        parameters: All parameters that the losses depend on.
        parts: Each computes a scalar loss and something to return.
        num_threads: Parts that run at the same time; 1 uses `backward` in the calling thread, as GPUs and sharded
            models need it.

    Returns:
        What the parts returned, in order.
    """
    if num_threads == 1:
        results = []
        for part in parts:
            loss, result = part()
            loss.backward()  # type: ignore[no-untyped-call]
            results.append(result)
        return results

    def gradients(
        part: Callable[[], tuple[torch.Tensor, ResultT]],
    ) -> tuple[Sequence[torch.Tensor | None], ResultT]:
        loss, result = part()
        return torch.autograd.grad(loss, parameters, allow_unused=True), result

    results = []
    for grads, result in _pool(num_threads).map(gradients, parts):
        results.append(result)
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
    return results


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "gradients", initializer=lambda: torch.set_num_threads(1))
