"""Numbers of a run: one JSON line per iteration (`metrics.jsonl`), the same numbers for TensorBoard, and stopwatches.

torch is not needed; TensorBoard's own event writer is used. Readers of a run need `metrics.jsonl` only.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]


class MetricsWriter:
    """Appends the metrics of each iteration to a run folder. A context manager; `close` may be called twice."""

    def __init__(self, folder: Path, first_iteration: int = 0) -> None:
        """Open for writing.

        Args:
            folder: The run folder; must exist.
            first_iteration: The next iteration that will be written. Rows from it on are removed (a resumed run writes
                them again), and so is a last row that a crash has torn.

        Raises:
            ValueError: `metrics.jsonl` holds something else than metrics.
        """
        self._path = folder / "metrics.jsonl"
        _keep_rows_before(self._path, first_iteration)
        self._file = self._path.open("a", encoding="utf-8")
        self._events = EventFileWriter(str(folder / "tensorboard"))
        if first_iteration:
            # Tells TensorBoard to forget what an interrupted run logged from this iteration on.
            start = SessionLog(status=SessionLog.START)
            self._events.add_event(Event(step=first_iteration, wall_time=time.time(), session_log=start))

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append one row, durably.

        Args:
            iteration: Number of the iteration.
            metrics: Names like "update/loss" and finite values.

        Raises:
            FloatingPointError: A value is not finite; nothing is written.
            OSError: The file cannot be written (full disk).
        """
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise FloatingPointError(f"metrics of iteration {iteration} are not finite: {', '.join(bad)}.")
        row = {"iteration": iteration, **{name: float(value) for name, value in metrics.items()}}
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            message = f"cannot write '{self._path}': {error.strerror or error}; free some space, then resume the run"
            raise OSError(error.errno or 0, message) from error
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._events.add_event(Event(step=iteration, wall_time=time.time(), summary=Summary(value=values)))
        self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        if not self._file.closed:
            self._file.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete rows of a run's `metrics.jsonl`, in order; empty if there is none.

    Raises:
        ValueError: A line other than the last is not a row of metrics.
    """
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            rows.append({**row, "iteration": int(row["iteration"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"'{path}', line {number} is not a row of metrics ({error}); move the file away."
            ) from error
    # What follows the last line break is empty, or a row that a crash has torn.
    return rows


def _keep_rows_before(path: Path, first_iteration: int) -> None:
    if not path.exists():
        return
    rows = [row for row in read_metrics(path.parent) if row["iteration"] < first_iteration]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Timings:
    """Adds up seconds by name: where the time of an iteration goes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count seconds under a name, e.g. "physics"."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the duration of a `with` block, also if it raises."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Metrics "time/<name>_s" since the last call; starts again from zero."""
        metrics = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics
