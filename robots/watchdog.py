"""A second pair of eyes: holds and then stops the robot if commands, states or pictures stop coming.

It has a thread and a clock of its own, so it acts while the control loop is blocked; after a process was frozen, it
acts as soon as the process runs again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULT_CHANNELS: Mapping[str, tuple[float, float]] = {
    "command": (0.25, 1.0),
    "state": (0.25, 1.0),
    "camera": (1.5, 3.0),
}
"""Seconds without news until hold, and until stop. A name before a colon ("camera:wrist") is looked up here."""
_TICK_S = 0.01
_HOLD_PERIODS, _STOP_PERIODS = 3.0, 6.0
"""Deadlines are never shorter than so many control periods: a slow loop is not a silent one."""
_PATIENCE_S = 0.1
"""How long a callback may take before the next one is due beside it."""


@dataclass(kw_only=True, eq=False)
class _Channel:
    stamp: object
    fresh_s: float
    has_held: bool = False
    has_stopped: bool = False


_Missed = tuple[bool, str]
"""Whether it is the deadline of the stop, and the reason."""


class Watchdog:
    """Feed it; `on_hold` and `on_stop` are called from threads of its own, once per silence each.

    Each call has its thread, so that a driver that blocks in `hold` does not keep the stop that follows from coming.
    """

    def __init__(
        self,
        channels: Mapping[str, tuple[float, float]] = DEFAULT_CHANNELS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set deadlines.

        Args:
            channels: Kind of channel -> (seconds until hold, seconds until stop).
            clock: Monotonic time.

        Raises:
            ValueError: A deadline is not positive, or stop comes before hold.
        """
        for name, (hold_s, stop_s) in channels.items():
            if not 0.0 < hold_s < stop_s < float("inf"):
                raise ValueError(
                    f"watchdog channel {name!r}: hold after {hold_s} s must come before stop after {stop_s} s"
                )
        self._deadlines = dict(channels)
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: dict[str, _Channel] = {}
        self._ended_silences: list[_Missed] = []
        self._period_s = 0.0
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.problems: list[str] = []
        """What went wrong in callbacks."""

    def start(self, on_hold: Callable[[str], None], on_stop: Callable[[str], None], period_s: float = 0.0) -> None:
        """Watch from now on; a channel is watched from its first feeding on. Starting again begins anew.

        Args:
            on_hold: Called with a reason when a channel is silent.
            on_stop: Called when it still is; on time, even if `on_hold` has not returned.
            period_s: Of the loop that feeds; deadlines are stretched for slow ones.
        """
        self.stop()
        self._channels, self._ended_silences, self._period_s = {}, [], period_s
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._ended, on_hold, on_stop), name="watchdog", daemon=True
        )
        self._thread.start()

    def feed(self, channel: str, stamp: object) -> None:
        """News; the same stamp again is none (a frozen camera delivers, too).

        A silence that they end counts, even if the watchdog's thread has not run since: a process may have been frozen.

        Raises:
            ValueError: No deadline is set for this kind of channel.
        """
        if channel.split(":")[0] not in self._deadlines:
            raise ValueError(f"no deadline for channel {channel!r}; there are: {', '.join(self._deadlines)}")
        with self._lock:
            known, now = self._channels.get(channel), self._clock()
            if known is not None and known.stamp == stamp:
                return
            if known is not None:
                self._ended_silences.extend(self._deadlines_missed(channel, known, now))
            self._channels[channel] = _Channel(stamp=stamp, fresh_s=now)

    def stop(self) -> None:
        """Stop watching; may be called at any time, also from a callback.

        What is due by then is still done, as after a process was frozen; nothing begins after it.
        """
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _watch(self, ended: threading.Event, on_hold: Callable[[str], None], on_stop: Callable[[str], None]) -> None:
        is_over = False
        while not is_over:
            is_over = ended.wait(_TICK_S)
            for callback, reason in self._due(on_hold, on_stop):
                self._call(callback, reason)

    def _due(
        self, on_hold: Callable[[str], None], on_stop: Callable[[str], None]
    ) -> list[tuple[Callable[[str], None], str]]:
        with self._lock:
            now = self._clock()
            missed, self._ended_silences = self._ended_silences, []
            for name, channel in self._channels.items():
                missed.extend(self._deadlines_missed(name, channel, now))
            return [(on_stop if is_stop else on_hold, reason) for is_stop, reason in missed]

    def _deadlines_missed(self, name: str, channel: _Channel, now: float) -> list[_Missed]:
        """What a channel's silence has reached since the last look."""
        hold_s, stop_s = self._deadlines_of(name)
        silent_s = now - channel.fresh_s
        reason = f"no news on {name} for {silent_s:.2f} s"
        missed: list[_Missed] = []
        if silent_s > hold_s and not channel.has_held:
            channel.has_held = True
            missed.append((False, reason))
        if silent_s > stop_s and not channel.has_stopped:
            channel.has_stopped = True
            missed.append((True, reason))
        return missed

    def _deadlines_of(self, channel: str) -> tuple[float, float]:
        hold_s, stop_s = self._deadlines[channel.split(":")[0]]
        return max(hold_s, _HOLD_PERIODS * self._period_s), max(stop_s, _STOP_PERIODS * self._period_s)

    def _call(self, callback: Callable[[str], None], reason: str) -> None:
        def call() -> None:
            try:
                callback(reason)
            except Exception as error:  # whatever a driver raises, the watchdog goes on and still tries to stop
                self.problems.append(f"{reason}: {error!r}")

        thread = threading.Thread(target=call, name="watchdog acts", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
