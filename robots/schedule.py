"""The fixed-rate schedule of the control loop, and the report on how well it was kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CadenceReport:
    """How regular the control periods were.

    Attributes:
        num_ticks: Control periods.
        period_p50_ms: Median time between the beginnings of two of them.
        period_p99_ms: 99 % quantile.
        period_max_ms: Longest.
        overruns: Periods whose work took longer than the period.
        skipped: Periods that were left out because of overruns; the schedule itself never shifts.
        starved: Periods without an action to execute.
        inference_mean_ms: Mean time from observation to answer.
        inference_max_ms: Longest.
    """

    num_ticks: int
    period_p50_ms: float
    period_p99_ms: float
    period_max_ms: float
    overruns: int
    skipped: int
    starved: int
    inference_mean_ms: float
    inference_max_ms: float

    def __str__(self) -> str:
        return (
            f"{self.num_ticks} ticks, period p50 {self.period_p50_ms:.1f} p99 {self.period_p99_ms:.1f} max "
            f"{self.period_max_ms:.1f} ms; {self.overruns} overruns, {self.skipped} skipped, {self.starved} starved; "
            f"inference mean {self.inference_mean_ms:.1f} max {self.inference_max_ms:.1f} ms"
        )


class Schedule:
    """Ticks at start + k * period, whatever happened before: delays do not add up.

    Args:
        period_s: Time between two ticks; 0: as fast as it goes (lockstep).
        clock: Monotonic time.
        sleep: Waits.
    """

    def __init__(
        self,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.period_s = period_s
        self._clock = clock
        self._sleep = sleep
        self._start_s = clock()
        self._tick = 0
        self._begins: list[float] = []
        self._inference_s: list[float] = []
        self._overruns = self._skipped = 0
        self.starved = 0

    def begin_tick(self) -> float:
        """Wait for the next tick; returns its time, as scheduled."""
        now = self._clock()
        if self.period_s == 0:
            self._begins.append(now)
            return now
        due = self._start_s + self._tick * self.period_s
        if now > due + self.period_s:
            missed = int((now - due) / self.period_s)
            self._skipped += missed
            self._tick += missed
            due += missed * self.period_s
        if now < due:
            self._sleep(due - now)
        self._begins.append(self._clock())
        self._tick += 1
        return due

    def end_tick(self) -> None:
        """The tick's work is done."""
        if self.period_s and self._clock() - self._begins[-1] > self.period_s:
            self._overruns += 1

    def note_inference(self, seconds: float) -> None:
        """An answer arrived this long after its observation."""
        self._inference_s.append(seconds)

    def expected_inference_s(self) -> float:
        """A careful guess at the next answer's time: the longest of the last ten."""
        return max(self._inference_s[-10:], default=0.0)

    def report(self) -> CadenceReport:
        """Of everything so far."""
        periods = 1e3 * np.diff(self._begins) if len(self._begins) > 1 else np.zeros(1)
        inference = 1e3 * np.array(self._inference_s or [0.0])
        return CadenceReport(
            num_ticks=len(self._begins),
            period_p50_ms=float(np.quantile(periods, 0.5)),
            period_p99_ms=float(np.quantile(periods, 0.99)),
            period_max_ms=float(periods.max()),
            overruns=self._overruns,
            skipped=self._skipped,
            starved=self.starved,
            inference_mean_ms=float(inference.mean()),
            inference_max_ms=float(inference.max()),
        )
