"""A thread that an object lives in: drawing contexts and windows are bound to the thread that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Value = TypeVar("Value")


class HomeThread:
    """Runs calls one after the other, in a thread of its own that does not keep the process alive.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True).start()

    def run(self, call: Callable[[], Value]) -> Value:
        """The result of a call, or whatever it raises."""
        result: Value = self.submit(call).result()
        return result

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call later; returns at once."""
        future: Future[Any] = Future()
        self._jobs.put((future, call))
        return future

    def stop(self) -> None:
        """End the thread after the calls that have been submitted; returns at once."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        try:
            future.set_result(call())
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)
        del job, future, call  # an idle thread keeps nothing alive
