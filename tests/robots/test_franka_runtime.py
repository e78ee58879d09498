"""The whole chain on franka-sim 1.1.7 with its limits enforced: server, client, runtime, safety, driver, controller.

Every scenario lets the arm work for three seconds, then provokes one fault. Where the chain can prevent a reflex of the
controller there must be none; after a fault the arm stands still.
"""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.robot_peers, pytest.mark.timeout(240)]


def play(start_peer: Any, run_client: Any, scenario: str, seconds: float, freeze_s: float = 0.0) -> dict[str, Any]:
    client = run_client("franka_runtime_client.py", start_peer("franka_sim").host, scenario, str(seconds))
    assert client.stdout is not None
    for line in client.stdout:
        if json.loads(line)["event"] == "running":
            break
    if freeze_s:
        time.sleep(3.0)
        client.send_signal(signal.SIGSTOP)
        time.sleep(freeze_s)
        client.send_signal(signal.SIGCONT)
    result: dict[str, Any] = json.loads(client.stdout.readline() or "{}")
    print(scenario, json.dumps(result))
    assert result, "the client died"
    return result


@pytest.fixture(autouse=True)
def _needs_franky() -> None:
    pytest.importorskip("franky", reason="franky-control is not installed: pip install 'vla-rl[franka]'")


def test_a_minute_of_picking_at_20_hz_without_a_reflex(start_peer: Any, run_client: Any) -> None:
    result = play(start_peer, run_client, "none", 60.0)
    assert (result["outcome"], result["num_reflexes"]) == ("failure", 0)  # "failure": only the time limit ends it
    assert result["num_steps"] == 1200
    assert result["points_reached"] >= 6
    assert result["travelled_m"] > 0.5
    assert "fault" not in result["events"]
    assert result["cadence"]["starved"] < 10


@pytest.mark.parametrize(("scenario", "kinds"), [("too_far", {"clipped_workspace"}), ("discontinuity", {"shaped"})])
def test_wild_but_finite_commands_are_tamed(start_peer: Any, run_client: Any, scenario: str, kinds: set[str]) -> None:
    result = play(start_peer, run_client, scenario, 9.0)
    assert result["num_reflexes"] == 0
    assert kinds <= set(result["events"])
    assert (result["outcome"], result["num_steps"]) == ("failure", 180)


@pytest.mark.parametrize("scenario", ["nan", "killed_server"])
def test_without_usable_answers_the_robot_holds_and_stops(start_peer: Any, run_client: Any, scenario: str) -> None:
    result = play(start_peer, run_client, scenario, 20.0)
    assert result["outcome"] == "fault"
    assert "held for more than 2.5 s" in result["detail"]
    assert result["num_reflexes"] == 0
    assert result["num_steps"] < 20 * (3 + 2.5 + 2.5)
    assert result["largest_joint_speed"] < 0.05


def test_slow_answers_slow_the_robot_down(start_peer: Any, run_client: Any) -> None:
    result = play(start_peer, run_client, "latency_0.2", 12.0)
    assert (result["outcome"], result["num_reflexes"]) == ("failure", 0)
    assert result["travelled_m"] > 0.02


def test_answers_later_than_their_last_action_are_never_used(start_peer: Any, run_client: Any) -> None:
    result = play(start_peer, run_client, "latency_1.0", 12.0)  # a chunk lasts 0.4 s
    assert (result["outcome"], result["num_reflexes"]) == ("fault", 0)
    assert "held for more than 2.5 s" in result["detail"]
    assert result["travelled_m"] < 0.001


def test_a_camera_that_freezes_for_a_moment_holds_the_robot_for_that_moment(start_peer: Any, run_client: Any) -> None:
    result = play(start_peer, run_client, "camera_freeze", 9.0)
    assert (result["outcome"], result["num_reflexes"]) == ("failure", 0)
    assert result["events"]["hold"] >= 2  # at the start, and during the freeze
    assert result["num_steps"] == 180


def test_a_frozen_client_is_stopped_by_the_controller_and_recovers_by_the_rule(
    start_peer: Any, run_client: Any
) -> None:
    result = play(start_peer, run_client, "frozen", 9.0, freeze_s=1.0)
    assert result["events"]["fault"] >= 1
    assert result["events"].get("recovered", 0) <= 2
    assert result["events"].get("watchdog_hold", 0) >= 1  # it acts as soon as the process runs again
    assert result["outcome"] in ("failure", "fault")
