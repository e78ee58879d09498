"""How fast the worlds are: our loop against robosuite's and the tabletop suite, or our LIBERO worlds against LIBERO."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from scripts.bench_libero import bench_libero, print_libero_report
from scripts.progress import console
from sim.rendering import ensure_gl_backend
from sim.tabletop.suite import TabletopConfig, TabletopSuite
from sim.vec_env import ThreadVecEnv
from sim.world import Suite
from vla_rl.run import flat_versions
from vla_rl.types import SlotResult, Start

SLOTS_PER_THREAD = 2
"""While a slot waits for the policy, another one of the same thread runs."""

Row = dict[str, float]


def main(
    suite: Annotated[str, typer.Option(help='"tabletop", or one LIBERO task, e.g. "libero_spatial/0".')] = "tabletop",
    against: Annotated[
        str, typer.Option(help='The peer: "robosuite" for tabletop, "libero" for LIBERO.')
    ] = "robosuite",
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of each measurement of the suite.")] = 3.0,
    max_threads: Annotated[int, typer.Option(min=1, help="Measure 1 to this many threads.")] = os.cpu_count() or 1,
    execution_horizon: Annotated[int, typer.Option(min=1, help="Control steps between images.")] = 8,
    image_size: Annotated[
        int | None, typer.Option(min=16, help="Tabletop: height and width of an image in pixels.", show_default="64")
    ] = None,
    lift_steps: Annotated[
        int | None, typer.Option(min=20, help="Control steps of robosuite's Lift.", show_default="200")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Measure control steps, decisions and images per second with random actions. Timings need a quiet machine."""
    if json_file is not None and not json_file.parent.is_dir():
        raise ValueError(f"--json: there is no folder '{json_file.parent}'; make it first")
    match (suite.partition("/")[0].partition("_")[0], against):
        case ("tabletop", "robosuite") if suite == "tabletop":
            report = bench_tabletop(seconds, max_threads, execution_horizon, image_size or 64, lift_steps or 200)
            print_report(report)
        case ("libero", "libero"):
            if image_size is not None or lift_steps is not None:
                raise ValueError(
                    "--image-size and --lift-steps belong to --suite tabletop; LIBERO is measured at 128 and 256"
                )
            report = bench_libero(suite, seconds, max_threads, execution_horizon)
            print_libero_report(report)
        case _:
            raise ValueError(
                f"nothing compares --suite {suite!r} with --against {against!r}; there are: --suite tabletop --against "
                "robosuite (the default), and --suite <LIBERO suite>/<task> --against libero"
            )
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def bench_tabletop(
    seconds: float, max_threads: int, execution_horizon: int, image_size: int, lift_steps: int
) -> dict[str, Any]:
    """Our physics loop against robosuite's on its Lift task, and the tabletop suite for 1 to `max_threads` threads."""
    suite = TabletopSuite(TabletopConfig(image_size=image_size))
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "rendering": ensure_gl_backend()},
        "versions": flat_versions(),
        "settings": {
            "execution_horizon": execution_horizon,
            "image_size": image_size,
            "cameras": len(suite.spec.cameras),
        },
        "lift": compare_with_robosuite(lift_steps),
        "tabletop_physics": [],
        "tabletop_rendered": [],
    }
    for num_threads in range(1, max_threads + 1):
        report["tabletop_physics"].append(measure_physics(suite, num_threads, seconds))
        report["tabletop_rendered"].append(measure_rendered(suite, num_threads, seconds, execution_horizon))
    return report


def compare_with_robosuite(num_steps: int, block: int = 10) -> Row:
    """Milliseconds per control step on robosuite's Lift task; alternating blocks show both the same machine."""
    from sim.robosuite_reference import LiftReference  # imports robosuite, which takes seconds

    lift = LiftReference(seed=0)
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (num_steps, 7))
    lift.step(actions[0])  # compiles the kernel
    lift.copy_state()
    theirs, ours = [], []
    for first in range(0, num_steps, block):
        chunk = actions[first : first + block]
        theirs.append(_seconds_each(lift.step_reference, chunk))
        ours.append(_seconds_each(lift.step, chunk))
    return {
        "robosuite_ms_median": 1e3 * median(theirs),
        "robosuite_ms_min": 1e3 * min(theirs),
        "ours_ms_median": 1e3 * median(ours),
        "ours_ms_min": 1e3 * min(ours),
        "physics_ratio": median(a / b for a, b in zip(theirs, ours, strict=True)),
    }


def measure_physics(suite: Suite, num_threads: int, seconds: float) -> Row:
    """Control steps per second without images; one world per thread."""
    counts = [0] * num_threads
    worlds = [suite.make_world() for _ in range(num_threads)]
    starts = [_start(suite, i) for i in range(num_threads)]
    ready = threading.Barrier(num_threads)

    def work(index: int) -> None:
        world, rng = worlds[index], np.random.default_rng(index)
        world.reset(starts[index])
        world.step(_chunk(suite, rng, 1))
        world.reset(starts[index])
        ready.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            step = world.step(_chunk(suite, rng, 8))
            counts[index] += step.num_steps
            if step.is_done:
                world.reset(starts[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"threads": num_threads, "control_steps_per_s": sum(counts) / seconds}


def measure_rendered(suite: Suite, num_threads: int, seconds: float, execution_horizon: int) -> Row:
    """A vectorised environment with a policy that answers at once: images at every decision."""
    env = ThreadVecEnv(suite, num_slots=SLOTS_PER_THREAD * num_threads, num_threads=num_threads)
    rng = np.random.default_rng(0)
    num_steps = num_decisions = num_images = 0
    physics_s = render_s = 0.0
    try:
        for slot in range(env.num_slots):
            env.reset(slot, _start(suite, slot))
        results = env.wait(range(env.num_slots))
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            for result in results:
                _answer(env, suite, result, _chunk(suite, rng, execution_horizon))
            results = env.wait()
            for result in results:
                num_steps += result.step.num_steps if result.step is not None else 0
                num_decisions += result.step is not None
                num_images += len(suite.spec.cameras) if result.observation is not None else 0
                physics_s += result.physics_s
                render_s += result.render_s
        elapsed = time.perf_counter() - began
    finally:
        env.close()
    return {
        "threads": num_threads,
        "control_steps_per_s": num_steps / elapsed,
        "decisions_per_s": num_decisions / elapsed,
        "images_per_s": num_images / elapsed,
        "render_ms_per_image": 1e3 * render_s / num_images,
        "physics_share": physics_s / (physics_s + render_s),
    }


def print_report(report: dict[str, Any]) -> None:
    """The numbers as tables."""
    lift = report["lift"]
    table = Table(title="Lift, one thread, no images: ms per control step")
    for column in ("robosuite 1.4 median", "min", "this loop median", "min", "ratio"):
        table.add_column(column, justify="right")
    table.add_row(
        *(f"{lift[key]:.2f}" for key in ("robosuite_ms_median", "robosuite_ms_min", "ours_ms_median", "ours_ms_min")),
        f"{lift['physics_ratio']:.1f} x",
    )
    console.print(table)
    settings = report["settings"]
    table = Table(
        title=f"Tabletop, {report['machine']['rendering']}, {settings['image_size']} px, "
        f"images every {settings['execution_horizon']} control steps"
    )
    for column in ("threads", "physics only: steps/s", "rendered: steps/s", "decisions/s", "images/s", "ms per image"):
        table.add_column(column, justify="right")
    for physics, rendered in zip(report["tabletop_physics"], report["tabletop_rendered"], strict=True):
        table.add_row(
            str(physics["threads"]),
            f"{physics['control_steps_per_s']:.0f}",
            f"{rendered['control_steps_per_s']:.0f}",
            f"{rendered['decisions_per_s']:.0f}",
            f"{rendered['images_per_s']:.0f}",
            f"{rendered['render_ms_per_image']:.2f}",
        )
    console.print(table)


def _seconds_each(step: Callable[[Any], object], actions: np.ndarray[Any, Any]) -> float:
    began = time.perf_counter()
    for action in actions:
        step(action)
    return (time.perf_counter() - began) / len(actions)


def _start(suite: Suite, index: int) -> Start:
    return suite.start(suite.tasks[index % len(suite.tasks)], "train", index)


def _chunk(suite: Suite, rng: np.random.Generator, num_steps: int) -> np.ndarray[Any, Any]:
    return rng.uniform(-1.0, 1.0, (num_steps, suite.spec.action_dim))


def _answer(env: ThreadVecEnv, suite: Suite, result: SlotResult, chunk: np.ndarray[Any, Any]) -> None:
    if result.error is not None:
        raise result.error
    if result.observation is None:
        env.reset(result.slot, _start(suite, result.slot))
    else:
        env.step(result.slot, chunk)


if __name__ == "__main__":
    typer.run(main)
