"""What `bench_libero.py` measures: our LIBERO worlds and LIBERO's own environments take turns in short blocks.

A ratio is the median over pairs of neighbouring blocks, so that both sides see the same other load of the machine.
LIBERO's environments draw two cameras at every control step, whatever the policy sees; that is what a decision costs
there. Both sides replay the same random actions from the same start.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import mean, median
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float64

from sim.libero.package import LiberoTask, read_init_states
from sim.libero.reference import LiberoProcesses, LiberoReference, address_space_mb, private_mb
from sim.libero.scene import MeshQuality
from sim.libero.suite import LiberoConfig, LiberoSuite
from sim.mujoco_world import MujocoWorld
from sim.vec_env import ThreadVecEnv
from vla_rl.types import Start

CAMERAS: tuple[Literal["agentview"], Literal["robot0_eye_in_hand"]] = ("agentview", "robot0_eye_in_hand")
NUM_BLOCKS = 5
"""Into how many blocks the time of a measurement is divided."""
PHYSICS_BLOCK, PHYSICS_STEPS = 10, 100
"""Control steps of a block, and of a rollout; then both sides go back to the start, before they drift apart."""
SLOTS_PER_THREAD = 2
"""While a slot waits for the policy, another one of the same thread runs."""
NUM_EXTRA_WORLDS = 16
"""The memory of a further world is the mean over so many."""
NUM_RESETS = 50
"""Resets of ours for each one of LIBERO's."""
NUM_CHUNKS = 64
TIMEOUT_S = 300.0

Row = dict[str, Any]
Chunks = Float64[np.ndarray, "chunks steps 7"]


class Drawing(NamedTuple):
    """What our images cost: meshes, and anti-aliasing samples per pixel."""

    mesh_quality: MeshQuality
    samples: int


AS_LIBERO, LITE, LITE_ALIASED = Drawing("full", 4), Drawing("lite", 4), Drawing("lite", 0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What both sides run.

    Attributes:
        task: The task.
        seconds: Duration of each measurement.
        execution_horizon: Control steps of a decision.
        thread_counts: Numbers of threads (or LIBERO's processes) to measure, ascending.
    """

    task: LiberoTask
    seconds: float
    execution_horizon: int
    thread_counts: tuple[int, ...]

    def suite(self, num_cameras: int = 1, image_size: int = 256, drawing: Drawing = AS_LIBERO) -> LiberoSuite:
        """Our worlds with these images and no time limit."""
        return LiberoSuite(
            LiberoConfig(
                tasks=(self.task.full_name,),
                cameras=CAMERAS[:num_cameras],
                image_size=image_size,
                mesh_quality=drawing.mesh_quality,
                samples=drawing.samples,
                horizon=1_000_000,
            )
        )

    def start(self, suite: LiberoSuite, index: int = 0) -> Start:
        """A published start; things have fallen into place."""
        return suite.start(self.task.full_name, "test", index)

    @property
    def init_state(self) -> Float64[np.ndarray, " state"]:
        """The same start for LIBERO, before things fall into place."""
        state: Float64[np.ndarray, " state"] = read_init_states(self.task.init_states)[0]
        return state

    def chunks(self, world: int) -> Chunks:
        """The random actions of one of our worlds or of LIBERO's environments, from the start on."""
        return np.random.default_rng(world).uniform(-1.0, 1.0, (NUM_CHUNKS, self.execution_horizon, 7))


def measure_models(subject: Subject) -> Row:
    """Seconds to a model: with an empty cache, with a full one, and what simplified meshes add."""
    row: Row = {}
    with _empty_cache():
        for drawing in (AS_LIBERO, LITE):
            for cache in ("cold", "cached"):
                began = time.perf_counter()
                subject.suite(drawing=drawing).scene(subject.task.full_name)
                row[f"{drawing.mesh_quality}_{cache}_s"] = time.perf_counter() - began
        suite = subject.suite()
        suite.scene(subject.task.full_name)
        began = time.perf_counter()
        subject.start(suite)
        row["settle_published_starts_s"] = time.perf_counter() - began
    return row


def measure_memory(subject: Subject) -> Row:
    """Memory of a further world of a task that already runs in this process."""
    suite = subject.suite()
    start = subject.start(suite)
    worlds = [_running_world(suite, start, subject.chunks(0))]
    resident, address_space = private_mb("self"), address_space_mb()
    worlds += [_running_world(suite, start, subject.chunks(i)) for i in range(NUM_EXTRA_WORLDS)]
    return {
        "worlds": len(worlds),
        "world_mb": (private_mb("self") - resident) / NUM_EXTRA_WORLDS,
        "world_address_space_mb": (address_space_mb() - address_space) / NUM_EXTRA_WORLDS,
    }


def compare_physics(subject: Subject, reference: LiberoReference) -> Row:
    """Milliseconds per control step without images, one world, one thread."""
    suite = subject.suite()
    world, start = suite.make_world(), subject.start(suite)
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (PHYSICS_STEPS // PHYSICS_BLOCK, PHYSICS_BLOCK, 7))
    theirs: list[float] = []
    ours: list[float] = []
    end = time.perf_counter() + subject.seconds
    while not theirs or time.perf_counter() < end:
        reference.settle(subject.init_state)
        world.reset(start)
        for chunk in actions:
            began = time.perf_counter()
            for action in chunk:
                reference.step(action)
            middle = time.perf_counter()
            world.step(chunk)
            theirs.append((middle - began) / PHYSICS_BLOCK)
            ours.append((time.perf_counter() - middle) / PHYSICS_BLOCK)
    return {
        "libero_ms": 1e3 * median(theirs),
        "ours_ms": 1e3 * median(ours),
        "ratio": _median_ratio(theirs, ours),
    }


def measure_threads(subject: Subject) -> list[Row]:
    """Control steps per second without images; one world per thread."""
    suite = subject.suite()
    start = subject.start(suite)
    worlds = [_running_world(suite, start, subject.chunks(i)) for i in range(subject.thread_counts[-1])]
    rates: dict[int, list[float]] = {count: [] for count in subject.thread_counts}
    for _ in range(NUM_BLOCKS):
        for count, measured in rates.items():
            measured.append(_threads_block(worlds[:count], start, subject))
    return [
        {
            "threads": count,
            "control_steps_per_s": median(measured),
            "ratio_to_one": _median_ratio(measured, rates[1]),
        }
        for count, measured in rates.items()
    ]


def _threads_block(worlds: list[MujocoWorld], start: Start, subject: Subject) -> float:
    rates = [0.0] * len(worlds)
    ready = threading.Barrier(len(worlds))

    def work(index: int) -> None:
        world, chunks = worlds[index], subject.chunks(index)
        world.reset(start)
        ready.wait(TIMEOUT_S)
        began = time.perf_counter()
        num_steps = 0
        while time.perf_counter() < began + subject.seconds / NUM_BLOCKS:
            num_steps += world.step(chunks[num_steps // subject.execution_horizon % NUM_CHUNKS]).num_steps
        rates[index] = num_steps / (time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(worlds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def compare_resets(subject: Subject) -> Row:
    """To a published start: LIBERO's `reset()` and `set_init_state()`, our `reset(start)`; and ours with an image."""
    suite = subject.suite()
    world, starts = suite.make_world(), [subject.start(suite, index) for index in range(10)]
    theirs: list[float] = []
    ours: list[float] = []
    drawn: list[float] = []
    began = time.perf_counter()
    reference = LiberoReference(subject.task, image_size=256)
    construction_s = time.perf_counter() - began
    # Our images come from another thread: in this one, LIBERO's reset frees its context while ours is the current one.
    with closing(reference), closing(ThreadVecEnv(suite, num_slots=1, num_threads=1)) as env:
        _reset_with_image(env, starts[0])  # makes the context for drawing
        end = time.perf_counter() + subject.seconds
        while len(theirs) < 2 or time.perf_counter() < end:
            began = time.perf_counter()
            reference.reset(subject.init_state)
            middle = time.perf_counter()
            for i in range(NUM_RESETS):
                world.reset(starts[i % len(starts)])
            theirs.append(middle - began)
            ours.append((time.perf_counter() - middle) / NUM_RESETS)
            began = time.perf_counter()
            _reset_with_image(env, starts[0])
            drawn.append(time.perf_counter() - began)
    return {
        "libero_construction_s": construction_s,
        "libero_ms": 1e3 * median(theirs),
        "ours_ms": 1e3 * median(ours),
        "ours_with_image_ms": 1e3 * median(drawn),
        "ratio": _median_ratio(theirs, ours),
        "ratio_with_image": _median_ratio(theirs, drawn),
    }


def compare_decisions(subject: Subject, image_size: int) -> Iterator[Row]:
    """Decisions per second: LIBERO's `SubprocVectorEnv`, and ours for one and two cameras and each way of drawing."""
    with closing(LiberoProcesses(subject.task, image_size, subject.thread_counts[-1])) as processes:
        processes.settle(subject.init_state)
        for count, num_cameras in product(subject.thread_counts, (1, 2)):
            rates: list[float] = []
            ours: dict[Drawing, list[Row]] = {AS_LIBERO: [], LITE: [], LITE_ALIASED: []}
            with ExitStack() as stack:
                suites = {drawing: subject.suite(num_cameras, image_size, drawing) for drawing in ours}
                envs = {
                    drawing: stack.enter_context(closing(ThreadVecEnv(suite, SLOTS_PER_THREAD * count, count)))
                    for drawing, suite in suites.items()
                }
                start = subject.start(suites[AS_LIBERO])
                for env in envs.values():
                    _our_block(env, start, subject)  # every thread makes its context for drawing
                for _ in range(NUM_BLOCKS):
                    rates.append(_their_block(processes, count, subject))
                    for drawing, env in envs.items():
                        ours[drawing].append(_our_block(env, start, subject))
            process_mb = mean(processes.private_mb())
            for drawing, blocks in ours.items():
                yield {
                    "threads": count,
                    "image_size": image_size,
                    "cameras": num_cameras,
                    **drawing._asdict(),
                    "libero_decisions_per_s": median(rates),
                    "libero_process_mb": process_mb,
                    **{key: median(block[key] for block in blocks) for key in blocks[0]},
                    "ratio": _median_ratio([block["decisions_per_s"] for block in blocks], rates),
                }


def _their_block(processes: LiberoProcesses, count: int, subject: Subject) -> float:
    chunks = np.stack([subject.chunks(i) for i in range(count)])
    processes.restore()
    began = time.perf_counter()
    num_decisions = 0
    while time.perf_counter() < began + subject.seconds / NUM_BLOCKS:
        for step in range(subject.execution_horizon):
            processes.step(chunks[:, num_decisions % NUM_CHUNKS, step])
        num_decisions += 1
    return count * num_decisions / (time.perf_counter() - began)


def _our_block(env: ThreadVecEnv, start: Start, subject: Subject) -> Row:
    """A policy that answers at once; the block ends when the last world has answered."""
    chunks = [subject.chunks(slot) for slot in range(env.num_slots)]
    for slot in range(env.num_slots):
        env.reset(slot, start)
    env.wait(range(env.num_slots), TIMEOUT_S)
    counts, num_running, physics_s, render_s = [0] * env.num_slots, env.num_slots, 0.0, 0.0
    began = time.perf_counter()
    for slot in range(env.num_slots):
        env.step(slot, chunks[slot][0])
    while num_running:
        for result in env.wait(timeout_s=TIMEOUT_S):
            if result.error is not None:
                raise result.error
            counts[result.slot] += result.step is not None
            physics_s += result.physics_s
            render_s += result.render_s
            if time.perf_counter() > began + subject.seconds / NUM_BLOCKS:
                num_running -= 1
            elif result.observation is None:  # solved by chance
                env.reset(result.slot, start)
            else:
                env.step(result.slot, chunks[result.slot][counts[result.slot] % NUM_CHUNKS])
    num_decisions = sum(counts)
    return {
        "decisions_per_s": num_decisions / (time.perf_counter() - began),
        "physics_ms": 1e3 * physics_s / num_decisions,
        "render_ms": 1e3 * render_s / num_decisions,
    }


def _reset_with_image(env: ThreadVecEnv, start: Start) -> None:
    env.reset(0, start)
    env.wait([0], TIMEOUT_S)


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return median(a / b for a, b in zip(above, below, strict=True))


@contextmanager
def _empty_cache() -> Iterator[None]:
    """A new cache folder for the duration of a block."""
    before = os.environ.get("VLA_RL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLA_RL_CACHE"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["VLA_RL_CACHE"]
            else:
                os.environ["VLA_RL_CACHE"] = before


def _running_world(suite: LiberoSuite, start: Start, chunks: Chunks) -> MujocoWorld:
    world = suite.make_world()
    world.reset(start)
    for chunk in chunks[:4]:
        world.step(chunk)
    return world
