"""Runs a policy on a robot: observation, inference in the background, safety chain, command, at a fixed rate.

    INIT -> PREFLIGHT -> READY -> RUNNING <-> HOLD -> FAULT -> READY (after a counted recovery) or the end
                                  any state -> ESTOP, which only a new process leaves

While a chunk is executed, the next one is computed; actions belong to times, not to positions in a queue, so those that
an answer was too late for are left out. A lockstep robot (a simulator) waits instead, and runs what training ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float64

from robots.contract import DeploymentContract, require_match
from robots.observing import Observer
from robots.recorder import Event, Recorder
from robots.robot import Camera, CameraFrame, Command, Robot, RobotError, RobotState
from robots.run_types import (
    ActionBuffer,
    Answer,
    EpisodeReport,
    Infer,
    Run,
    RunState,
    RuntimeConfig,
    StaleError,
    control_period_s,
    preflight_lines,
    recording_facts,
)
from robots.safety import SafetyChain
from robots.schedule import Schedule
from robots.watchdog import Watchdog


class Runtime:
    """See the module's docstring. `stop` and `emergency_stop` may be called from any thread or signal handler."""

    def __init__(
        self,
        robot: Robot,
        cameras: Sequence[Camera],
        infer: Infer,
        chain: SafetyChain,
        buffer: ActionBuffer,
        contract: DeploymentContract,
        config: RuntimeConfig,
        *,
        watchdog: Watchdog | None = None,
        recorder: Recorder | None = None,
        is_episode_over: Callable[[], str | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put the parts together; nothing moves.

        Args:
            robot: Not yet connected.
            cameras: With the contract's names.
            infer: The policy.
            chain: Every command passes it.
            buffer: Where chunks wait.
            contract: Of the checkpoint.
            config: Settings.
            watchdog: On its own thread; None for lockstep robots only.
            recorder: Where to write episodes.
            is_episode_over: Asked after each control period: "success", "failure", or None to go on.
            clock: Monotonic time.

        Raises:
            ValueError: Robot and contract do not fit, or a robot that moves on its own has no watchdog.
        """
        require_match(contract, robot.description, tuple(camera.name for camera in cameras))
        if watchdog is None and not robot.description.is_lockstep:
            raise ValueError("a robot that does not wait for its commands needs a watchdog")
        self._robot = robot
        self._cameras = list(cameras)
        self._infer = infer
        self._chain = chain
        self._buffer = buffer
        self._contract = contract
        self._config = config
        self._watchdog = watchdog
        self._recorder = recorder
        self._is_episode_over = is_episode_over
        self._clock = clock
        self._observer = Observer(contract, cameras, is_simulated=robot.description.name == "sim")
        self._worker = ThreadPoolExecutor(1, "inference")
        self._stop_requested = threading.Event()
        self._estop_requested = threading.Event()
        self._run: Run | None = None
        self.state = RunState.INIT

    @property
    def period_s(self) -> float:
        """Of a control step."""
        return control_period_s(self._contract, self._config)

    def preflight(self, timeout_s: float = 5.0) -> list[str]:
        """Connect, look, and ask the policy once; nothing moves.

        Returns:
            Lines that say what will happen.

        Raises:
            RobotError: Robot or camera do not answer.
        """
        self.state = RunState.PREFLIGHT
        self._robot.connect(timeout_s)
        state, frames = self._robot.observe(), self._observer.frames()
        started = self._clock()
        answer = self._infer(
            self._observer.observation(state, frames, "preflight"), max(10.0, self._config.inference_deadline_s)
        )
        self.state = RunState.READY
        answered_s = self._clock() - started
        return preflight_lines(self._robot.description, self._config, self._contract, state, frames, answer, answered_s)

    def run_episode(self, instruction: str) -> EpisodeReport:
        """One episode; returns when it is over, for whatever reason.

        Raises:
            ValueError: The runtime is not ready: no preflight, a fault, or an emergency stop.
        """
        if self.state is not RunState.READY:
            raise ValueError(f"the runtime is in state {self.state.value!r}; an episode begins in 'ready'")
        is_lockstep = self._robot.description.is_lockstep
        run = self._run = Run(instruction=instruction, schedule=Schedule(0.0 if is_lockstep else self.period_s))
        self._stop_requested.clear()
        self._buffer.clear()
        if self._recorder:
            facts = recording_facts(instruction, self._robot.description, self._observer.is_simulated, self._contract)
            self._recorder.begin(facts)
        self.state = RunState.RUNNING
        try:
            self._chain.resync(self._robot.observe())
            if self._watchdog:
                self._watchdog.start(on_hold=self._watchdog_hold, on_stop=self._watchdog_stop)
            while run.outcome is None:
                self._tick(run, is_lockstep)
        except RobotError as error:
            run.outcome, run.detail = "fault", str(error)
        finally:
            self._end(run)
        return EpisodeReport(
            outcome=run.outcome or "fault",
            num_steps=run.num_steps,
            events=run.events,
            cadence=run.schedule.report(),
            detail=run.detail,
        )

    def mark_last_episode(self, outcome: str) -> None:
        """Write a person's verdict into the recording of the last episode."""
        if self._recorder:
            self._recorder.amend({"outcome": outcome, "marked_by": "operator"})

    def acknowledge(self) -> None:
        """A person has seen to a fault: clear it and be ready again.

        Raises:
            RobotError: The fault persists.
            ValueError: After an emergency stop, which takes a new process.
        """
        if self.state is RunState.ESTOP:
            raise ValueError("after an emergency stop the runtime has to be started again")
        if self.state is RunState.FAULT:
            self._robot.recover()
            self.state = RunState.READY

    def stop(self) -> None:
        """End the episode at the next tick."""
        self._stop_requested.set()

    def emergency_stop(self) -> None:
        """Stop the robot now; the runtime does not run again."""
        self._estop_requested.set()
        self.state = RunState.ESTOP
        self._robot.stop()

    def close(self) -> None:
        """Let go of everything; safe at any time."""
        self._stop_requested.set()
        if self._watchdog:
            self._watchdog.stop()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._robot.close()
        for camera in self._cameras:
            camera.close()

    # --- One control period ------------------------------------------------------------------------------------------

    def _tick(self, run: Run, is_lockstep: bool) -> None:
        now = run.schedule.begin_tick()
        if self._config.estop_file and self._config.estop_file.exists():
            self.emergency_stop()
        if self._estop_requested.is_set() or self._stop_requested.is_set():
            run.outcome = "estop" if self._estop_requested.is_set() else "stopped"
            return
        action, sent = None, None
        try:
            state = self._look(run)
            try:
                action = self._next_action(run, state, now, is_lockstep)
                sent = self._act(run, state, action)
            except StaleError as error:
                self._hold(run, state, str(error))
        except RobotError as error:
            self._fault(run, str(error))
            return
        run.num_steps += 1
        if self._recorder:
            self._recorder.tick(now, action, sent, state)
        run.outcome = self._is_episode_over() or ("failure" if run.num_steps >= self._config.max_steps else None)
        if run.hold_since_s is not None and self._clock() - run.hold_since_s > self._config.max_hold_s:
            run.outcome, run.detail = "fault", f"held for more than {self._config.max_hold_s:g} s: {run.detail}"
        run.schedule.end_tick()

    def _look(self, run: Run) -> RobotState:
        state = self._robot.observe()
        if state.mode == "fault":
            raise RobotError("; ".join(state.faults) or "the controller reports a fault")
        if self._watchdog:
            self._watchdog.feed("state", state.time_s)
        return state

    def _next_action(
        self, run: Run, state: RobotState, now: float, is_lockstep: bool
    ) -> Float64[np.ndarray, " action_dim"] | None:
        if is_lockstep:
            if self._buffer.remaining(run.num_steps * self.period_s) == 0:
                self._wait_for_chunk(run, state)
            return self._buffer.action_at(run.num_steps * self.period_s)
        frames = None if self._observer.is_simulated else self._frames()
        self._collect(run, state, now)
        lead_s = run.schedule.expected_inference_s() + 2 * self.period_s
        is_low = self._buffer.remaining(now) * self.period_s <= lead_s
        if run.pending is None and (is_low or run.is_first_chunk):
            self._ask(run, state, frames or self._frames(), now)
        action = self._buffer.action_at(now)
        run.schedule.starved += action is None
        return action

    def _wait_for_chunk(self, run: Run, state: RobotState) -> None:
        """Lockstep: the world waits; exactly the chunk's executed part is used, as in training."""
        started = self._clock()
        observation = self._observer.observation(state, self._frames(), run.instruction)
        answer = self._infer(observation, self._config.inference_deadline_s)
        run.schedule.note_inference(self._clock() - started)
        self._check_first(run, answer, state)
        executed = answer.actions[: self._contract.execution_horizon]
        t_obs = run.num_steps * self.period_s
        self._buffer.clear()
        self._buffer.add(executed, t_obs, t_obs)

    def _ask(self, run: Run, state: RobotState, frames: Mapping[str, CameraFrame], now: float) -> None:
        observation = self._observer.observation(state, frames, run.instruction)
        run.pending_t_obs = now
        run.pending = self._worker.submit(self._infer, observation, self._config.inference_deadline_s)

    def _collect(self, run: Run, state: RobotState, now: float) -> None:
        """Take an answer that has arrived.

        What went wrong in inference is an event; the robot holds when it has nothing left to do.
        """
        if run.pending is None or not run.pending.done():
            return
        pending, run.pending = run.pending, None
        error = pending.exception()
        if error is not None:
            self._note(run, "inference_failed", "hold", str(error))
            return
        run.schedule.note_inference(self._clock() - run.pending_t_obs)
        self._check_first(run, answer := pending.result(), state)
        self._buffer.add(answer.actions, run.pending_t_obs, now)

    def _frames(self) -> dict[str, CameraFrame]:
        """The newest frames; real cameras are looked at in every control period, so that a frozen one is noticed."""
        frames = self._observer.frames()
        for name, frame in frames.items():
            if self._watchdog:
                self._watchdog.feed(f"camera:{name}", frame.index)
            age_s = self._clock() - frame.captured_s
            if age_s > self._config.max_camera_age_s:
                raise StaleError(f"the newest frame of camera {name} is {age_s:.2f} s old")
            if self._recorder:
                self._recorder.picture(name, frame)
        return frames

    def _check_first(self, run: Run, answer: Answer, state: RobotState) -> None:
        if not run.is_first_chunk:
            return
        run.is_first_chunk = False
        for event in self._chain.check_first_chunk(answer.actions, state):
            self._note(run, event.kind, event.severity, event.detail)
            if event.severity in ("hold", "fault"):
                run.num_recoveries = self._config.max_recoveries  # final: another chunk would not be checked
                raise RobotError(f"the first chunk does not look like training: {event.detail}")

    def _act(self, run: Run, state: RobotState, action: Float64[np.ndarray, " action_dim"] | None) -> Command | None:
        if action is None:
            self._hold(run, state, "no action for this control period", is_waiting=True)
            return None
        decision = self._chain.review(action, state)
        for event in decision.events:
            self._note(run, event.kind, event.severity, event.detail)
        if any(event.severity == "fault" for event in decision.events):
            raise RobotError("; ".join(event.detail for event in decision.events if event.severity == "fault"))
        if decision.command is None:
            self._hold(run, state, "; ".join(event.kind for event in decision.events))
            return None
        run.hold_since_s, run.detail = None, ""
        self._enter(RunState.RUNNING)
        if self._watchdog:
            self._watchdog.feed("command", run.num_steps)
        if self._config.mode in ("dry_run", "shadow") or self._estop_requested.is_set():
            return None
        return self._robot.command(decision.command)

    # --- When something is wrong -------------------------------------------------------------------------------------

    def _hold(self, run: Run, state: RobotState, reason: str, is_waiting: bool = False) -> None:
        """Stand still until there is a fresh command.

        What was planned before is forgotten, and so is an answer that is still to come, because its observation is from
        before; unless the answer is all that is missing.
        """
        is_new = run.hold_since_s is None
        if is_new:
            run.hold_since_s = self._clock()
            self._buffer.clear()
        if not is_waiting:
            run.pending = None
        run.detail = reason
        self._enter(RunState.HOLD)
        self._chain.resync(state)
        if self._config.mode not in ("dry_run", "shadow"):
            self._robot.hold()
        if self._watchdog:
            self._watchdog.feed("command", run.num_steps)
        if is_new:
            self._note(run, "hold", "hold", reason)

    def _fault(self, run: Run, reason: str) -> None:
        """A reflex, a lost connection, a stale camera: stop, and go on only as often as the settings allow."""
        self._enter(RunState.FAULT)
        self._robot.stop()
        self._note(run, "fault", "fault", reason)
        self._buffer.clear()
        run.pending = None
        run.num_recoveries += 1
        if run.num_recoveries > self._config.max_recoveries or self._estop_requested.is_set():
            run.outcome, run.detail = "estop" if self._estop_requested.is_set() else "fault", reason
            return
        try:
            self._robot.recover()
            self._chain.resync(self._robot.observe())
        except RobotError as error:
            run.outcome, run.detail = "fault", f"{reason}; recovery failed: {error}"
            return
        self._note(run, "recovered", "info", f"recovery {run.num_recoveries} of {self._config.max_recoveries}")
        self._enter(RunState.RUNNING)

    def _watchdog_hold(self, reason: str) -> None:
        self._robot.hold()
        if self._run:
            self._note(self._run, "watchdog_hold", "hold", reason)

    def _watchdog_stop(self, reason: str) -> None:
        self._robot.stop()
        if self._run:
            self._note(self._run, "watchdog_stop", "fault", reason)

    def _end(self, run: Run) -> None:
        if self._watchdog:
            self._watchdog.stop()
        if run.outcome in (None, "fault", "estop"):
            self._robot.stop()
        elif self._config.mode not in ("dry_run", "shadow") and not self._robot.description.is_lockstep:
            self._robot.hold()
        self._enter(RunState.FAULT if run.outcome in (None, "fault") else RunState.READY)
        if self._recorder:
            self._recorder.finish({"outcome": run.outcome, "detail": run.detail, "cadence": str(run.schedule.report())})

    def _enter(self, state: RunState) -> None:
        """Change the state; an emergency stop, which may come from another thread at any time, has the last word."""
        self.state = RunState.ESTOP if self._estop_requested.is_set() else state

    def _note(self, run: Run, kind: str, severity: str, detail: str) -> None:
        run.events[kind] = run.events.get(kind, 0) + 1
        if self._recorder:
            self._recorder.event(
                Event(time_s=self._clock(), tick=run.num_steps, kind=kind, severity=severity, detail=detail)
            )
