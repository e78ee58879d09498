"""Runs a policy on a robot: observation, inference in the background, safety chain, command, at a fixed rate.

    INIT -> PREFLIGHT -> READY -> RUNNING <-> HOLD -> FAULT -> READY (after a counted recovery) or the end
                                  any state -> ESTOP, which only a new process leaves

While a chunk is executed, the next one is computed; actions belong to times, not to positions in a queue, so those that
an answer was too late for are left out. A lockstep robot (a simulator) waits instead, and runs what training ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float64

from robots.contract import DeploymentContract, require_match
from robots.guard import Guard
from robots.observing import Observer
from robots.recorder import Recorder
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
    require_rate,
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
        require_rate(contract, robot.description, config)
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
        self._guard = Guard(robot, chain, buffer, config, self.period_s, watchdog, recorder, clock)
        self._observer = Observer(contract, cameras, is_simulated=robot.description.name == "sim")
        self._worker = ThreadPoolExecutor(1, "inference")
        self._is_stop_asked = False

    @property
    def state(self) -> RunState:
        """Where the runtime is."""
        return self._guard.state

    @property
    def period_s(self) -> float:
        """Of a control step."""
        return control_period_s(self._contract, self._config)

    def preflight(self, timeout_s: float = 5.0) -> list[str]:
        """Connect, look, and ask the policy once; nothing moves.

        Returns:
            Lines that say what will happen.

        Raises:
            RobotError: Robot or camera do not answer, or the tool is outside the workspace.
        """
        self._guard.enter(RunState.PREFLIGHT)
        self._robot.connect(timeout_s)
        state, frames = self._robot.observe(), self._observer.frames()
        if refused := self._chain.check_start(state):
            raise RobotError("; ".join(event.detail for event in refused))
        started = self._clock()
        answer = self._infer(
            self._observer.observation(state, frames, "preflight"), max(10.0, self._config.inference_deadline_s)
        )
        self._guard.enter(RunState.READY)
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
        run = Run(instruction=instruction, schedule=Schedule(0.0 if is_lockstep else self.period_s))
        self._is_stop_asked = False
        self._buffer.clear()
        if self._recorder:
            facts = recording_facts(instruction, self._robot.description, self._observer.is_simulated, self._contract)
            self._recorder.begin(facts)
        try:
            self._guard.begin(run)
            while run.outcome is None:
                self._tick(run, is_lockstep)
        except RobotError as error:
            run.outcome, run.detail = "estop" if self._guard.is_estopped else "fault", str(error)
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
        self._guard.acknowledge()

    def stop(self) -> None:
        """End the episode at the next tick."""
        self._is_stop_asked = True

    def emergency_stop(self) -> None:
        """Stop the robot now; the runtime does not run again."""
        self._guard.emergency_stop()

    def close(self) -> None:
        """Let go of everything; safe at any time."""
        self._is_stop_asked = True
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
        if self._guard.is_estopped or self._is_stop_asked:
            run.outcome = "estop" if self._guard.is_estopped else "stopped"
            return
        action, sent = None, None
        try:
            state = self._look(run)
            try:
                self._guard.raise_alarm()
                action = self._next_action(run, state, now, is_lockstep)
                sent = self._act(run, state, action)
            except StaleError as error:
                self._guard.hold(run, state, str(error))
        except RobotError as error:
            self._guard.fault(run, str(error))
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
            self._guard.note(run, "inference_failed", "hold", str(error))
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
            self._guard.note(run, event.kind, event.severity, event.detail)
            if event.severity in ("hold", "fault"):
                run.num_recoveries = self._config.max_recoveries  # final: another chunk would not be checked
                raise RobotError(f"the first chunk does not look like training: {event.detail}")

    def _act(self, run: Run, state: RobotState, action: Float64[np.ndarray, " action_dim"] | None) -> Command | None:
        if action is None:
            self._guard.hold(run, state, "no action for this control period", is_waiting=True)
            return None
        decision = self._chain.review(action, state)
        for event in decision.events:
            self._guard.note(run, event.kind, event.severity, event.detail)
        if any(event.severity == "fault" for event in decision.events):
            raise RobotError("; ".join(event.detail for event in decision.events if event.severity == "fault"))
        if decision.command is None:
            self._guard.hold(run, state, "; ".join(event.kind for event in decision.events))
            return None
        run.hold_since_s, run.detail = None, ""
        self._guard.enter(RunState.RUNNING)
        if self._watchdog:
            self._watchdog.feed("command", run.num_steps)
        return self._guard.send(decision.command)

    def _end(self, run: Run) -> None:
        try:
            self._guard.end(run)
        finally:
            if self._recorder:
                cadence = str(run.schedule.report())
                self._recorder.finish({"outcome": run.outcome, "detail": run.detail, "cadence": cadence})
