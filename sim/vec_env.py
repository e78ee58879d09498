"""Many worlds, one interface: asynchronous slots. The collector talks to this and to nothing below it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64

from sim.rendering import free_renderers
from sim.world import Suite, World
from vla_rl.types import EnvSpec, SimError, SlotResult, Start


@runtime_checkable
class VecEnv(Protocol):
    """A fixed number of slots, each running one episode at a time.

    No auto-reset: a slot whose episode is over (or whose world crashed) waits until it is given the next `Start`.
    A slot with a request under way must be waited for before it takes another.
    """

    @property
    def num_slots(self) -> int:
        """Number of slots."""

    @property
    def spec(self) -> EnvSpec:
        """The interface of the suite."""

    def reset(self, slot: int, start: Start, record_frames: bool = False) -> None:
        """Request an episode; its first observation comes from `wait`. Returns at once."""

    def step(self, slot: int, chunk: Float64[np.ndarray, "steps action_dim"]) -> None:
        """Request a chunk; its outcome and the next observation come from `wait`. Returns at once."""

    def wait(self, slots: Collection[int] | None = None, timeout_s: float = 60.0) -> list[SlotResult]:
        """Results in slot order.

        Args:
            slots: Wait for all of these; None waits for at least one and returns every result that is ready.
            timeout_s: Limit for the wait.

        Raises:
            TimeoutError: Names the slots that did not answer.
        """

    def close(self) -> None:
        """Stop the threads and free the renderers. May be called twice."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    """One world and where it stands.

    The status is "empty" before the first episode, "busy" while a request is under way, "answered" until its result is
    fetched, then "running" if the next chunk may come, or "over" if the episode ended or the world crashed.
    """

    index: int
    world: World
    status: Literal["empty", "busy", "answered", "running", "over"] = "empty"
    start: Start | None = None
    record_frames: bool = False
    answer: SlotResult | BaseException | None = None


class ThreadVecEnv:
    """A `VecEnv` whose worlds share a few threads of this process.

    Requests go through one queue, so a slow world holds up nobody while another thread is free. Physics and drawing
    run without Python's lock. Each thread draws with contexts of its own.

    Args:
        suite: Where the worlds come from.
        num_slots: Number of worlds.
        num_threads: Number of threads; more than there are cores gains nothing.

    Raises:
        ValueError: A number is not positive.
    """

    def __init__(self, suite: Suite, num_slots: int, num_threads: int) -> None:
        if num_slots < 1 or num_threads < 1:
            raise ValueError(f"num_slots is {num_slots} and num_threads is {num_threads}; both must be at least 1")
        self._spec = suite.spec
        self._slots = [_Slot(index=i, world=suite.make_world()) for i in range(num_slots)]
        self._changed = threading.Condition()  # guards what follows and every field of the slots but `world`
        self._is_enough: Callable[[], bool] = lambda: False  # what the caller of `wait` waits for
        self._is_closed = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(self._jobs,), name=f"sim-{i}", daemon=True)
            for i in range(min(num_threads, num_slots))
        ]
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
        """Request an episode; its first observation comes from `wait`. Returns at once.

        Raises:
            ValueError: A request of this slot has not been waited for, or the environment is closed.
        """
        entry = self._claim(slot, "reset", ("empty", "running", "over"))
        entry.start, entry.record_frames = start, record_frames
        self._jobs.put(lambda: self._answer(entry, lambda: _run_reset(entry.index, entry.world, start)))

    def step(self, slot: int, chunk: Float64[np.ndarray, "steps action_dim"]) -> None:
        """Request a chunk; its outcome and the next observation come from `wait`. Returns at once.

        Raises:
            ValueError: The slot has no running episode or an open request, or the environment is closed.
        """
        entry = self._claim(slot, "step", ("running",))
        copied, record_frames = chunk.copy(), entry.record_frames
        self._jobs.put(lambda: self._answer(entry, lambda: _run_step(entry.index, entry.world, copied, record_frames)))

    def wait(self, slots: Collection[int] | None = None, timeout_s: float = 60.0) -> list[SlotResult]:
        """Results in slot order.

        A world's `SimError` comes as `SlotResult.error`; any other exception is raised here, with a note that names the
        slot and the start.

        Args:
            slots: Wait for all of these; None waits for at least one and returns every result that is ready.
            timeout_s: Limit for the wait.

        Raises:
            TimeoutError: Names the slots that did not answer.
            ValueError: Nothing was requested from a slot.
        """
        with self._changed:
            asked = self._open_slots() if slots is None else [self._slots[i] for i in sorted(set(slots))]
            idle = [entry.index for entry in asked if entry.status not in ("busy", "answered")]
            if idle or not asked:
                raise ValueError(f"nothing to wait for in slots {idle or 'any'}: call reset or step first")
            enough = any if slots is None else all
            self._is_enough = lambda: enough(entry.status == "answered" for entry in asked)
            if not self._changed.wait_for(self._is_enough, timeout_s):
                late = [
                    f"{entry.index} ({entry.start.key})"
                    for entry in asked
                    if entry.status != "answered" and entry.start is not None
                ]
                raise TimeoutError(f"no answer within {timeout_s:g} s from slots: {', '.join(late)}")
            answered = [entry for entry in asked if entry.status == "answered"]
            for entry in answered:
                _raise_failure(entry)
            return [_fetch(entry) for entry in answered]

    def close(self) -> None:
        """Stop the threads and free the renderers. May be called twice; requests that have not begun are dropped."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _open_slots(self) -> list[_Slot]:
        return [entry for entry in self._slots if entry.status in ("busy", "answered")]

    def _claim(self, slot: int, request: str, allowed: tuple[str, ...]) -> _Slot:
        """Mark a slot as busy, if it may take the request."""
        if not 0 <= slot < len(self._slots):
            raise ValueError(f"slot {slot} does not exist; slots are 0 to {len(self._slots) - 1}")
        entry = self._slots[slot]
        with self._changed:
            if self._is_closed:
                raise ValueError(f"{request} on a closed environment")
            if entry.status not in allowed:
                advice = "wait for it first" if entry.status in ("busy", "answered") else "reset it first"
                raise ValueError(f"slot {slot} cannot {request}: it is {entry.status}; {advice}")
            entry.status = "busy"
        return entry

    def _answer(self, entry: _Slot, run: Callable[[], SlotResult]) -> None:
        """Run a request in a thread of the pool and hand over its result, or whatever it raised."""
        if self._is_closed:
            return
        answer: SlotResult | BaseException
        try:
            answer = run()
        except SimError as error:
            answer = SlotResult(slot=entry.index, observation=None, step=None, error=error)
        except BaseException as error:  # the thread must live on; `wait` raises it where the caller can see it
            answer = error
        with self._changed:
            entry.answer, entry.status = answer, "answered"
            # Waking the caller for each of its slots would take Python's lock away from the worlds each time.
            if self._is_enough():
                self._changed.notify_all()


def _raise_failure(entry: _Slot) -> None:
    """Raise what a request raised; answers of other slots stay where they are, for the next `wait`."""
    if isinstance(entry.answer, BaseException) and entry.start is not None:
        failure, entry.answer, entry.status = entry.answer, None, "over"
        failure.add_note(f"raised by the world in slot {entry.index}, start {entry.start.key}")
        raise failure


def _fetch(entry: _Slot) -> SlotResult:
    answer, entry.answer = entry.answer, None
    assert isinstance(answer, SlotResult), "an answered slot without a failure has a result"
    entry.status = "over" if answer.observation is None else "running"
    return answer


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """Body of a pool thread: run jobs until None comes, then free the drawing contexts that belong to this thread."""
    while (job := jobs.get()) is not None:
        job()
    free_renderers()


def _run_reset(slot: int, world: World, start: Start) -> SlotResult:
    began = time.perf_counter()
    world.reset(start)
    reset = time.perf_counter()
    observation = world.observe()
    return SlotResult(
        slot=slot,
        observation=observation,
        step=None,
        physics_s=reset - began,
        render_s=time.perf_counter() - reset,
    )


def _run_step(
    slot: int, world: World, chunk: Float64[np.ndarray, "steps action_dim"], record_frames: bool
) -> SlotResult:
    """Frames recorded inside the chunk count as physics; the decision's own images as rendering."""
    began = time.perf_counter()
    step = world.step(chunk, record_frames)
    stepped = time.perf_counter()
    observation = None if step.is_done else world.observe()
    return SlotResult(
        slot=slot,
        observation=observation,
        step=step,
        physics_s=stepped - began,
        render_s=time.perf_counter() - stepped,
    )
