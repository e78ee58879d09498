"""The person beside a robot: what signals and keys do while an episode runs, and what is asked after it.

    Ctrl-C (SIGINT)                      the episode ends with the next control period, the robot holds
    Ctrl-C again, or SIGTERM             emergency stop: the robot stops now, and the program has to be started again
    s, f, and q or Enter (a terminal's)  the episode ends as a success, as a failure, to be judged afterwards

Between episodes nothing moves, and a signal ends the program, which stops the robot and lets go of it.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TextIO

import typer

from robots.run_types import EpisodeReport
from robots.runtime import Runtime

_VERDICTS = {"s": "success", "f": "failure"}
_STOP_KEYS = ("q", "\n", "\r")
_POLL_S = 0.05


class Operator:
    """Runs episodes that a person can end and judge. See the module's docstring."""

    def __init__(self, runtime: Runtime, keyboard: TextIO | None = None) -> None:
        """Prepare.

        Args:
            runtime: What is stopped.
            keyboard: Where keys are read during episodes if it is a terminal; None: nowhere.
        """
        self._runtime = runtime
        self._keyboard = keyboard if keyboard is not None and keyboard.isatty() else None
        self._is_between_episodes = True
        self._num_signals = 0
        self._verdict: str | None = None

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Signals are the operator's in this block, at whose end the runtime is closed; only in the main thread."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in before:
                signal.signal(number, self._on_signal)
            yield
        finally:
            self._is_between_episodes = False  # letting go of the robot is not interrupted, only hastened
            self._runtime.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def run_episode(self, instruction: str) -> EpisodeReport:
        """One episode; a verdict by key is its outcome, and is in its recording."""
        self._num_signals, self._verdict = 0, None
        self._is_between_episodes = False
        try:
            with self._reading_keys():
                report = self._runtime.run_episode(instruction)
        finally:
            self._is_between_episodes = True
        return self._judged(report, self._verdict) if report.outcome == "stopped" and self._verdict else report

    def run_real_episode(self, instruction: str, report_line: Callable[[str], None]) -> EpisodeReport:
        """One episode on a real robot: the operator starts it, judges it, and sees to faults.

        Raises:
            RobotError: A fault persists.
        """
        typer.prompt("hands off the robot; press Enter to start", default="", show_default=False)
        if self._keyboard:
            report_line("s: success, f: failure, q or Enter: end; Ctrl-C: end, twice: emergency stop")
        report = self.run_episode(instruction)
        report_line(f"{report.outcome} after {report.num_steps} steps; {report.cadence}  {report.detail}")
        if report.outcome in ("stopped", "failure") and self._verdict is None:
            report = self._judged(report, "success" if typer.confirm("was the task solved?") else "failure")
        if report.outcome == "fault":
            typer.prompt("see to the robot, then press Enter to clear the fault", default="", show_default=False)
            self._runtime.acknowledge()
        return report

    def _judged(self, report: EpisodeReport, outcome: str) -> EpisodeReport:
        self._runtime.mark_last_episode(outcome)
        return replace(report, outcome=outcome)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_between_episodes:
            raise KeyboardInterrupt
        self._num_signals += 1
        if number == signal.SIGINT and self._num_signals == 1:
            self._runtime.stop()
        else:
            self._runtime.emergency_stop()

    @contextmanager
    def _reading_keys(self) -> Iterator[None]:
        """Keys arrive one by one and unseen in this block; what is left of them does not answer the next question."""
        if self._keyboard is None:
            yield
            return
        terminal, is_over = self._keyboard.fileno(), threading.Event()
        before = termios.tcgetattr(terminal)
        thread = threading.Thread(target=self._read_keys, args=(terminal, is_over), name="keys", daemon=True)
        tty.setcbreak(terminal)  # Ctrl-C remains a signal
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)

    def _read_keys(self, terminal: int, is_over: threading.Event) -> None:
        while not is_over.is_set():
            if not select.select([terminal], [], [], _POLL_S)[0]:
                continue
            key = os.read(terminal, 1).decode("ascii", "replace")
            if not key:  # the terminal is gone
                return
            if key in _VERDICTS or key in _STOP_KEYS:
                self._verdict = self._verdict or _VERDICTS.get(key)
                self._runtime.stop()
