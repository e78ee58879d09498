"""What the user sees while a verb works: one progress bar, plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(highlight=False)


class Bar:
    """Counts up to a total with a status text behind it."""

    def __init__(self, progress: Progress | None, title: str, total: float) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, status="") if progress else None
        self._title, self._total = title, total
        self._done = 0.0
        self._printed_at = time.monotonic()

    def update(self, done: float | None = None, status: str = "") -> None:
        """Set what is done (None: one more) and the status."""
        self._done = self._done + 1 if done is None else done
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done, status=status)
        elif time.monotonic() - self._printed_at > 10.0:
            self._printed_at = time.monotonic()
            console.print(f"{self._title}: {self._done:g}/{self._total:g} {status}")


@contextmanager
def progress_bar(title: str, total: float) -> Iterator[Bar]:
    """A bar for the duration of a block."""
    if not console.is_terminal:
        yield Bar(None, title, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, title, total)
