"""The runtime on a made-up robot: what is sent, when it holds, when it gives up."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_robot import CONTRACT, RATE_HZ, SAFETY, FakeCamera, FakeRobot, forward, make, policy

from robots.recorder import finished_episodes, load_episode
from robots.run_types import Run, RunState, RuntimeConfig
from robots.runtime import Runtime
from robots.safety import SafetyChain
from robots.schedule import Schedule
from vla_rl.serving.chunking import ChunkBuffer


def run(runtime: Runtime):  # type: ignore[no-untyped-def]
    try:
        assert any("rate: 50 Hz" in line for line in runtime.preflight())
        return runtime.run_episode("go on")
    finally:
        runtime.close()


def test_lockstep_sends_the_policys_numbers_to_the_bit_and_asks_once_per_executed_chunk() -> None:
    robot, asked = FakeRobot(is_lockstep=True), []
    chunk = np.random.default_rng(0).uniform(-0.3, 0.3, (8, 7))

    def infer(observation: dict, deadline_s: float) -> SimpleNamespace:
        asked.append(observation)
        return SimpleNamespace(actions=chunk)

    report = run(make(robot, infer, max_steps=20))
    assert (report.outcome, report.num_steps) == ("failure", 20)
    assert len(asked) == 1 + 3  # preflight, then at 0, 8 and 16
    for i, (_, command) in enumerate(robot.sent):
        assert command.action is not None
        np.testing.assert_array_equal(command.action, chunk[i % 8])
    assert asked[1]["prompt"] == "go on"
    assert asked[1]["observation/state"].dtype == np.float32


@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_commands_go_on_while_the_next_chunk_is_computed(latency_s: float) -> None:
    robot = FakeRobot()
    report = run(make(robot, policy(forward(), latency_s)))
    assert report.outcome == "failure"  # the time limit
    first_wait = round(latency_s * RATE_HZ) + 3
    assert report.cadence.starved <= first_wait + 3
    assert len(robot.sent) >= report.num_steps - first_wait - 3
    assert report.cadence.inference_max_ms >= 1e3 * latency_s


def test_answers_that_are_never_in_time_hold_and_then_end_the_episode() -> None:
    robot = FakeRobot()
    runtime = make(robot, policy(forward()), inference_deadline_s=0.05, max_hold_s=0.4)
    runtime.preflight()
    runtime._infer = policy(forward(), latency_s=9.0)
    report = runtime.run_episode("go on")
    runtime.close()
    assert report.outcome == "fault"
    assert "held for more than 0.4 s" in report.detail
    assert robot.sent == []
    assert report.events["inference_failed"] >= 2
    assert robot.calls[-2:] != []
    assert "stop" in robot.calls


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none_are_never_sent(value: float) -> None:
    robot, bad = FakeRobot(), forward()
    bad[1] = value
    runtime = make(robot, policy(bad))
    runtime.preflight()
    report = runtime.run_episode("go on")
    runtime.close()
    assert report.outcome == "fault"
    assert robot.sent == []


def test_a_reflex_is_cleared_as_often_as_allowed_and_with_fresh_observations() -> None:
    robot, camera = FakeRobot(), FakeCamera()
    robot.fails_after = 5
    report = run(make(robot, policy(forward()), camera, max_recoveries=1))
    assert report.outcome == "failure"
    assert (report.events["fault"], report.events["recovered"]) == (1, 1)
    assert robot.calls.count("recover") == 1
    robot = FakeRobot()
    robot.fails_after = 5
    runtime = make(robot, policy(forward()), max_recoveries=0)
    runtime.preflight()
    report = runtime.run_episode("go on")
    assert report.outcome == "fault"
    assert "joint_velocity_violation" in report.detail
    assert "recover" not in robot.calls
    with pytest.raises(ValueError, match="state 'fault'"):
        runtime.run_episode("again")
    runtime.acknowledge()
    assert runtime.state is RunState.READY
    runtime.close()


@pytest.mark.parametrize("is_lockstep", [True, False])
def test_a_first_chunk_unlike_training_ends_the_episode_before_anything_is_sent(is_lockstep: bool) -> None:
    robot = FakeRobot(is_lockstep)
    report = run(make(robot, policy(forward(size=50.0))))
    assert report.outcome == "fault"
    assert "training" in report.detail
    assert not robot.sent
    assert "recover" not in robot.calls


def test_a_watchdog_acts_although_nothing_can_be_recorded(tmp_path: Path) -> None:
    robot = FakeRobot()
    runtime = make(robot, policy(forward()), folder=tmp_path)
    runtime._guard._run = Run(instruction="go on", schedule=Schedule(0.0))
    runtime._recorder.event = lambda event: 1 / 0  # type: ignore[union-attr,method-assign,assignment,return-value]
    for act in (runtime._guard.watchdog_hold, runtime._guard.watchdog_stop):
        with pytest.raises(ZeroDivisionError):
            act("no news")
    assert robot.calls == ["hold", "stop"]
    runtime.close()


def test_a_frozen_camera_holds_and_ends_the_episode() -> None:
    robot, camera = FakeRobot(), FakeCamera()
    runtime = make(robot, policy(forward()), camera, max_steps=500, max_camera_age_s=0.1)
    runtime.preflight()
    threading.Timer(0.3, lambda: setattr(camera, "frozen_s", time.monotonic())).start()
    report = runtime.run_episode("go on")
    runtime.close()
    assert report.outcome == "fault"
    assert "camera agentview" in report.detail
    assert report.num_steps < 200


def test_an_emergency_stop_is_final() -> None:
    robot = FakeRobot()
    runtime = make(robot, policy(forward()), max_steps=5000)
    runtime.preflight()
    threading.Timer(0.2, runtime.emergency_stop).start()
    report = runtime.run_episode("go on")
    assert report.outcome == "estop"
    assert "stop" in robot.calls
    for call in (lambda: runtime.run_episode("again"), runtime.acknowledge):
        with pytest.raises(ValueError, match=r"estop|emergency stop"):
            call()
    runtime.close()
    runtime.close()


def test_the_estop_file_stops(tmp_path: Path) -> None:
    robot = FakeRobot()
    (tmp_path / "stop").touch()
    report = run(make(robot, policy(forward()), estop_file=tmp_path / "stop"))
    assert (report.outcome, robot.sent) == ("estop", [])


@pytest.mark.parametrize("mode", ["dry_run", "shadow"])
def test_dry_runs_send_nothing_and_record_what_was_asked(mode: str, tmp_path: Path) -> None:
    robot = FakeRobot()
    report = run(make(robot, policy(forward()), folder=tmp_path, mode=mode, max_steps=20))
    assert robot.sent == []
    assert "hold" not in robot.calls
    episode = load_episode(finished_episodes(tmp_path)[0])
    assert len(episode.time_s) == report.num_steps == 20
    np.testing.assert_array_equal(episode.asked[-1], forward())
    assert np.isnan(episode.sent_position_m).all()


def test_what_was_asked_sent_and_measured_is_recorded(tmp_path: Path) -> None:
    robot = FakeRobot()
    run(make(robot, policy(forward()), folder=tmp_path, max_steps=30))
    episode = load_episode(finished_episodes(tmp_path)[0])
    is_sent = np.isfinite(episode.sent_position_m[:, 0])
    assert is_sent.sum() == len(robot.sent) > 10
    np.testing.assert_array_equal(episode.sent_position_m[is_sent][-1], robot.sent[-1][1].position_m)
    assert episode.info["outcome"] == "failure"
    assert episode.info["instruction"] == "go on"
    assert len(episode.images["agentview"]) >= 2


def test_a_robot_that_does_not_fit_is_refused_before_anything_moves() -> None:
    robot = FakeRobot()
    camera = FakeCamera()
    camera.name = "front"  # type: ignore[misc]
    with pytest.raises(ValueError, match="cameras: checkpoint agentview"):
        make(robot, policy(forward()), camera)
    with pytest.raises(ValueError, match="needs a watchdog"):
        Runtime(
            robot,
            [FakeCamera()],
            policy(forward()),
            SafetyChain(CONTRACT, SAFETY, robot.description),
            ChunkBuffer(0.02),
            CONTRACT,
            RuntimeConfig(),
        )
    assert robot.calls == []
