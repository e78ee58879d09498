"""How fast our LIBERO worlds are beside LIBERO's own environments: same task, start, actions, images and machine."""

from __future__ import annotations

import os
import platform
from contextlib import closing

from rich.table import Table

from scripts.libero_measurements import (
    AS_LIBERO,
    LITE,
    SLOTS_PER_THREAD,
    Drawing,
    Row,
    Subject,
    compare_decisions,
    compare_physics,
    compare_resets,
    measure_memory,
    measure_models,
    measure_threads,
)
from scripts.progress import console
from sim.libero.package import find_tasks, package_version
from sim.libero.reference import LiberoReference
from sim.rendering import ensure_gl_backend
from vla_rl.run import flat_versions


def bench_libero(name: str, seconds: float, max_threads: int, execution_horizon: int) -> Row:
    """Measure everything.

    Args:
        name: "<suite>/<index>" or "<suite>/<task name>".
        seconds: Duration of each measurement; some take longer, because LIBERO's reset and rendering do.
        max_threads: Measure 1, 2, 4, ... threads or processes up to this many.
        execution_horizon: Control steps between the images that a policy sees.

    Raises:
        ImportError: LIBERO is not installed.
        ValueError: Unknown task, or more than one.
    """
    tasks = find_tasks([name])
    if len(tasks) != 1:
        raise ValueError(f"{name!r} stands for {len(tasks)} tasks; name one of them, e.g. {tasks[0].full_name!r}")
    counts = {max_threads, *(2**i for i in range(max_threads.bit_length()))}
    subject = Subject(
        task=tasks[0], seconds=seconds, execution_horizon=execution_horizon, thread_counts=tuple(sorted(counts))
    )
    console.print(f"LIBERO's own environment of {subject.task.full_name}")
    with closing(LiberoReference(subject.task, image_size=None)) as reference:  # imports all that both sides need
        console.print("models, memory, physics")
        models = measure_models(subject)
        memory = measure_memory(subject)
        physics = compare_physics(subject, reference)
    threads = measure_threads(subject)
    console.print("resets")
    resets = compare_resets(subject)
    decisions: list[Row] = []
    for size in (256, 128):
        console.print(f"decisions at {size} pixels")
        decisions += compare_decisions(subject, size)
    process_mb = max(row["libero_process_mb"] for row in decisions)
    most = max(subject.thread_counts)
    return {
        **_conditions(subject),
        "physics_ratio": physics["ratio"],
        "decision_ratio": _ratio(decisions, most, 256, AS_LIBERO),
        "decision_ratio_lite": _ratio(decisions, most, 128, LITE),
        "reset_ratio": resets["ratio"],
        "world_mb": memory["world_mb"],
        "threads_ratio": next((row["ratio_to_one"] for row in threads if row["threads"] == 2), None),
        "physics": physics,
        "threads": threads,
        "decisions": decisions,
        "resets": resets,
        "memory": memory | {"libero_process_mb": process_mb, "ratio": process_mb / memory["world_mb"]},
        "models": models,
    }


def _conditions(subject: Subject) -> Row:
    """Where, with which versions and how it was measured."""
    return {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "rendering": ensure_gl_backend(),
            "environment": {key: os.environ.get(key) for key in ("LP_NUM_THREADS", "OMP_NUM_THREADS")},
        },
        "versions": flat_versions() | {"libero": package_version()},
        "settings": {
            "task": subject.task.full_name,
            "seconds": subject.seconds,
            "execution_horizon": subject.execution_horizon,
            "slots_per_thread": SLOTS_PER_THREAD,
            "libero_cameras": 2,
        },
    }


def print_libero_report(report: Row) -> None:
    """The numbers as tables."""
    physics, resets, memory, models = (report[key] for key in ("physics", "resets", "memory", "models"))
    table = Table(title=f"{report['settings']['task']}, {report['machine']['rendering']}")
    for column in ("", "LIBERO", "ours", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        ("control step without images, one world, ms", physics["libero_ms"], physics["ours_ms"], physics["ratio"]),
        ("reset to a start, ms", resets["libero_ms"], resets["ours_ms"], resets["ratio"]),
        ("  with an image of ours", resets["libero_ms"], resets["ours_with_image_ms"], resets["ratio_with_image"]),
        ("memory of a further world, MB", memory["libero_process_mb"], memory["world_mb"], memory["ratio"]),
        ("  its address space, MB", None, memory["world_address_space_mb"], None),
        ("model, first time, s", resets["libero_construction_s"], models["full_cold_s"], None),
        ("model from the cache, s", None, models["full_cached_s"], None),
        ("lite meshes, first time, s", None, models["lite_cold_s"], None),
        ("lite meshes from the cache, s", None, models["lite_cached_s"], None),
    ]
    for name, theirs, ours, ratio in rows:
        table.add_row(name, _number(theirs), _number(ours), _number(ratio, " x"))
    console.print(table)
    table = Table(title="Without images: control steps per second, one world per thread")
    for column in ("threads", "steps/s", "of one thread"):
        table.add_column(column, justify="right")
    for row in report["threads"]:
        table.add_row(str(row["threads"]), _number(row["control_steps_per_s"]), _number(row["ratio_to_one"], " x"))
    console.print(table)
    table = Table(title=f"Decisions per second: {report['settings']['execution_horizon']} control steps and the images")
    kind = ("image_size", "threads", "cameras", "mesh_quality", "samples")
    figures = ("libero_decisions_per_s", "decisions_per_s", "ratio", "physics_ms", "render_ms")
    for column in ("pixels", "threads", "cameras", "meshes", "samples"):
        table.add_column(column, justify="right")
    for column in ("LIBERO", "ours", "ratio", "physics ms", "drawing ms"):
        table.add_column(column, justify="right")
    for row in report["decisions"]:
        numbers = [_number(row[name], " x" if name == "ratio" else "") for name in figures]
        table.add_row(*(str(row[name]) for name in kind), *numbers)
    console.print(table)


def _number(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 100 else 0}f}{unit}"


def _ratio(decisions: list[Row], threads: int, image_size: int, drawing: Drawing) -> float:
    wanted = {"threads": threads, "cameras": 1, "image_size": image_size, **drawing._asdict()}
    return next(float(row["ratio"]) for row in decisions if wanted.items() <= row.items())
