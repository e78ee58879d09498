"""Signals and keys of the person beside a robot, real ones: sent to this process, typed into a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from robots.run_types import EpisodeReport, RunState
from robots.runtime import Runtime
from robots.schedule import Schedule
from scripts.robot_operator import Operator


class StubRuntime(Runtime):
    """An episode lasts until somebody ends it."""

    state = RunState.READY

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.begun, self.ended = threading.Event(), threading.Event()
        self.natural_outcome: str | None = None

    def run_episode(self, instruction: str) -> EpisodeReport:
        self.calls.append(f"run {instruction}")
        self.begun.set()
        deadline_s = time.monotonic() + 30.0
        while self.natural_outcome is None and not self.ended.wait(0.05):  # as in ticks: signals are handled between
            assert time.monotonic() < deadline_s
        outcome = self.natural_outcome or ("estop" if "emergency_stop" in self.calls else "stopped")
        return EpisodeReport(outcome=outcome, num_steps=1, events={}, cadence=Schedule(0.0).report())

    def stop(self) -> None:
        self.calls.append("stop")
        self.ended.set()

    def emergency_stop(self) -> None:
        self.calls.append("emergency_stop")
        self.ended.set()

    def mark_last_episode(self, outcome: str) -> None:
        self.calls.append(f"mark {outcome}")

    def acknowledge(self) -> None:
        self.calls.append("acknowledge")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def runtime() -> StubRuntime:
    return StubRuntime()


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as keyboard:
        yield ours, keyboard
    os.close(ours)


def when_begun(runtime: StubRuntime, do: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        assert runtime.begun.wait(30.0)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_the_first_interrupt_ends_the_episode(runtime: StubRuntime) -> None:
    operator = Operator(runtime)
    with operator.attending():
        helper = when_begun(runtime, kill(signal.SIGINT))
        assert operator.run_episode("push").outcome == "stopped"
    helper.join()
    assert runtime.calls == ["run push", "stop", "close"]


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]
)
def test_the_second_interrupt_and_a_request_to_terminate_are_emergency_stops(
    runtime: StubRuntime, numbers: tuple[signal.Signals, ...]
) -> None:
    operator = Operator(runtime)
    with operator.attending():
        # What the loop does between two signals does not matter: it may be blocked in a driver.
        runtime.stop = lambda: runtime.calls.append("stop")  # type: ignore[method-assign]

        def press() -> None:
            for number in numbers:
                num_before = len(runtime.calls)
                os.kill(os.getpid(), number)
                while len(runtime.calls) == num_before:
                    time.sleep(0.001)

        helper = when_begun(runtime, press)
        assert operator.run_episode("push").outcome == "estop"
    helper.join()
    assert runtime.calls == ["run push", *["stop"] * (len(numbers) - 1), "emergency_stop", "close"]


def send_between_episodes(operator: Operator, number: signal.Signals) -> None:
    with operator.attending():
        os.kill(os.getpid(), number)
        time.sleep(10.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_between_episodes_a_signal_ends_the_program_and_closes_the_robot(
    runtime: StubRuntime, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        send_between_episodes(Operator(runtime), number)
    assert runtime.calls == ["close"]
    assert signal.getsignal(number) is before


def test_signals_count_anew_in_every_episode(runtime: StubRuntime) -> None:
    operator = Operator(runtime)
    with operator.attending():
        for _ in range(2):
            runtime.begun.clear()
            runtime.ended.clear()
            helper = when_begun(runtime, kill(signal.SIGINT))
            assert operator.run_episode("push").outcome == "stopped"
            helper.join()
    assert "emergency_stop" not in runtime.calls


@pytest.mark.parametrize(
    ("key", "outcome"),
    [(b"s", "success"), (b"f", "failure"), (b"q", "stopped"), (b"\n", "stopped"), (b"xs", "success")],
)
def test_keys_end_and_judge(
    runtime: StubRuntime, terminal: tuple[int, TextIO], key: bytes, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, keyboard = terminal
    before = termios.tcgetattr(keyboard)
    operator = Operator(runtime, keyboard)
    with operator.attending():
        helper = when_begun(runtime, lambda: os.write(ours, key) and None)
        assert operator.run_episode("push").outcome == outcome
    helper.join()
    marks = [] if outcome == "stopped" else [f"mark {outcome}"]
    assert runtime.calls == ["run push", "stop", *marks, "close"]
    assert termios.tcgetattr(keyboard) == before  # the terminal is as it was


def answers(monkeypatch: pytest.MonkeyPatch, is_solved: bool) -> list[str]:
    asked: list[str] = []
    monkeypatch.setattr("typer.prompt", lambda text, **_: asked.append(text))
    monkeypatch.setattr("typer.confirm", lambda text: asked.append(text) or is_solved)
    return asked


@pytest.mark.parametrize(("is_solved", "outcome"), [(True, "success"), (False, "failure")])
def test_who_ended_it_without_a_verdict_is_asked(
    runtime: StubRuntime, monkeypatch: pytest.MonkeyPatch, is_solved: bool, outcome: str
) -> None:
    asked, lines = answers(monkeypatch, is_solved), list[str]()
    operator = Operator(runtime)
    with operator.attending():
        helper = when_begun(runtime, kill(signal.SIGINT))
        assert operator.run_real_episode("push", lines.append).outcome == outcome
    helper.join()
    assert asked == ["hands off the robot; press Enter to start", "was the task solved?"]
    assert runtime.calls == ["run push", "stop", f"mark {outcome}", "close"]
    assert lines[-1].startswith("stopped after 1 steps")


def test_a_verdict_by_key_is_not_asked_for_again(
    runtime: StubRuntime, terminal: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, False)
    ours, keyboard = terminal
    operator = Operator(runtime, keyboard)
    with operator.attending():
        helper = when_begun(runtime, lambda: os.write(ours, b"s") and None)
        assert operator.run_real_episode("push", lambda line: None).outcome == "success"
    helper.join()
    assert asked == ["hands off the robot; press Enter to start"]


def test_a_fault_is_acknowledged_and_not_judged(runtime: StubRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, True)
    runtime.natural_outcome = "fault"
    operator = Operator(runtime)
    with operator.attending():
        assert operator.run_real_episode("push", lambda line: None).outcome == "fault"
    assert asked[1].startswith("see to the robot")
    assert runtime.calls == ["run push", "acknowledge", "close"]
