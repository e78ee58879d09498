"""`VecEnv` on a thread pool: MuJoCo, the controller and the renderer release the GIL, so worlds need no processes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from sim.rendering import free_renderers
from sim.world import Suite, World
from vla_rl.types import EnvSpec, SimError, SlotResult, Start


@dataclass
class _Slot:
    world: World
    start: Start | None = None
    record_frames: bool = False
    is_busy: bool = False
    can_step: bool = False


class ThreadVecEnv:
    """See `sim.vec_env.VecEnv`. Any thread serves any slot, so one slow world never holds up another."""

    def __init__(self, suite: Suite, num_slots: int, num_threads: int) -> None:
        """Make the worlds and start the threads.

        Args:
            suite: Maker of the worlds.
            num_slots: Episodes at the same time.
            num_threads: Simulation threads; more than there are cores or slots bring nothing.
        """
        if num_slots < 1 or num_threads < 1:
            raise ValueError(f"num_slots is {num_slots} and num_threads {num_threads}; both must be at least 1")
        self._spec = suite.spec
        self._slots = [_Slot(suite.make_world()) for _ in range(num_slots)]
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: dict[int, SlotResult | BaseException] = {}
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self._slots)

    @property
    def spec(self) -> EnvSpec:
        """The interface of the suite."""
        return self._spec

    def reset(self, slot: int, start: Start, record_frames: bool = False) -> None:
        """See `VecEnv.reset`."""
        entry = self._claim(slot)
        entry.start, entry.record_frames = start, record_frames
        self._submit(slot, lambda: self._reset(slot))

    def step(self, slot: int, chunk: Float64[np.ndarray, "steps action_dim"]) -> None:
        """See `VecEnv.step`."""
        if not self._slots[slot].can_step and not self._slots[slot].is_busy:
            raise ValueError(f"slot {slot} has no running episode; reset it with a start first")
        self._claim(slot)
        self._submit(slot, lambda: self._step(slot, chunk))

    def wait(self, slots: Collection[int] | None = None, timeout_s: float = 60.0) -> list[SlotResult]:
        """See `VecEnv.wait`."""
        if slots is None and not any(entry.is_busy for entry in self._slots):
            raise ValueError("nothing to wait for: no slot has a request under way")
        for slot in slots or ():
            if not self._slots[slot].is_busy:
                raise ValueError(f"slot {slot} has no request under way")
        with self._changed:
            is_ready = (lambda: bool(self._done)) if slots is None else (lambda: all(s in self._done for s in slots))
            if not self._changed.wait_for(is_ready, timeout_s):
                late = [s for s, entry in enumerate(self._slots) if entry.is_busy and s not in self._done]
                raise TimeoutError(f"slots {late} did not answer within {timeout_s:g} s")
            ready = sorted(self._done if slots is None else slots)
            answers = {slot: self._done.pop(slot) for slot in ready}
        return [self._release(slot, answer) for slot, answer in answers.items()]

    def close(self) -> None:
        """Stop the threads and free the renderers. May be called twice."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=60.0)
        self._threads = []

    def _claim(self, slot: int) -> _Slot:
        if not self._threads:
            raise ValueError("the environment is closed")
        entry = self._slots[slot]
        if entry.is_busy:
            raise ValueError(f"slot {slot} has a request under way; wait for it first")
        entry.is_busy = True
        return entry

    def _release(self, slot: int, answer: SlotResult | BaseException) -> SlotResult:
        entry = self._slots[slot]
        entry.is_busy = False
        entry.can_step = False
        if isinstance(answer, BaseException):
            key = entry.start.key if entry.start is not None else "no start"
            raise RuntimeError(f"slot {slot} ({key}) failed: {answer}") from answer
        entry.can_step = answer.observation is not None
        return answer

    def _submit(self, slot: int, job: Callable[[], SlotResult]) -> None:
        def run() -> None:
            answer: SlotResult | BaseException
            try:
                answer = job()
            except SimError as error:
                answer = SlotResult(slot=slot, observation=None, step=None, error=error)
            except Exception as error:  # noqa: BLE001 - handed to `wait`, which raises it in the caller's thread
                answer = error
            with self._changed:
                self._done[slot] = answer
                self._changed.notify_all()

        self._jobs.put(run)

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        finally:
            free_renderers()

    def _reset(self, slot: int) -> SlotResult:
        entry = self._slots[slot]
        assert entry.start is not None
        began = time.perf_counter()
        entry.world.reset(entry.start)
        reset_at = time.perf_counter()
        observation = entry.world.observe()
        return SlotResult(
            slot=slot,
            observation=observation,
            step=None,
            physics_s=reset_at - began,
            render_s=time.perf_counter() - reset_at,
        )

    def _step(self, slot: int, chunk: Float64[np.ndarray, "steps action_dim"]) -> SlotResult:
        entry = self._slots[slot]
        began = time.perf_counter()
        step = entry.world.step(chunk, entry.record_frames)
        stepped_at = time.perf_counter()
        observation = None if step.is_done else entry.world.observe()
        return SlotResult(
            slot=slot,
            observation=observation,
            step=step,
            physics_s=stepped_at - began,
            render_s=time.perf_counter() - stepped_at,
        )
