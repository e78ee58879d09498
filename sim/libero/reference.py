"""LIBERO's own environments, set up as LIBERO's evaluations do: the peers of the benchmark."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import multiprocessing
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float64

from sim.libero.package import LiberoTask, prepare_libero
from sim.libero.starts import DUMMY_ACTION

T = TypeVar("T")

SETTLE_STEPS = 10
"""Control steps of the dummy action that evaluations let pass after setting the initial state."""
PROCESS_TIMEOUT_S = 300.0
"""Longest wait for processes; each builds an environment, which takes ten seconds on a quiet machine."""


class LiberoReference:
    """One of LIBERO's environments in this process.

    Args:
        task: Which task.
        image_size: Height and width of the images in pixels, of both of LIBERO's cameras; None draws nothing.
    """

    def __init__(self, task: LiberoTask, image_size: int | None) -> None:
        self.env = make_environment(task, image_size)

    def reset(self, state: Float64[np.ndarray, " state"]) -> None:
        """LIBERO's way to a published initial state: `reset()`, then `set_init_state()`."""
        with quiet():
            self.env.reset()
            self.env.set_init_state(state)

    def settle(self, state: Float64[np.ndarray, " state"]) -> None:
        """Go to an initial state, without `reset()`, and let things fall into place."""
        self.env.set_init_state(state)
        for _ in range(SETTLE_STEPS):
            self.env.step(DUMMY_ACTION)

    def step(self, action: Float64[np.ndarray, " 7"]) -> None:
        """One control step; with images, of both cameras."""
        self.env.step(action)

    def close(self) -> None:
        """Free its context for drawing."""
        self.env.close()


class LiberoProcesses:
    """LIBERO's `SubprocVectorEnv`: one process per environment, all in lockstep.

    Processes are spawned, not forked: this process has threads and contexts for drawing, which do not survive a fork.

    Args:
        task: Which task.
        image_size: Height and width of the images in pixels, of both of LIBERO's cameras.
        num_processes: Number of environments.

    Raises:
        TimeoutError: A process does not answer.
    """

    def __init__(self, task: LiberoTask, image_size: int, num_processes: int) -> None:
        prepare_libero()
        with quiet():
            from libero.libero.envs.venv import SubprocVectorEnv
        self._thread = ThreadPoolExecutor(1)  # waits for the processes in our place
        with spawned():
            self._env = SubprocVectorEnv([partial(make_environment, task, image_size)] * num_processes)
        self._settled = self._within_time(self._env.get_sim_state)

    def settle(self, state: Float64[np.ndarray, " state"]) -> None:
        """Every environment goes to an initial state, without `reset()`, and lets things fall into place."""
        self._set_states([state] * len(self._env))
        for _ in range(SETTLE_STEPS):
            self.step(np.tile(DUMMY_ACTION, (len(self._env), 1)))
        self._settled = self._within_time(self._env.get_sim_state)

    def restore(self) -> None:
        """Every environment goes back to where it has settled."""
        self._set_states(self._settled)

    def step(self, actions: Float64[np.ndarray, "processes 7"]) -> None:
        """One control step with images of both cameras of the first so many environments; the others stay idle."""
        self._within_time(lambda: self._env.step(actions, id=range(len(actions))))

    def private_mb(self) -> list[float]:
        """Resident memory of each process that it shares with no other one, in MB."""
        return [private_mb(worker.process.pid) for worker in self._env.workers]

    def close(self) -> None:
        """End the processes."""
        self._within_time(self._env.close)
        self._thread.shutdown()

    def _set_states(self, states: list[Float64[np.ndarray, " state"]]) -> None:
        self._within_time(lambda: self._env.set_init_state(states, id=range(len(states))))

    def _within_time(self, call: Callable[[], T]) -> T:
        try:
            return self._thread.submit(call).result(timeout=PROCESS_TIMEOUT_S)
        except TimeoutError as error:
            for worker in self._env.workers:
                worker.process.kill()  # ends the wait of the thread, too
            raise TimeoutError(f"LIBERO's processes did not answer within {PROCESS_TIMEOUT_S:g} s") from error


def make_environment(task: LiberoTask, image_size: int | None) -> Any:
    """`OffScreenRenderEnv` as LIBERO's evaluations make it (20 Hz, two cameras), or the same without drawing."""
    prepare_libero()
    with quiet():
        from libero.libero.envs.env_wrapper import ControlEnv, OffScreenRenderEnv

        settings: dict[str, Any] = {"bddl_file_name": str(task.bddl), "ignore_done": True}  # no limit on its steps
        if image_size is None:
            env = ControlEnv(use_camera_obs=False, has_offscreen_renderer=False, **settings)
        else:
            env = OffScreenRenderEnv(camera_heights=image_size, camera_widths=image_size, **settings)
        env.seed(0)
        env.reset()
    return env


def private_mb(process: int | Literal["self"]) -> float:
    """Resident memory in MB that a process shares with no other one.

    Args:
        process: Id, or "self"; that one first gives back to the system what it has freed.
    """
    if process == "self":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    return sum(int(kb) for kb in re.findall(r"^Private_\w+: +(\d+) kB", text, flags=re.MULTILINE)) / 2**10


def address_space_mb() -> float:
    """Virtual memory of this process in MB."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize() / 2**20


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what LIBERO and robosuite print and warn about to themselves."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def spawned() -> Iterator[None]:
    """Let `multiprocessing` spawn the processes that code which does not choose for itself starts."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
