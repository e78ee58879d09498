"""What the runtime does when something is wrong: holds, faults, counted recoveries, stops, and the note of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from robots.recorder import Event, Recorder
from robots.robot import Command, Robot, RobotError, RobotState
from robots.run_types import ActionBuffer, Run, RunState, RuntimeConfig, StaleError
from robots.safety import SafetyChain
from robots.watchdog import Watchdog


class _Hands(Protocol):
    """The part of a robot that moves it."""

    def command(self, command: Command) -> Command | None: ...

    def hold(self) -> None: ...

    def stop(self) -> None: ...

    def recover(self) -> None: ...


class _HandsOff:
    """In place of the robot in modes that only look on: somebody else may be driving it."""

    def command(self, command: Command) -> None:
        """Nothing is sent."""

    def hold(self) -> None:
        """Whoever drives it decides."""

    def stop(self) -> None:
        """Likewise."""

    def recover(self) -> None:
        """Likewise."""


class Guard:
    """All that reaches the robot passes here; an emergency stop, from any thread or signal, has the last word."""

    def __init__(
        self,
        robot: Robot,
        chain: SafetyChain,
        buffer: ActionBuffer,
        config: RuntimeConfig,
        period_s: float,
        watchdog: Watchdog | None,
        recorder: Recorder | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._robot = robot
        self._hands: _Hands = robot if config.is_moving else _HandsOff()
        self._is_lockstep = robot.description.is_lockstep
        self._chain = chain
        self._buffer = buffer
        self._config = config
        self._period_s = period_s
        self._watchdog = watchdog
        self._recorder = recorder
        self._clock = clock
        self._run: Run | None = None
        self._alarm: RobotError | None = None  # what the watchdog did; the loop has not seen it yet
        # A plain value: a handler that interrupts the setting of a threading.Event would wait for itself.
        self.is_estopped = False
        self._state = RunState.INIT

    @property
    def state(self) -> RunState:
        """Where the runtime is; after an emergency stop there is only one place."""
        return RunState.ESTOP if self.is_estopped else self._state

    def begin(self, run: Run) -> None:
        """An episode: count from where the robot is, watch, and refuse a tool that is not where it may be.

        Raises:
            RobotError: The robot does not answer, or its tool is outside the workspace.
        """
        self._run = run
        self.enter(RunState.RUNNING)
        state = self._robot.observe()
        self._chain.resync(state)
        refused = self._chain.check_start(state)
        for event in refused:
            self.note(run, event.kind, event.severity, event.detail)
        if refused:
            raise RobotError("; ".join(event.detail for event in refused))
        self._watch()

    def _watch(self) -> None:
        self._alarm = None
        if self._watchdog:
            self._watchdog.start(self.watchdog_hold, self.watchdog_stop, self._period_s)

    def enter(self, state: RunState) -> None:
        """Change the state."""
        self._state = state

    def send(self, command: Command) -> Command | None:
        """Send a command.

        Returns:
            What was really sent; None: nothing.

        Raises:
            RobotError: The robot refuses.
        """
        if self.is_estopped:
            return None
        sent = self._hands.command(command)
        if self.is_estopped:  # it came while the command was on its way
            self._robot.stop()
        return sent

    def hold(self, run: Run, state: RobotState, reason: str, is_waiting: bool = False) -> None:
        """Stand still until there is a fresh command.

        What was planned before is forgotten, and so is an answer that is still to come, because its observation is from
        before; unless the answer is all that is missing.

        Raises:
            RobotError: The robot does not hold, or the state is not finite.
        """
        is_new = run.hold_since_s is None
        if is_new:
            run.hold_since_s = self._clock()
            self._buffer.clear()
        if not is_waiting:
            run.pending = None
        run.detail = reason
        self.enter(RunState.HOLD)
        self._hands.hold()
        self._chain.resync(state)
        if self._watchdog:
            self._watchdog.feed("command", run.num_steps)
        if is_new:
            self.note(run, "hold", "hold", reason)

    def fault(self, run: Run, reason: str) -> None:
        """A reflex, a lost connection, a stale camera: stop, and go on only as often as the settings allow."""
        self.enter(RunState.FAULT)
        self._hands.stop()
        self.note(run, "fault", "fault", reason)
        self._buffer.clear()
        run.pending = None
        run.num_recoveries += 1
        is_final = run.num_recoveries > self._config.max_recoveries
        if not is_final and not self.is_estopped:
            try:
                self._recover(run)
            except RobotError as error:
                is_final, reason = True, f"{reason}; recovery failed: {error}"
        if is_final or self.is_estopped:
            run.outcome, run.detail = "estop" if self.is_estopped else "fault", reason

    def _recover(self, run: Run) -> None:
        """Nobody watches meanwhile: the robot was stopped, and recoveries may take longer than the deadlines."""
        if self._watchdog:
            self._watchdog.stop()
        self._hands.recover()
        if self.is_estopped:  # it came meanwhile, and may have been cleared with the rest
            self._robot.stop()
            return
        self._chain.resync(self._robot.observe())
        if self._config.is_moving:
            self.note(run, "recovered", "info", f"recovery {run.num_recoveries} of {self._config.max_recoveries}")
        self.enter(RunState.RUNNING)
        self._watch()

    def acknowledge(self) -> None:
        """A person has seen to a fault.

        Raises:
            RobotError: The fault persists.
            ValueError: After an emergency stop, which takes a new process.
        """
        if self.is_estopped:
            raise ValueError("after an emergency stop the runtime has to be started again")
        if self.state is RunState.FAULT:
            self._hands.recover()
            if self.is_estopped:  # it came meanwhile
                self._robot.stop()
            self.enter(RunState.READY)

    def emergency_stop(self) -> None:
        """Stop the robot now, in every mode."""
        self.is_estopped = True
        self._robot.stop()

    def end(self, run: Run) -> None:
        """Let no motion outlive the episode: a robot that cannot hold is stopped."""
        if self._watchdog:
            self._watchdog.stop()
        if self.is_estopped:
            self._robot.stop()
        elif run.outcome in (None, "fault"):
            self._hands.stop()
        elif not self._is_lockstep:
            try:
                self._hands.hold()
            except RobotError as error:
                run.outcome, run.detail = "fault", str(error)
                self._hands.stop()
        self.enter(RunState.FAULT if run.outcome in (None, "fault") else RunState.READY)

    def note(self, run: Run, kind: str, severity: str, detail: str) -> None:
        """Count an event, and write it down."""
        run.events[kind] = run.events.get(kind, 0) + 1
        if self._recorder:
            self._recorder.event(
                Event(time_s=self._clock(), tick=run.num_steps, kind=kind, severity=severity, detail=detail)
            )

    # --- The watchdog's threads --------------------------------------------------------------------------------------

    def raise_alarm(self) -> None:
        """Tell the loop what the watchdog has done since the last time.

        Raises:
            StaleError: It held the robot.
            RobotError: It stopped the robot.
        """
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            raise alarm

    def watchdog_hold(self, reason: str) -> None:
        """The loop is silent: hold."""
        try:
            self._hands.hold()
        finally:
            if self._alarm is None:
                self._alarm = StaleError(f"the watchdog held the robot: {reason}")
        if self._run:
            self.note(self._run, "watchdog_hold", "hold", reason)

    def watchdog_stop(self, reason: str) -> None:
        """The loop is still silent: stop."""
        try:
            self._hands.stop()
        finally:
            self._alarm = RobotError(f"the watchdog stopped the robot: {reason}")
        if self._run:
            self.note(self._run, "watchdog_stop", "fault", reason)
